"""Figures of panels, each of bars by case or of lines over numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from .report import UNITS

Row = dict[str, Any]

# ours stands out; the rivals share one family of colours
COLOURS = {"ours": "#d1495b", "portable": "#e27d60", "base": "#edae9b"}
COLOURS |= {"fa3": "#1d3557", "fla": "#1d3557", "fa3-repeats": "#6d7f9c", "cudnn": "#457b9d"}
COLOURS |= {"fa2": "#a8c5da", "flex": "#c9c4b8"}
INK, MUTED = "#2b2b2b", "#7a7a7a"
STYLE = {
    "font.size": 9,
    "axes.edgecolor": MUTED,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


class Series(NamedTuple):
    """Points of one provider: what they are called, and y by x."""

    label: str
    points: dict[Any, float]
    colour: str | None = None
    line: str = "-"


class Panel(NamedTuple):
    """Some series over one axis.

    ``bars`` are groups by x, in the order of the first appearance; otherwise there are lines, on
    ``scale`` in both directions.
    """

    title: str
    series: list[Series]
    ylabel: str = ""
    xlabel: str = ""
    bars: bool = True
    scale: str = "linear"


def bars(
    bench: Any, rows: list[Row], one: str, place: Callable[[Row], str] | None = None, **more: Any
) -> Panel:
    """Return bars of a pass of some rows, by case, in the unit of their family.

    Args:
        bench: The benchmark.
        rows: Those of cases that are known, right and timed.
        one: The pass.
        place: What a row's case is called; its name without the pass, unless one says otherwise.
        more: Further fields of the panel.
    """
    rows = [row for row in rows if row.get("pass", "") == one]
    unit = bench.unit(rows[0]["family"]) if rows else "ms"
    place = place or (lambda row: bench.cases[row["case"]][0].name)
    series = []
    for name, provider in bench.providers.items():
        points = {place(row): row[unit] for row in rows if row["provider"] == name}
        if points:
            series.append(Series(provider.label, points, COLOURS.get(name)))
    return Panel(**{"title": one, "series": series, "ylabel": UNITS[unit], **more})


def note_of(found: Row) -> str:
    """Return where and when results were measured."""
    machine = found["machine"]
    dates = ", ".join(sorted({began.split()[0] for began in found["runs"]}))
    return f"{machine['device']}, {dates}, torch {machine['torch']}, Triton {machine['triton']}"


def draw(panels: list[Panel], path: Path, columns: int, title: str, note: str = "") -> Path:
    """Draw panels from left to right, so many in a line, with one legend."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    lines = -(-len(panels) // columns)
    most = max(len(_places(panel)) * len(panel.series) for panel in panels)
    width = min(15.0 / columns, max(4.2, 0.12 * most)) if panels[0].bars else 4.6
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            lines,
            columns,
            figsize=(width * columns, 0.9 + 3.0 * lines),
            squeeze=False,
            layout="constrained",
        )
        for axis, panel in zip(grid.flat, panels, strict=False):
            (_draw_bars if panel.bars else _draw_lines)(axis, panel)
            axis.set_title(panel.title, fontsize=9, loc="left", color=INK)
            axis.set(ylabel=panel.ylabel, xlabel=panel.xlabel)
        for axis in grid.flat[len(panels) :]:
            axis.set_visible(False)
        handles: dict[str, Any] = {}
        for axis in grid.flat:
            found, texts = axis.get_legend_handles_labels()
            handles = dict(zip(texts, found, strict=True)) | handles
        figure.legend(
            handles.values(),
            handles,
            loc="outside lower center",
            # of some 0.08 inches a letter
            ncols=max(1, int(width * columns / (0.6 + 0.08 * max(map(len, handles))))),
            frameon=False,
        )
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        figure.supxlabel(note, x=0.01, ha="left", fontsize=7, color=MUTED)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140, facecolor="white")
        plt.close(figure)
    return path


def _places(panel: Panel) -> list[Any]:
    return list(dict.fromkeys(x for series in panel.series for x in series.points))


def _draw_bars(axis: Any, panel: Panel) -> None:
    places = _places(panel)
    width = 0.84 / max(1, len(panel.series))
    for i, series in enumerate(panel.series):
        offset = (i - (len(panel.series) - 1) / 2) * width
        at = [places.index(x) + offset for x in series.points]
        heights = list(series.points.values())
        bars = axis.bar(at, heights, width * 0.92, color=series.colour, label=series.label)
        if panel.scale == "linear":
            texts = [f"{y:.0f}" if y > 100 else f"{y:.3g}" for y in heights]
            axis.bar_label(bars, texts, fontsize=5, padding=1, color=MUTED)
    names = [str(x) for x in places]
    is_long = max(map(len, names), default=0) > 8
    axis.set_xticks(range(len(places)), names, rotation=30 if is_long else 0, fontsize=7)
    if is_long:
        for text in axis.get_xticklabels():
            text.set_ha("right")
    axis.set_yscale(panel.scale)
    axis.tick_params(length=0)


def _draw_lines(axis: Any, panel: Panel) -> None:
    for series in panel.series:
        points = sorted(series.points.items())
        axis.plot(
            *zip(*points, strict=True),
            series.line,
            color=series.colour,
            marker="o" if len(points) > 2 or series.colour else None,
            markersize=4,
            label=series.label,
        )
    axis.set(xscale="log" if panel.scale == "log" else "linear", yscale=panel.scale)
    axis.grid(True, which="both", alpha=0.3)
