"""Pieces that the forward and the backward kernels share: tiles, dots, logits, masks, dropout.

Scores are kept in base 2 ("logits" below are natural scores times log2(e)), because the hardware
exponential is ``exp2``.
"""

import triton
import triton.language as tl

from ._linked.primitives import LOG2E, tanh

# widest access to memory
ACCESS_BYTES = tl.constexpr(16)


@triton.jit
def load_tile(
    base, rows, stride, first, last, cols,
    WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load rows x cols of a matrix with unit column stride; rows outside [first, last) give 0.

    Every row begins at a whole access: the launcher sees to it.
    """
    # int64: rows * stride may pass 2**31 elements
    begin = tl.multiple_of(base + rows.to(tl.int64)[:, None] * stride, [ACCESS_BYTES, ACCESS_BYTES])
    pointers = begin + cols[None, :]
    if MASKED:
        mask = (rows >= first)[:, None] & (rows < last)[:, None] & (cols < WIDTH)[None, :]
        tile = tl.load(pointers, mask=mask, other=0.0)
    elif WIDTH != BLOCK_WIDTH:
        tile = tl.load(pointers, mask=(cols < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)  # whole tile inside: no mask needed
    return tile


@triton.jit
def load_tile_transposed(
    base, rows, stride, first, last, cols,
    WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load the same tile as ``load_tile``, as cols x rows."""
    begin = tl.multiple_of(base + rows.to(tl.int64)[None, :] * stride, [ACCESS_BYTES, ACCESS_BYTES])
    pointers = begin + cols[:, None]
    if MASKED:
        mask = (rows >= first)[None, :] & (rows < last)[None, :] & (cols < WIDTH)[:, None]
        tile = tl.load(pointers, mask=mask, other=0.0)
    elif WIDTH != BLOCK_WIDTH:
        tile = tl.load(pointers, mask=(cols < WIDTH)[:, None], other=0.0)
    else:
        tile = tl.load(pointers)  # whole tile inside: no mask needed
    return tile


@triton.jit
def logits_of(
    products, scale, softcap, slope, bias_base, stride_bias_m, stride_bias_n,
    rows, cols, diagonal, seqlen_q, seqlen_k,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, BIAS_BYTES: tl.constexpr,
):  # fmt: skip
    """Turn raw products into base-2 logits: scale, softcap, ALiBi, bias, in that order.

    ``rows`` and ``cols`` broadcast against ``products``, so either may run down the tile. Of a row
    of the bias, ``BIAS_BYTES`` can be read at once; they are 0 without a bias.
    """
    if HAS_SOFTCAP:
        logits = tanh(products * (scale / softcap)) * (softcap * LOG2E)
    else:
        logits = products * (scale * LOG2E)
    if HAS_ALIBI:
        distance = tl.abs(rows + diagonal - cols).to(tl.float32)
        logits -= distance * (slope * LOG2E)
    if BIAS_BYTES:
        begin = bias_base + rows.to(tl.int64) * stride_bias_m
        if BIAS_BYTES == ACCESS_BYTES:
            pointers = tl.multiple_of(begin, [ACCESS_BYTES, ACCESS_BYTES]) + cols
        else:
            pointers = begin + cols.to(tl.int64) * stride_bias_n
        inside = (rows < seqlen_q) & (cols < seqlen_k)
        logits += tl.load(pointers, mask=inside, other=0.0).to(tl.float32) * LOG2E
    return logits


@triton.jit
def through_softcap(ds, products, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Take a gradient of logits back to the raw products, but for the scale."""
    if HAS_SOFTCAP:
        capped = tanh(products * (scale / softcap))
        # a key that nobody sees may hold NaN; its gradient is 0 already
        ds = tl.where(ds == 0.0, 0.0, ds * (1.0 - capped * capped))
    return ds


@triton.jit
def load_row(base, rows, seqlen_q, other, MASKED: tl.constexpr):
    """Load one number per row of a block; rows past the end give ``other``."""
    if MASKED:
        values = tl.load(base + rows, mask=rows < seqlen_q, other=other)
    else:
        values = tl.load(base + rows)  # whole block inside: no mask needed
    return values


@triton.jit
def count_keys(seqused_k_ptr, sequence, batch, seqlen_k):
    """Return how many of a sequence's keys count."""
    if seqused_k_ptr is not None:
        is_real = (sequence >= 0) & (sequence < batch)
        seqlen_k = tl.load(seqused_k_ptr + sequence, mask=is_real, other=0)
    return seqlen_k


@triton.jit
def is_visible(
    rows, cols, diagonal, seqlen_k, window_left, window_right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Mask of the keys that each query sees; windows hang on the last key of the last query."""
    visible = (cols < seqlen_k) & (rows >= 0)
    if HAS_RIGHT:
        visible &= cols <= rows + diagonal + window_right
    if HAS_LEFT:
        visible &= cols >= rows + diagonal - window_left
    return visible


@triton.jit
def key_range(
    first_row, last_row, diagonal, seqlen_k, window_left, window_right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return what the queries ``first_row..last_row`` see of the keys.

    ``(first, last, start, full_start, full_end)``: the keys ``[first, last)`` are seen by some row;
    tiles from ``start`` up to ``full_start`` and from ``full_end`` to ``last`` need a mask, those
    between are seen by every row. ``step_start`` walks them.
    """
    first = 0
    last = seqlen_k
    full_first = 0
    full_last = seqlen_k
    if HAS_LEFT:
        first = tl.maximum(first, first_row + diagonal - window_left)
        full_first = tl.maximum(full_first, last_row + diagonal - window_left)
    if HAS_RIGHT:
        last = tl.maximum(tl.minimum(last, last_row + diagonal + window_right + 1), 0)
        full_last = tl.maximum(tl.minimum(full_last, first_row + diagonal + window_right + 1), 0)
    start = first // BLOCK_N * BLOCK_N
    full_end = full_last // BLOCK_N * BLOCK_N
    full_start = tl.cdiv(tl.minimum(full_first, last), BLOCK_N) * BLOCK_N
    full_start = tl.maximum(full_start, start)
    full_end = tl.maximum(full_end, full_start)
    return first, last, start, full_start, full_end


@triton.jit
def query_range(
    first_key, last_key, diagonal, seqlen_q, seqlen_k, window_left, window_right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return which queries see the keys ``first_key..last_key``: the mirror of ``key_range``.

    ``(last, start, full_start, full_end)``; a key tile that hangs over the end has no full part.
    """
    first = 0
    last = seqlen_q
    full_first = 0
    full_last = seqlen_q
    if HAS_RIGHT:
        first = tl.maximum(first, first_key - diagonal - window_right)
        full_first = tl.maximum(full_first, last_key - diagonal - window_right)
    if HAS_LEFT:
        last = tl.maximum(tl.minimum(last, last_key - diagonal + window_left + 1), 0)
        full_last = tl.maximum(tl.minimum(full_last, first_key - diagonal + window_left + 1), 0)
    if last_key >= seqlen_k:
        full_last = 0
    start = first // BLOCK_M * BLOCK_M
    full_end = full_last // BLOCK_M * BLOCK_M
    full_start = tl.cdiv(tl.minimum(full_first, last), BLOCK_M) * BLOCK_M
    full_start = tl.maximum(full_start, start)
    full_end = tl.maximum(full_end, full_start)
    return last, start, full_start, full_end


@triton.jit
def is_kept(rng_state_ptr, batch_head, rows, cols, dropout_threshold):
    """Draw the dropout mask of a tile; it depends on seed, offset and position alone."""
    seed = tl.load(rng_state_ptr)
    offset = tl.load(rng_state_ptr + 1)
    zeros = rows * 0 + cols * 0
    word, _, _, _ = tl.philox(
        seed, zeros + cols, zeros + rows, zeros + batch_head, zeros + offset.to(tl.int32)
    )
    return word.to(tl.int64) >= dropout_threshold


@triton.jit
def score_gradient(
    products, dp, lse2, delta, scale, softcap, slope, bias_base, stride_bias_m, stride_bias_n,
    rows, cols, diagonal, seqlen_q, seqlen_k, window_left, window_right,
    rng_state_ptr, batch_head, dropout_threshold, keep_scale,
    MASKED: tl.constexpr, BIAS_BYTES: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Return ``(p, ds)``: probabilities after dropout, and d(loss)/d(logit).

    Works on tiles of either orientation: ``rows``, ``cols``, ``lse2`` (the LSE in base 2) and
    ``delta`` broadcast.
    """
    logits = logits_of(
        products, scale, softcap, slope, bias_base, stride_bias_m, stride_bias_n,
        rows, cols, diagonal, seqlen_q, seqlen_k, HAS_SOFTCAP, HAS_ALIBI, BIAS_BYTES,
    )  # fmt: skip
    p = tl.exp2(logits - lse2)
    if MASKED:
        visible = is_visible(
            rows, cols, diagonal, seqlen_k, window_left, window_right, HAS_LEFT, HAS_RIGHT
        )
        p = tl.where(visible, p, 0.0)
        # a key that nobody sees may hold NaN
        dp = tl.where(visible, dp, 0.0)
    p_kept = p
    if HAS_DROPOUT:
        kept = is_kept(rng_state_ptr, batch_head, rows, cols, dropout_threshold)
        p_kept = tl.where(kept, p * keep_scale, 0.0)
        dp = tl.where(kept, dp * keep_scale, 0.0)
    return p_kept, p * (dp - delta)
