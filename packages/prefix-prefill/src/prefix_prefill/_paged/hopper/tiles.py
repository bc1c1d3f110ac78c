"""Which tiles of keys a tile of queries visits, in which order, and which keys they hold.

No tile holds both cached and new keys. The tiles of new keys follow the last tile of cached keys,
which may end in a *gap*. Positions do not count the gap.
"""

from ..._linked.hopper.compat import gl, gluon
from ..._linked.hopper.pipeline import key_tiles
from .structures import KeyTiles, Seen


@gluon.jit
def _tiles_with_new(first_row, len_q, len_k, scores, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Return the ``KeyTiles`` of a sequence with new keys."""
    BLOCK_M: gl.constexpr = TILE.WARPGROUPS * (TILE.ROWS // TILE.PACK)
    diagonal = len_k - len_q
    context = gl.maximum(diagonal, 0)
    new = gl.cdiv(context, TILE.BLOCK_N)
    gap = new * TILE.BLOCK_N - context
    # count the gap as keys; the last key that a row sees is always after the gap
    low, left, right, high = key_tiles(
        first_row,
        len_q,
        len_k + gap,
        scores.window_left,
        scores.window_right,
        False,
        OPTIONS.HAS_RIGHT,
        BLOCK_M,
        TILE.BLOCK_N,
    )
    shift = 0
    if OPTIONS.HAS_LEFT:
        last_row = gl.minimum(first_row + BLOCK_M, len_q) - 1
        first = gl.maximum(first_row + diagonal - scores.window_left, 0)
        whole = gl.maximum(last_row + diagonal - scores.window_left, 0)
        if TILE.WARPS == 1:
            # a copy can leave out keys at one end of a piece only
            is_both = (first < context) & (first // TILE.PIECE == (context - 1) // TILE.PIECE)
            shift = gl.where(is_both, first % TILE.PIECE, 0)
        first += gl.where(first < context, 0, gap)
        whole += gl.where(whole < context, 0, gap)
        low = gl.minimum(first // TILE.BLOCK_N, high - 1)
        right = gl.maximum(right, low)
        left = gl.maximum(gl.minimum(gl.cdiv(whole, TILE.BLOCK_N), right), low)
    cached = gl.maximum(new - low, 0)
    return KeyTiles(low, left, right, high, context, new, cached, shift)


@gluon.jit
def tiles_of(first_row, len_q, len_k, scores, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Return the ``KeyTiles`` of a tile of queries.

    It takes numbers, not structures: ``Announced`` and ``Work`` have fields of the same types in
    another order, and Triton confuses them if the callers have the same number of warps.
    """
    if OPTIONS.HAS_NEW:
        tiles = _tiles_with_new(first_row, len_q, len_k, scores, OPTIONS, TILE)
    else:
        low, left, right, high = key_tiles(
            first_row,
            len_q,
            len_k,
            scores.window_left,
            scores.window_right,
            OPTIONS.HAS_LEFT,
            OPTIONS.HAS_RIGHT,
            TILE.WARPGROUPS * (TILE.ROWS // TILE.PACK),
            TILE.BLOCK_N,
        )
        tiles = KeyTiles(low, left, right, high, len_k, high, 0, 0)
    return tiles


@gluon.jit
def tile_of(step, tiles, OPTIONS: gl.constexpr):
    """Return the tile of a step: cached keys from the last tile to the first, then new keys so.

    If there are new keys, some row sees one of them.
    """
    tile = tiles.high - 1 - step
    if OPTIONS.HAS_NEW:
        tile = gl.where(step < tiles.cached, tiles.new - 1 - step, tile + tiles.cached)
    return tile


@gluon.jit
def keys_of(tile, tiles, len_k, OPTIONS: gl.constexpr, N: gl.constexpr):
    """Return the position of a tile's first key, and the end of its (cached or new) keys."""
    first, last = tile * N, len_k
    if OPTIONS.HAS_NEW:
        first += gl.where(tile < tiles.new, tiles.shift, tiles.context - tiles.new * N)
        last = gl.where(tile < tiles.new, tiles.context, len_k)
    return first, last


@gluon.jit
def seen_of(head, first, len_k, tiles, OPTIONS: gl.constexpr):
    """Return the cached and the new keys that some row of a tile of queries sees.

    ``first`` is the first key inside a window. New keys count from the first new one.
    """
    last = len_k
    if OPTIONS.HAS_NEW:
        last = tiles.context
    return Seen(head, first, last), Seen(head, first - last, len_k - last)
