"""Which tiles of keys a tile of queries sees, by segment."""

from ...hopper.compat import gl, gluon
from ...hopper.pipeline import key_tiles
from .structures import KeyTiles


@gluon.jit
def tiles_of(work, scores, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Return the ``KeyTiles`` of a tile of queries."""
    low, left, right, high = key_tiles(
        work.first_row,
        work.len_q,
        work.len_k,
        scores.window_left,
        scores.window_right,
        OPTIONS.HAS_LEFT,
        OPTIONS.HAS_RIGHT,
        TILE.WARPGROUPS * (TILE.ROWS // TILE.PACK),
        TILE.BLOCK_N,
    )
    return KeyTiles(low, left, right, high)


@gluon.jit
def segments_of(tiles, part, TILE: gl.constexpr):
    """Return ``(first, last)``: the program walks the segments ``[first, last)``."""
    first = tiles.low // TILE.SEGMENT
    last = gl.cdiv(tiles.high, TILE.SEGMENT)
    first = gl.where(part >= 0, gl.maximum(first, part), first)
    last = gl.where(part >= 0, gl.minimum(last, part + 1), last)
    return first, last


@gluon.jit
def within(tiles, segment, TILE: gl.constexpr):
    """Return the ``KeyTiles`` of a segment; its last tile counts as masked."""
    low = gl.maximum(tiles.low, segment * TILE.SEGMENT)
    high = gl.minimum(tiles.high, (segment + 1) * TILE.SEGMENT)
    right = gl.maximum(gl.minimum(tiles.right, high - 1), low)
    left = gl.maximum(gl.minimum(tiles.left, right), low)
    return KeyTiles(low, left, right, high)
