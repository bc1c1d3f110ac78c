"""A picture of a layout; matplotlib is imported at the first use."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._linked.host.versions import need


def draw(kept: Tensor, block_size: tuple[int, int], title: str, ax: Any) -> Any:
    """Draw a mask of blocks, ``[rows, cols]``, in ``ax`` or in new axes; return the axes."""
    if ax is None:
        need("matplotlib", (3, 0), "BlockSparseLayout.plot")
        from matplotlib import pyplot

        ax = pyplot.subplots()[1]
    ax.imshow(kept.int().tolist(), cmap="Blues", vmin=0, vmax=1, interpolation="none")
    ax.set(
        xlabel=f"blocks of {block_size[1]} keys",
        ylabel=f"blocks of {block_size[0]} queries",
        title=title,
    )
    return ax
