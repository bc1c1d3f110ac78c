"""Merge results over the keys of several ranks in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import entry
from ..._linked.portable.primitives import NEG_INF
from .arguments import MergeNumbers, MergeTensors, MergeTile


@entry(triton.jit)
def merge_kernel(tensors: MergeTensors, numbers: MergeNumbers, TILE: MergeTile):
    """``lse = log(sum(exp(lse_p)))`` and ``out = sum(exp(lse_p - lse) * out_p)`` over pieces p.

    Without LSEs, ``out = sum(out_p)``. ``out`` is [tokens, heads, HEAD_DIM_V] and ``lse`` [heads,
    tokens]. A piece has ``batch`` groups of ``size`` tokens, which begin ``step`` tokens apart from
    ``begin`` on: [batch, size, heads, HEAD_DIM_V] and [batch, heads, size], contiguous. Tokens from
    ``first`` to ``last`` are written; ``out`` and ``lse`` may be those of a piece with all tokens
    in one group.
    """
    pid = tl.program_id(0)
    heads = numbers.heads
    # neighbouring programs: heads of the same tokens, which are adjacent in memory
    head = pid % heads
    token = (
        numbers.first + (pid // heads).to(tl.int64) * TILE.BLOCK + tl.arange(0, TILE.BLOCK)
    )  # [BLOCK]
    inside = token < numbers.last
    row0, lse_at0, seen0 = place(token, inside, head, heads, numbers.piece0)
    row1, lse_at1, seen1 = place(token, inside, head, heads, numbers.piece1)
    lse0 = load_lse(tensors.lse0_ptr, lse_at0, seen0)
    lse1 = load_lse(tensors.lse1_ptr, lse_at1, seen1)
    largest = tl.maximum(lse0, lse1)
    if tensors.out2_ptr is not None:
        row2, lse_at2, seen2 = place(token, inside, head, heads, numbers.piece2)
        lse2 = load_lse(tensors.lse2_ptr, lse_at2, seen2)
        largest = tl.maximum(largest, lse2)
    if tensors.out3_ptr is not None:
        row3, lse_at3, seen3 = place(token, inside, head, heads, numbers.piece3)
        lse3 = load_lse(tensors.lse3_ptr, lse_at3, seen3)
        largest = tl.maximum(largest, lse3)
    # 0 where no piece saw a key
    shift = tl.where(largest > NEG_INF, largest, 0.0)
    cols = tl.arange(0, TILE.BLOCK_DV)  # [BLOCK_DV]
    weight0 = tl.exp(lse0 - shift)  # [BLOCK]
    weight1 = tl.exp(lse1 - shift)
    total = weight0 + weight1
    acc = weighted(tensors.out0_ptr, row0, cols, weight0, TILE.HEAD_DIM_V)  # [BLOCK, BLOCK_DV]
    acc += weighted(tensors.out1_ptr, row1, cols, weight1, TILE.HEAD_DIM_V)
    if tensors.out2_ptr is not None:
        weight2 = tl.exp(lse2 - shift)
        total += weight2
        acc += weighted(tensors.out2_ptr, row2, cols, weight2, TILE.HEAD_DIM_V)
    if tensors.out3_ptr is not None:
        weight3 = tl.exp(lse3 - shift)
        total += weight3
        acc += weighted(tensors.out3_ptr, row3, cols, weight3, TILE.HEAD_DIM_V)
    # warps share rows: all must have read before one overwrites the first piece
    tl.debug_barrier()
    if tensors.lse_ptr is not None:
        acc = acc * tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
        # log(0) is -inf
        tl.store(
            tensors.lse_ptr + head.to(tl.int64) * numbers.tokens + token,
            shift + tl.log(total),
            mask=inside,
        )
    out_at = tensors.out_ptr + (token * heads + head)[:, None] * TILE.HEAD_DIM_V + cols[None, :]
    mask = inside[:, None] & (cols < TILE.HEAD_DIM_V)[None, :]
    tl.store(out_at, acc.to(tensors.out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def place(token, inside, head, heads, raster):
    """Return each token's row in a piece, the index of its LSE, and whether the piece has it."""
    since = tl.where(inside, token - raster.begin, -1)
    one = since // raster.step
    at = since % raster.step
    seen = (since >= 0) & (one < raster.batch) & (at < raster.size)
    row = ((one * raster.size + at) * heads + head).to(tl.int64)
    return row, (one * heads + head).to(tl.int64) * raster.size + at, seen


@triton.jit
def load_lse(lse_ptr, at, seen):
    """Load the LSE, -inf outside of the piece; without an LSE return 0, so that weights are 1."""
    if lse_ptr is not None:
        lse = tl.load(lse_ptr + at, mask=seen, other=NEG_INF)
    else:
        lse = tl.where(seen, 0.0, NEG_INF)
    return lse


@triton.jit
def weighted(out_ptr, row, cols, weight, HEAD_DIM_V: tl.constexpr):
    """Return the rows of a piece times their weight, in fp32; rows of weight 0 are not read."""
    mask = (weight > 0.0)[:, None] & (cols < HEAD_DIM_V)[None, :]
    out = tl.load(out_ptr + row[:, None] * HEAD_DIM_V + cols[None, :], mask=mask, other=0.0)
    return out.to(tl.float32) * weight[:, None]
