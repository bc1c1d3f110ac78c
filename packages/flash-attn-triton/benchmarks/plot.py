"""Bar charts of the dense grid: one picture for the forward pass, one for the backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Row = dict[str, Any]

TITLES = {"fwd": "forward", "bwd": "backward"}

# ours stands out; the rivals share one family of colours
OURS = "#d1495b"
RIVALS = {"fa3": "#1d3557", "cudnn": "#457b9d", "fa2": "#a8c5da", "flex": "#c9c4b8"}
INK = "#2b2b2b"
MUTED = "#7a7a7a"


def draw(results: Row, path: Path, labels: dict[str, str]) -> list[Path]:
    """Draw ``<stem>-forward.png`` and ``<stem>-backward.png`` beside ``path``.

    Args:
        results: What the benchmark wrote as JSON.
        path: Where; its stem is the prefix of both names.
        labels: Names for the legend by provider.

    Returns:
        The files written; a pass without results has none.
    """
    written = []
    for direction, title in TITLES.items():
        rows = [
            row
            for row in results["results"]
            if row["pass"] == direction and row["family"] == "grid" and row["status"] == "ok"
        ]
        if rows:
            target = path.with_name(f"{path.stem}-{title}.png")
            _draw_pass(rows, title, results["machine"], target, labels)
            written.append(target)
    return written


def _draw_pass(
    rows: list[Row], title: str, machine: Row, path: Path, labels: dict[str, str]
) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    head_dims = sorted({row["head_dim"] for row in rows})
    masks = sorted({row["causal"] for row in rows})
    names = [name for name in labels if any(row["provider"] == name for row in rows)]
    top = max(row["tflops"] for row in rows)
    style = {"font.size": 9, "axes.edgecolor": MUTED, "text.color": INK, "xtick.color": INK}
    with plt.rc_context({**style, "ytick.color": MUTED, "axes.labelcolor": INK}):
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
            f"Attention {title}, bf16, {machine['device']}, 16k tokens, heads x dim = 2048",
            x=0.01,
            ha="left",
            fontsize=11,
            fontweight="bold",
        )
        figure.text(
            0.01,
            0.005,
            f"{machine['date']}, torch {machine['torch']}, Triton {machine['triton']}; "
            "higher is better",
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
