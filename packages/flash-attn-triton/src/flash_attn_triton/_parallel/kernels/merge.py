"""Merge results over the keys of several ranks in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._dense.portable.primitives import NEG_INF
from ..._dense.portable.structures import MergeNumbers


@triton.jit(do_not_specialize=MergeNumbers._fields)
def merge_kernel(
    out_ptr,
    lse_ptr,
    out0_ptr,
    lse0_ptr,
    out1_ptr,
    lse1_ptr,
    out2_ptr,
    lse2_ptr,
    out3_ptr,
    lse3_ptr,
    first,
    last,
    tokens,
    heads,
    begin0,
    size0,
    step0,
    batch0,
    begin1,
    size1,
    step1,
    batch1,
    begin2,
    size2,
    step2,
    batch2,
    begin3,
    size3,
    step3,
    batch3,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``lse = log(sum(exp(lse_p)))`` and ``out = sum(exp(lse_p - lse) * out_p)`` over pieces p.

    Without LSEs, ``out = sum(out_p)``. ``out`` is [tokens, heads, HEAD_DIM_V] and ``lse`` [heads,
    tokens]. A piece has ``batch`` groups of ``size`` tokens, which begin ``step`` tokens apart from
    ``begin`` on: [batch, size, heads, HEAD_DIM_V] and [batch, heads, size], contiguous. Tokens from
    ``first`` to ``last`` are written; ``out`` and ``lse`` may be those of a piece with all tokens
    in one group. The parameters are the fields of ``MergeTensors``, ``MergeNumbers`` and
    ``MergeTile``.
    """
    pid = tl.program_id(0)
    # neighbouring programs: heads of the same tokens, which are adjacent in memory
    head = pid % heads
    token = first + (pid // heads).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = token < last
    row0, lse_at0, seen0 = place(token, inside, head, heads, begin0, size0, step0, batch0)
    row1, lse_at1, seen1 = place(token, inside, head, heads, begin1, size1, step1, batch1)
    lse0 = load_lse(lse0_ptr, lse_at0, seen0)
    lse1 = load_lse(lse1_ptr, lse_at1, seen1)
    largest = tl.maximum(lse0, lse1)
    if out2_ptr is not None:
        row2, lse_at2, seen2 = place(token, inside, head, heads, begin2, size2, step2, batch2)
        lse2 = load_lse(lse2_ptr, lse_at2, seen2)
        largest = tl.maximum(largest, lse2)
    if out3_ptr is not None:
        row3, lse_at3, seen3 = place(token, inside, head, heads, begin3, size3, step3, batch3)
        lse3 = load_lse(lse3_ptr, lse_at3, seen3)
        largest = tl.maximum(largest, lse3)
    # 0 where no piece saw a key
    shift = tl.where(largest > NEG_INF, largest, 0.0)
    cols = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    weight0 = tl.exp(lse0 - shift)  # [BLOCK]
    weight1 = tl.exp(lse1 - shift)
    total = weight0 + weight1
    acc = weighted(out0_ptr, row0, cols, weight0, HEAD_DIM_V)  # [BLOCK, BLOCK_DV]
    acc += weighted(out1_ptr, row1, cols, weight1, HEAD_DIM_V)
    if out2_ptr is not None:
        weight2 = tl.exp(lse2 - shift)
        total += weight2
        acc += weighted(out2_ptr, row2, cols, weight2, HEAD_DIM_V)
    if out3_ptr is not None:
        weight3 = tl.exp(lse3 - shift)
        total += weight3
        acc += weighted(out3_ptr, row3, cols, weight3, HEAD_DIM_V)
    # warps share rows: all must have read before one overwrites the first piece
    tl.debug_barrier()
    if lse_ptr is not None:
        acc = acc * tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
        # log(0) is -inf
        tl.store(lse_ptr + head.to(tl.int64) * tokens + token, shift + tl.log(total), mask=inside)
    out_at = out_ptr + (token * heads + head)[:, None] * HEAD_DIM_V + cols[None, :]
    mask = inside[:, None] & (cols < HEAD_DIM_V)[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def place(token, inside, head, heads, begin, size, step, batch):
    """Return each token's row in a piece, the index of its LSE, and whether the piece has it."""
    since = tl.where(inside, token - begin, -1)
    one = since // step
    at = since % step
    seen = (since >= 0) & (one < batch) & (at < size)
    row = ((one * size + at) * heads + head).to(tl.int64)
    return row, (one * heads + head).to(tl.int64) * size + at, seen


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
