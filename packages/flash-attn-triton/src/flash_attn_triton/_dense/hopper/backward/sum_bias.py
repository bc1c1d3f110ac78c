"""Sum the gradient of a bias from the gradients of all scores that the Hopper backward stored."""

from __future__ import annotations

import triton
import triton.language as tl

from ..parameters import BiasSumNumbers


@triton.jit(do_not_specialize=BiasSumNumbers._fields)
def sum_bias_kernel(
    ds_ptr,
    dbias_ptr,
    keep_scale,
    window_right,
    batch,
    heads_q,
    tokens_q,
    tokens_k,
    tiles_q,
    tiles_k,
    HAS_RIGHT: tl.constexpr,
    BIAS_BATCH: tl.constexpr,
    BIAS_HEADS: tl.constexpr,
    ACCESS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``dbias = keep_scale * sum(ds)`` over the sequences and heads that share a bias.

    A program sums a tile in a fixed order. ``ds`` is ``[batch, heads_q, tokens_q, columns]``;
    columns are keys, padded to whole accesses. Hidden elements may be undefined. There is no left
    window: other kernels run calls with a bias and a left window.
    """
    pid = tl.program_id(0)
    tile_q = pid % tiles_q
    tile_k = pid // tiles_q % tiles_k
    plane = pid // tiles_q // tiles_k
    rows = tile_q * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    keys = tile_k * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    inside = (rows < tokens_q)[:, None] & (keys < tokens_k)[None, :]  # [BLOCK_M, BLOCK_N]
    visible = inside
    if HAS_RIGHT:
        visible &= keys[None, :] <= (rows + (tokens_k - tokens_q) + window_right)[:, None]
    first = plane
    count = 1
    step = 1
    if BIAS_BATCH and not BIAS_HEADS:
        first = plane * heads_q
        count = heads_q
    elif BIAS_HEADS and not BIAS_BATCH:
        count = batch
        step = heads_q
    elif not BIAS_BATCH:
        count = batch * heads_q
    # 64 bits: an offset may exceed 2**31
    columns = tl.cdiv(tokens_k, ACCESS).to(tl.int64) * ACCESS
    ds_ptr += first * tokens_q * columns
    place = rows[:, None] * columns + keys[None, :]  # [BLOCK_M, BLOCK_N]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # [BLOCK_M, BLOCK_N]
    for _ in range(count):
        total += tl.load(ds_ptr + place, mask=visible, other=0.0).to(tl.float32)
        ds_ptr += step * tokens_q * columns
    row_at = plane.to(tl.int64) * tokens_q + rows
    pointers = dbias_ptr + (row_at * tokens_k)[:, None] + keys[None, :]
    tl.store(pointers, (total * keep_scale).to(dbias_ptr.dtype.element_ty), mask=inside)
