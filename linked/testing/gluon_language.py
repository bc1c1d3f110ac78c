"""The part of Gluon's language that the Hopper kernels use, in PyTorch on a CPU; see ``gluon``."""

from __future__ import annotations

import itertools
import re
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .gluon_machine import NAN, Barrier, Dtype, Machine, Shared, flat_memory, plain
from .gluon_programs import Programs
from .ptx import run_on_words


class Register(torch.Tensor):
    """A value in registers: a tensor, or a number as a tensor without dimensions."""

    @classmethod
    def __torch_function__(cls, function, _types, arguments=(), options=None):
        # the same as PyTorch's own, but faster
        with torch._C.DisableTorchFunctionSubclass():
            made = function(*arguments, **(options or {}))
        if made.__class__ is Tensor:
            return made.as_subclass(cls)
        if isinstance(made, tuple | list):
            return type(made)(x.as_subclass(cls) if x.__class__ is Tensor else x for x in made)
        return made

    @property
    def type(self):
        return types.SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        dtype = dtype.torch if isinstance(dtype, Dtype) else dtype
        return self.view(dtype) if bitcast else super().to(dtype)

    # integer division truncates, as in C
    def __floordiv__(self, other):
        return torch.div(self, other, rounding_mode="trunc")

    def __rfloordiv__(self, other):
        return torch.div(other, self, rounding_mode="trunc")

    def __mod__(self, other):
        return torch.fmod(self, other)

    def __rmod__(self, other):
        return torch.fmod(register(other), self)

    # values are immutable: an assignment rebinds the name
    def __iadd__(self, other):
        return self + other

    def __isub__(self, other):
        return self - other

    def __imul__(self, other):
        return self * other

    def __iand__(self, other):
        return self & other

    def __ior__(self, other):
        return self | other


def _by_numpy(function: Callable[..., Any]) -> Callable[[Any], Register]:
    """Return a function with the same bits as in Triton's interpreter."""
    return lambda x: register(torch.as_tensor(function(plain(x).numpy())))


def register(x: Any) -> Register:
    """Return a tensor or number as a register; a number has 32 bits if it fits."""
    if isinstance(x, Register):
        return x
    if isinstance(x, int) and not isinstance(x, bool) and -(2**31) <= x < 2**31:
        x = torch.tensor(x, dtype=torch.int32)
    elif isinstance(x, float):
        x = torch.tensor(x, dtype=torch.float32)
    return torch.as_tensor(x).as_subclass(Register)


