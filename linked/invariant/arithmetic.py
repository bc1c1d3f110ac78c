"""The arithmetic of a row, which decides its bits; docs/numerics.md has the equations.

``plans.py`` turns fusion of multiplications and additions off, so that all compilations round
alike; fused ones are explicit ``fma`` calls.
"""

import triton
import triton.language as tl

from ..portable.primitives import LN2, LOG2E, NEG_INF, is_sanitized, tanh
from .structures import Softmax


@triton.jit
def _dot(a, b, TILE: tl.constexpr):
    """Matrix product with fp32 accumulation."""
    if TILE.UPCAST:
        # NumPy's products round depending on a row's position: these sums run in the order of k
        c = tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    else:
        c = tl.dot(a, b, input_precision=TILE.PRECISION)
    return c


@triton.jit
def _dot_add(acc, a, b, TILE: tl.constexpr):
    """Return ``acc + a @ b``, with ``a`` rounded to ``b``'s dtype as the tensor cores need it."""
    if TILE.UPCAST:
        c = acc + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    else:
        c = tl.dot(a.to(b.dtype), b, acc, input_precision=TILE.PRECISION)
    return c


@triton.jit
def _pivot_of(m):
    """Return finite pivots of maxima: -inf - -inf is NaN (not in FpSan, which has no infinity)."""
    if not is_sanitized():
        m = tl.where(m == NEG_INF, 0.0, m)
    return m


@triton.jit
def fold_keys(softmax, q, k, v, visible, scores, OPTIONS: tl.constexpr, TILE: tl.constexpr):
    """Fold a tile of keys into the sums of its rows.

    ``q`` is ``[BLOCK_M, BLOCK_D]``, ``k`` ``[BLOCK_N, BLOCK_D]``, ``v`` ``[BLOCK_N, BLOCK_DV]``.
    ``visible`` is None if every row sees every key. A row that sees no key of the tile keeps its
    sums bit by bit, so it does not matter whether such a tile is visited.
    """
    s = _dot(q, tl.trans(k), TILE)  # [BLOCK_M, BLOCK_N]
    if OPTIONS.HAS_SOFTCAP:
        s = tanh(s * (scores.scale / scores.softcap)) * (scores.softcap * LOG2E)
    elif not OPTIONS.FOLD:
        s = s * (scores.scale * LOG2E)
    if visible is not None:
        s = tl.where(visible, s, NEG_INF)
    largest = tl.max(s, 1)  # [BLOCK_M]
    if OPTIONS.FOLD:
        # the scale is part of the exponential's fma; it is positive, so it commutes with max
        factor = scores.scale * LOG2E
        m_new = tl.maximum(softmax.m_i, largest * factor)
    else:
        m_new = tl.maximum(softmax.m_i, largest)
    pivot = _pivot_of(m_new)  # [BLOCK_M]
    if OPTIONS.FOLD:
        wide_factor = tl.zeros(s.shape, tl.float32) + factor
        p = tl.exp2(tl.fma(s, wide_factor, tl.broadcast_to(-pivot[:, None], s.shape)))
    else:
        p = tl.exp2(s - pivot[:, None])
    alpha = tl.exp2(softmax.m_i - pivot)  # [BLOCK_M]
    l_i = tl.fma(softmax.l_i, alpha, tl.sum(p, 1))
    acc = _dot_add(softmax.acc * alpha[:, None], p, v, TILE)  # [BLOCK_M, BLOCK_DV]
    if visible is not None:
        sees = largest != NEG_INF
        acc = tl.where(sees[:, None], acc, softmax.acc)
        l_i = tl.where(sees, l_i, softmax.l_i)
        m_new = tl.where(sees, m_new, softmax.m_i)
    return Softmax(acc, l_i, m_new)


@triton.jit
def no_keys(ROWS: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Return the sums of no key."""
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    return Softmax(acc, tl.zeros([ROWS], tl.float32), tl.full([ROWS], NEG_INF, tl.float32))


@triton.jit
def sink_alone(sinks_ptr, head, counts, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Return the sums of rows before the first segment: the sink, if given, which has no value."""
    total = no_keys(ROWS, BLOCK_DV)
    if sinks_ptr is not None:
        m_i = tl.load(sinks_ptr + head, mask=counts, other=NEG_INF).to(tl.float32) * LOG2E
        total = Softmax(total.acc, tl.where(m_i == NEG_INF, 0.0, 1.0), m_i)
    return total


@triton.jit
def merge_segment(total, part):
    """Merge the sums of the next segment into those of the segments before it."""
    m_new = tl.maximum(total.m_i, part.m_i)
    pivot = _pivot_of(m_new)
    a = tl.exp2(total.m_i - pivot)  # [rows]
    b = tl.exp2(part.m_i - pivot)
    l_i = tl.fma(total.l_i, a, part.l_i * b)
    acc = tl.fma(total.acc, tl.broadcast_to(a[:, None], total.acc.shape), part.acc * b[:, None])
    return Softmax(acc, l_i, m_new)


@triton.jit
def finish(total):
    """Return the outputs and the log-sum-exps of rows: 0 and -inf of fully masked ones."""
    l_safe = tl.where(total.l_i == 0.0, 1.0, total.l_i)
    out = total.acc * (1.0 / l_safe)[:, None] + 0.0  # turns -0.0 into 0.0
    lse = tl.where(total.l_i == 0.0, NEG_INF, (total.m_i + tl.log2(l_safe)) * LN2)
    return out, lse
