"""Plots of what was measured: every committed result, beside its rivals, and over commits.

``pages`` returns Markdown pages and, beside each, the figures that ``plots.js`` draws with Plotly.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = "packages/{}/benchmarks/results/h200.json"
PACKAGES = ("flash-attn-triton", "prefix-prefill", "blocksparse-attn", "lightning-attn")
# beside whom the history is drawn
RIVAL = {
    "flash-attn-triton": "fa3",
    "prefix-prefill": "fa3",
    "blocksparse-attn": "flex",
    "lightning-attn": "fla",
}
LABELS = {
    "ours": "this package",
    "portable": "its portable kernels",
    "base": "without the feature",
    "fa3": "FlashAttention-3",
    "fa3-short": "FlashAttention-3, short walks",
    "fa3-repeats": "FlashAttention-3, deterministic",
    "fa2": "PyTorch's flash",
    "cudnn": "cuDNN",
    "flex": "FlexAttention",
    "fla": "flash-linear-attention",
    "dense": "flash-attn-triton, dense",
}
PASSES = {"fwd": "forward", "bwd": "backward", "train": "forward and backward", None: ""}
BANDWIDTH = ("decode", "write")

Row = dict[str, Any]


def _rows(data: Any) -> list[Row]:
    """Return the cases that were right and timed."""
    rows = data["results"] if isinstance(data, dict) else []
    return [r for r in rows if r.get("status") == "ok" and r.get("ms")]


def _pass(row: Row) -> str | None:
    return row.get("pass", row.get("direction"))


def _groups(rows: Iterable[Row]) -> dict[tuple[str, str | None], list[Row]]:
    found = defaultdict(list)
    for row in rows:
        found[row.get("family", ""), _pass(row)].append(row)
    return dict(found)


def _unit(family: str, rows: list[Row]) -> tuple[str, str]:
    """Return the number that a family is drawn by, and its unit."""
    if family in BANDWIDTH and all("gbps" in r for r in rows):
        return "gbps", "GB/s, more is faster"
    if all(r.get("tflops") for r in rows):
        return "tflops", "TFLOP/s, more is faster"
    return "ms", "milliseconds, less is faster"


def _bars(family: str, one: str | None, rows: list[Row]) -> Row:
    key, unit = _unit(family, rows)
    cases = list(dict.fromkeys(r["case"].removesuffix(f"-{one}") for r in rows))
    traces = []
    for provider in dict.fromkeys(r["provider"] for r in rows):
        values = {
            r["case"].removesuffix(f"-{one}"): r[key] for r in rows if r["provider"] == provider
        }
        y = [values.get(case) and float(f"{values[case]:.4g}") for case in cases]
        traces.append({"type": "bar", "name": LABELS.get(provider, provider), "x": cases, "y": y})
    return {"data": traces, "layout": {"yaxis": {"title": {"text": unit}}}}


def ratios(rows: list[Row], rival: str) -> dict[str, float]:
    """Return the speed beside a rival, by family and pass: the geometric mean over its cases."""
    found = {}
    for (family, one), group in _groups(rows).items():
        times: dict[str, dict[str, float]] = defaultdict(dict)
        for row in group:
            times[row["case"]][row["provider"]] = row["ms"]
        pairs = [t[rival] / t["ours"] for t in times.values() if rival in t and "ours" in t]
        if pairs:
            mean = math.exp(sum(map(math.log, pairs)) / len(pairs))
            found[f"{family} {PASSES.get(one, one)}".strip()] = mean
    return found


def _history(root: Path, package: str) -> tuple[list[str], list[dict[str, float]]]:
    """Return commits with their dates, the oldest first, and the ratios at each."""
    path = RESULTS.format(package)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        log = git("log", "--reverse", "--format=%h %cs", "--", path).splitlines()
    except (OSError, subprocess.CalledProcessError):  # no repository: an archive of it
        return [], []
    names, found = [], []
    for line in log:
        try:
            data = json.loads(git("show", f"{line.split()[0]}:{path}"))
        except (subprocess.CalledProcessError, ValueError):  # taken away there
            continue
        if means := ratios(_rows(data), RIVAL[package]):
            names.append(line)
            found.append(means)
    return names, found


def _lines(names: list[str], points: list[dict[str, float]], rival: str) -> Row:
    keys = list(dict.fromkeys(key for point in points for key in point))
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": key,
            "x": names,
            "y": [point.get(key) and round(point[key], 3) for point in points],
        }
        for key in keys
    ]
    text = f"speed / {LABELS[rival]}"
    layout = {"yaxis": {"title": {"text": text}}, "xaxis": {"type": "category"}}
    return {"data": traces, "layout": layout}


def _repeats(rows: list[Row]) -> Row | None:
    """Draw what gradients that repeat bit for bit cost."""
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.get("family") == "repeats":
            times[row["case"]][row["provider"]] = row["ms"]
    cases = [case for case, t in times.items() if {"ours", "base"} <= t.keys()]
    if not cases:
        return None
    pairs = (("ours", "base"), ("fa3-repeats", "fa3"))
    traces = [
        {
            "type": "bar",
            "name": LABELS[one],
            "x": cases,
            "y": [
                round(times[c][base] / times[c][one], 3) if {one, base} <= times[c].keys() else None
                for c in cases
            ],
        }
        for one, base in pairs
    ]
    text = "speed / the same kernel's, not deterministic"
    return {"data": traces, "layout": {"yaxis": {"title": {"text": text}}}}


def _plot(package: str, name: str) -> str:
    return f'<div class="plot" data-source="{package}.json" data-name="{name}"></div>\n'


def _machine(data: Row) -> str:
    told = data.get("machine", {})
    parts = [told.get("device", ""), told.get("date", "")]
    parts += [f"{name} {told[name]}" for name in ("torch", "triton") if told.get(name)]
    return ", ".join(part for part in parts if part)


def _page(root: Path, package: str) -> tuple[str, Row]:
    data = json.loads((root / RESULTS.format(package)).read_text())
    rows = _rows(data)
    lines = [f"# {package}: measured", "", f"{_machine(data)}. Checked before it was timed;"]
    lines += ["ratios within one run count, absolute figures move from run to run.", ""]
    figures: Row = {}
    names, points = _history(root, package)
    if len(names) > 1:
        figures["history"] = _lines(names, points, RIVAL[package])
        lines += ["## By commit", "", "Geometric means over the cases of a family.", ""]
        lines += [_plot(package, "history")]
    if (figure := _repeats(rows)) is not None:
        figures["repeats-cost"] = figure
        lines += ["## What repeating gradients cost", "", _plot(package, "repeats-cost")]
    for (family, one), group in _groups(rows).items():
        name = f"{family} {PASSES.get(one, one)}".strip()
        figures[name] = _bars(family, one, group)
        lines += [f"## {name.capitalize()}", "", _plot(package, name)]
    return "\n".join(lines), figures


def pages(root: Path) -> dict[str, str]:
    """Return the dashboard's files by name: pages, and the figures beside them."""
    files: dict[str, str] = {}
    index = ["# Measured", "", "Speed beside one rival each, as the geometric mean of a family's"]
    index += ["cases. Above 1 is faster.", ""]
    index += ["| package | what | beside | speed |", "|---|---|---|---:|"]
    for package in PACKAGES:
        page, figures = _page(root, package)
        files |= {f"{package}.md": page, f"{package}.json": json.dumps(figures)}
        data = json.loads((root / RESULTS.format(package)).read_text())
        for name, mean in ratios(_rows(data), RIVAL[package]).items():
            rival = LABELS[RIVAL[package]]
            index.append(f"| [{package}]({package}.md) | {name} | {rival} | {mean:.2f} |")
    files["index.md"] = "\n".join([*index, ""])
    return files


def write_scripts(folder: Path) -> None:
    """Put Plotly, which its Python package brings along, and what calls it into a folder."""
    (library,) = [f for f in metadata.files("plotly") or () if f.name == "plotly.min.js"]
    shutil.copy2(Path(str(library.locate())), folder / "plotly.min.js")
    shutil.copy2(Path(__file__).with_name("plots.js"), folder / "plots.js")