class Pointer:
    """Addresses within the memory of a tensor."""

    def __init__(self, base: Tensor, offset: Any) -> None:
        self.base, self.offset = base, offset
        self.dtype = Dtype(base.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.base, self.offset + plain(other).long())

    def to(self, dtype: Any, bitcast: bool = False) -> Pointer:
        """Return the addresses as numbers for ``inline_asm``.

        ``bitcast``: as addresses of numbers of another dtype.
        """
        if not bitcast:
            return self
        words = flat_memory(self.base).view(torch.uint8).view(dtype.torch)
        size = self.base.element_size()
        offset = (plain(self.offset) + self.base.storage_offset()) * size
        return Pointer(words, offset // dtype.torch.itemsize)

    def places(self, mask: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the flat memory, the indices into it, and a mask of the valid ones."""
        flat = flat_memory(self.base)
        mask = plain(True if mask is None else mask)
        offset, mask = torch.broadcast_tensors(self.offset + self.base.storage_offset(), mask)
        read = offset[mask]
        in_range = (read >= 0) & (read < len(flat))
        assert bool(in_range.all()), "an access out of range"
        return flat, offset, mask


def _none(*_arguments: Any, **_options: Any) -> None:
    return None


def _layout(*parts: Any) -> Any:
    """Return a layout that only knows its shape."""
    return types.SimpleNamespace(shape=parts[-1])


def _static_assert(condition: bool, message: str = "") -> None:
    assert condition, message


def _binary(function: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda a, b: function(register(a), register(b))


def _fma(a: Any, b: Any, c: Any) -> Register:
    """Return ``a * b + c``, rounded twice, as Triton's interpreter does."""
    a, b, c = map(plain, (a, b, c))
    return register(a * b + c)


def _full(shape: Any, value: Any, dtype: Dtype, _layout: Any = None) -> Register:
    return register(torch.full(tuple(shape), plain(value).item(), dtype=dtype.torch))


def _load(pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Register:
    flat, places, mask = pointer.places(mask)
    dtype = flat.dtype
    if dtype.is_floating_point and dtype.itemsize == 1:
        assert other == 0
        flat = flat.view(torch.uint8)  # indexing does not support FP8
    value = torch.full(places.shape, other, dtype=flat.dtype)
    value[mask] = flat[places[mask]]
    return register(value.view(dtype))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    flat, places, mask = pointer.places(mask)
    flat[places[mask]] = torch.broadcast_to(plain(value), places.shape)[mask].to(flat.dtype)


def _add(pointer: Pointer, value: Any, sem: str = "") -> Register:
    flat, places, _ = pointer.places()
    old = flat[places].clone()  # for a single index it would be a view
    added = torch.broadcast_to(plain(value).to(flat.dtype), places.shape)
    flat.index_put_((places,), added, accumulate=True)
    return register(old)


def _exchange(pointer: Pointer, value: Any, sem: str = "") -> Register:
    old = _load(pointer)
    _store(pointer, value)
    return old


def _scan(x: Tensor, axis: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return torch.stack(list(itertools.accumulate(x.unbind(axis), combine)), axis)


def _arithmetic(text: str, *values: Tensor) -> Register:
    """Compute the result of PTX that only does arithmetic."""
    if "shfl.sync.idx" in text or text.startswith("mov.b32"):
        return register(values[0])
    if "selp.f32 $0, $3, $4" in text:
        low, high, yes, no = values
        return register(torch.where(low <= high, yes, no))
    if "setp.le.s32" in text:
        s, low, high = values
        return register(torch.where(low <= high, s, -torch.inf))
    if "setp.ge.u32" in text:
        p, draw, threshold = values
        below = -p if "neg.f32" in text else 0.0
        return register(torch.where(_unsigned(draw) >= _unsigned(threshold), p, below))
    if "setp.lt.f32" in text:
        p, kept, dropped = values
        return register(p.abs() * torch.where(p < 0, dropped, kept))
    if "vote.sync.any" in text:
        return register(values[0] * values[1])
    raise NotImplementedError(text)


def _unsigned(x: Tensor) -> Tensor:
    return x.long() % 2**32


def _negate_four(text: str, *values: Tensor) -> tuple[Register, ...]:
    """Draw two words by Philox 2x32; negate each of four numbers whose half word is low."""
    rounds = re.findall(r"mul.wide.u32 wide, low, (\d+); .*? add.s32 key, key, (-?\d+);", text)
    low, high, key, threshold = map(_unsigned, values[4:])
    for multiplier, step in rounds:
        # in two halves of 16 bits: signed 64 bits do not hold the product
        lower = (low & 0xFFFF) * int(multiplier)
        upper = (low >> 16) * int(multiplier) + (lower >> 16)
        low, high = upper >> 16 ^ key ^ high, (upper & 0xFFFF) << 16 | lower & 0xFFFF
        key = (key + int(step)) % 2**32
    shifts = [int(n) for n in re.findall(r"shl.b32 draw, \w+, (\d+);", text)] + [0, 0]
    made = []
    for p, word, shift in zip(values, (low, high, low, high), shifts, strict=False):
        made.append(register(torch.where(word << shift & 0xFFFFFFFF >= threshold, p, -p)))
    return tuple(made)


def _word_of_e4m3(values: list[Tensor]) -> Register:
    """Round four numbers to e4m3, one per byte of a word; larger ones saturate."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    rounded = [plain(x).clamp(-limit, limit).to(torch.float8_e4m3fn) for x in values]
    codes = torch.stack([x.view(torch.uint8) for x in rounded], -1)
    return register(codes.contiguous().view(torch.int32).squeeze(-1))


def _bytes_of_words(words: Tensor, dtype: torch.dtype) -> Register:
    """Return byte 0 of word 0, byte 1 of word 1, and so on modulo 4."""
    codes = plain(words).contiguous().view(torch.uint8).view(*words.shape, 4)
    place = torch.arange(words.shape[-1]) % 4
    codes = codes.gather(-1, place.expand(words.shape)[..., None])
    return register(codes.squeeze(-1).view(dtype))


class Language:
    """Gluon's names, for the current program."""

    def __init__(self) -> None:
        self.machine = Machine(register, False)
        self.pid = self.programs = 0
        self.names = self._names()

    def run(self, kernel: Callable[[], None], pids: range, programs: int, reverse: bool) -> None:
        """Run some programs of a launch, at once if there are several."""
        self.programs = programs

        def resume(number: int) -> None:
            self.machine, self.pid = machines[number], pids[number]

        def run() -> None:
            kernel()
            self.machine.land()

        together = Programs([run] * len(pids), resume) if len(pids) > 1 else None
        machines = [Machine(register, reverse, together) for _ in pids]
        if together:
            together()
        else:
            resume(0)
            run()

    def _memory(self, dtype: Dtype, shape: list[int], layout: Any) -> Any:
        if layout == "barriers":
            made = [Barrier() for _ in range(shape[0])]
            self.machine.barriers += made
            return types.SimpleNamespace(shape=shape, index=lambda number: made[int(number)])
        memory = torch.zeros(shape, dtype=dtype.torch)
        return Shared(memory.fill_(NAN) if memory.is_floating_point() else memory, self.machine)

    def _inline_asm(
        self, text: str, _constraints: str, values: list[Any], *, pack: int, **options: Any
    ) -> Register:
        if "griddepcontrol" in text:
            return register(0)  # launches do not overlap
        first = values[0]
        if "bar.sync" in text or "bar.arrive" in text:
            number, parties = (int(x.flatten()[0]) for x in values[-2:])
            meet = self.machine.sync if "bar.sync" in text else self.machine.arrive
            meet(number, parties, first.numel() // pack)
        elif "ld.relaxed.gpu" in text:
            return register(_load(first))
        elif "ld.acquire.gpu" in text and "setp.le.s32 early" in text:
            counter, turn = values
            self.machine.pause(lambda: bool((_load(counter) > turn).all()))
            first = turn
        elif "ld.acquire.gpu" in text:
            self._take_turn(text, values)
            first = values[-1]
        elif "red.relaxed.gpu.global.add" in text:
            if arrived := re.search(r"cp.async.bulk.wait_group (\d+);", text):
                self.machine.store_wait(int(arrived[1]), is_read=False)
            _add(first, values[1])
            if self.machine.programs:
                self.machine.programs.say_raised()
            first = values[1]
        elif "mul.wide.u32" in text:
            return _negate_four(text, *map(plain, values))
        elif text.startswith("cvt.rn.relu"):
            return register(plain(first).relu().to(options["dtype"].torch))
        elif "cvt.rn.satfinite.e4m3x2.f32" in text:
            return _word_of_e4m3(values)
        elif widened := re.search(r"cvt.rn.f16x2.(e4m3|e5m2)x2", text):
            stored = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[widened[1]]
            return register(_bytes_of_words(first, stored).to(options["dtype"]))
        elif "lop3.b32" in text or "prmt.b32" in text:
            return register(run_on_words(text, plain(first), options["dtype"].torch))
        elif (
            text.startswith("mov.b32")
            and getattr(options["dtype"], "torch", None) is torch.float8_e4m3fn
        ):
            return _bytes_of_words(first, torch.float8_e4m3fn)
        else:
            return _arithmetic(text, *map(plain, values))
        return register(torch.zeros(first.shape, dtype=torch.int32))

    def _take_turn(self, text: str, values: list[Any]) -> None:
        """End the turn at one counter, if any, and take the turn at another.

        Earlier programs are done; another partition of this program may not be.
        """
        has_turn = "red.relaxed.gpu" in text
        if not has_turn:
            self.machine.pause(lambda: bool((_load(values[0]) >= values[1]).all()))
        count, turn = (values[1], values[3]) if has_turn else (_load(values[0]), values[1])
        assert bool((plain(count) == plain(turn)).all()), "it is not one's turn"
        if has_turn:
            if "cp.async.bulk.wait_group 0;" in text:
                self.machine.store_wait(0, is_read=False)
            assert not self.machine.own("landing"), "additions are not waited for"
            _store(values[0], _load(values[0]) + 1)

    def _atomic_add(self, pointer: Pointer, value: Any, sem: str = "") -> Register:
        old = _add(pointer, value)
        if self.machine.programs:
            self.machine.programs.begin_next()
        return old

    def _machine(self, name: str) -> Callable[..., Any]:
        return lambda *arguments, **options: getattr(self.machine, name)(*arguments, **options)

    def _names(self) -> dict[str, Any]:
        dtypes = {
            name: Dtype(getattr(torch, name))
            for name in ("float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
        }
        dtypes["float8e4nv"] = Dtype(torch.float8_e4m3fn)
        dtypes["float8e5"] = Dtype(torch.float8_e5m2)
        layout = types.SimpleNamespace(get_default_for=_none)
        gl = types.SimpleNamespace(
            **dtypes,
            constexpr=lambda x: x,
            static_range=range,
            static_assert=_static_assert,
            assume=_none,
            pointer_type=lambda dtype: dtype,
            NVMMADistributedLayout=_none,
            DotOperandLayout=_none,
            SliceLayout=_none,
            BlockedLayout=_none,
            DistributedLinearLayout=_layout,
            SwizzledSharedLayout=_none,
            NVMMASharedLayout=layout,
            program_id=lambda axis: register(self.pid),
            num_programs=lambda axis: register(self.programs),
            zeros=lambda shape, dtype, layout=None: _full(shape, 0, dtype),
            full=_full,
            arange=lambda begin, end, layout=None: register(
                torch.arange(begin, end, dtype=torch.int32)
            ),
            fma=_fma,
            add=lambda a, b, sanitize_overflow=True: register(a) + b,
            exp2=_by_numpy(np.exp2),
            log2=_by_numpy(np.log2),
            abs=torch.abs,
            multiple_of=lambda x, _: x,
            cdiv=lambda a, b: (a + b - 1) // b,
            where=lambda a, b, c: torch.where(register(a), register(b), register(c)),
            maximum=_binary(torch.maximum),
            minimum=_binary(torch.minimum),
            max=lambda x, axis: x.amax(axis),
            sum=lambda x, axis: x.sum(axis, dtype=x.dtype),
            reshape=lambda x, shape: x.reshape(tuple(shape)),
            permute=lambda x, order: x.permute(order),
            convert_layout=lambda x, *_, **__: x,
            join=lambda a, b: torch.stack((a, b), -1),
            split=lambda x: x.unbind(-1),
            load=_load,
            store=_store,
            atomic_add=self._atomic_add,
            atomic_xchg=_exchange,
            associative_scan=_scan,
            allocate_shared_memory=self._memory,
            inline_asm_elementwise=self._inline_asm,
            warp_specialize=self._machine("specialize"),
        )
        return {
            "gl": gl,
            "hopper": types.SimpleNamespace(
                warpgroup_mma=self._machine("mma"),
                warpgroup_mma_wait=self._machine("mma_wait"),
                fence_async_shared=self._machine("fence"),
            ),
            "mbarrier": types.SimpleNamespace(
                MBarrierLayout=lambda: "barriers",
                init=lambda barrier, count: barrier.init(count),
                expect=self._machine("expect"),
                arrive=self._machine("arrive_at"),
                wait=self._machine("wait_phase"),
            ),
            "tma": types.SimpleNamespace(store_wait=self._machine("store_wait")),
            "copy_in": self._machine("copy_in"),
            "copy_out": self._machine("copy_out"),
            "add_out": self._machine("add_out"),
            "range": lambda *bounds: (register(n) for n in range(*map(int, bounds))),
        }
