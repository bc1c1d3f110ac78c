"""A picture of a schedule: engines over time, as one HTML file that needs nothing else."""

from __future__ import annotations

import html
from pathlib import Path

from .cost import DMA_LATENCY, cost, schedule
from .targets import find_target
from .trace import Trace

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


def write_timeline(trace: Trace, path: str | Path, *, end: float | None = None) -> None:
    """Write the page to a file."""
    Path(path).write_text(timeline_html(trace, end=end))
