"""What the package aims at, and how far it is: ratios of speed in one run. Needs no torch."""

from __future__ import annotations

from typing import Any, NamedTuple

from cases import Problem
from report import mean_of

Row = dict[str, Any]


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
STEP_GATE, STEP_GOAL = 1.25, 1.0
FIRST_GATE, FIRST_GOAL = 6.0, 3.0


def table(found: Row, labels: dict[str, str]) -> str:
    """Return every aim with what was measured, as Markdown."""
    lines = [
        "| what | pass | beside | gate | goal | measured | |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for aim in AIMS:
        mean = mean_of(found["results"], aim.rival, aim.direction, aim.chosen)
        if mean is None:
            continue
        value = mean.least if aim.least else mean.mean
        lines.append(_line(aim.what, aim.direction, labels[aim.rival], aim.gate, aim.goal, value))
    times = {(row["case"], row["provider"]): row for row in found["host"] if row["status"] == "ok"}
    # the gate is for the first; results from before it was measured have the other, a wider one
    for case in ("host-small-step", "host-step"):
        step, rival = times.get((case, "ours")), times.get((case, "fa2"))
        if step is None or rival is None:
            continue
        value = step["median_us"] / rival["median_us"]
        lines.append(
            _line("time of a small step", "both", labels["fa2"], STEP_GATE, STEP_GOAL, value)
        )
        break
    first = times.get(("host-first-call", "ours"))
    if first:
        value = first["seconds"]["all"]
        lines.append(
            _line("first step of a process, s", "both", "-", FIRST_GATE, FIRST_GOAL, value)
        )
    return "\n".join(lines)


def _line(what: str, direction: str, rival: str, gate: float, goal: float, value: float) -> str:
    # of times, less is better
    sign = 1 if goal >= gate else -1
    reached = "goal" if sign * value >= sign * goal else "gate"
    verdict = reached if sign * value >= sign * gate else "**missed**"
    return f"| {what} | {direction} | {rival} | {gate:.2f} | {goal:.2f} | {value:.2f} | {verdict} |"
