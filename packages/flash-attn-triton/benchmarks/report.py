"""Tables of results, as text for the terminal and as Markdown for the documents. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from cases import PROBLEMS, PROVIDERS_OF, Problem

# measured on one NVIDIA H200 (SXM): 8192**3 bf16 matmul, best of several runs; device copy
MATMUL_TFLOPS = 788.0
COPY_TBPS = 4.27
# nominal ratio of the two rates; not measured
FP8_FACTOR = 2.0

Row = dict[str, Any]

CASES: dict[str, tuple[Problem, str]] = {
    problem.case(one): (problem, one) for problem in PROBLEMS for one in problem.passes
}
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}


def by_case(results: list[Row]) -> dict[str, dict[str, Row]]:
    """Group results by case, in order of the table of cases."""
    table: dict[str, dict[str, Row]] = {}
    for row in results:
        table.setdefault(row["case"], {})[row["provider"]] = row
    order = {case: place for place, case in enumerate(CASES)}
    return dict(sorted(table.items(), key=lambda item: order.get(item[0], len(order))))


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{row['tflops']:.0f}" if row["status"] == "ok" else row["status"]


def subject(rows: dict[str, Row]) -> str:
    """Return the provider that a case's ratios are taken of."""
    return PROVIDERS_OF[next(iter(rows.values()))["family"]][0]


def ratio_of(rows: dict[str, Row], rival: str) -> float | None:
    """Return how many times as fast as a rival the case's subject is."""
    mine, other = rows.get(subject(rows)), rows.get(rival)
    if not mine or not other or mine["status"] != "ok" or other["status"] != "ok":
        return None
    return float(mine["tflops"] / other["tflops"])


def _number(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def floor_of(problem: Problem, direction: str) -> tuple[float, str]:
    """Return the milliseconds that no version is below, and what takes them."""
    rate = MATMUL_TFLOPS * (FP8_FACTOR if problem.dtype == "fp8" else 1.0)
    compute = problem.flops(direction) / rate / 1e9
    memory = problem.bytes(direction) / COPY_TBPS / 1e9
    return (compute, "FLOPs") if compute > memory else (memory, "bytes")


# ---- for the terminal


def results_table(results: list[Row], providers: list[str]) -> str:
    """Return TFLOP/s per case and provider, then the subject over each rival."""
    table = by_case(results)
    width = max([len(name) for name in table] + [4])
    head = f"{'TFLOP/s':<{width}}" + "".join(f"{name:>12}" for name in providers)
    lines = [head + "  |" + "".join(f"{'/' + name:>13}" for name in providers)]
    for case, rows in table.items():
        line = f"{case:<{width}}" + "".join(f"{_cell(rows.get(n)):>12}" for n in providers)
        ratios = (None if n == subject(rows) else ratio_of(rows, n) for n in providers)
        lines.append(line + "  |" + "".join(f"{_number(one):>13}" for one in ratios))
    return "\n".join(lines)


class Mean(NamedTuple):
    """A subject over one rival, in one pass of a group of cases."""

    mean: float
    least: float
    least_case: str
    cases: int


def mean_of(
    results: list[Row], rival: str, direction: str, chosen: Callable[[Problem], bool]
) -> Mean | None:
    """Return the geometric mean and the least ratio over the chosen problems."""
    ratios = {}
    for case, rows in by_case(results).items():
        if case in CASES and CASES[case][1] == direction and chosen(CASES[case][0]):
            ratio = ratio_of(rows, rival)
            if ratio is not None:
                ratios[case] = ratio
    if not ratios:
        return None
    worst = min(ratios, key=ratios.__getitem__)
    return Mean(geometric_mean(ratios.values()), ratios[worst], worst, len(ratios))


def means(results: list[Row]) -> list[tuple[str, Mean]]:
    """Return the means of every family, pass and rival."""
    found = []
    for family, (_, *rivals) in PROVIDERS_OF.items():
        for direction in DIRECTIONS:
            for rival in rivals:
                one = mean_of(results, rival, direction, lambda p, f=family: p.family == f)
                if one is not None:
                    found.append((f"{family} {direction} / {rival}", one))
    return found


def means_table(rows: list[tuple[str, Mean]]) -> str:
    """Return the text of ``means``."""
    lines = [f"{'ratio':<28}{'geomean':>9}{'least':>9}  cases  least at"]
    for name, one in rows:
        lines.append(
            f"{name:<28}{one.mean:>9.3f}{one.least:>9.3f}  {one.cases:>5}  {one.least_case}"
        )
    return "\n".join(lines)


def host_table(rows: list[Row]) -> str:
    """Return the text of the host times."""
    lines = [f"{'host time of a call':<24}{'provider':<12}{'median':>12}{'min':>12}"]
    for row in rows:
        if row["status"] != "ok":
            lines.append(f"{row['case']:<24}{row['provider']:<12}{row['status']}: {row['message']}")
        elif "seconds" in row:
            text = ", ".join(f"{name} {value:.2f} s" for name, value in row["seconds"].items())
            lines.append(f"{row['case']:<24}{row['provider']:<12}{text}")
        else:
            median, least = f"{row['median_us']:.1f} us", f"{row['min_us']:.1f} us"
            lines.append(f"{row['case']:<24}{row['provider']:<12}{median:>12}{least:>12}")
    return "\n".join(lines)


# ---- for the documents


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return "Not measured yet."
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows))


def cases_of(found: Row, family: str, labels: dict[str, str]) -> str:
    """Return every case of a family: its floor, TFLOP/s of each provider, ratios."""
    table = by_case([row for row in found["results"] if row["family"] == family])
    own, *rivals = PROVIDERS_OF[family]
    rivals = [name for name in rivals if any(name in rows for rows in table.values())]
    names = [labels[name] for name in (own, *rivals)]
    head = ["case", "floor, ms", "of", *names, *(f"/ {name}" for name in names[1:])]
    lines = []
    for case, rows in table.items():
        if case in CASES:
            least, kind = floor_of(*CASES[case])
            cells = [_cell(rows.get(name)) for name in (own, *rivals)]
            ratios = [_number(ratio_of(rows, rival)) for rival in rivals]
            lines.append([case, f"{least:.3f}", kind, *cells, *ratios])
    return _markdown(head, lines)


def families(
    found: Row,
    groups: dict[str, Callable[[Problem], bool]],
    rivals: list[str],
    labels: dict[str, str],
) -> str:
    """Return the means of groups of cases beside rivals, with the least in brackets."""
    head = ["cases", "pass", *(f"/ {labels[rival]}" for rival in rivals)]
    lines = []
    for title, chosen in groups.items():
        for direction, word in DIRECTIONS.items():
            means_here = [mean_of(found["results"], r, direction, chosen) for r in rivals]
            if any(means_here):
                cells = ["-" if m is None else f"{m.mean:.2f} ({m.least:.2f})" for m in means_here]
                lines.append([title, word, *cells])
    return _markdown(head, lines)


def host(found: Row, labels: dict[str, str]) -> str:
    """Return the host times of calls, in microseconds."""
    rows = [row for row in found["host"] if row["status"] == "ok" and "median_us" in row]
    names = list(dict.fromkeys(row["provider"] for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    times = {(row["case"], row["provider"]): f"{row['median_us']:.0f}" for row in rows}
    lines = [[case, *(times.get((case, name), "-") for name in names)] for case in cases]
    return _markdown(["µs in the median", *(labels[name] for name in names)], lines)
