"""Engine cycles, DMA time and the bound of a run, from its trace alone.

The formulae are those of the instruction pages (``nki.isa.*``, cost tables), of
``nki/deep-dives/nki_perf_guide`` and of ``nki/deep-dives/nki-dma-bandwidth-guide``. They are an
estimate from documents; nothing here was timed on a device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .targets import Target, find_target
from .trace import Instruction, Trace

ENGINES = ("tensor", "vector", "scalar", "gpsimd")
# the least number of cycles between two instructions of an engine
MIN_CYCLES = 64
# reading out the reduce registers takes an instruction
READOUT = 64
# cycles before GpSimd writes the first index
GPSIMD_START = 150
# operands in steps of more than 16 bytes come at half the rate
STRIDED = 2
# bytes of a descriptor with which an engine reaches the rate that it has in practice
DESCRIPTOR_BYTES = 2048
# cycles in which GpSimd writes a descriptor: 16 bytes for each side, a word a cycle (an assumption)
DESCRIPTOR_CYCLES = 8
# nanoseconds in which a sequencer has the hardware write the descriptors of a DMA
HARDWARE_DESCRIPTORS = 600.0
# nanoseconds from a semaphore to the first byte
DMA_LATENCY = 1300.0


def cycles(i: Instruction) -> int:
    """Return the cycles that an instruction occupies its engine."""
    n = i.elements * (STRIDED if "strided" in i.form else 1)
    least = max(MIN_CYCLES, n)
    wide = 4 if "fp32" in i.form else 1
    readout = READOUT if "readout" in i.form else 0
    match i.op:
        case "nc_matmul":
            return wide * max(min(MIN_CYCLES, i.stationary), n)
        case "nc_transpose" if i.engine == "tensor":
            return wide * max(i.stationary, min(MIN_CYCLES, n))
        case "tensor_tensor":
            return least if "cheap" in i.form else max(MIN_CYCLES, 2 * n)
        case "scalar_tensor_tensor":
            return least if "cheap" in i.form else max(MIN_CYCLES, 2 * n)
        case "tensor_copy_predicated":
            return max(MIN_CYCLES, 2 * n) if "both_sbuf" in i.form else least
        case "tensor_scalar_reduce":
            return least + READOUT
        case "reciprocal":
            return max(MIN_CYCLES, 8 * n)
        case "tensor_reduce" | "memset" if "cheap" in i.form:
            return max(MIN_CYCLES, n // 2)
        case "iota" | "affine_select":
            return GPSIMD_START + n
        case "dma_copy" | "dma_transpose":
            return 0
        case _:
            return least + readout


def descriptor_time(nbytes: int, target: str | Target) -> float:
    """Return the nanoseconds that one DMA engine takes for a descriptor.

    A fixed part, and the bytes at the engine's rate in theory. The fixed part is what makes
    descriptors of 2 KiB come at the rate in practice; longer ones count as several.
    """
    found = find_target(target)
    fixed = DESCRIPTOR_BYTES / found.dma_rate - DESCRIPTOR_BYTES / found.dma_peak
    count = max(1, -(-nbytes // DESCRIPTOR_BYTES))
    return count * fixed + nbytes / found.dma_peak


def dma_occupancy(i: Instruction, target: Target) -> float:
    """Return the nanoseconds for which a DMA occupies all queues together."""
    rows = max(i.rows, 1)
    time = rows * descriptor_time(-(-i.nbytes // rows), target) / target.dma_engines
    if i.op == "dma_transpose":
        # at best so much of the throughput: from HBM, and between tiles
        time /= 0.9 if i.hbm else 0.5
    return max(time, i.nbytes / target.hbm_rate)


def descriptor_cycles(i: Instruction) -> int:
    """Return the cycles in which GpSimd writes the descriptors of a gather or scatter."""
    if i.engine != "dma" or "indirect" not in i.form:
        return 0
    return GPSIMD_START + DESCRIPTOR_CYCLES * i.rows


def duration(i: Instruction, target: Target) -> float:
    """Return the nanoseconds for which an instruction occupies its engine."""
    if i.engine == "dma":
        return dma_occupancy(i, target)
    return cycles(i) / target.clocks[i.engine]


@dataclass(frozen=True)
class Cost:
    """What a trace costs on its target.

    Attributes:
        instructions: that run, those of a loop in each of its iterations.
        cycles: of each engine; with two programs, those of the busier core.
        times: nanoseconds of each engine, and of DMA.
        dma_bytes: bytes moved by all programs.
        bound: the engine that takes longest, and no schedule can beat.
        makespan: nanoseconds of an in-order schedule with the trace's dependences.
        sbuf_peak, psum_peak: bytes per partition and banks, at most.
        busy: share of the makespan in which an engine works; of DMA, in which a transfer is under
            way, its latency included, as AWS's profiler counts.
    """

    target: str
    instructions: int
    cycles: dict[str, int]
    times: dict[str, float]
    dma_bytes: int
    bound: str
    makespan: float
    sbuf_peak: int
    psum_peak: int
    busy: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.target}: {self.instructions} instructions run, an estimate from documents"]
        for name, time in self.times.items():
            work = f"{self.cycles[name]} cycles" if name in self.cycles else f"{self.dma_bytes} B"
            lines.append(
                f"  {name:7} {work:>16} {time / 1e3:12.1f} us, {self.busy[name]:5.1%} busy"
            )
        lines.append(f"  bound by {self.bound}; in-order schedule {self.makespan / 1e3:.1f} us")
        lines.append(
            f"  peaks: {self.sbuf_peak} B of SBUF a partition, {self.psum_peak} PSUM banks"
        )
        return "\n".join(lines)


def cost(trace: Trace, target: str | Target | None = None) -> Cost:
    """Sum the trace's instructions by engine, and schedule them.

    Args:
        trace: of a simulation.
        target: another generation's clocks and bandwidths; the trace's own by default.
    """
    found = find_target(target or trace.target)
    programs = sorted({i.program for i in trace.instructions}) or [0]
    sums = {p: dict.fromkeys(ENGINES, 0.0) for p in programs}
    dma = dict.fromkeys(programs, 0.0)
    for i in trace.instructions:
        if i.engine == "dma":
            dma[i.program] += dma_occupancy(i, found) * i.times
            sums[i.program]["gpsimd"] += descriptor_cycles(i) * i.times
        else:
            sums[i.program][i.engine] += cycles(i) * i.times
    most = {e: round(max(sums[p][e] for p in programs)) for e in ENGINES}
    times = {e: most[e] / found.clocks[e] for e in ENGINES} | {"dma": max(dma.values())}
    plan, end = _place(trace, found)
    # the two queues of DMA share its rate
    makespan = max(end, times["dma"])
    busy = {e: t / makespan if makespan else 0.0 for e, t in times.items()}
    busy["dma"] = max(busy["dma"], _under_way(plan) / makespan if makespan else 0.0)
    return Cost(
        target=found.name,
        instructions=round(sum(i.times for i in trace.instructions)),
        cycles=most,
        times=times,
        dma_bytes=trace.dma_bytes(),
        bound=max(times, key=lambda e: times[e]),
        makespan=makespan,
        sbuf_peak=trace.sbuf_peak,
        psum_peak=trace.psum_peak,
        busy=busy,
    )


def _under_way(plan: list[tuple[Instruction, float, float]]) -> float:
    """Return for how long a DMA of a schedule is under way, from its start to its end."""
    total = covered = 0.0
    found = sorted((a, b, i.times) for i, a, b in plan if i.engine == "dma")
    for start, end, times in found:
        total += max(0.0, end - max(start, covered)) * times
        covered = max(covered, end)
    return total


def schedule(trace: Trace, target: str | Target) -> list[tuple[Instruction, float, float]]:
    """Return (instruction, start, end) in nanoseconds.

    Each engine runs its instructions in program order, and waits for what they read or overwrite.
    A tile waits for the last use of the tiles whose place it takes. DMA has two queues, one for
    what goes to HBM, so that results which are not there yet do not hold up what comes.
    """
    return _place(trace, find_target(target))[0]


def _place(trace: Trace, found: Target) -> tuple[list[tuple[Instruction, float, float]], float]:
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
            # GpSimd writes the descriptors, once the indices are there
            gpsimd = (i.program, "gpsimd")
            ready = max(ready, free.get(gpsimd, 0.0)) + written / found.clocks["gpsimd"]
            free[gpsimd] = ready
        if "dynamic" in i.form:
            # by SyncE, which does nothing else
            sync = (i.program, "sync")
            ready = max(ready, free.get(sync, 0.0)) + HARDWARE_DESCRIPTORS
            free[sync] = ready
        queue = (i.program, "out" if i.is_store else i.engine)
        start = max(ready, free.get(queue, 0.0))
        busy = start + duration(i, found)
        # further transfers overlap the latency of one
        end = busy + (DMA_LATENCY if i.engine == "dma" else 0.0)
        free[queue] = busy
        if i.op == "core_barrier":
            # it waits for its own program, and neither goes on before both are there
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
        # of each program, when it came to each of the barriers that two have
        self.arrivals: dict[int, list[float]] = {}

    def meet(self, program: int) -> tuple[float, float]:
        """Come to a barrier of two programs; return when that was, and when they go on."""
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
        """Begin and end what does so before an instruction; return when that may start."""
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
            # what a write covers can be waited for through the write
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
