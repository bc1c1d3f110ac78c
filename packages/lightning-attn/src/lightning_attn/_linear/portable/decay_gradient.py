"""The gradient of the decays: minus the distances between writes and reads, weighted and summed.

``d(loss)/d(decay)`` is ``-sum (i - j) a_ij``, where a_ij is the derivative of the loss through the
path from token j, which writes, to token i, which reads. A path may cross chunks, and every chunk
counts only the steps within it, so that no large terms cancel: between two of its tokens; from the
state before the chunk to a token; from a token to the state after the chunk; and from state to
state.
"""

import triton
import triton.language as tl

from ..._linked.portable.primitives import dot
from .primitives import (
    dot_add,
    factor,
    load_rows,
    load_rows_transposed,
    locate,
    rate_of,
    slot_of,
    state_offsets,
)
from .structures import DecayGradientNumbers, DecayGradientTensors, Lengths, Products


@triton.jit
def _within(q, k_t, v_t, dout, rate, index, scale, PRODUCTS: tl.constexpr):
    """Return the weighted sum of steps between two tokens of a chunk."""
    PRECISION: tl.constexpr = PRODUCTS.PRECISION
    apart = tl.maximum(index[:, None] - index[None, :], 0)  # [C, C]
    # 0 above the diagonal
    steps = apart.to(tl.float32) * factor(rate, apart) * scale
    scores = dot(q, k_t, PRECISION, PRODUCTS.UPCAST)  # [C, C]
    return tl.sum(tl.sum(steps * scores * dot(dout, v_t, PRECISION, PRODUCTS.UPCAST), 1), 0)


@triton.jit(
    do_not_specialize=DecayGradientNumbers._fields,
    do_not_specialize_on_alignment=DecayGradientTensors._fields,
)
def decay_gradient_kernel(
    read_ptr,
    key_ptr,
    value_ptr,
    dout_ptr,
    out_ptr,
    decay_ptr,
    first_ptr,
    last_ptr,
    cu_seqlens_ptr,
    scale,
    batch,
    heads,
    tokens,
    size,
    pieces,
    stride_rb,
    stride_rs,
    stride_rh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_db,
    stride_ds,
    stride_dh,
    stride_first_b,
    stride_first_s,
    stride_first_h,
    stride_first_d,
    stride_first_e,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ROW_BYTES_V: tl.constexpr,
    TERMS: tl.constexpr,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``out = sum of (i - j) exp(-s (i - j)) scale (q_i . k_j) (dout_i . v_j)`` over steps j to i.

    A program writes the sum of the steps within one chunk, for some columns of the state of one
    head.
    """
    PRODUCTS: tl.constexpr = Products(TERMS, NARROW, PRECISION, UPCAST)
    SPLITS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    pid = tl.program_id(0)
    cols = pid % SPLITS * BLOCK_E + tl.arange(0, BLOCK_E)
    head = pid // SPLITS % heads
    piece = pid // SPLITS // heads
    found = locate(cu_seqlens_ptr, piece, Lengths(batch, tokens, size, pieces), SEGMENTED=True)
    length = found.length
    if (length <= 0) | (slot_of(None, found.sequence, batch) < 0):
        return
    head_64 = head.to(tl.int64)
    sequence_64 = found.sequence.to(tl.int64)
    if cu_seqlens_ptr is not None:
        sequence_64 = tl.zeros([], tl.int64)
    origin = found.begin.to(tl.int64)
    q_base = read_ptr + sequence_64 * stride_rb + origin * stride_rs + head_64 * stride_rh
    k_base = key_ptr + sequence_64 * stride_kb + origin * stride_ks + head_64 * stride_kh
    v_base = value_ptr + sequence_64 * stride_vb + origin * stride_vs + head_64 * stride_vh
    dout_base = dout_ptr + sequence_64 * stride_db + origin * stride_ds + head_64 * stride_dh
    index = tl.arange(0, CHUNK)  # [CHUNK]
    inside = index < length
    rows_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    q = load_rows(q_base, index, stride_rs, inside, rows_d, D, ROW_BYTES)  # [C, D]
    k_t = load_rows_transposed(k_base, index, stride_ks, inside, rows_d, D, ROW_BYTES)  # [D, C]
    v_t = load_rows_transposed(v_base, index, stride_vs, inside, cols, E, ROW_BYTES_V)  # [E, C]
    dout = load_rows(dout_base, index, stride_ds, inside, cols, E, ROW_BYTES_V)  # [C, E]

    rate = rate_of(decay_ptr, head)
    total = _within(q, k_t, v_t, dout, rate, index, scale, PRODUCTS)

    # the state before the chunk and the gradient of the state after it have the same strides
    base = sequence_64 * stride_first_b + found.index.to(tl.int64) * stride_first_s
    base += head_64 * stride_first_h
    offsets = state_offsets(rows_d, cols, stride_first_d, stride_first_e)
    inside_state = (rows_d < D)[:, None] & (cols < E)[None, :]
    state = tl.load(first_ptr + base + offsets, mask=inside_state, other=0.0)  # [D, E]
    zeros = tl.zeros([CHUNK, BLOCK_E], tl.float32)  # [C, E]
    reads = dot_add(zeros, q, state, q.dtype, PRODUCTS) * dout.to(tl.float32)
    # from the state before the chunk to each token, then from each token to the state after it
    steps = (index + 1).to(tl.float32) * factor(rate, index + 1) * scale
    total += tl.sum(steps * tl.sum(reads, 1), 0)

    gradient = tl.load(last_ptr + base + offsets, mask=inside_state, other=0.0)  # [D, E]
    k = load_rows(k_base, index, stride_ks, inside, rows_d, D, ROW_BYTES)  # [C, D]
    v = load_rows(v_base, index, stride_vs, inside, cols, E, ROW_BYTES_V)  # [C, E]
    left = tl.maximum(length - 1 - index, 0)
    writes = dot_add(zeros, k, gradient, k.dtype, PRODUCTS) * v.to(tl.float32)
    steps = left.to(tl.float32) * factor(rate, left)
    total += tl.sum(steps * tl.sum(writes, 1), 0)

    through = tl.sum(tl.sum(state * gradient, 1), 0)
    total += length.to(tl.float32) * factor(rate, length) * through
    # every program of the grid has its own element
    tl.store(out_ptr + tl.program_id(0).to(tl.int64), total)
