"""Sum the gradient of a bias from the gradients of all scores that the Hopper backward stored."""

from __future__ import annotations

import triton
import triton.language as tl

from ...._linked.launch.entries import entry
from .arguments import BiasSumNumbers, BiasSumOptions, BiasSumTensors


@entry(triton.jit)
def sum_bias_kernel(tensors: BiasSumTensors, numbers: BiasSumNumbers, OPTIONS: BiasSumOptions):
    """``dbias = keep_scale * sum(ds)`` over the sequences and heads that share a bias.

    A program sums a tile in a fixed order. ``ds`` is ``[batch, heads_q, tokens_q, columns]``;
    columns are keys, padded to whole accesses. Hidden elements may be undefined. There is no left
    window: other kernels run calls with a bias and a left window.
    """
    heads_q, tokens_q, tokens_k = numbers.heads_q, numbers.tokens_q, numbers.tokens_k
    pid = tl.program_id(0)
    tile_q = pid % numbers.tiles_q
    tile_k = pid // numbers.tiles_q % numbers.tiles_k
    plane = pid // numbers.tiles_q // numbers.tiles_k
    rows = tile_q * OPTIONS.BLOCK_M + tl.arange(0, OPTIONS.BLOCK_M)  # [BLOCK_M]
    keys = tile_k * OPTIONS.BLOCK_N + tl.arange(0, OPTIONS.BLOCK_N)  # [BLOCK_N]
    inside = (rows < tokens_q)[:, None] & (keys < tokens_k)[None, :]  # [BLOCK_M, BLOCK_N]
    visible = inside
    if OPTIONS.HAS_RIGHT:
        visible &= keys[None, :] <= (rows + (tokens_k - tokens_q) + numbers.window_right)[:, None]
    first = plane
    count = 1
    step = 1
    if OPTIONS.BIAS_BATCH and not OPTIONS.BIAS_HEADS:
        first = plane * heads_q
        count = heads_q
    elif OPTIONS.BIAS_HEADS and not OPTIONS.BIAS_BATCH:
        count = numbers.batch
        step = heads_q
    elif not OPTIONS.BIAS_BATCH:
        count = numbers.batch * heads_q
    # 64 bits: an offset may exceed 2**31
    columns = tl.cdiv(tokens_k, OPTIONS.ACCESS).to(tl.int64) * OPTIONS.ACCESS
    ds_ptr = tensors.ds_ptr + first * tokens_q * columns
    place = rows[:, None] * columns + keys[None, :]  # [BLOCK_M, BLOCK_N]
    total = tl.zeros([OPTIONS.BLOCK_M, OPTIONS.BLOCK_N], tl.float32)  # [BLOCK_M, BLOCK_N]
    for _ in range(count):
        total += tl.load(ds_ptr + place, mask=visible, other=0.0).to(tl.float32)
        ds_ptr += step * tokens_q * columns
    row_at = plane.to(tl.int64) * tokens_q + rows
    pointers = tensors.dbias_ptr + (row_at * tokens_k)[:, None] + keys[None, :]
    total = (total * numbers.keep_scale).to(tensors.dbias_ptr.dtype.element_ty)
    tl.store(pointers, total, mask=inside)
