"""The curve: time over dense FlashAttention-3's time against density, with the ideal line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from providers import PROVIDERS


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw forward and backward, for both block sizes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in results["results"] if r["family"] == "curve" and "ms" in r]
    dense = {r["case"]: r["ms"] for r in rows if r["provider"] == "fa3"}
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 5.6), sharey=True, layout="constrained")
    for ax, way, title in zip(axes, ("fwd", "bwd"), ("forward", "backward"), strict=True):
        ax.plot([0.02, 1], [0.02, 1], color="grey", linestyle=":", label="ideal: density")
        for color, provider in enumerate(("ours", "portable", "flex")):
            for block, line in ((64, "-"), (128, "--")):
                points = sorted(
                    (r["density"], r["ms"] / dense[r["case"]])
                    for r in rows
                    if (r["provider"], r["block"], r["pass"]) == (provider, block, way)
                    and r["case"] in dense
                )
                if points:
                    label = f"{PROVIDERS[provider].label}, block {block}"
                    curve = zip(*points, strict=True)
                    ax.plot(*curve, line, color=f"C{color}", marker="o", label=label)
        ax.set(xscale="log", yscale="log", xlabel="density of the causal blocks", title=title)
        ax.grid(True, which="both", alpha=0.3)
    axes[0].set_ylabel("time / dense FlashAttention-3's")
    # FlexAttention may lack a curve in one of the two
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    machine = results["machine"]
    figure.suptitle(f"8192 tokens, 32:8 heads of 128, bf16, {machine['device']}, {machine['date']}")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
