"""Tables of results as Markdown, for the terminal and the documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Row = dict[str, Any]
Cases = dict[str, dict[str, Row]]
Chosen = Callable[[Any], bool]

DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
DIGITS = {"tflops": ".0f", "gbps": ".0f", "ms": ".4f"}
UNITS = {"tflops": "TFLOP/s", "gbps": "GB/s", "ms": "ms"}


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """Return a table whose first column is text."""
    if not rows:
        return "Not measured yet."
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows))


def by_case(bench: Any, rows: Iterable[Row]) -> Cases:
    """Group results by case and provider, in order of the table of cases."""
    table: Cases = {}
    for row in rows:
        table.setdefault(row["case"], {})[row["provider"]] = row
    order = {case: place for place, case in enumerate(bench.cases)}
    return dict(sorted(table.items(), key=lambda item: order.get(item[0], -1)))


def speed(row: Row | None) -> float | None:
    """Return how fast a provider is: in TFLOP/s where they are known, else in calls a second."""
    if not row or row["status"] != "ok" or not ("tflops" in row or "ms" in row):
        return None
    return float(row["tflops"] if "tflops" in row else 1e3 / row["ms"])


def ratio(rows: dict[str, Row], name: str, rival: str) -> float | None:
    """Return how many times as fast as a rival a provider is."""
    mine, other = speed(rows.get(name)), speed(rows.get(rival))
    return mine / other if mine and other else None


def number(value: float | None, digits: str = ".2f") -> str:
    """Return a number of a table, or a dash."""
    return "-" if value is None else format(value, digits)


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def cases_of(bench: Any, found: Row, family: str) -> str:
    """Return every case of a family: its floor, each provider's speed, ratios."""
    table = by_case(bench, [row for row in found["results"] if row["family"] == family])
    own, *rivals = bench.families.get(family, bench.providers)
    rivals = [name for name in rivals if any(name in rows for rows in table.values())]
    names = [bench.providers[name].label for name in (own, *rivals)]
    unit = bench.unit(family)
    head = ["case", "floor, ms", "of", *names, *(f"/ {name}" for name in names[1:])]
    lines = []
    for case, rows in table.items():
        if case in bench.cases:
            least, kind = bench.floor(*bench.cases[case])
            cells = [_cell(rows.get(name), unit) for name in (own, *rivals)]
            ratios = [number(ratio(rows, own, rival)) for rival in rivals]
            lines.append([case, f"{least:.3f}", kind, *cells, *ratios])
    return markdown(head, lines)


def _cell(row: Row | None, unit: str) -> str:
    if row is None:
        return "-"
    return format(row[unit], DIGITS[unit]) if row["status"] == "ok" else row["status"]


class Mean(NamedTuple):
    """A subject over one rival, in one pass of a group of cases."""

    mean: float
    least: float
    least_case: str
    cases: int


def mean_of(bench: Any, results: list[Row], rival: str, one: str, chosen: Chosen) -> Mean | None:
    """Return the geometric mean and the least ratio over the chosen problems."""
    ratios = {}
    for case, rows in by_case(bench, results).items():
        if case in bench.cases and bench.cases[case][1] == one and chosen(bench.cases[case][0]):
            family = next(iter(rows.values()))["family"]
            found = ratio(rows, bench.families.get(family, ("ours",))[0], rival)
            if found is not None:
                ratios[case] = found
    if not ratios:
        return None
    worst = min(ratios, key=ratios.__getitem__)
    return Mean(geometric_mean(ratios.values()), ratios[worst], worst, len(ratios))


