"""Bar charts: the dense grid, a picture for each pass, and a picture for every other family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cases import PROVIDERS_OF
from report import CASES, by_case, floor_of

Row = dict[str, Any]

TITLES = {"fwd": "forward", "bwd": "backward"}

# ours stands out; the rivals share one family of colours
OURS = "#d1495b"
BASE = "#edae9b"
RIVALS = {"fa3": "#1d3557", "cudnn": "#457b9d", "fa2": "#a8c5da", "flex": "#c9c4b8"}
COLOURS = {"ours": OURS, "base": BASE, "portable": "#e27d60", "fa3-repeats": "#6d7f9c", **RIVALS}
INK = "#2b2b2b"
MUTED = "#7a7a7a"
STYLE = {
    "font.size": 9,
    "axes.edgecolor": MUTED,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": MUTED,
    "axes.labelcolor": INK,
}


def draw(results: Row, path: Path, labels: dict[str, str]) -> list[Path]:
    """Draw ``<stem>-forward.png``, ``<stem>-backward.png`` and ``<stem>-<family>.png`` at ``path``.

    Args:
        results: What the benchmark wrote as JSON.
        path: Where; its stem is the prefix of all names.
        labels: Names for the legend by provider.

    Returns:
        The files written; a pass or a family without results has none.
    """
    rows = [
        {**row, **vars(CASES[row["case"]][0]), "family": row["family"]}
        for row in results["results"]
        if row["status"] == "ok" and row["case"] in CASES
    ]
    made = footnote(results)
    written = []
    for direction, title in TITLES.items():
        here = [row for row in rows if row["pass"] == direction and row["family"] == "grid"]
        if here:
            written.append(path.with_name(f"{path.stem}-{title}.png"))
            _draw_pass(here, title, made, written[-1], labels)
    for family in PROVIDERS_OF:
        here = [row for row in rows if row["family"] == family]
        if here and family != "grid":
            written.append(path.with_name(f"{path.stem}-{family}.png"))
            _draw_family(here, family, made, written[-1], labels)
    return written


def footnote(results: Row) -> str:
    """Return where and when the results were measured."""
    machine = results["machine"]
    dates = sorted({began.split()[0] for began in results["runs"]})
    return (
        f"{machine['device']}, {', '.join(dates)}, torch {machine['torch']}, "
        f"Triton {machine['triton']}; higher is better"
    )


def _draw_family(
    rows: list[Row], family: str, made: str, path: Path, labels: dict[str, str]
) -> None:
    """Draw one group of bars a case, from left to right, with the bound of the products."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    table = by_case(rows)
    names = [n for n in PROVIDERS_OF[family] if any(n in one for one in table.values())]
    height = 0.16 * len(names) + 0.12
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(8, 1.2 + height * len(table)))
        for place, name in enumerate(names):
            at = [
                i + (place + 0.5) / (len(names) + 1)
                for i, one in enumerate(table.values())
                if name in one
            ]
            values = [one[name]["tflops"] for one in table.values() if name in one]
            colour = COLOURS.get(name, MUTED)
            bars = axis.barh(at, values, 0.92 / (len(names) + 1), color=colour, label=labels[name])
            axis.bar_label(bars, fmt="%.0f", fontsize=6, padding=2, color=MUTED)
        for i, case in enumerate(table):
            problem, direction = CASES[case]
            most = problem.flops(direction) / floor_of(problem, direction)[0] / 1e9
            axis.plot([most, most], [i, i + 0.85], color=INK, linewidth=0.8)
        axis.set_yticks([i + 0.4 for i in range(len(table))], list(table), fontsize=7)
        axis.margins(y=0.01)
        axis.invert_yaxis()
        axis.set_xlabel(f"TFLOP/s; black: what the GPU allows. {made}", fontsize=7)
        axis.tick_params(length=0)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        axis.legend(
            frameon=False, fontsize=8, ncols=len(names), loc="lower left", bbox_to_anchor=(0, 1)
        )
        figure.tight_layout()
        figure.savefig(path, dpi=130, facecolor="white")
        plt.close(figure)


def _draw_pass(rows: list[Row], title: str, made: str, path: Path, labels: dict[str, str]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    head_dims = sorted({row["head_dim"] for row in rows})
    masks = sorted({row["causal"] for row in rows})
    names = [name for name in labels if any(row["provider"] == name for row in rows)]
    top = max(row["tflops"] for row in rows)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            len(masks),
            len(head_dims),
            figsize=(1.4 + 3.6 * len(head_dims), 0.9 + 2.3 * len(masks)),
            sharey=True,
            squeeze=False,
        )
        for line, causal in zip(grid, masks, strict=True):
            for axis, head_dim in zip(line, head_dims, strict=True):
                here = [r for r in rows if r["causal"] == causal and r["head_dim"] == head_dim]
                _draw_panel(axis, here, names, labels)
                mask = "causal" if causal else "no mask"
                axis.set_title(f"head dim {head_dim}, {mask}", fontsize=9, loc="left", color=INK)
                axis.set_ylim(0, top * 1.12)
            line[0].set_ylabel("TFLOP/s")
        for axis in grid[-1]:
            axis.set_xlabel("sequence length", color=MUTED)
        handles, texts = grid[0][0].get_legend_handles_labels()
        figure.suptitle(
            f"Attention {title}, bf16, 16k tokens, heads x dim = 2048",
            x=0.01,
            ha="left",
            fontsize=11,
            fontweight="bold",
        )
        figure.text(
            0.01,
            0.005,
            made,
            fontsize=7,
            color=MUTED,
        )
        height = figure.get_size_inches()[1]
        figure.legend(
            handles,
            texts,
            loc="upper left",
            bbox_to_anchor=(0.004, 1 - 0.26 / height),
            ncols=len(names),
            frameon=False,
            fontsize=9,
            columnspacing=1.4,
            handlelength=1.0,
        )
        figure.tight_layout(rect=(0, 0.02, 1, 1 - 0.26 / height))
        figure.savefig(path, dpi=160, facecolor="white")
        plt.close(figure)


def _draw_panel(axis: Any, rows: list[Row], names: list[str], labels: dict[str, str]) -> None:
    """Draw groups of bars by sequence length, with the figure on top of each bar."""
    seqlens = sorted({max(row["lengths"]) for row in rows})
    width = 0.84 / len(names)
    for place, name in enumerate(names):
        found = {max(row["lengths"]): row["tflops"] for row in rows if row["provider"] == name}
        offset = (place - (len(names) - 1) / 2) * width
        at = [i + offset for i, seqlen in enumerate(seqlens) if seqlen in found]
        heights = [found[s] for s in seqlens if s in found]
        ours = name == "ours"
        bars = axis.bar(
            at,
            heights,
            width * 0.92,
            color=OURS if ours else RIVALS.get(name, "#999999"),
            label=labels[name],
            zorder=2,
        )
        axis.bar_label(
            bars,
            fmt="%.0f",
            fontsize=6,
            padding=1,
            color=OURS if ours else MUTED,
            fontweight="bold" if ours else "normal",
        )
    axis.set_xticks(range(len(seqlens)), [f"{s // 1024}k" for s in seqlens])
    axis.tick_params(length=0)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.7, zorder=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
