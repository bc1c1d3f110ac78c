"""The machine that runs a kernel: memories with capacity and liveness, registers, the log."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..dtypes import NUMPY, Array, name_of, poison
from ..errors import NkiValidationError, describe, require, running_frame
from ..lnc import LNC, Turns
from ..targets import Target
from ..trace import Instruction, Tile, Trace
from .marks import BY_OTHERS, Marks
from .storage import Iteration, Storage

_current = threading.local()


def running() -> Machine | None:
    """Return the machine that runs the kernel of this thread, if there is one."""
    return getattr(_current, "machine", None)


def machine() -> Machine:
    """Return the machine that runs the kernel of this thread."""
    found = running()
    if found is None:
        raise RuntimeError("nki calls need a running kernel; use simulate(kernel)(*arrays)")
    return found


class Machine:
    """State of one program of a run: a core with its own memories.

    Args:
        target: the generation.
        strict: reading memory that was never written raises an error that names the tensor.
        execute: compute; otherwise only check and log, without values.
        programs: cores of the logical core; ``program``: number of this one.
        first: the machine of program 0; this one shares its log and HBM.
    """

    def __init__(
        self,
        target: Target,
        *,
        programs: int,
        strict: bool,
        execute: bool,
        first: Machine | None = None,
    ) -> None:
        self.target = target
        self.strict = strict
        self.execute = execute
        self.programs = programs
        self.program = 0 if first is None else 1
        # the machine of program 0 of the logical core
        self.core: Machine = first or self
        self.trace: Trace = Trace(target.name) if first is None else first.trace
        self.shared: list[Storage] = [] if first is None else first.shared
        self.turns: Turns = Turns() if first is None else first.turns
        # how many iterations of a loop to trace; None: all
        self.samples: int | None = None if first is None else first.samples
        self.weight = 1.0
        # within nl.no_reorder
        self.is_ordered = False
        # what looks at each instruction after it has written
        self.watch: Any = None if first is None else first.watch
        # iteration of the innermost device loop that runs
        self.iteration: Iteration | None = None
        self.shared_used = 0
        # the first tile that did not fit by references
        self.overflow: NkiValidationError | None = None
        # decisions of registers: bounds of loops, and whether loops continue
        self.branches: list[int] = []
        # tensors at explicit addresses
        self.placed: weakref.WeakSet[Storage] = weakref.WeakSet()
        self.scalar_registers = np.zeros(128, np.float32)
        # None: no chain of accumulation is open
        self.vector_registers: Array | None = None
        self.sbuf_live = 0
        self.psum_live = 0
        # places that were freed, the oldest first, and the bytes or banks of each
        self.freed: dict[str, deque[tuple[int, int]]] = {"sbuf": deque(), "psum": deque()}
        self.pooled = {"sbuf": 0, "psum": 0}

    def __enter__(self) -> Machine:
        self.outer = running()
        _current.machine = self
        return self

    def __exit__(self, *_: object) -> None:
        _current.machine = self.outer

    def partner(self) -> Machine:
        """Return the machine of the other program of a logical core of two."""
        return Machine(
            self.target,
            programs=self.programs,
            strict=self.strict,
            execute=self.execute,
            first=self,
        )

    # memory

    def place(self, storage: Storage) -> int:
        """Return the bytes per partition, or the banks of PSUM, that a storage takes."""
        nbytes: int = storage.partition * storage.itemsize
        if storage.region == "psum":
            return max(1, -(-nbytes // self.target.psum_bank_bytes))
        return nbytes

    def allocate(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        region: str,
        address: tuple[int, int] | None = None,
    ) -> Storage:
        """Make room for a tensor, or take an address; its contents are undefined."""
        storage = Storage(self, name, shape, dtype, region)
        storage.iteration = self.iteration
        try:
            if address is not None:
                self._take_address(storage, address)
            elif storage.on_chip:
                self._reserve(storage)
        except NkiValidationError:
            storage.memory = None
            raise
        self._fill(storage)
        return storage

    def _reserve(self, storage: Storage) -> None:
        target, region, need = self.target, storage.region, self.place(storage)
        page = "nki/guides/architecture, memory of a NeuronCore"
        require(
            storage.shape[0] <= target.partitions,
            "nl.ndarray",
            storage.name,
            f"may have at most {target.partitions} partitions",
            storage.shape[0],
            page,
        )
        self.trace.tiles[storage.id] = Tile(region, need, self.program)
        if region == "psum":
            room, live = target.psum_banks, self.psum_live
            unit = f"banks of {target.psum_bank_bytes} bytes of PSUM are live at once"
        else:
            room, live = target.sbuf_bytes, self.sbuf_live
            unit = "bytes of each partition of SBUF are live at once"
        try:
            require(
                live + need <= room,
                "nl.ndarray",
                storage.name,
                f"must fit: at most {room} {unit}",
                live + need,
                page,
            )
        except NkiValidationError as error:
            # does not fit by references; the end of the run checks live ranges
            if self.overflow is None:
                frame = running_frame()
                error.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                error.args = (f"{error}\n  at {describe(frame, frame.f_lineno)}",)
                self.overflow = error
        # fresh room first, then what was freed longest ago: rotation, as double buffers do
        taken = []
        while self.freed[region] and live + self.pooled[region] + need > room:
            old, size = self.freed[region].popleft()
            self.pooled[region] -= size
            taken.append(old)
        if taken:
            self.trace.reuses[storage.id] = tuple(taken)
        if region == "psum":
            self.psum_live += need
            self.trace.psum_peak = max(self.trace.psum_peak, self.psum_live)
        else:
            self.sbuf_live += need
            self.trace.sbuf_peak = max(self.trace.sbuf_peak, self.sbuf_live)

    def _take_address(self, storage: Storage, address: tuple[int, int]) -> None:
        """Put a tensor at (first partition, byte); writes to it overwrite other tensors there."""
        target, page = self.target, "nki.language.ndarray, address"
        partition, start = address
        nbytes = storage.partition * storage.itemsize
        in_psum = storage.region == "psum"
        room = target.psum_banks * target.psum_bank_bytes if in_psum else target.sbuf_bytes
        require(
            partition >= 0 and partition + storage.shape[0] <= target.partitions,
            "nl.ndarray",
            "address",
            f"must leave {storage.shape[0]} partitions of {target.partitions}",
            partition,
            page,
        )
        require(
            start >= 0 and start + nbytes <= room,
            "nl.ndarray",
            "address",
            f"must leave {nbytes} bytes of {room}",
            start,
            page,
        )
        require(
            not in_psum or start % target.psum_bank_bytes == 0,
            "nl.ndarray",
            "address",
            f"must begin a bank of PSUM, a multiple of {target.psum_bank_bytes}",
            start,
            "nki/migration, PSUM addresses",
        )
        storage.address = (partition, start)
        before = [s for s in self.placed if s.overlaps(storage, 0, nbytes)]
        if before:
            self.trace.reuses[storage.id] = tuple(s.id for s in before)
        self.placed.add(storage)
        if in_psum:
            banks = -(-(start + nbytes) // target.psum_bank_bytes)
            self.trace.psum_peak = max(self.trace.psum_peak, banks)
        else:
            self.trace.sbuf_peak = max(self.trace.sbuf_peak, start + nbytes)

    def overwrite(self, storage: Storage, start: int, end: int) -> None:
        """Note that bytes of a tensor at an address were written: other tensors there lose them."""
        storage.lost = [x for x in storage.lost if not (start <= x[0] and x[1] <= end)]
        low = storage.address[1]  # type: ignore[index]
        for other in self.placed:
            if other is not storage and other.overlaps(storage, start, end):
                at = other.address[1]  # type: ignore[index]
                first, last = max(low + start, at), min(low + end, at + other.row_bytes)
                other.lost.append((first - at, last - at, storage.name))

    def release(self, storage: Storage) -> None:
        """Free the room of a tensor without references."""
        if storage.address is not None:
            return
        need = self.place(storage)
        if storage.region == "psum":
            self.psum_live -= need
        else:
            self.sbuf_live -= need
        self.freed[storage.region].append((storage.id, need))
        self.pooled[storage.region] += need

    def _fill(self, storage: Storage) -> None:
        if storage.region == "psum" or (self.strict and self.execute):
            storage.state = Marks(storage.nbytes, storage.itemsize)
        # indices shape a run, so integers are kept even without execution
        if self.execute or storage.dtype in ("int32", "uint32"):
            storage.data = np.empty(storage.nbytes, np.uint8)
            poison(storage.data.view(NUMPY[storage.dtype]))
        if self.watch is not None:
            self.watch.storages[storage.id] = storage
        self._watch(storage)

    def _watch(self, storage: Storage) -> None:
        if self.programs > 1 and storage.region == "shared_hbm":
            storage.traffic = Marks(storage.nbytes, storage.itemsize)

    def take(self, name: str, x: Any) -> Storage:
        """Return an argument of the kernel as a tensor of HBM; ``x`` has a shape and a dtype."""
        shape = tuple(int(n) for n in x.shape)
        region = "shared_hbm" if self.programs > 1 else "private_hbm"
        storage = Storage(self, name, shape, name_of(x.dtype), region)
        storage.is_argument = True
        if isinstance(x, np.ndarray):
            storage.data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
            storage.is_constant = not x.flags.writeable
            if self.strict:
                storage.state = Marks(storage.nbytes, storage.itemsize, BY_OTHERS)
        if self.watch is not None:
            self.watch.argument(storage)
        self._watch(storage)
        return storage

    def share(self, name: str, shape: tuple[int, ...], dtype: str) -> Storage:
        """Return a tensor of shared HBM: the programs of a logical core get the same one."""
        if self.shared_used == len(self.shared):
            self.shared.append(self.allocate(name, shape, dtype, "shared_hbm"))
        storage = self.shared[self.shared_used]
        self.shared_used += 1
        require(
            (storage.shape, storage.dtype) == (shape, dtype),
            "nl.ndarray",
            storage.name,
            f"must be the same in both programs: {storage.dtype} {storage.shape}",
            f"{dtype} {shape}",
            LNC,
        )
        return storage

    # log

    def branch(self, value: int) -> None:
        """Note a decision that a register made: a turn of a loop, or a loop's bound."""
        self.branches.append(value)

    def log(self, instruction: Instruction) -> None:
        """Append an instruction to the trace."""
        instruction.program = self.program
        instruction.times = self.weight
        self.trace.instructions.append(instruction)
        if self.watch is not None:
            self.watch(instruction)

    @contextmanager
    def loop(self, weight: float) -> Iterator[None]:
        """Log an iteration of a loop of the device, which stands for ``weight`` of them."""
        outer, around, first = self.weight, self.iteration, len(self.trace.instructions)
        self.weight = outer * weight
        self.iteration = own = Iteration()
        try:
            yield
        finally:
            # the loop may be left in the middle
            own.is_over = True
            self.weight, self.iteration = outer, around
            self.trace.loops.append((first, len(self.trace.instructions), weight))
