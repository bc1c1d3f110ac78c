"""Runs the walk for Hopper on a CPU: Gluon has no interpreter, so here is one for what it uses.

The Python of the kernel runs as it stands, one program after the other, every partition of its
warps in a thread of its own, with the barriers of shared memory and of the hardware, and with the
copies of tensor maps. What is asynchronous happens as late as it may: a product reads its operands,
and has a result, when it is waited for, and so do copies to memory. So a wait too few gives NaN,
and a barrier too few a wrong result or none. Layouts, registers and the order of memory are not
looked at.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from lightning_attn._kernels import hopper as shared
from lightning_attn._kernels import hopper_walk
from torch import Tensor

PATIENCE = 20.0  # seconds at a barrier
NAN = float("nan")


class Register(torch.Tensor):
    """What a thread holds: a tensor, or a number as one without dimensions."""

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else super().to(dtype)

    # values do not change, names do
    def __iadd__(self, other):
        return self + other

    def __imul__(self, other):
        return self * other

    def __iand__(self, other):
        return self & other


def register(x: Any) -> Register:
    return torch.as_tensor(x).as_subclass(Register)


class Pointer:
    """Addresses within the memory of a tensor."""

    def __init__(self, base: Tensor, offset: Any) -> None:
        self.base, self.offset = base, offset
        self.dtype = types.SimpleNamespace(element_ty=base.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.base, self.offset + other)

    def places(self, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the flat memory, the places in it, and which of them count."""
        flat = torch.empty(0, dtype=self.base.dtype).set_(self.base.untyped_storage())
        offset = torch.as_tensor(self.offset).as_subclass(torch.Tensor)
        mask = torch.as_tensor(True if mask is None else mask).as_subclass(torch.Tensor)
        offset, mask = torch.broadcast_tensors(offset + self.base.storage_offset(), mask)
        read = offset[mask]
        in_range = (read >= 0) & (read < len(flat))
        assert in_range.all(), "an access out of range"
        return flat, offset, mask


class Shared:
    """A view of shared memory."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.dtype = memory.dtype

    def index(self, number: Any) -> Shared:
        return Shared(self.memory[int(number)])

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.memory.view(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.memory.permute(order))

    def load(self, _layout: Any) -> Register:
        return register(self.memory.clone())

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.dtype
        self.memory.copy_(value)


class Map:
    """A tensor map: see ``hopper.coordinates``."""

    def __init__(self, tensor_map: Any) -> None:
        self.map = tensor_map
        self.dtype, self.layout = tensor_map.base.dtype, None
        size = 1
        for side in tensor_map.block_shape:
            size *= side
        self.block_type = types.SimpleNamespace(nbytes=size * tensor_map.base.element_size())

    def rows(self, where: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the flat memory, the places of a panel in it, and which of them are inside."""
        base, shape, strides = self.map.base, self.map.shape, self.map.strides
        numbers = [int(x) for x in where]
        rows, cols = self.map.block_shape[-2:]
        r = torch.arange(rows)[:, None] + numbers[3]
        c = torch.arange(cols)[None, :] + numbers[4]
        inside = (r < shape[3]) & (c < shape[4]) & (r >= 0)
        inside &= all(0 <= n < size for n, size in zip(numbers[:3], shape[:3], strict=True))
        begin = sum(n * stride for n, stride in zip(numbers, strides, strict=True))
        size = base.element_size()
        begin = begin * size % 2**64 // size  # addresses have 64 bits
        places = begin + torch.arange(rows)[:, None] * strides[3] + torch.arange(cols)[None, :]
        flat = torch.empty(0, dtype=base.dtype).set_(base.untyped_storage())
        return flat, places + base.storage_offset(), inside


class Barrier:
    """A barrier in shared memory: arrivals of a phase, and the bytes that it waits for."""

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self.pending, self.bytes, self.phase = parties, 0, 0


