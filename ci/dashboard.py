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
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = "packages/{}/benchmarks/results"
RESULTS = FOLDER + "/h200.json"
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
# what a row is told apart by, beside its case
KEYS = ("provider", "schedule", "tile", "kernel", "variant", "splits")
# what a row was timed by; the first that all rows have is drawn
TIMES = ("tflops", "gbps", "ms", "us")
UNITS = {
    "tflops": "TFLOP/s, more is faster",
    "gbps": "GB/s, more is faster",
    "ms": "milliseconds, less is faster",
    "us": "microseconds, less is faster",
}
STATIC = "nki-paged-attn"

Row = dict[str, Any]


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
    return kept | (
        dict(zip(("fwd", "bwd"), ms, strict=True)) if isinstance(ms, list) else {"ms": ms}
    )


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
        return "gbps", UNITS["gbps"]
    key = next(key for key in TIMES if all(r.get(key) for r in rows))
    return key, UNITS[key]


def _series(row: Row) -> str:
    """Return what a row is drawn as beside others of the same case."""
    provider = row.get("provider", "")
    parts = [LABELS.get(provider, provider)]
    for key in KEYS[1:]:
        if row.get(key) not in (None, "", 0, "auto"):
            # of a tile's fields the numbers
            parts.append(re.sub(r"\w+[=(]+|\)$|'", "", str(row[key])))
    return ", ".join(part for part in parts if part)


def _bars(family: str, one: str | None, rows: list[Row]) -> Row:
    key, unit = _unit(family, rows)
    cases = list(dict.fromkeys(r["case"].removesuffix(f"-{one}") for r in rows))
    traces = []
    for name in dict.fromkeys(map(_series, rows)):
        values = {r["case"].removesuffix(f"-{one}"): r[key] for r in rows if _series(r) == name}
        traces.append(_bar(name, cases, [values.get(case) for case in cases]))
    figure = _chart(traces, unit)
    # what all cases begin with is said once
    columns = zip(*(case.split("-")[:-1] for case in cases), strict=False)
    same = [column[0] for column in itertools.takewhile(lambda x: len(set(x)) == 1, columns)]
    if same and len(cases) > 1:
        common = "-".join(same)
        for trace in traces:
            trace["x"] = [case.removeprefix(f"{common}-") for case in cases]
        figure["layout"]["xaxis"] = {"title": {"text": common}}
    return figure


def _bar(name: str, x: list[str], y: list[float | None]) -> Row:
    rounded = [value and float(f"{value:.4g}") for value in y]
    return {"type": "bar", "name": name, "x": x, "y": rounded}


def _chart(traces: list[Row], text: str) -> Row:
    return {"data": traces, "layout": {"yaxis": {"title": {"text": text}}}}


def _others(path: Path) -> Row:
    """Return the figures of a file beside the main one, by name.

    A comparison of tiles has them along the axis, and a bar for each case.
    """
    rows = _rows(json.loads(path.read_text()))
    title = path.stem.removeprefix("h200-").replace("-", " ")
    figures: Row = {}
    both = [r for r in rows if "fwd" in r]
    split = [{**r, "ms": r[one], "pass": one} for r in both for one in ("fwd", "bwd")]
    rows = [r for r in rows if "fwd" not in r] + [r for r in split if r["ms"]]
    for (family, one), group in _groups(rows).items():
        name = " ".join(x for x in (f"{title}:", family, PASSES.get(one, one)) if x).rstrip(": ")
        if any(r.get("tile") or r.get("variant") for r in group):
            key, unit = _unit(family or "", group)
            tiles = list(dict.fromkeys(_series(r) or "as chosen" for r in group))
            traces = []
            for case in dict.fromkeys(r.get("case", "") for r in group):
                own = {
                    _series(r) or "as chosen": r[key] for r in group if r.get("case", "") == case
                }
                traces.append(_bar(case, tiles, [own.get(tile) for tile in tiles]))
            figures[name] = _chart(traces, unit)
        else:
            figures[name] = _bars(family or "", one, group)
    return figures


def _besides(data: Row) -> Row:
    """Return the figures of what the main file holds beside its results."""
    figures: Row = {}
    for key, title in (("decode", "decode"), ("building", "making layouts and lists")):
        rows = [r for r in data.get(key, ()) if r.get("status", "ok") == "ok"]
        if rows:
            figures[title] = _bars(key, None, [{"provider": "ours", **r} for r in rows])
    host = data.get("host", [])
    if isinstance(host, dict):
        host = [{"case": name, "us": us} for name, us in host.items()]
    rows = [{"provider": "ours", "us": r.get("median_us"), **r} for r in host]
    if rows := [r for r in rows if isinstance(r["us"], (int, float))]:
        figures["host's time of a call"] = _bars("", None, rows)
    return figures


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
    return _chart([trace for trace in traces if any(trace["y"])], text)


