"""ALiBi in the walk over keys: ``-slope * |row - key|`` for one addition per logit.

A tile of keys that lies on one side of all rows needs no absolute value. There the distance is the
sum of two distances: from the row to its ``anchor``, which is the tile's nearest key, and from the
anchor to the key. The distance from the anchor is subtracted from the logits; the distance to the
anchor, as ``level``, from the row's maximum. Neither exceeds the whole distance: where rounding of
a large term is coarse, the key is far and weighs nothing. For a row that stands at one of the
tile's keys, that key is the anchor.
"""

from ...._linked.hopper.compat import gl, gluon
from ...._linked.hopper.pipeline import LOG2E, opaque
from ...._linked.hopper.softmax import logits_of, row_sums

# kinds of tiles of keys
WHOLE = gl.constexpr(0)  # all rows see all keys, which with ALiBi lie before the rows
AHEAD = gl.constexpr(1)  # all rows see all keys, which lie after the rows
CUT = gl.constexpr(2)  # any other

# 3 * 2**25
FAR = gl.constexpr(100663296.0)


@gluon.jit
def sides(first_row, left, right, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return ``(behind, ahead)``.

    Tiles ``[left, behind)`` lie before all rows, tiles ``[ahead, right)`` after all rows.
    """
    behind = gl.maximum(first_row + 1, 0) // BLOCK_N
    ahead = gl.cdiv(gl.maximum(first_row + ROWS - 1, 0), BLOCK_N)
    behind = gl.minimum(gl.maximum(behind, left), right)
    return behind, gl.minimum(gl.maximum(ahead, behind), right)


@gluon.jit
def _columns(s, first):
    """Return the columns of a tile, in fp32: ``eights + ones``, ``[BLOCK_N // 8]`` and ``[8]``.

    A thread holds the same two columns of every eight columns. The eights are compile-time numbers;
    the two ones are converted once per tile. ``opaque`` hides that they are equal for all tiles: a
    compiler that knew it would keep all terms in registers.
    """
    COUNT: gl.constexpr = s.shape[1]
    cube = gl.reshape(s, [s.shape[0], COUNT // 8, 8])
    FLAT: gl.constexpr = gl.SliceLayout(0, cube.type.layout)  # [COUNT // 8, 8]
    eights = gl.arange(0, COUNT // 8, gl.SliceLayout(1, FLAT)).to(gl.float32) * 8.0
    zero = opaque(first) - first
    ones = (zero + gl.arange(0, 8, gl.SliceLayout(0, FLAT))).to(gl.float32)
    return eights, ones


@gluon.jit
def _one_sided(s, first, slope, KIND: gl.constexpr, IS_PACKED: gl.constexpr):
    """Return ``slope`` times the distance from the anchor to each key: ``[1 or ROWS, BLOCK_N]``.

    The anchor is the first key if the keys lie after the rows, the last key if they lie before.
    Packed rows of several heads round as rows of one head do.
    """
    S: gl.constexpr = s.type.layout
    ROWS: gl.constexpr = s.shape[0]
    COUNT: gl.constexpr = s.shape[1]
    eights, ones = _columns(s, first)
    if KIND == WHOLE:
        eights = (COUNT - 8.0) - eights
        ones = 7.0 - ones
    if IS_PACKED:
        CUBE: gl.constexpr = gl.reshape(s, [ROWS, COUNT // 8, 8]).type.layout
        ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, CUBE))
        by_row = gl.convert_layout(gl.sum(slope, 1), ROW)[:, None][:, :, None]  # [ROWS, 1, 1]
        terms = gl.fma(eights[:, None][None, :, :], by_row, ones[None, :][None, :, :] * by_row)
        terms = gl.convert_layout(gl.reshape(terms, [ROWS, COUNT]), S)
    else:
        terms = gl.fma(eights[:, None], slope, ones[None, :] * slope)  # [COUNT // 8, 8]
        terms = gl.convert_layout(gl.reshape(terms, [COUNT]), gl.SliceLayout(0, S))[None, :]
    return terms


@gluon.jit
def _two_sided(s, first, slope, anchor):
    """Return ``slope`` times the distance from each row's anchor, a column: ``[ROWS, BLOCK_N]``.

    Each number has the same bits as in a tile on one side, so that results do not depend on which
    rows share the tile.
    """
    S: gl.constexpr = s.type.layout
    COUNT: gl.constexpr = s.shape[1]
    eights, ones = _columns(s, first)
    columns = gl.reshape(eights[:, None] + ones[None, :], [COUNT])  # [BLOCK_N]
    columns = gl.convert_layout(columns, gl.SliceLayout(0, S))[None, :]
    distance = gl.abs(columns - anchor.to(gl.float32)[:, None])  # [ROWS, BLOCK_N]
    # round down to a multiple of 8: around ``FAR`` fp32 holds every eighth integer
    eights = ((distance - 3.5) + FAR) - FAR
    return gl.fma(eights, slope, (distance - eights) * slope)


@gluon.jit
def tilted(s, first, scale, walk, program, KIND: gl.constexpr, OPTIONS: gl.constexpr):
    """Return base-2 logits without the level, ``[ROWS, BLOCK_N]``, and the level, ``[ROWS]``."""
    factor = scale * LOG2E
    if OPTIONS.HAS_SOFTCAP:
        s = logits_of(s, walk.rows, first, scale, program.numbers.softcap, 0.0, True, False)
        factor = 1.0
    slope = walk.slope * -LOG2E  # a number, or [ROWS, 1]
    rows = walk.rows - first  # [ROWS]
    if KIND == CUT:
        anchor = gl.minimum(gl.maximum(rows, 0), s.shape[1] - 1)  # [ROWS]
        terms = _two_sided(s, first, slope, anchor)
        distance = gl.abs((rows - anchor).to(gl.float32))  # [ROWS]
    else:
        terms = _one_sided(s, first, slope, KIND, OPTIONS.PACK > 1)
        distance = (-rows if KIND == AHEAD else rows - (s.shape[1] - 1)).to(gl.float32)
    level = gl.sum(distance[:, None] * slope, 1)
    return gl.fma(s, factor, terms), level


@gluon.jit
def largest(s, level):
    """Return the maxima of the rows, ``[ROWS]``, level included: rounding keeps the order."""
    return gl.max(s, 1) + level


@gluon.jit
def less_pivot(s, level, pivot):
    """Return the logits, level included, minus the rows' pivots: ``[ROWS, BLOCK_N]``."""
    return s - (pivot - level)[:, None]


@gluon.jit
def start_tilted(s, level, FLOOR: gl.constexpr):
    """Do what ``start_softmax`` does, for a tile of kind ``CUT``."""
    m = largest(s, level)
    e = gl.exp2(less_pivot(s, level, gl.where(m <= FLOOR, 0.0, m)))
    return m, row_sums(e), e
