"""Plots of what was measured: every committed result, beside its rivals, and over commits.

``pages`` returns Markdown pages and, beside each, the figures that ``plots.js`` draws with Plotly.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = "packages/{}/benchmarks/results"
RESULTS = FOLDER + "/h200.json"
# whom a package is drawn beside over commits
RIVAL = {
    "flash-attn-triton": "fa3",
    "prefix-prefill": "fa3",
    "blocksparse-attn": "flex",
    "lightning-attn": "fla",
}
STATIC = "nki-paged-attn"
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
PASSES = {"fwd": "forward", "bwd": "backward", "train": "forward and backward"}
BANDWIDTH = ("decode", "write")
# what a row is told apart by, beside its case and provider
KEYS = ("schedule", "tile", "kernel", "variant", "splits")
# what a row was timed by; the first that all rows have is drawn
UNITS = {
    "tflops": "TFLOP/s, more is faster",
    "gbps": "GB/s, more is faster",
    "ms": "milliseconds, less is faster",
    "us": "microseconds, less is faster",
}

Row = dict[str, Any]
# a value by the name of a series and the place on the axis
Values = Mapping[str, Mapping[str, float]]


def _rows(data: Any) -> list[Row]:
    """Return the cases that were right and timed."""
    rows = data if isinstance(data, list) else data.get("results", data.get("rows", []))
    if isinstance(data, dict) and "ranks" in data.get("machine", {}):
        rows = list(map(_of_ranks, rows))
    timed = [r for r in rows if any(r.get(key) for key in ("ms", "fwd", "bwd"))]
    return [r for r in timed if r.get("status", "ok") == "ok"]


def _of_ranks(row: Row) -> Row:
    """Return what several GPUs gave in the form of what one gave."""
    sizes = [f"{row[key]} {key}" for key in ("batch", "tokens", "heads", "keys") if key in row]
    kept = {key: x for key, x in row.items() if key not in ("ms", "case", "batch", "heads")}
    kept["case"] = ", ".join([row["case"], *sizes] if "case" in row else sizes)
    in_graph = {True: "in a graph", False: "without a graph", None: ""}[row.get("captured")]
    kept["provider"] = row.get("way") or row.get("shard") or in_graph
    ms = row.get("ms")
    both = dict(zip(("fwd", "bwd"), ms, strict=True)) if isinstance(ms, list) else {"ms": ms}
    return kept | both


def _families(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return rows by family and pass; one that was timed in both passes is of both."""
    found = defaultdict(list)
    for row in rows:
        split = [{**row, "ms": row[one], "pass": one} for one in ("fwd", "bwd") if row.get(one)]
        for each in [row] if "fwd" not in row else split:
            one = each.get("pass", each.get("direction")) or ""
            name = f"{each.get('family', '')} {PASSES.get(one, one)}".strip()
            found[name].append({**each, "case": each.get("case", "").removesuffix(f"-{one}")})
    return dict(found)


def _series(row: Row) -> str:
    """Return what a row is drawn as beside others of the same case."""
    provider = row.get("provider", "")
    parts = [LABELS.get(provider, provider)]
    for key in KEYS:
        if row.get(key) not in (None, "", 0, "auto"):
            # of a tile's fields the numbers
            parts.append(re.sub(r"\w+[=(]+|\)$|'", "", str(row[key])))
    return ", ".join(filter(None, parts)) or "as chosen"


def _chart(values: Values, text: str, kind: str = "bar", xaxis: Row | None = None) -> Row:
    """Return a figure, whose bars or lines are the series."""
    places = list(dict.fromkeys(x for series in values.values() for x in series))
    # what all begin with is said once
    columns = zip(*(place.split("-")[:-1] for place in places), strict=False)
    same = [column[0] for column in itertools.takewhile(lambda x: len(set(x)) == 1, columns)]
    common = "-".join(same) if len(places) > 1 and kind == "bar" else ""
    short = [place.removeprefix(f"{common}-") for place in places]
    data = [
        {"type": kind, "name": name, "x": short, "y": [_rounded(y.get(place)) for place in places]}
        for name, y in values.items()
    ]
    axis = xaxis or ({"title": {"text": common}} if common else {})
    return {"data": data, "layout": {"yaxis": {"title": {"text": text}}, "xaxis": axis}}


