"""An in-order schedule of a run: when each engine begins and ends each instruction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..targets import Target, find_target
from ..trace import Instruction, Trace
from .durations import DMA_LATENCY, HARDWARE_DESCRIPTORS, descriptor_cycles, duration


def schedule(trace: Trace, target: str | Target) -> list[tuple[Instruction, float, float]]:
    """Return (instruction, start, end) in nanoseconds.

    Each engine runs its instructions in program order, and waits for the data that they read or
    overwrite. A tile waits for the last use of the tiles whose place it takes. DMA has two queues,
    one of them for stores to HBM, so that stores that wait for results do not delay loads.
    """
    return run_schedule(trace, find_target(target))[0]


def run_schedule(
    trace: Trace, found: Target
) -> tuple[list[tuple[Instruction, float, float]], float]:
    """Return the schedule, and when the last instruction ends.

    No engine begins an iteration of a loop of the device before all have ended the one before. The
    instructions of an iteration that stands for several are placed once, and what follows waits for
    all of them.
    """
    free: dict[tuple[int, str], float] = {}
    memory: dict[int, _Uses] = {}
    result = []
    barriers = _Barriers(trace)
    for number, i in enumerate(trace.instructions):
        ready = barriers.pass_to(number, i.program)
        for region in i.reads:
            ready = max(ready, _uses(memory, region[0], trace).when(region, writes_only=True))
        for region in i.writes:
            ready = max(ready, _uses(memory, region[0], trace).when(region, writes_only=False))
        written = descriptor_cycles(i)
        if written:
            # GpSimd writes the descriptors once the indices are known
            gpsimd = (i.program, "gpsimd")
            ready = max(ready, free.get(gpsimd, 0.0)) + written / found.clocks["gpsimd"]
            free[gpsimd] = ready
        if "dynamic" in i.form:
            # SyncE starts it, and does nothing else
            sync = (i.program, "sync")
            ready = max(ready, free.get(sync, 0.0)) + HARDWARE_DESCRIPTORS
            free[sync] = ready
        queue = (i.program, "out" if i.is_store else i.engine)
        start = max(ready, free.get(queue, 0.0))
        busy = start + duration(i, found)
        # transfers overlap each other's latency
        end = busy + (DMA_LATENCY if i.engine == "dma" else 0.0)
        free[queue] = busy
        if i.op == "core_barrier":
            # it waits for its own program, and then for the other one
            result.append((i, *barriers.meet(i.program)))
            continue
        for region in i.reads:
            memory[region[0]].add(region, end, is_write=False)
        for region in i.writes:
            memory[region[0]].add(region, end, is_write=True)
        barriers.ends[i.program] = max(barriers.ends.get(i.program, 0.0), end)
        result.append((i, start, end))
    barriers.pass_to(len(trace.instructions), None)
    return result, max([*barriers.ends.values(), 0.0])


class _Barriers:
    """The times at which iterations of loops begin and end, for each program."""

    def __init__(self, trace: Trace) -> None:
        # at an instruction, iterations end, the inner first, before others begin, the outer first
        self.events: list[tuple[int, int, int, float]] = []
        for first, end, weight in trace.loops:
            if first < end:
                self.events.append((first, 1, -end, weight))
                self.events.append((end, 0, -first, weight))
        self.events.sort()
        self.at = 0
        self.open: list[tuple[int, float]] = []
        self.ends: dict[int, float] = {}
        self.floor: dict[int, float] = {}
        self.program = 0
        # when each program arrived at each barrier of two programs
        self.arrivals: dict[int, list[float]] = {}

    def meet(self, program: int) -> tuple[float, float]:
        """Arrive at a barrier of two programs; return the time of arrival and of departure."""
        now = self.ends.get(program, 0.0)
        own = self.arrivals.setdefault(program, [])
        own.append(now)
        others = self.arrivals.get(1 - program, [])
        if len(others) < len(own):
            return now, now
        after = max(now, others[len(own) - 1])
        for each in (program, 1 - program):
            self.floor[each] = max(self.floor.get(each, 0.0), after)
            self.ends[each] = max(self.ends.get(each, 0.0), after)
        return now, after

    def pass_to(self, number: int, program: int | None) -> float:
        """Begin and end iterations before an instruction; return when it may start."""
        while self.at < len(self.events) and self.events[self.at][0] <= number:
            _, begins, _, weight = self.events[self.at]
            self.at += 1
            if begins:
                self.program = self.program if program is None else program
                now = self.ends.get(self.program, 0.0)
                self.open.append((self.program, now))
                self.floor[self.program] = now
            else:
                whose, began = self.open.pop()
                now = began + (self.ends.get(whose, 0.0) - began) * weight
                self.ends[whose] = self.floor[whose] = now
        return 0.0 if program is None else self.floor.get(program, 0.0)


class _Uses:
    """When the regions of a storage were last read and written."""

    __slots__ = ("floor", "last", "reads", "writes")

    def __init__(self, floor: float) -> None:
        self.floor = floor
        self.last = floor
        self.reads: list[tuple[int, int, float]] = []
        self.writes: list[tuple[int, int, float]] = []

    def when(self, region: tuple[int, int, int], *, writes_only: bool) -> float:
        _, low, high = region
        uses: Iterable[Any] = self.writes if writes_only else [*self.writes, *self.reads]
        return max((t for a, b, t in uses if a < high and low < b), default=self.floor)

    def add(self, region: tuple[int, int, int], end: float, *, is_write: bool) -> None:
        _, low, high = region
        self.last = max(self.last, end)
        if is_write:
            # later users wait for the write, which waited for the uses that it covers
            self.reads = [u for u in self.reads if not (low <= u[0] and u[1] <= high)]
            self.writes = [u for u in self.writes if not (low <= u[0] and u[1] <= high)]
            self.writes.append((low, high, end))
        else:
            self.reads = [u for u in self.reads if (u[0], u[1]) != (low, high) or u[2] > end]
            self.reads.append((low, high, end))


def _uses(memory: dict[int, _Uses], storage: int, trace: Trace) -> _Uses:
    if storage not in memory:
        before = [memory[s].last for s in trace.reuses.get(storage, ()) if s in memory]
        memory[storage] = _Uses(max(before, default=0.0))
    return memory[storage]
