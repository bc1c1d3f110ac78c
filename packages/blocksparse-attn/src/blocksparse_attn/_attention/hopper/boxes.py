"""Tiles of keys in shared memory, as the tensor cores read them and as copies fill them.

A tile is stored in panels of 64 columns. A copy fills a box: one block's rows of one panel.
"""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon.language._core import builtin

from ..._linked.hopper.compat import gl, gluon


@builtin
def reinterpret(
    x: Any, shape: Any, layout: Any, _semantic: Any = None
) -> gl.shared_memory_descriptor:
    """View shared memory in another shape; Triton 3.8 changed the method of this name."""
    sizes = [getattr(size, "value", size) for size in shape]
    return _semantic.memdesc_reinterpret(x, x.dtype, sizes, getattr(layout, "value", layout))


@gluon.jit
def rows_for(tile, W: gl.constexpr, ROWS: gl.constexpr):
    """Return warpgroup ``W``'s rows of a tile that has more than ``ROWS`` rows, else the tile."""
    if tile.shape[0] > ROWS:
        tile = tile.slice(W * ROWS, ROWS, 0)
    return tile


@gluon.jit
def boxes_of(tiles, desc, BLOCK_K: gl.constexpr):
    """Return the boxes of tiles, in the order of tiles, panels, blocks."""
    COUNT: gl.constexpr = tiles.shape[0] * (tiles.shape[2] // 64) * (tiles.shape[1] // BLOCK_K)
    return reinterpret(tiles, [COUNT, 1, 1, 1, BLOCK_K, 64], desc.layout)
