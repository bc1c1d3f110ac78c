"""A schedule over time: as one self-contained HTML file, or as Chrome's trace events."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from ..targets import find_target
from ..trace import Trace
from .durations import DMA_LATENCY
from .scheduling import schedule
from .totals import cost

LANES = ("dma", "gpsimd", "tensor", "scalar", "vector")
COLOURS = {
    "nc_matmul": "#3b6fb6",
    "nc_transpose": "#7fb2e5",
    "activation": "#d9822b",
    "dma_copy": "#4b9e5f",
}
OTHER = "#9a6bb0"
WIDTH, HEIGHT, LEFT = 1600, 34, 90


def timeline_html(trace: Trace, *, start: float = 0.0, end: float | None = None) -> str:
    """Return a page that shows what each engine does from ``start`` to ``end``, in nanoseconds."""
    found = find_target(trace.target)
    whole = cost(trace)
    stop = whole.makespan if end is None else end
    scale = WIDTH / max(stop - start, 1.0)
    programs = sorted({i.program for i in trace.instructions}) or [0]
    lanes = [(p, lane) for p in programs for lane in LANES]
    rows = []
    for number, (program, lane) in enumerate(lanes):
        label = lane if len(programs) == 1 else f"{lane} {program}"
        y = number * HEIGHT + 20
        rows.append(f'<text x="4" y="{y}">{label}</text>')
    for i, begin, finish in schedule(trace, found):
        finish -= DMA_LATENCY if i.engine == "dma" else 0.0
        if finish < start or begin > stop:
            continue
        x = LEFT + (begin - start) * scale
        wide = max((finish - begin) * scale, 0.3)
        y = lanes.index((i.program, i.engine)) * HEIGHT + 4
        title = html.escape(f"{i.op}, {i.elements} elements, {begin:.0f} to {finish:.0f} ns")
        rows.append(
            f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{HEIGHT - 8}" '
            f'fill="{COLOURS.get(i.op, OTHER)}"><title>{title}</title></rect>'
        )
    tall = len(lanes) * HEIGHT + 10
    return (
        "<!doctype html><meta charset='utf-8'><title>Timeline</title>"
        "<style>body{font:13px sans-serif}pre{font-size:12px}</style>"
        f"<pre>{html.escape(str(whole))}</pre>"
        f"<svg width='{WIDTH + LEFT}' height='{tall}'>{''.join(rows)}</svg>"
        "<p>In-order engines, each waiting for its operands. Blue: products and transposes; "
        "orange: ScalarE; green: DMA; violet: VectorE and GpSimd.</p>\n"
    )


def timeline_events(trace: Trace) -> dict[str, list[dict[str, Any]]]:
    """Return the schedule as Chrome's trace events, in microseconds.

    A program of the logical core is a process, an engine a thread of it. Transfers of DMA overlap
    by their latency, so that they are asynchronous events.
    """
    programs = sorted({i.program for i in trace.instructions}) or [0]
    events: list[dict[str, Any]] = []
    for program in programs:
        name = {"name": f"program {program}"}
        events.append({"ph": "M", "name": "process_name", "pid": program, "args": name})
        for thread, lane in enumerate(LANES):
            place = {"pid": program, "tid": thread, "args": {"name": lane}}
            events.append({"ph": "M", "name": "thread_name", **place})
    for number, (i, begin, finish) in enumerate(schedule(trace, trace.target)):
        event: dict[str, Any] = {
            "name": i.op,
            "cat": i.engine,
            "pid": i.program,
            "tid": LANES.index(i.engine),
            "ts": begin / 1e3,
            "args": {"elements": i.elements, "form": sorted(i.form), "bytes": i.nbytes},
        }
        if i.engine == "dma":
            events.append({**event, "ph": "b", "id": number})
            events.append({**event, "ph": "e", "id": number, "ts": finish / 1e3})
        else:
            events.append({**event, "ph": "X", "dur": (finish - begin) / 1e3})
    return {"traceEvents": events}


def write_timeline(trace: Trace, path: str | Path, *, end: float | None = None) -> None:
    """Write the timeline to a file: Chrome's trace events for ``.json``, else a page."""
    found = Path(path)
    if found.suffix == ".json":
        found.write_text(json.dumps(timeline_events(trace)))
    else:
        found.write_text(timeline_html(trace, end=end))
