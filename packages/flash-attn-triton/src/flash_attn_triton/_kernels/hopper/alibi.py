"""ALiBi in the walk over keys: ``-slope * |row - key|`` at the price of one addition a logit.

A tile of keys that lies on one side of all rows needs no absolute value. There the term is the sum
of one of the key, ``side * slope * (key - first)``, and one of the row, its ``level``: the first is
added to the logits, the second to the row's maximum. ``side`` is 1 behind the rows and -1 ahead of
them, and ``first`` is the tile's first key: what is large is also far, and weighs nothing.
"""

from ._linked.compat import gl, gluon
from ._linked.pipeline import LOG2E, opaque
from ._linked.ptx import either
from ._linked.softmax import logits_of, row_sums

# kinds of tiles of keys: all rows see all keys, which with ALiBi lie behind the rows; likewise,
# ahead of them; any others
WHOLE = gl.constexpr(0)
AHEAD = gl.constexpr(1)
CUT = gl.constexpr(2)


@gluon.jit
def sides(first_row, left, right, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return ``(behind, ahead)``: tiles ``[left, behind)`` and ``[ahead, right)`` have one side."""
    behind = gl.maximum(first_row + 1, 0) // BLOCK_N
    ahead = gl.cdiv(gl.maximum(first_row + ROWS - 1, 0), BLOCK_N)
    behind = gl.minimum(gl.maximum(behind, left), right)
    return behind, gl.minimum(gl.maximum(ahead, behind), right)


@gluon.jit
def side_slope(walk, KIND: gl.constexpr):
    """Return ``side * slope`` in base 2: a number, or ``[ROWS, 1]``."""
    return walk.slope * (-LOG2E if KIND == AHEAD else LOG2E)


@gluon.jit
def _terms(s, zero, slope, IS_PACKED: gl.constexpr):
    """Return ``slope * column``, to be added to ``s``: ``[1 or ROWS, BLOCK_N]``.

    A thread holds the same two columns of every eight. The eights are numbers that the compiler
    knows, the two are converted once, and ``zero`` is not known to be the same for every tile, or
    all terms would be kept. Rows of several heads round as those of one do.
    """
    S: gl.constexpr = s.type.layout
    ROWS: gl.constexpr = s.shape[0]
    EIGHTS: gl.constexpr = s.shape[1] // 8
    cube = gl.reshape(s, [ROWS, EIGHTS, 8])
    FLAT: gl.constexpr = gl.SliceLayout(0, cube.type.layout)  # [EIGHTS, 8]
    eights = gl.arange(0, EIGHTS, gl.SliceLayout(1, FLAT)).to(gl.float32) * 8.0
    ones = (zero + gl.arange(0, 8, gl.SliceLayout(0, FLAT))).to(gl.float32)
    if IS_PACKED:
        ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, cube.type.layout))
        by_row = gl.convert_layout(gl.sum(slope, 1), ROW)[:, None][:, :, None]  # [ROWS, 1, 1]
        terms = gl.fma(eights[:, None][None, :, :], by_row, ones[None, :][None, :, :] * by_row)
        terms = gl.convert_layout(gl.reshape(terms, [ROWS, EIGHTS * 8]), S)
    else:
        terms = gl.fma(eights[:, None], slope, ones[None, :] * slope)  # [EIGHTS, 8]
        terms = gl.convert_layout(gl.reshape(terms, [EIGHTS * 8]), gl.SliceLayout(0, S))[None, :]
    return terms


@gluon.jit
def tilted(s, first, scale, walk, problem, KIND: gl.constexpr, OPTIONS: gl.constexpr):
    """Return base-2 logits of products without the rows' level, ``[ROWS, BLOCK_N]``, and the level.

    The level is ``[ROWS]``; in a tile with keys on both sides it is that of the keys behind, and
    its negative is that of those ahead. There each number is what it would be in a tile of one
    side, so that results do not depend on the rows that share the tile.
    """
    factor = scale * LOG2E
    if OPTIONS.HAS_SOFTCAP:
        s = logits_of(s, walk.rows, first, scale, problem.softcap, 0.0, True, False)
        factor = 1.0
    slope = side_slope(walk, KIND)
    level = gl.sum((first - walk.rows).to(gl.float32)[:, None] * slope, 1)
    terms = _terms(s, opaque(first) - first, slope, OPTIONS.PACK > 1)
    if KIND == CUT:
        terms = terms * _by_side(first, walk, 1.0, -1.0, s)
    return gl.fma(s, factor, terms), level


@gluon.jit
def _by_side(first, walk, behind, ahead, s):
    """Return one of two numbers, or of ``[ROWS, 1]`` numbers, for each element of ``s``."""
    S: gl.constexpr = s.type.layout
    rows = (walk.rows - first)[:, None]
    zeros = gl.zeros([s.shape[0], s.shape[1]], gl.float32, S)
    cols = gl.arange(0, s.shape[1], gl.SliceLayout(0, S))[None, :]
    return either(cols, rows, zeros + behind, zeros + ahead)


@gluon.jit
def largest(s, level, first, walk, KIND: gl.constexpr):
    """Return the maxima of the rows, ``[ROWS]``."""
    if KIND == CUT:
        level = level[:, None]
        top = gl.max(s + _by_side(first, walk, level, -level, s), 1)
    else:
        # rounding keeps the order, so the maximum may come first
        top = gl.max(s, 1) + level
    return top


@gluon.jit
def less_pivot(s, level, pivot, first, walk, KIND: gl.constexpr):
    """Return the logits, level included, less the rows' pivots: ``[ROWS, BLOCK_N]``."""
    behind = (pivot - level)[:, None]
    if KIND == CUT:
        ahead = (pivot + level)[:, None]
        s = s - _by_side(first, walk, behind, ahead, s)
    else:
        s = s - behind
    return s


@gluon.jit
def start_tilted(s, level, first, walk, FLOOR: gl.constexpr):
    """Return what ``start_softmax`` returns, of a tile of kind ``CUT``."""
    m = largest(s, level, first, walk, CUT)
    e = gl.exp2(less_pivot(s, level, gl.where(m <= FLOOR, 0.0, m), first, walk, CUT))
    return m, row_sums(e), e