def _plot(package: str, name: str) -> str:
    return f'<div class="plot" data-source="{package}.json" data-name="{name}"></div>\n'


def _machine(data: Row) -> str:
    told = data.get("machine", {})
    parts = [told.get("device", ""), told.get("date", "")]
    parts += [f"{name} {told[name]}" for name in ("torch", "triton") if told.get(name)]
    return ", ".join(part for part in parts if part)


def _files(root: Path, package: str) -> list[Path]:
    """Return the files of a package's results, the main one first."""
    main = root / RESULTS.format(package)
    return [main, *sorted(set((root / FOLDER.format(package)).glob("*.json")) - {main})]


def _page(root: Path, package: str) -> tuple[str, Row]:
    main, *others = _files(root, package)
    data = json.loads(main.read_text())
    rows = _rows(data)
    lines = [f"# {package}: measured", "", f"{_machine(data)}. Checked before it was timed;"]
    lines += ["ratios within one run count, absolute figures move from run to run.", ""]
    figures: Row = {}
    names, points = _history(root, package)
    if len(names) > 1:
        figures["history"] = _lines(names, points, RIVAL[package])
        lines += ["## By commit", "", "Geometric means over the cases of a family.", ""]
        lines += [_plot(package, "history")]
    every = [row for path in (main, *others) for row in _rows(json.loads(path.read_text()))]
    if (figure := _repeats(every)) is not None:
        figures["repeats-cost"] = figure
        lines += ["## What repeating gradients cost", ""]
        lines += ["The backward of `deterministic=True`; 1 would cost nothing.", ""]
        lines += [_plot(package, "repeats-cost")]
    found = {
        f"{family} {PASSES.get(one, one)}".strip(): {**_bars(family, one, group), "of": main.name}
        for (family, one), group in _groups(rows).items()
    }
    found |= {name: {**figure, "of": ""} for name, figure in _besides(data).items()}
    for path in others:
        found |= {name: {**x, "of": path.name} for name, x in _others(path).items()}
    for name, figure in found.items():
        figures[name] = figure
        lines += [f"## {name[0].upper()}{name[1:]}", "", _plot(package, name)]
    return "\n".join(lines), figures


def _static_page(root: Path) -> tuple[str, Row]:
    """Return the page of what is computed from programs, and not measured."""
    (path,) = (root / FOLDER.format(STATIC)).glob("*.json")
    data = json.loads(path.read_text())
    told = ", ".join(f"{key} {value}" for key, value in data["computed, not measured"].items())
    lines = [f"# {STATIC}: computed", ""]
    lines += [f"Computed from instructions, not measured: {told}.", ""]
    calls = {key: x for key, x in data.items() if isinstance(x, dict) and "new" in x}
    figures: Row = {}
    for key, title, unit in (
        ("schedule_us", "Time by the model of costs", UNITS["us"]),
        ("dma_bytes_over_bound", "Bytes copied / the least there are", "1 is the bound"),
        ("instructions", "Instructions", "count"),
    ):
        traces = [
            _bar(name, list(calls), [x[which][key] for x in calls.values()])
            for which, name in (("new", "this package"), ("old", "its first version"))
        ]
        figures[title] = _chart(traces, unit)
    groups = {f"{count} query heads": x for count, x in data["decode cycles"].items()}
    for title, values, unit in (
        ("Decode: cycles of products", groups, "its first version / this package"),
        ("Decode: bytes copied", {"": data["decode bytes"]}, "bytes / the least there are"),
    ):
        traces = [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": list(map(int, x)),
                "y": list(x.values()),
            }
            for name, x in values.items()
        ]
        figures[title] = _chart(traces, unit)
        axis = {"type": "log", "title": {"text": "cached tokens of a sequence"}}
        figures[title]["layout"]["xaxis"] = axis
    for name in figures:
        lines += [f"## {name[0].upper()}{name[1:]}", "", _plot(STATIC, name)]
    return "\n".join(lines), {name: {**x, "of": path.name} for name, x in figures.items()}


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
    page, figures = _static_page(root)
    files |= {f"{STATIC}.md": page, f"{STATIC}.json": json.dumps(figures)}
    index += ["", f"No device has run [{STATIC}]({STATIC}.md): its figures are computed."]
    files["index.md"] = "\n".join([*index, ""])
    return files


def write_scripts(folder: Path) -> None:
    """Put Plotly, which its Python package brings along, and what calls it into a folder."""
    (library,) = [f for f in metadata.files("plotly") or () if f.name == "plotly.min.js"]
    shutil.copy2(Path(str(library.locate())), folder / "plotly.min.js")
    shutil.copy2(Path(__file__).with_name("plots.js"), folder / "plots.js")