def _rounded(y: float | None) -> float | None:
    return y and float(f"{y:.4g}")


def _bars(rows: list[Row], family: str = "") -> Row:
    """Return a figure of rows: cases along the axis, and a bar for whatever they differ in."""
    units = ["gbps"] if family.startswith(BANDWIDTH) else []
    key = next(key for key in (*units, *UNITS) if all(r.get(key) for r in rows))
    values: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        values[_series(row)][row["case"]] = row[key]
    return _chart(values, UNITS[key])


def _besides(data: Row) -> Row:
    """Return the figures of what the main file holds beside its results."""
    figures: Row = {}
    for key, title in (("decode", "decode"), ("building", "making layouts and lists")):
        rows = [r for r in data.get(key, ()) if r.get("status", "ok") == "ok"]
        if rows:
            figures[title] = _bars([{"provider": "ours", **r} for r in rows], key)
    host = data.get("host", [])
    if isinstance(host, dict):
        host = [{"case": name, "us": us} for name, us in host.items()]
    rows = [{"provider": "ours", "us": r.get("median_us"), **r} for r in host]
    if rows := [r for r in rows if isinstance(r["us"], (int, float))]:
        figures["host's time of a call"] = _bars(rows)
    return figures


def _times(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Return the times of each case by provider."""
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        times[row["case"]][row["provider"]] = row["ms"]
    return times


def _speeds(times: Values, one: str, other: str) -> dict[str, float]:
    """Return the time of one over another's, of the cases that both ran."""
    both = {case: t for case, t in times.items() if {one, other} <= t.keys()}
    return {case: t[one] / t[other] for case, t in both.items()}


def ratios(rows: list[Row], rival: str) -> dict[str, float]:
    """Return the speed beside a rival, by family and pass: the geometric mean over its cases."""
    found = {}
    for name, group in _families(rows).items():
        if speeds := _speeds(_times(group), rival, "ours").values():
            found[name] = math.exp(sum(map(math.log, speeds)) / len(speeds))
    return found


def _history(root: Path, package: str) -> dict[str, dict[str, float]]:
    """Return the ratios at each commit, by family; the oldest first."""
    path = RESULTS.format(package)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    found: dict[str, dict[str, float]] = defaultdict(dict)
    try:
        log = git("log", "--reverse", "--format=%h %cs", "--", path).splitlines()
    except (OSError, subprocess.CalledProcessError):  # no repository: an archive of it
        return found
    for line in log:
        try:
            data = json.loads(git("show", f"{line.split()[0]}:{path}"))
        except (subprocess.CalledProcessError, ValueError):  # taken away there
            continue
        for family, mean in ratios(_rows(data), RIVAL[package]).items():
            found[family][line] = mean
    return found


def _repeats(rows: list[Row]) -> Row | None:
    """Draw what gradients that repeat bit for bit cost."""
    times = _times([row for row in rows if row.get("family") == "repeats"])
    pairs = (("ours", "base"), ("fa3-repeats", "fa3"))
    values = {LABELS[one]: _speeds(times, base, one) for one, base in pairs}
    text = "speed / the same kernel's, not deterministic"
    return _chart({n: x for n, x in values.items() if x}, text) if values["this package"] else None


def _computed(data: Row) -> Row:
    """Return the figures of what is computed from programs, and not measured."""
    calls = {key: x for key, x in data.items() if isinstance(x, dict) and "new" in x}
    which = {"this package": "new", "its first version": "old"}
    log = {"type": "log", "title": {"text": "cached tokens of a sequence"}}
    cycles = {f"{count} query heads": x for count, x in data["decode cycles"].items()}
    cost = "its first version / this package"
    figures = {
        "Decode: cycles of products": _chart(cycles, cost, "scatter", log),
        "Decode: bytes copied": _chart(
            {"": data["decode bytes"]}, "bytes / the least there are", "scatter", log
        ),
    }
    for key, title, unit in (
        ("schedule_us", "Time by the model of costs", UNITS["us"]),
        ("dma_bytes_over_bound", "Bytes copied / the least there are", "1 is the bound"),
        ("instructions", "Instructions", "count"),
    ):
        values = {n: {call: x[w][key] for call, x in calls.items()} for n, w in which.items()}
        figures[title] = _chart(values, unit)
    return figures


def _page(root: Path, package: str) -> tuple[list[str], Row]:
    """Return what a page says at its head, and its figures."""
    files = sorted((root / FOLDER.format(package)).glob("*.json"))
    read = {path.name: json.loads(path.read_text()) for path in files}
    if package == STATIC:
        ((name, data),) = read.items()
        told = ", ".join(f"{key} {value}" for key, value in data["computed, not measured"].items())
        head = [f"# {package}: computed", f"Computed from instructions, not measured: {told}."]
        return head, {title: {**x, "of": name} for title, x in _computed(data).items()}
    main = Path(RESULTS).name
    machine = read[main].get("machine", {})
    parts = [machine.get("device", ""), machine.get("date", "")]
    parts += [f"{name} {machine[name]}" for name in ("torch", "triton") if machine.get(name)]
    head = [f"# {package}: measured", f"{', '.join(filter(None, parts))}. Checked before timing;"]
    head[1] += " ratios within one run count, absolute figures move from run to run."
    figures: Row = {}
    history = _history(root, package)
    if len({line for points in history.values() for line in points}) > 1:
        text = f"speed / {LABELS[RIVAL[package]]}, geometric means of families"
        figures["history"] = _chart(history, text, "scatter", {"type": "category"})
    if figure := _repeats([row for data in read.values() for row in _rows(data)]):
        figures["repeats-cost"] = figure
    for name in (main, *(name for name in read if name != main)):
        title = Path(name).stem.removeprefix("h200-").replace("-", " ")
        for family, rows in _families(_rows(read[name])).items():
            key = family if name == main else f"{title}: {family}".rstrip(": ")
            figures[key] = {**_bars(rows, family), "of": name}
        if name == main:
            figures |= _besides(read[name])
    return head, figures


HEADINGS = {"history": "By commit", "repeats-cost": "What repeating gradients cost"}


def pages(root: Path) -> dict[str, str]:
    """Return the dashboard's files by name: pages, and the figures beside them."""
    files: dict[str, str] = {}
    for package in (*RIVAL, STATIC):
        lines, figures = _page(root, package)
        for name in figures:
            lines.append(f"## {HEADINGS.get(name) or name[0].upper() + name[1:]}")
            plot = f'data-source="{package}.json" data-name="{name}"'
            lines.append(f'<div class="plot" {plot}></div>')
        files[f"{package}.md"] = "\n\n".join(lines) + "\n"
        files[f"{package}.json"] = json.dumps(figures)
    index = ["# Measured\n", "Speed beside one rival each, the geometric mean of a family's cases."]
    index += ["Above 1 is faster.\n", "| package | what | beside | speed |", "|---|---|---|---:|"]
    for package, rival in RIVAL.items():
        data = json.loads((root / RESULTS.format(package)).read_text())
        for name, mean in ratios(_rows(data), rival).items():
            index.append(f"| [{package}]({package}.md) | {name} | {LABELS[rival]} | {mean:.2f} |")
    index += [f"\nNo device has run [{STATIC}]({STATIC}.md): its figures are computed.\n"]
    return {**files, "index.md": "\n".join(index)}


def write_scripts(folder: Path) -> None:
    """Put Plotly, which its Python package brings along, and what calls it into a folder."""
    (library,) = [f for f in metadata.files("plotly") or () if f.name == "plotly.min.js"]
    shutil.copy2(Path(str(library.locate())), folder / "plotly.min.js")
    shutil.copy2(Path(__file__).with_name("plots.js"), folder / "plots.js")
