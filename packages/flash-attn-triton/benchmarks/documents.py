"""The tables of README, NOTES and docs, the aims among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from _linked import report, shapes
from cases import Problem

Row = dict[str, Any]
Chosen = Callable[[Problem], bool]


class Aim(NamedTuple):
    """A ratio over a rival, in the mean of a family's cases or in the least of them."""

    what: str
    family: str
    direction: str
    rival: str
    gate: float
    goal: float
    least: bool = False
    dims: tuple[int, ...] = ()  # head dims that count; empty: all

    def chosen(self, problem: Problem) -> bool:
        """Say whether a problem counts."""
        return problem.family == self.family and (not self.dims or problem.head_dim in self.dims)


NARROW = (64, 128)
AIMS = (
    Aim("dense", "grid", "fwd", "fa3", 1.00, 1.05),
    Aim("dense", "grid", "bwd", "fa3", 0.97, 1.03),
    Aim("dense, every case", "grid", "fwd", "fa3", 0.93, 1.00, least=True),
    Aim("dense, every case", "grid", "bwd", "fa3", 0.93, 1.00, least=True),
    Aim("other head dims", "dims", "fwd", "fa3", 0.97, 1.05),
    Aim("other head dims", "dims", "bwd", "fa3", 0.93, 1.03),
    Aim("dropout", "dropout", "fwd", "cudnn", 0.95, 1.10, dims=NARROW),
    Aim("dropout", "dropout", "bwd", "cudnn", 0.90, 1.10, dims=NARROW),
    Aim("additive bias", "bias", "fwd", "cudnn", 1.00, 1.15),
    Aim("additive bias", "bias", "bwd", "cudnn", 1.00, 1.10),
    Aim("gradient of the bias", "dbias", "bwd", "base", 0.80, 0.90),
    Aim("ALiBi, seqused_k", "extras", "bwd", "base", 0.95, 0.98),
    Aim("deterministic", "repeats", "bwd", "fa3", 0.85, 0.92),
    Aim("invariant", "invariant", "fwd", "base", 0.90, 0.97),
    Aim("FP8", "fp8", "fwd", "base", 1.40, 1.50),
    Aim("tree", "tree", "fwd", "base", 0.90, 0.97),
    Aim("tree", "tree", "bwd", "base", 0.85, 0.97),
    Aim("tree", "tree", "fwd", "flex", 1.30, 1.30),
    Aim("tree", "tree", "bwd", "flex", 1.20, 1.20),
    Aim("tree", "tree", "fwd", "fa3", 1.00, 1.00),
    Aim("portable, every case", "portable", "fwd", "flex", 1.00, 1.10, least=True, dims=(128,)),
    Aim("portable, every case", "portable", "bwd", "flex", 1.00, 1.05, least=True, dims=(128,)),
)
# longest times: of a step over SDPA's, and in seconds of the first step of a process
STEP, FIRST = (1.25, 1.0), (6.0, 3.0)


def aims(bench: Any, found: Row) -> str:
    """Return every aim with what was measured, as Markdown."""
    lines = [
        "| what | pass | beside | gate | goal | measured | |",
        "|---|---|---|---:|---:|---:|---|",
    ]

    def add(what: str, passes: str, beside: str, aim: tuple[float, float], value: float) -> None:
        gate, goal = aim
        judged = report.verdict([value], gate, goal, less=goal < gate)
        numbers = f"{gate:.2f} | {goal:.2f} | {value:.2f} | {judged}"
        lines.append(f"| {what} | {passes} | {beside} | {numbers} |")

    for aim in AIMS:
        mean = report.mean_of(bench, found["results"], aim.rival, aim.direction, aim.chosen)
        if mean is not None:
            value = mean.least if aim.least else mean.mean
            beside = bench.providers[aim.rival].label
            add(aim.what, aim.direction, beside, (aim.gate, aim.goal), value)
    times = {(row["case"], row["provider"]): row for row in found["host"] if row["status"] == "ok"}
    # the gate is for the first; results from before it was measured have the other, a wider one
    for case in ("host-small-step", "host-step"):
        step, rival = times.get((case, "ours")), times.get((case, "fa2"))
        if step and rival:
            value = step["median_us"] / rival["median_us"]
            add("time of a small step", "both", bench.providers["fa2"].label, STEP, value)
            break
    if first := times.get(("host-first-call", "ours")):
        add("first step of a process, s", "both", "-", FIRST, first["seconds"]["all"])
    return "\n".join(lines)


def _dense(head_dim: int, family: str) -> Chosen:
    return lambda p: p.family == family and p.head_dim == head_dim


def _family(name: str) -> Chosen:
    return lambda p: p.family == name


DENSE = {f"dense, d={d}": _dense(d, "grid") for d in (64, 128, 256)}
DENSE |= {
    "dense, d=128, batch 4, 8k": _family("long"),
    "packed, 32:8 heads, d=128": _family("packed"),
    "few queries, 32:4 heads, d=128": _family("few"),
}
DIMS = {
    f"d={name}": (lambda p, d=d, v=v: p.family == "dims" and (p.head_dim, p.values) == (d, v))
    for name, d, v in [(str(d), d, 0) for d in (72, 80, 96, 112, 160, 192)]
    + [("192, 128", 192, 128)]
}
FEATURES = {f"dropout, d={d}": _dense(d, "dropout") for d in (64, 128, 256)}
FEATURES |= {f"additive bias, d={d}": _dense(d, "bias") for d in (64, 128)}
WITHOUT: dict[str, Chosen] = {
    "gradient of the bias": _family("dbias"),
    "ALiBi": lambda p: p.alibi,
    "`seqused_k`": lambda p: p.used,
    "`deterministic=True`": _family("repeats"),
    "`invariant=True`": _family("invariant"),
    "FP8": _family("fp8"),
    "a tree": _family("tree"),
}
PORTABLE = {f"d={d}": _dense(d, "portable") for d in (64, 128, 256)}


def tables(bench: Any, found: Row) -> dict[str, str]:
    """Return every table by its name."""
    made = {
        "machine": _machine(found),
        "aims": aims(bench, found),
        "dense": report.means(bench, found, DENSE, "fa2", "cudnn", "fa3"),
        "dims": report.means(bench, found, DIMS, "fa3"),
        "features": report.means(bench, found, FEATURES, "fa2", "cudnn"),
        "without": report.means(bench, found, WITHOUT, "base", "flex", "fa3", "fa3-repeats"),
        "portable": report.means(bench, found, PORTABLE, "flex", "ours"),
        "host": report.host(bench, found),
        shapes.FAMILY: shapes.summary(bench, found),
    }
    grids = [family for family in bench.families if family != shapes.FAMILY]
    return made | {f"cases {f}": report.cases_of(bench, found, f) for f in grids}


def _machine(found: Row) -> str:
    machine = found["machine"]
    commit = f", commit {machine['commit']}" if machine["commit"] else ""
    dates = sorted({began.split()[0] for began in found["runs"]})
    copies = [run["ceilings"]["copy_gbps"] / 1e3 for run in found["runs"].values()]
    products = [run["ceilings"]["matmul_bf16_tflops"] for run in found["runs"].values()]
    return (
        f"{machine['device']}, {' and '.join(dates)}, PyTorch {machine['torch']}, Triton "
        f"{machine['triton']}, cuDNN {machine['cudnn']}{commit}.\n"
        f"An 8192³ bf16 product ran at {min(products):.0f} to {max(products):.0f} TFLOP/s, "
        f"a copy at {min(copies):.2f} to {max(copies):.2f} TB/s."
    )
