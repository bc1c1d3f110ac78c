"""Stores: outputs and log-sum-exps, partial results of splits, padding."""

import triton
import triton.language as tl

from ..._linked.portable.primitives import LN2, NEG_INF
from .primitives import offsets_of


@triton.jit
def scaled_out(out, out_scale_ptr, OUT_MAX: tl.constexpr):
    """Divide outputs by their scale and saturate FP8; the caller casts them."""
    if out_scale_ptr is not None:
        out /= tl.load(out_scale_ptr)
    if OUT_MAX > 0:
        out = tl.clamp(out, -OUT_MAX, OUT_MAX, propagate_nan=tl.PropagateNan.ALL)
    return out


@triton.jit
def _row_pointers(base, rows, cols, BYTES: tl.constexpr):
    """Return pointers to rows, each of which begins on a multiple of ``BYTES``."""
    return tl.multiple_of(base + rows[:, None], [BYTES, BYTES]) + cols[None, :]


@triton.jit
def store_part(out, lse2, rows, at, tensors, OPTIONS: tl.constexpr, TILE: tl.constexpr):
    """Store the result of a split in fp32 from row ``at`` on, for ``split_merge_kernel``."""
    cols = rows.cols_v
    at += tl.arange(0, out.shape[0])  # [BLOCK_M]
    tl.store(tensors.part_lse_ptr + at, lse2, mask=rows.is_inside)
    # [BLOCK_M, BLOCK_DV]
    where = _row_pointers(tensors.part_out_ptr, at * TILE.HEAD_DIM_V, cols, OPTIONS.PART_BYTES)
    tl.store(where, out, mask=rows.is_inside[:, None] & (cols < TILE.HEAD_DIM_V)[None, :])


@triton.jit
def store_out(out, lse2, rows, problem, OPTIONS: tl.constexpr, TILE: tl.constexpr):
    """Store rows of the output in its dtype, and their log-sum-exps."""
    tensors, cols = problem.tensors, rows.cols_v
    out = scaled_out(out, tensors.out_scale_ptr, OPTIONS.OUT_MAX)
    if tensors.lse_ptr is not None:
        at = tensors.lse_ptr + rows.head * problem.numbers.tokens + rows.token_64
        tl.store(at, lse2 * LN2, mask=rows.is_inside)
    out_rows = offsets_of(rows, problem.numbers.out)
    # [BLOCK_M, BLOCK_DV]
    where = _row_pointers(tensors.out_ptr, out_rows, cols, OPTIONS.OUT_BYTES)
    out_mask = rows.is_inside[:, None] & (cols < TILE.HEAD_DIM_V)[None, :]
    tl.store(where, out.to(tensors.out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit
def fill_padding(block, head_k, problem, SCHEDULE: tl.constexpr, TILE: tl.constexpr):
    """Write out 0 and lse -inf for the tokens of a block that belong to no sequence."""
    tensors, numbers = problem.tensors, problem.numbers
    begin = tl.load(tensors.cu_seqlens_q_ptr)
    end = tl.load(tensors.cu_seqlens_q_ptr + numbers.batch)
    cols = tl.arange(0, TILE.BLOCK_DV)  # [BLOCK_DV]
    for first in range(0, TILE.FILL_TOKENS * SCHEDULE.GROUP, SCHEDULE.BLOCK_M):
        row = first + tl.arange(0, SCHEDULE.BLOCK_M)  # [BLOCK_M]
        token = block * TILE.FILL_TOKENS + row // SCHEDULE.GROUP
        head = (head_k * SCHEDULE.GROUP + row % SCHEDULE.GROUP).to(tl.int64)
        is_padding = ((token < begin) | (token >= end)) & (token < numbers.tokens)
        is_padding &= row < TILE.FILL_TOKENS * SCHEDULE.GROUP
        token = token.to(tl.int64)
        out_rows = token * numbers.out.token + head * numbers.out.head
        where = tensors.out_ptr + out_rows[:, None] + cols[None, :]  # [BLOCK_M, BLOCK_DV]
        zeros = tl.zeros([SCHEDULE.BLOCK_M, TILE.BLOCK_DV], tl.float32)
        zeros = zeros.to(tensors.out_ptr.dtype.element_ty)
        tl.store(where, zeros, mask=is_padding[:, None] & (cols < TILE.HEAD_DIM_V)[None, :])
        if tensors.lse_ptr is not None:
            nothing = tl.full([SCHEDULE.BLOCK_M], NEG_INF, tl.float32)
            tl.store(tensors.lse_ptr + head * numbers.tokens + token, nothing, mask=is_padding)
