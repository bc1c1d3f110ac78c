"""Engine cycles, DMA time and the bound of a run, from its trace alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..targets import Target, find_target
from ..trace import Instruction, Trace
from .durations import cycles, descriptor_cycles, dma_occupancy
from .scheduling import run_schedule

ENGINES = ("tensor", "vector", "scalar", "gpsimd")


@dataclass(frozen=True)
class Cost:
    """What a trace costs on its target.

    Attributes:
        instructions: instructions that run; a loop's count in each of its iterations.
        cycles: of each engine; with two programs, those of the busier core.
        times: nanoseconds of each engine, and of DMA.
        dma_bytes: bytes moved by all programs.
        bound: the engine that takes longest; no schedule is shorter.
        makespan: nanoseconds of an in-order schedule with the trace's dependences.
        sbuf_peak, psum_peak: bytes per partition and banks, at most.
        busy: share of the makespan in which an engine works; for DMA, in which a transfer is under
            way, latency included, as AWS's profiler counts it.
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
    plan, end = run_schedule(trace, found)
    # the two queues of DMA share its rate
    makespan = max(end, times["dma"])
    busy = {e: t / makespan if makespan else 0.0 for e, t in times.items()}
    busy["dma"] = max(busy["dma"], time_under_way(plan) / makespan if makespan else 0.0)
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


def time_under_way(plan: list[tuple[Instruction, float, float]]) -> float:
    """Return for how long a DMA of a schedule is under way, from its start to its end."""
    total = covered = 0.0
    found = sorted((a, b, i.times) for i, a, b in plan if i.engine == "dma")
    for start, end, times in found:
        total += max(0.0, end - max(start, covered)) * times
        covered = max(covered, end)
    return total
