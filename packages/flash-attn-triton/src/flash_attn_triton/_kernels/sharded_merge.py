"""Merging results over the keys of another rank into those that a rank has; see ``_sharded.py``."""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import NEG_INF
from .structures import MergeNumbers


@triton.jit(do_not_specialize=MergeNumbers._fields)
def merge_kernel(
    out_ptr, lse_ptr, part_out_ptr, part_lse_ptr,
    rows, heads, blocks,
    stride_ob, stride_os, stride_oh, stride_lb, stride_lh,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``lse = log(exp(lse) + exp(part_lse))``, ``out = (w out + w_part part_out) / (w + w_part)``.

    The weights are ``exp(lse)`` and ``exp(part_lse)`` over that of the larger. A block without keys
    in the part is left as it is. The part is contiguous, ``[batch, rows, heads, HEAD_DIM_V]`` and
    ``[batch, heads, rows]``. The parameters are the fields of ``MergeTensors``, ``MergeNumbers``
    and ``MergeTile``.
    """
    pid = tl.program_id(0)
    # neighbours are heads of the same rows, which lie together
    head = pid % heads
    block = pid // heads % blocks
    batch = (pid // heads // blocks).to(tl.int64)
    row = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = row < rows  # [BLOCK]
    part_lse_at = (batch * heads + head) * rows + row
    part_lse = tl.load(part_lse_ptr + part_lse_at, mask=inside, other=NEG_INF)  # [BLOCK]
    if tl.max(part_lse, 0) > NEG_INF:
        lse_at = lse_ptr + batch * stride_lb + head.to(tl.int64) * stride_lh + row
        lse = tl.load(lse_at, mask=inside, other=NEG_INF)  # [BLOCK]
        larger = tl.maximum(lse, part_lse)
        shift = tl.where(larger > NEG_INF, larger, 0.0)
        own = tl.exp(lse - shift)
        other = tl.exp(part_lse - shift)
        total = own + other
        scale = tl.where(total > 0.0, 1.0 / total, 0.0)
        cols = tl.arange(0, BLOCK_DV)
        mask = inside[:, None] & (cols < HEAD_DIM_V)[None, :]
        out_at = out_ptr + batch * stride_ob + head.to(tl.int64) * stride_oh
        out_at += row[:, None] * stride_os + cols[None, :]
        part_at = ((batch * rows + row) * heads + head)[:, None] * HEAD_DIM_V + cols[None, :]
        # [BLOCK, BLOCK_DV]
        out = tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
        part = tl.load(part_out_ptr + part_at, mask=mask, other=0.0).to(tl.float32)
        merged = (own * scale)[:, None] * out + (other * scale)[:, None] * part
        tl.store(out_at, merged.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(lse_at, shift + tl.log(total), mask=inside)
