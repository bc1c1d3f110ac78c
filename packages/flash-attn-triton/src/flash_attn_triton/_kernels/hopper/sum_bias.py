"""The gradient of a bias after the Hopper backward, which keeps the gradients of all scores."""

from __future__ import annotations

import triton
import triton.language as tl

from .parameters import BiasSumNumbers


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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``dbias = keep_scale * sum(ds)`` over the sequences and heads that share a bias.

    A program sums a tile in a fixed order and writes it transposed. ``ds`` has tiles of keys by
    queries: ``[batch, heads_q, tiles_k, tiles_q, BLOCK_N, BLOCK_M]``. It begins with the first
    query that sees a key. Tiles without a visible score are unset. No window ends on the left:
    beside one, other kernels serve a bias.
    """
    pid = tl.program_id(0)
    tile_q = pid % tiles_q
    tile_k = pid // tiles_q % tiles_k
    plane = pid // tiles_q // tiles_k
    ahead_q = 0
    if HAS_RIGHT:
        ahead_q = tl.minimum(tl.maximum(tokens_q - tokens_k - window_right, 0), tokens_q)
    rows = ahead_q + tile_q * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    keys = tile_k * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    inside = (keys < tokens_k)[:, None] & (rows < tokens_q)[None, :]  # [BLOCK_N, BLOCK_M]
    visible = inside
    if HAS_RIGHT:
        visible &= keys[:, None] <= (rows + (tokens_k - tokens_q) + window_right)[None, :]
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
    # 64 bits: an offset may pass 2**31
    tile = (first.to(tl.int64) * tiles_k + tile_k) * tiles_q + tile_q
    place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    ds_ptr += tile * (BLOCK_N * BLOCK_M)
    pitch = step * tiles_k.to(tl.int64) * tiles_q * (BLOCK_N * BLOCK_M)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # [BLOCK_N, BLOCK_M]
    for _ in range(count):
        total += tl.load(ds_ptr + place, mask=visible, other=0.0).to(tl.float32)
        ds_ptr += pitch
    total = tl.trans(total * keep_scale).to(dbias_ptr.dtype.element_ty)  # [BLOCK_M, BLOCK_N]
    row_at = plane.to(tl.int64) * tokens_q + rows
    pointers = dbias_ptr + (row_at * tokens_k)[:, None] + keys[None, :]
    tl.store(pointers, total, mask=tl.trans(inside))