class Machine:
    """What the threads of one program share."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.arrived: dict[int, int] = {}
        self.passed: dict[int, int] = {}
        self.failure: BaseException | None = None
        self.own = threading.local()

    def wait(self, reached: Callable[[], bool]) -> None:
        with self.condition:
            done = self.condition.wait_for(lambda: reached() or self.failure, PATIENCE)
        if not done or self.failure:
            raise RuntimeError("nobody comes to a barrier")

    # ---- barriers in shared memory

    def complete(self, barrier: Barrier) -> None:
        if barrier.pending == 0 and barrier.bytes == 0:
            barrier.phase ^= 1
            barrier.pending = barrier.parties
        self.condition.notify_all()

    def expect(self, barrier: Shared | Barrier, size: int) -> None:
        with self.condition:
            barrier.pending -= 1
            assert barrier.pending >= 0, "a barrier has more arrivals than parties"
            barrier.bytes += size
            self.complete(barrier)

    def wait_phase(self, barrier: Barrier, parity: Any) -> None:
        self.wait(lambda: barrier.phase != int(parity))

    # ---- barriers of the hardware

    def arrive(self, number: Any, threads: int, warps: int) -> int:
        number = int(number)
        with self.condition:
            turn = self.passed.get(number, 0)
            self.arrived[number] = self.arrived.get(number, 0) + 32 * warps
            assert self.arrived[number] <= threads, "a barrier has too many arrivals"
            if self.arrived[number] == threads:
                self.arrived[number] = 0
                self.passed[number] = turn + 1
                self.condition.notify_all()
        return turn

    def sync(self, number: Any, threads: int, warps: int) -> None:
        turn = self.arrive(number, threads, warps)
        self.wait(lambda: self.passed.get(int(number), 0) > turn)

    # ---- copies

    def copy_in(self, tensor_map: Map, where: Any, barrier: Barrier, target: Shared) -> None:
        flat, places, inside = tensor_map.rows(where)
        panel = torch.zeros(places.shape, dtype=flat.dtype)
        panel[inside] = flat[places[inside]]
        target.memory.view(places.shape).copy_(panel)
        with self.condition:
            barrier.bytes -= tensor_map.block_type.nbytes
            self.complete(barrier)

    def copy_out(self, tensor_map: Map, where: Any, source: Shared) -> None:
        def write() -> None:
            flat, places, inside = tensor_map.rows(where)
            flat[places[inside]] = source.memory.view(places.shape)[inside]

        self.queue("stores").append(write)

    def store_wait(self, left: int) -> None:
        queue = self.queue("stores")
        while len(queue) > left:
            queue.pop(0)()

    # ---- products

    def queue(self, name: str) -> list[Any]:
        return self.own.__dict__.setdefault(name, [])

    def mma(self, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
        assert is_async
        product = types.SimpleNamespace(operands=(a, b, acc if use_acc else None), value=None)
        self.queue("products").append(product)
        result = torch.full(acc.shape, NAN).as_subclass(Register)
        result.product = product
        return result

    def mma_wait(self, left: int, deps: tuple[Any, ...]) -> Any:
        queue = self.queue("products")
        while len(queue) > left:
            product = queue.pop(0)
            a, b, acc = product.operands
            a, b = (x.memory if isinstance(x, Shared) else x for x in (a, b))
            assert a.dtype == b.dtype
            value = a.as_subclass(torch.Tensor).float() @ b.float()
            if acc is not None:
                value = value + (acc.product.value if hasattr(acc, "product") else acc)
            product.value = value
        found = [d if d.product.value is None else register(d.product.value) for d in deps]
        return found[0] if len(found) == 1 else tuple(found)

    # ---- programs

    def specialize(self, parts: list[tuple[Any, tuple[Any, ...]]], *_numbers: Any) -> None:
        def work(function: Any, arguments: tuple[Any, ...]) -> None:
            try:
                with torch.no_grad():
                    function(*arguments)
                assert not self.queue("stores"), "a copy to memory is not waited for"
            except BaseException as failure:
                with self.condition:
                    self.failure = self.failure or failure
                    self.condition.notify_all()

        threads = [threading.Thread(target=work, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure:
            raise self.failure
        assert not any(self.arrived.values()), "somebody is left at a barrier"


def _language(machine: Machine, pid: int) -> types.SimpleNamespace:
    def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Register:
        flat, places, mask = pointer.places(mask)
        value = torch.full(places.shape, other, dtype=flat.dtype)
        value[mask] = flat[places[mask]]
        return register(value)

    def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
        flat, places, mask = pointer.places(mask)
        flat[places[mask]] = torch.broadcast_to(value, places.shape)[mask].as_subclass(torch.Tensor)

    def memory(dtype: torch.dtype, shape: list[int], _layout: Any) -> Shared:
        return Shared(torch.full(shape, NAN, dtype=dtype))

    def none(*_arguments: Any) -> None:
        return None

    layout = types.SimpleNamespace(get_default_for=none)
    return types.SimpleNamespace(
        float32=torch.float32, int32=torch.int32, int64=torch.int64, constexpr=lambda x: x,
        NVMMADistributedLayout=none, DotOperandLayout=none, SliceLayout=none, BlockedLayout=none,
        SwizzledSharedLayout=none, NVMMASharedLayout=layout,
        program_id=lambda axis: register(torch.tensor(pid, dtype=torch.int32)),
        zeros=lambda shape, dtype, layout: register(torch.zeros(shape, dtype=dtype)),
        arange=lambda begin, end, layout: register(torch.arange(begin, end, dtype=torch.int32)),
        exp2=torch.exp2, static_range=range, cdiv=lambda a, b: (a + b - 1) // b,
        where=lambda a, b, c: torch.where(register(a), register(b), register(c)),
        maximum=lambda a, b: torch.maximum(register(a), register(b)),
        minimum=lambda a, b: torch.minimum(register(a), register(b)),
        sum=lambda x, axis: x.sum(axis), convert_layout=lambda x, layout: x,
        load=load, store=store, allocate_shared_memory=memory, warp_specialize=machine.specialize,
    )  # fmt: skip


def _relinked(functions: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """Return the Python of jit functions, with other meanings for the names that they use."""
    for name, function in functions.items():
        code = function.fn
        names[name] = types.FunctionType(code.__code__, names, name, code.__defaults__)
    return names


def run_program(pid: int, arguments: dict[str, Any]) -> None:
    """Run one program of ``hopper_walk_kernel``."""
    machine = Machine()

    class Barriers(list):
        def index(self, number: Any) -> Barrier:  # type: ignore[override]
            return self[int(number)]

    names: dict[str, Any] = {"__builtins__": __builtins__}
    for module in (shared, hopper_walk):
        # numbers that are constants of the compiler
        names |= {n: v.value for n, v in vars(module).items() if type(v).__name__ == "constexpr"}
    names |= {
        "gl": _language(machine, pid),
        "hopper": types.SimpleNamespace(
            warpgroup_mma=machine.mma, warpgroup_mma_wait=machine.mma_wait,
            fence_async_shared=lambda: None,
        ),
        "mbarrier": types.SimpleNamespace(expect=machine.expect, wait=machine.wait_phase),
        "tma": types.SimpleNamespace(store_wait=machine.store_wait),
        "range": lambda *bounds: (register(n) for n in range(*map(int, bounds))),
        "copy_in": machine.copy_in, "copy_out": machine.copy_out,
        "barrier_sync": machine.sync, "barrier_arrive": machine.arrive,
        "barriers": lambda count, parties: Barriers(Barrier(parties) for _ in range(count)),
    }  # fmt: skip
    functions = {
        name: function
        for name, function in vars(hopper_walk).items()
        if hasattr(function, "fn") and name not in names
    }
    kernel = _relinked({"coordinates": shared.coordinates, **functions}, names)
    kernel["hopper_walk_kernel"](**arguments)


class Kernel:
    """In place of the jit function: a launch runs its programs one after the other."""

    __name__ = "hopper_walk_kernel"

    def __init__(self) -> None:
        self.params = hopper_walk.hopper_walk_kernel.params
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, **constants: Any) -> None:
            self.launches += 1
            names = [p.name for p in self.params]
            arguments = dict(zip(names, given, strict=False))
            arguments |= {name: value for name, value in constants.items() if name in names}
            for name, value in arguments.items():
                if hasattr(value, "block_shape"):
                    arguments[name] = Map(value)
                elif isinstance(value, Tensor):
                    arguments[name] = Pointer(value, register(torch.zeros((), dtype=torch.int64)))
            for pid in range(grid[0]):
                run_program(pid, dict(arguments))

        return launch
