"""What a run is told in: text, tables of README and NOTES, a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aims
from aims import SUMS, by_case
from cases import BY_NAME, PROBLEMS, in_bf16
from providers import FEW, LABELS

Row = dict[str, Any]

# of one NVIDIA H200 (SXM): 8192**3 bf16 matmul, device copy
MATMUL_TFLOPS, COPY_GBPS = 788.0, 4270.0
# the cases of README
PREFILL = {
    "prefill-8x1024+7168": "8 x (1024 + 7168)",
    "prefill-8x512+4096": "8 x (512 + 4096)",
    "prefill-1x2048+14336": "1 x (2048 + 14336)",
    "prefill-4x1024+0": "4 x (1024 + 0)",
}
DECODE = {
    "decode-64x8192": "64 x 8192",
    "decode-1x65536": "1 x 65536",
    "decode-256x2048": "256 x 2048",
}


def shares_of_sums(results: Row) -> dict[str, float]:
    """Return how long the cases of ``SUMS`` took, over their parts."""
    found = {case: aims.value_of(results, "parts", case) for case in SUMS}
    return {case: share for case, share in found.items() if share is not None}


def has_time(rows: dict[str, Row], name: str) -> bool:
    return "ms" in rows.get(name, {})


def _speed(rows: dict[str, Row], name: str, rival: str) -> str:
    if not (has_time(rows, name) and has_time(rows, rival)):
        return ""
    return f"{rows[rival]['ms'] / rows[name]['ms']:.2f}"


def markdown(results: Row) -> list[str]:
    """Return the tables of README and NOTES that hold figures of a run."""
    cases, copy = by_case(results), results["copy_gbps"]
    of_readme = [_prefill(cases), _decode(cases, copy), _sentences(results)]
    return [*of_readme, _all(results), aims.table(results)]


def _prefill(cases: dict[str, dict[str, Row]]) -> str:
    lines = [
        "| sequences, new and cached tokens of each | prefix-prefill | FlashAttention-3 | "
        "/ FlashAttention-3 |",
        "|---|---:|---:|---:|",
    ]
    for case, label in PREFILL.items():
        rows = cases.get(case, {})
        rates = (
            f"{rows[name]['tflops']:.0f}" if has_time(rows, name) else ""
            for name in ("ours", "fa3")
        )
        lines.append(f"| {label} | {' | '.join(rates)} | {_speed(rows, 'ours', 'fa3')} |")
    return "\n".join(lines)


def _decode(cases: dict[str, dict[str, Row]], copy: float) -> str:
    lines = ["| sequences x keys | prefix-prefill | FlashAttention-3 |", "|---|---:|---:|"]
    for case, label in DECODE.items():
        rows = cases.get(case, {})
        shares = (
            f"{rows[name]['gbps'] / copy:.2f}" if has_time(rows, name) else ""
            for name in ("ours", "fa3")
        )
        lines.append(f"| {label} | {' | '.join(shares)} |")
    return "\n".join(lines)


def _sentences(results: Row) -> str:
    cases, copy = by_case(results), results["copy_gbps"]
    sums = shares_of_sums(results)
    mixed, decoding, prefill = (sums.get(name, float("nan")) for name in SUMS)
    writes = [
        cases.get(f"write-{n}", {}).get("ours", {}).get("gbps", float("nan")) / copy
        for n in (1000, 8192)
    ]
    host = cases.get("host", {}).get("ours", {}).get("us", float("nan"))
    return (
        f"A mixture of 32 decoding sequences and 4 chunks took {mixed:.2f} of the sum of its "
        f"parts; a window of 4096 in a\ncontext of 64k {decoding:.2f} (decoding) and "
        f"{prefill:.2f} (prefill) of what a context of 4096 takes. Writing runs at\n"
        f"{writes[0]:.2f} of copy bandwidth for 1000 tokens, and at {writes[1]:.2f} for 8192. A "
        f"warm decoding call takes {host:.1f} µs of the\nhost's time."
    )


def _all(results: Row) -> str:
    cases, copy = by_case(results), results["copy_gbps"]
    lines = [
        "| case | ms | in a graph, ms | portable, ms | FA3, ms | FA3's time over ours | "
        "bf16's time over ours | other |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for case, rows in cases.items():
        mine = rows.get("ours", {})
        if "ms" not in mine:
            continue
        cells = [case, f"{mine['ms']:.4f}"]
        cells.append(f"{mine['ms_graph']:.4f}" if "ms_graph" in mine else "")
        cells += [
            f"{rows[name]['ms']:.4f}" if has_time(rows, name) else ""
            for name in ("portable", "fa3")
        ]
        cells += [_speed(rows, "ours", "fa3"), _over_bf16(results, case)]
        if is_chunk(case):
            cells.append(f"{mine['tflops']:.0f} TFLOP/s")
        else:
            cells.append(f"{mine['gbps'] / copy:.3f} of copy bandwidth")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def is_chunk(case: str) -> bool:
    """Say whether products bound a case, not bytes."""
    return case in BY_NAME and BY_NAME[case].max_new >= FEW


def _over_bf16(results: Row, case: str) -> str:
    if case not in BY_NAME or in_bf16(BY_NAME[case]) is None:
        return ""
    speed = aims.value_of(results, "bf16", case)
    return "" if speed is None else f"{speed:.2f}"


def show(results: Row) -> None:
    """Print everything that was measured, and ours over each rival."""
    copy, cases = results["copy_gbps"], by_case(results)
    for case, rows in cases.items():
        mine = rows.get("ours", {})
        for name, row in rows.items():
            if row["status"] == "skipped":
                continue
            if row["status"] != "ok":
                text = f"{row['status']} {row.get('message', row.get('error', ''))}"
            elif "us" in row:
                text = f"{row['us']:.1f} us of the host"
            else:
                text = f"{row['ms']:9.4f} ms  {row.get('tflops', 0.0):7.1f} TFLOP/s"
                text += f"  {row['gbps']:7.0f} GB/s"
                text += f"  {row['gbps'] / copy:5.3f} of copy" if copy else ""
                if "ms_graph" in row:
                    text += f"  {row['ms_graph']:.4f} ms in a graph"
                    if copy:
                        text += f", {row['gbps'] * row['ms'] / row['ms_graph'] / copy:.3f} of copy"
                if name != "ours" and "ms" in mine:
                    text += f"  ours is {row['ms'] / mine['ms']:.3f} times as fast"
                elif name == "ours" and _over_bf16(results, case):
                    text += f"  {_over_bf16(results, case)} times as fast as from bf16"
            print(f"{case:<32}{name:<14}{text}")
    for whole, share in shares_of_sums(results).items():
        print(f"{whole}: {share:.3f} of {' + '.join(SUMS[whole])}")
    print(aims.table(results))
    print(", ".join(f"{key} {value}" for key, value in results["machine"].items()), end="")
    print(f", copy {copy:.0f} GB/s" if copy else "")


def is_usual(case: str) -> bool:
    """Say whether a case is of what the title of the plot says."""
    p = BY_NAME[case]
    return (p.cache, p.heads_q, p.columns) == ("bf16", 32, 256) and not p.dense


def draw(results: Row, path: Path) -> None:
    """Draw TFLOP/s of prefill and the share of copy bandwidth of decoding."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(15, 5), layout="constrained")
    copy = results["copy_gbps"] or COPY_GBPS
    for axis, family, key, unit in (
        (axes[0], "prefill", "tflops", 1.0),
        (axes[1], "decode", "gbps", copy),
    ):
        rows = [r for r in results["results"] if r["status"] == "ok" and r["family"] == family]
        rows = [r for r in rows if is_usual(r["case"])]
        names = list(dict.fromkeys(r["case"] for r in rows))
        providers = [name for name in LABELS if any(r["provider"] == name for r in rows)]
        for i, provider in enumerate(providers):
            found = {r["case"]: r[key] / unit for r in rows if r["provider"] == provider}
            at = [names.index(case) + i * 0.8 / len(providers) for case in found]
            axis.bar(at, list(found.values()), 0.8 / len(providers), label=LABELS[provider])
        axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axis.set_ylabel("TFLOP/s" if family == "prefill" else "share of copy bandwidth")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(f"{results['machine']['device']}, bf16, 32:8 heads, head_dim 128")
    figure.savefig(path, dpi=120)


def bounds() -> str:
    """Return, as Markdown, the two bounds of each case."""
    lines = [
        "| case | GFLOP | FLOPs / rate, ms | MB of K and V | bytes / bandwidth, ms |",
        "|---|---:|---:|---:|---:|",
    ]
    for p in PROBLEMS:
        compute, memory = p.flops / MATMUL_TFLOPS / 1e9, p.bytes / COPY_GBPS / 1e6
        lines.append(
            f"| {p.name} | {p.flops / 1e9:.1f} | {compute:.3f} | {p.bytes / 1e6:.1f} | "
            f"{memory:.3f} |"
        )
    return "\n".join(lines)
