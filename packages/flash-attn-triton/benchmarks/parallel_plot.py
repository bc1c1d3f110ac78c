"""Draws the results of several GPUs."""

from __future__ import annotations

import json
from pathlib import Path


def draw_plot(path: Path, files: list[Path]) -> None:
    """Draw the share of one GPU's speed over tokens a GPU: a column a file, a row a pass."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    figure, axes = plt.subplots(
        2, len(found), figsize=(4 * len(found), 6), sharex=True, sharey=True, squeeze=False
    )
    for column, one in enumerate(found):
        lines = sorted({(r["case"], r["way"]) for r in one["results"] if "share" in r})
        for row, title in enumerate(("forward", "backward")):
            plot = axes[row][column]
            for case, way in lines:
                points = sorted(
                    (r["tokens"], r["share"][row])
                    for r in one["results"]
                    if (r["case"], r["way"]) == (case, way) and "share" in r
                )
                plot.plot(*zip(*points, strict=True), marker="o", label=f"{case}, {way}")
            plot.set_title(f"{one['machine']['ranks']} ranks, {title}", fontsize=9)
            plot.set_xscale("log", base=2)
            plot.set_ylim(0.0, 1.1)
            plot.axhline(1.0, color="#7a7a7a", linewidth=0.8)
        axes[1][column].set_xlabel("tokens a rank")
    axes[0][0].set_ylabel("share of one GPU's speed")
    axes[1][0].set_ylabel("share of one GPU's speed")
    axes[0][0].legend(fontsize=7)
    where = found[0]["machine"]
    note = f"{where['device']}, torch {where['torch']}, Triton {where['triton']}, {where['date']}"
    figure.text(0.01, 0.005, note, fontsize=7, color="#7a7a7a")
    figure.savefig(path, dpi=150, bbox_inches="tight")
