"""Tables of results and bounds, as text."""

from __future__ import annotations

from typing import Any

from cases import PROBLEMS
from timing import geometric_mean

# measured on one NVIDIA H200 (SXM): 8192**3 bf16 matmul, best of several runs; device copy
MATMUL_TFLOPS = 788.0
COPY_TBPS = 4.27
# nominal ratio of the two rates; not measured
FP8_FACTOR = 2.0

# the provider that every ratio is taken of
OURS = "ours"

Row = dict[str, Any]


def by_case(results: list[Row]) -> dict[str, dict[str, Row]]:
    """Group results by case, in order of appearance."""
    table: dict[str, dict[str, Row]] = {}
    for row in results:
        table.setdefault(row["case"], {})[row["provider"]] = row
    return table


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{row['tflops']:.0f}" if row["status"] == "ok" else row["status"]


def _ratio(rows: dict[str, Row], rival: str) -> float | None:
    mine, other = rows.get(OURS), rows.get(rival)
    if not mine or not other or mine["status"] != "ok" or other["status"] != "ok":
        return None
    return mine["tflops"] / other["tflops"]


def results_table(results: list[Row], providers: list[str]) -> str:
    """Return TFLOP/s per case and provider, then ours over each rival."""
    rivals = [name for name in providers if name != OURS]
    table = by_case(results)
    width = max([len(name) for name in table] + [4])
    head = f"{'TFLOP/s':<{width}}" + "".join(f"{name:>10}" for name in providers)
    head += "  |" + "".join(f"{'/' + name:>10}" for name in rivals)
    lines = [head]
    for case, rows in table.items():
        line = f"{case:<{width}}" + "".join(f"{_cell(rows.get(n)):>10}" for n in providers)
        ratios = [_ratio(rows, rival) for rival in rivals]
        cells = ("-" if one is None else f"{one:.3f}" for one in ratios)
        lines.append(line + "  |" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def means(results: list[Row], providers: list[str]) -> list[Row]:
    """Return ours over each rival: geometric mean and smallest ratio per family and pass."""
    found = []
    rivals = [name for name in providers if name != OURS]
    groups: dict[tuple[str, str], list[dict[str, Row]]] = {}
    for rows in by_case(results).values():
        one = next(iter(rows.values()))
        groups.setdefault((one["family"], one["pass"]), []).append(rows)
    for (family, direction), cases in groups.items():
        for rival in rivals:
            ratios = {
                next(iter(rows.values()))["case"]: ratio
                for rows in cases
                if (ratio := _ratio(rows, rival)) is not None
            }
            if ratios:
                worst = min(ratios, key=ratios.__getitem__)
                found.append(
                    {
                        "family": family,
                        "pass": direction,
                        "rival": rival,
                        "geomean": geometric_mean(list(ratios.values())),
                        "min": ratios[worst],
                        "min_case": worst,
                        "cases": len(ratios),
                    }
                )
    return found


def means_table(rows: list[Row]) -> str:
    """Return the text of ``means``."""
    lines = [f"{'ours over':<24}{'geomean':>9}{'min':>9}  cases  smallest at"]
    for row in rows:
        name = f"{row['family']} {row['pass']} / {row['rival']}"
        numbers = f"{row['geomean']:>9.3f}{row['min']:>9.3f}  {row['cases']:>5}"
        lines.append(f"{name:<24}{numbers}  {row['min_case']}")
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


def bounds_table() -> str:
    """Return, as Markdown, the two bounds of each case."""
    lines = [
        "| case | GFLOP | FLOPs / rate, ms | MB | bytes / bandwidth, ms | binding |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for problem in PROBLEMS:
        rate = MATMUL_TFLOPS * (FP8_FACTOR if problem.dtype == "fp8" else 1.0)
        for direction in problem.passes:
            flops, moved = problem.flops(direction), problem.bytes(direction)
            compute, memory = flops / rate / 1e9, moved / COPY_TBPS / 1e9
            lines.append(
                f"| {problem.case(direction)} | {flops / 1e9:.1f} | {compute:.3f} | "
                f"{moved / 1e6:.1f} | {memory:.3f} | {'FLOPs' if compute > memory else 'bytes'} |"
            )
    return "\n".join(lines)
