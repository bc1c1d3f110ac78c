"""The machine of ``gluon``: threads, barriers, shared memory, copies and products.

One thread runs at a time: the first partition, in order or in reverse order, that does not wait. So
a program always runs the same way, and the first partition runs as early and as far as the barriers
let it.

Asynchronous work happens as late as it may, when it is waited for: a product reads its operands and
has a result, a copy to memory reads its source, and a copy from memory writes its target. A copy to
memory arrives when its arrival is waited for, or when its partition ends; an addition arrives when
it is read, before stores that it should follow. Until then results and targets are NaN. So a
missing wait gives NaN, and a missing barrier a wrong result, NaN or a deadlock.
"""

from __future__ import annotations

import math
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .gluon_programs import Programs

NAN = float("nan")
WARP = 32


class Dtype:
    """A dtype with the attributes of Triton's dtypes."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.torch = dtype
        self.primitive_bitwidth = 8 * dtype.itemsize
        self.element_ty = self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dtype) and other.torch == self.torch

    def __hash__(self) -> int:
        return hash(self.torch)


def plain(x: Any) -> Tensor:
    """Return a register as a plain tensor."""
    return torch.as_tensor(x).as_subclass(Tensor)


def flat_memory(base: Tensor) -> Tensor:
    """Return the whole storage of a tensor, flat."""
    return torch.empty(0, dtype=base.dtype).set_(base.untyped_storage())


class Shared:
    """A view of shared memory, and its writers since the last fence, as ``1 + partition``."""

    def __init__(self, memory: Tensor, machine: Machine, writers: Tensor | None = None) -> None:
        self.memory, self.machine = memory, machine
        if writers is None:
            writers = torch.zeros(memory.shape, dtype=torch.int8)
        self.writers = writers
        self.dtype = Dtype(memory.dtype)
        self.shape = list(memory.shape)

    def _view(self, of: Callable[[Tensor], Tensor]) -> Shared:
        return Shared(of(self.memory), self.machine, of(self.writers))

    def index(self, number: Any) -> Shared:
        assert 0 <= int(number) < self.shape[0], "an index out of range"
        return self._view(lambda x: x[int(number)])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return self._view(lambda x: x.view(*shape))

    def permute(self, order: Sequence[int]) -> Shared:
        return self._view(lambda x: x.permute(*order))

    def slice(self, start: Any, length: int, axis: int = 0) -> Shared:
        return self._view(lambda x: x.narrow(axis, int(start), length))

    def load(self, _layout: Any) -> Tensor:
        return self.machine.register(self.memory.clone())

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.memory.dtype, "a store of another type"
        assert value.shape == self.memory.shape, "a store of another shape"
        self.memory.copy_(plain(value))
        self.writers.fill_(1 + self.machine.partition)
        self.machine.own("unfenced").append(self.writers)

    def poison(self) -> None:
        if self.memory.is_floating_point():
            self.memory.fill_(NAN)

    def assert_fenced(self) -> None:
        assert not self.writers.any(), "a fence is missing"


class Boxes:
    """Tiles of shared memory as boxes of copies: panels, each of blocks."""

    def __init__(self, tiles: Shared, shape: Sequence[int]) -> None:
        self.tiles, self.box = tiles, list(shape[1:])
        self.rows, self.columns = shape[-2:]

    def index(self, number: Any) -> Shared:
        _, rows, columns = self.tiles.shape
        blocks, panels = rows // self.rows, columns // self.columns
        number, block = divmod(int(number), blocks)
        tile, panel = divmod(number, panels)
        found = self.tiles.index(tile).slice(block * self.rows, self.rows)
        return found.slice(panel * self.columns, self.columns, 1).reshape(self.box)


class Map:
    """A tensor map: see ``hopper.coordinates``."""

    def __init__(self, tensor_map: Any) -> None:
        base = self.base = tensor_map.base
        self.extents, self.strides = tensor_map.shape, tensor_map.strides
        self.box = list(tensor_map.block_shape)
        self.dtype, self.layout = Dtype(base.dtype), None
        size = math.prod(self.box) * base.element_size()
        self.block_type = types.SimpleNamespace(nbytes=size, shape=self.box)
        # the indices of a box that begins at 0
        self._places = torch.zeros([], dtype=torch.int64)
        for stride, side in zip(self.strides, self.box, strict=True):
            self._places = self._places[..., None] + torch.arange(side) * stride
        self._everywhere = torch.ones(self._places.shape, dtype=torch.bool)

    def places(self, where: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the flat memory, the indices of a box in it, and a mask of those inside."""
        numbers = [int(x) for x in where]
        inside = self._everywhere
        sides = list(zip(numbers, self.extents, self.box, strict=True))
        if any(n < 0 or n + side > extent for n, extent, side in sides):
            inside = torch.tensor(True)
            for number, extent, side in sides:
                index = torch.arange(number, number + side)
                inside = inside[..., None] & (index >= 0) & (index < extent)
        size = self.base.element_size()
        assert numbers[-1] * size % 16 == 0, "a box begins within 16 bytes of its row"
        begin = sum(n * stride for n, stride in zip(numbers, self.strides, strict=True)) * size
        begin = (begin + 2**63) % 2**64 - 2**63  # addresses have 64 bits
        places = self._places + (begin // size + self.base.storage_offset())
        flat = flat_memory(self.base)
        read = places[inside]
        assert bool(((read >= 0) & (read < len(flat))).all()), "a copy out of range"
        return flat, places, inside

    def written(self, where: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the ``places`` of a box that is written, which may not begin before the tensor.

        So says NVIDIA's programming guide. A box that is read may begin before the tensor, and both
        may end after it.
        """
        assert min(int(x) for x in where) >= 0, "a store begins ahead of its tensor"
        return self.places(where)


class Barrier:
    """An mbarrier: arrivals of a phase, bytes that it waits for, pending copies."""

    def __init__(self) -> None:
        self.parties = self.pending = self.bytes = self.phase = 0
        self.copies: list[Callable[[], None]] = []

    def init(self, count: int) -> None:
        self.parties = self.pending = count

    def complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.parties

    def arrive(self, count: int, size: int = 0) -> None:
        self.pending -= count
        assert self.pending >= 0, "a barrier has more arrivals than parties"
        self.bytes += size
        self.complete()

    def is_past(self, parity: int) -> bool:
        """Return whether a phase of this parity is over, after its pending copies arrive."""
        if self.phase == parity:
            while self.copies:
                self.copies.pop(0)()
        return self.phase != parity


class Task:
    """A partition of a program: its thread, and the condition that it waits for."""

    def __init__(self, number: int) -> None:
        self.number = number
        # a lock that the running partition releases to let this one run
        self.go = threading.Lock()
        self.go.acquire()
        self.is_done = False
        self.is_ready: Callable[[], bool] = lambda: True
        self.own: dict[str, list[Any]] = {}


class Machine:
    """The state shared by the partitions of a program; ``register`` makes a register."""

    def __init__(
        self,
        register: Callable[[Any], Any],
        reverse: bool,
        programs: Programs | None = None,
    ) -> None:
        self.register, self.reverse = register, reverse
        self.programs = programs  # the programs that run at once, this one included
        self.arrived: dict[int, int] = {}
        # the number of threads that the first arrival waits for
        self.expected: dict[int, int] = {}
        self.passed: dict[int, int] = {}
        self.failure: BaseException | None = None
        self.current = Task(0)
        self.order = [self.current]
        self.barriers: list[Barrier] = []

    # ---- threads

    @property
    def partition(self) -> int:
        return self.current.number

    def own(self, name: str) -> list[Any]:
        """Return a list that is private to the running partition."""
        return self.current.own.setdefault(name, [])

    def pause(self, is_ready: Callable[[], bool] = lambda: True) -> None:
        """Let the first ready partition go on; return once that is the caller."""
        task = self.current
        task.is_ready = is_ready
        chosen = self._choose()
        if chosen is task:
            return
        self.current = chosen
        chosen.go.release()
        task.go.acquire()
        if self.failure:
            raise RuntimeError("another partition failed")

    def _choose(self) -> Task:
        while True:
            for task in self.order:
                if not task.is_done and task.is_ready():
                    if self.programs:
                        self.programs.note_progress()
                    return task
            if not (self.programs and self.programs.step_aside()):
                raise RuntimeError("nobody comes to a barrier")

    def specialize(self, parts: Sequence[tuple[Any, tuple[Any, ...]]], *_numbers: Any) -> None:
        whole, tasks = self.current, [Task(number) for number in range(len(parts))]
        self.order = tasks[::-1] if self.reverse else tasks

        def work(task: Task, function: Any, arguments: tuple[Any, ...]) -> None:
            task.go.acquire()
            try:
                if not self.failure:
                    with torch.no_grad():
                        function(*arguments)
                    self.land()
                    assert not task.own.get("stores"), "a copy to memory is not waited for"
                    assert not task.own.get("products"), "a product is not waited for"
                task.is_done = True
                if not self.failure and not all(other.is_done for other in tasks):
                    self.current = self._choose()
                    self.current.go.release()
            except BaseException as failure:
                task.is_done = True
                self.failure = self.failure or failure
            if self.failure:
                for other in tasks:
                    if other.go.locked():
                        other.go.release()

        threads = [
            threading.Thread(target=work, args=(task, *part))
            for task, part in zip(tasks, parts, strict=True)
        ]
        for thread in threads:
            thread.start()
        self.current = self.order[0]
        self.current.go.release()
        for thread in threads:
            thread.join()
        if self.failure:
            raise self.failure
        self.current, self.order = whole, [whole]
        assert not any(self.arrived.values()), "somebody is left at a barrier"
        assert not any(b.copies for b in self.barriers), "a copy is not waited for"

    # ---- barriers in shared memory

    def expect(self, barrier: Barrier, size: int, pred: Any = True) -> None:
        if pred:
            barrier.arrive(1, size)
            self.pause()

    def arrive_at(self, barrier: Barrier, count: int = 1, pred: Any = True) -> None:
        if pred:
            barrier.arrive(count)
            self.pause()

    def wait_phase(self, barrier: Barrier, parity: Any, pred: Any = True) -> None:
        if pred:
            bit = int(parity)
            self.pause(lambda: barrier.is_past(bit))

    # ---- barriers of the hardware

    def _join(self, number: int, parties: int, threads: int) -> int:
        turn = self.passed.get(number, 0)
        assert parties % 32 == 0, "a barrier is of whole warps"
        if not self.arrived.get(number):
            self.expected[number] = parties
        assert self.expected[number] == parties, "a barrier is for two numbers of threads"
        self.arrived[number] = self.arrived.get(number, 0) + threads
        assert self.arrived[number] <= parties, "a barrier has too many arrivals"
        if self.arrived[number] == parties:
            self.arrived[number] = 0
            self.passed[number] = turn + 1
        return turn

    def arrive(self, number: int, parties: int, threads: int) -> None:
        self._join(number, parties, threads)
        self.pause()

    def sync(self, number: int, parties: int, threads: int) -> None:
        turn = self._join(number, parties, threads)
        self.pause(lambda: self.passed.get(number, 0) > turn)

    # ---- copies

    def fence(self) -> None:
        """Make the running partition's stores visible to products and copies."""
        for writers in self.own("unfenced"):
            writers[writers == 1 + self.partition] = 0
        self.own("unfenced").clear()

    def copy_in(self, tensor_map: Map, where: Any, barrier: Barrier, target: Shared) -> None:
        flat, places, inside = tensor_map.places(where)
        target.poison()

        def write() -> None:
            panel = torch.zeros(places.shape, dtype=flat.dtype)
            panel[inside] = flat[places[inside]]
            target.memory.copy_(panel.view(target.memory.shape))
            barrier.bytes -= tensor_map.block_type.nbytes
            barrier.complete()

        barrier.copies.append(write)
        self.pause()

    def copy_out(self, tensor_map: Map, where: Any, source: Shared) -> None:
        flat, places, inside = tensor_map.written(where)
        source.assert_fenced()

        def read() -> Callable[[], None]:
            tile = source.memory.view(places.shape)[inside]

            def write() -> None:
                flat[places[inside]] = tile

            return write

        self.own("stores").append(read)

    def add_out(self, tensor_map: Map, where: Any, source: Shared) -> None:
        flat, places, inside = tensor_map.written(where)
        source.assert_fenced()

        def add() -> Callable[[], None]:
            flat[places[inside]] += source.memory.view(places.shape)[inside]
            return lambda: None

        self.own("stores").append(add)

    def store_wait(self, left: int, *, is_read: bool = True) -> None:
        """Wait until copies to memory have read their sources, or (not ``is_read``) arrived."""
        queue, landing = self.own("stores"), self.own("landing")
        while len(queue) > left:
            landing.append(queue.pop(0)())
        if not is_read:
            self.land(max(left - len(queue), 0))

    def land(self, left: int = 0) -> None:
        """Let the partition's copies that were read arrive in memory, all but ``left``."""
        landing = self.own("landing")
        while len(landing) > left:
            landing.pop(0)()

    # ---- products

    def mma(self, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
        assert is_async
        for x in (a, b):
            if isinstance(x, Shared):
                x.assert_fenced()
        product = types.SimpleNamespace(operands=(a, b, acc if use_acc else None), value=None)
        self.own("products").append(product)
        result = self.register(torch.full(acc.shape, NAN))
        result.product = product
        return result

    def mma_wait(self, left: int, deps: Sequence[Any]) -> Any:
        queue = self.own("products")
        while len(queue) > left:
            product = queue.pop(0)
            a, b, acc = product.operands
            a, b = (x.memory if isinstance(x, Shared) else plain(x) for x in (a, b))
            assert a.dtype == b.dtype
            value = a.float() @ b.float()
            if acc is not None:
                value = value + (acc.product.value if hasattr(acc, "product") else plain(acc))
            product.value = value
        found = [d if d.product.value is None else self.register(d.product.value) for d in deps]
        return found[0] if len(found) == 1 else tuple(found)
