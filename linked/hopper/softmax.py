"""Logits, masks, and the start and end of the online softmax, on a warpgroup's accumulators."""

from .compat import gl, gluon, is_sanitized
from .pipeline import LN2, LOG2E, NEG_INF, opaque
from .ptx import hide_unless


@gluon.jit
def tanh(x):
    """Hyperbolic tangent, to fp32 accuracy and without overflow."""
    # 1 - exp cancels near 0, where the Taylor polynomial takes over
    square = x * x
    poly = 62.0 / 2835.0 + square * (-1382.0 / 155925.0)
    poly = 2.0 / 15.0 + square * (-17.0 / 315.0 + square * poly)
    near = x + x * square * (-1.0 / 3.0 + square * poly)
    decay = gl.exp2(gl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - decay) / (1.0 + decay)
    far = gl.where(x < 0, -far, far)
    return gl.where(gl.abs(x) < 0.35, near, far)


@gluon.jit
def logits_of(
    s, rows, first, scale, softcap, slope, HAS_SOFTCAP: gl.constexpr, HAS_ALIBI: gl.constexpr
):
    """Turn products into base-2 logits with softcap or ALiBi; columns count from ``first``."""
    if HAS_SOFTCAP:
        s = tanh(s * (scale / softcap)) * (softcap * LOG2E)
    elif HAS_ALIBI:
        s = s * (scale * LOG2E)
    if HAS_ALIBI:
        # an integer distance would take longer than the exponential, so it is the difference of two
        # fp32 numbers relative to the tile's first key; opaque, or those of all tiles would be kept
        slope *= LOG2E
        cols = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)) + (opaque(first) - first)
        far = (rows - first)[:, None].to(gl.float32) * slope  # [ROWS, 1]
        s -= gl.abs(far - cols[None, :].to(gl.float32) * slope)
    return s


@gluon.jit
def hide(
    s,
    rows,
    cols,
    len_k,
    window_left,
    window_right,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """Hide the keys that a row does not see; rows and keys count on one axis."""
    if HAS_LEFT:
        # two limits per row in ``hide_unless`` would take more registers
        if HAS_RIGHT:
            visible = cols[None, :] <= gl.minimum(rows + window_right, len_k - 1)[:, None]
        else:
            visible = (cols < len_k)[None, :]
        visible &= cols[None, :] >= (rows - window_left)[:, None]
        return gl.where(visible, s, NEG_INF)
    limit = gl.full(rows.shape, len_k - 1, gl.int32, rows.type.layout)  # [ROWS]
    if HAS_RIGHT:
        limit = gl.minimum(rows + window_right, limit)
    return hide_unless(s, cols[None, :], limit[:, None])  # [ROWS, BLOCK_N]


@gluon.jit
def row_sums(e):
    """Sum each row within a thread: ``[ROWS, BLOCK_N]`` to ``[ROWS, 4]``."""
    ROWS: gl.constexpr = e.shape[0]
    PARTS: gl.constexpr = e.shape[1] // 8
    return gl.sum(gl.sum(gl.reshape(e, [ROWS, PARTS, 4, 2]), 1), 2)


@gluon.jit
def pivot_of(m):
    """Return finite pivots of maxima: -inf - -inf is NaN (not in FpSan, which has no infinity)."""
    if not is_sanitized():
        m = gl.where(m == NEG_INF, 0.0, m)
    return m


@gluon.jit
def start_softmax(s, factor, FLOOR: gl.constexpr):
    """Return maxima, partial sums and exponentials of the first tile of keys.

    A row whose base-2 maximum is at most ``FLOOR`` sees no key of the tile.
    """
    m = gl.max(s, 1) * factor
    # a row that has seen no key yet needs a finite pivot: -inf - -inf is NaN
    e = gl.exp2(s * factor - gl.where(m <= FLOOR, 0.0, m)[:, None])
    return m, row_sums(e), e


@gluon.jit
def finish_softmax(m, l, head, is_padding, sinks_ptr):
    """Return the first three results of ``close_softmax``, with a sink per head if given."""
    sink = None
    if sinks_ptr is not None:
        sink = gl.load(sinks_ptr + head).to(gl.float32) * LOG2E
        sink = gl.where(is_padding, NEG_INF, sink)
    weight, empty, lse, _ = close_softmax(m, l, sink)
    return weight, empty, lse


@gluon.jit
def close_softmax(m, l, sink):
    """Return ``[ROWS]`` each: output factor, whether the row is fully masked, LSE, sink weight.

    ``sink`` is None or the base-2 logit of a sink, a key without a value.
    """
    sums = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    shrink = 1.0
    of_sink = 0.0
    if sink is not None:
        top = gl.maximum(m, sink)
        pivot = pivot_of(top)
        shrink = gl.exp2(m - pivot)
        of_sink = gl.exp2(sink - pivot)
        sums = sums * shrink + of_sink
        m = top
    # fully masked rows: output 0, lse -inf
    empty = sums == 0.0
    safe = gl.where(empty, 1.0, sums)
    lse = gl.where(empty, NEG_INF, (m + gl.log2(safe)) * LN2)
    # divide both by the sum: an exponential of a large LSE would multiply them by its rounding
    return shrink / safe, empty, lse, of_sink / safe