def means_of_families(bench: Any, results: list[Row]) -> str:
    """Return the means of every family, pass and rival."""
    lines = []
    for family in dict.fromkeys(row["family"] for row in results):
        for one in dict.fromkeys(one for _, one in bench.cases.values()):
            for rival in bench.families.get(family, tuple(bench.providers))[1:]:
                mean = mean_of(bench, results, rival, one, lambda p, f=family: p.family == f)
                if mean is not None:
                    cells = [f"{mean.mean:.3f}", f"{mean.least:.3f}", str(mean.cases)]
                    name = f"{family} {one}".strip()
                    lines.append([f"{name} / {rival}", *cells, mean.least_case])
    return markdown(["ratio", "geomean", "least", "cases", "least at"], lines) if lines else ""


def means(bench: Any, found: Row, groups: dict[str, Chosen], *rivals: str) -> str:
    """Return the means of groups of cases beside rivals, with the least in brackets."""
    head = ["cases", "pass", *(f"/ {bench.providers[rival].label}" for rival in rivals)]
    lines = []
    for title, chosen in groups.items():
        for one, word in DIRECTIONS.items():
            here = [mean_of(bench, found["results"], rival, one, chosen) for rival in rivals]
            if any(here):
                cells = ["-" if m is None else f"{m.mean:.2f} ({m.least:.2f})" for m in here]
                lines.append([title, word, *cells])
    return markdown(head, lines)


def host(bench: Any, found: Row) -> str:
    """Return the host times of calls, in microseconds."""
    rows = [row for row in found["host"] if row["status"] == "ok" and "median_us" in row]
    names = list(dict.fromkeys(row["provider"] for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    times = {(row["case"], row["provider"]): f"{row['median_us']:.0f}" for row in rows}
    lines = [[case, *(times.get((case, name), "-") for name in names)] for case in cases]
    return markdown(["µs in the median", *(bench.providers[name].label for name in names)], lines)


def bounds(bench: Any) -> str:
    """Return the two bounds of each case, and which is the larger."""
    head = ["case", *bench.problems[0].told()]
    head += ["GFLOP", "FLOPs / rate, ms", "MB", "bytes / bandwidth, ms", "binding"]
    lines = []
    for case, (problem, one) in bench.cases.items():
        flops, size = problem.flops(one), problem.bytes(one)
        times = (flops / bench.rate(problem) / 1e9, size / bench.copy_tbps / 1e9)
        cells = [f"{flops / 1e9:.1f}", f"{times[0]:.3f}", f"{size / 1e6:.1f}", f"{times[1]:.3f}"]
        lines.append([case, *problem.told().values(), *cells, bench.floor(problem, one)[1]])
    return markdown(head, lines)


def verdict(
    values: Iterable[float | None], gate: float, goal: float | None, less: bool = False
) -> str:
    """Say how far values are: at the goal, at the gate, or short of it; of times, less is better.

    The worst of them counts, and none may be missing for a goal.
    """
    every = list(values)
    sign = -1 if less else 1
    worst = min(sign * value for value in every if value is not None)
    if worst < sign * gate:
        return "**missed**"
    if None in every:
        return "not all measured"
    return "goal" if goal is not None and worst >= sign * goal else "gate"


def show(bench: Any, found: Row) -> None:
    """Print everything that was measured."""
    for family in dict.fromkeys(row["family"] for row in found["results"]):
        if family not in bench.specials.values():
            unit = UNITS[bench.unit(family)]
            print(f"\n{family}, {unit}\n\n{cases_of(bench, found, family)}")
    print("\n" + means_of_families(bench, found["results"]))
    print("\n" + bench.summary(found))
    for row in found["results"] + found["host"]:
        told = {k: v for k, v in row.items() if k not in ("case", "family", "provider", "run")}
        is_special = row in found["host"] or row["family"] in bench.specials.values()
        if is_special or row["status"] not in ("ok", "skipped"):
            print(f"{row['case']}, {row['provider']}: {told}")
    print("\n" + ", ".join(f"{key} {value}" for key, value in found["machine"].items()))
    for began, one in found["runs"].items():
        print(began, ", ".join(f"{key} {value:.0f}" for key, value in one["ceilings"].items()))
