"""First step of the backward: two numbers per row, which every tile of the row needs.

The backward recomputes the probabilities from the saved LSE. One kernel makes dk and dv by blocks
of keys, one dq by blocks of queries, and one the bias gradient, if asked for, by blocks of the
bias. The method is that of FlashAttention-2 (Dao, 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import row_numbers
from .structures import FOREIGN_ROWS, GradientStrides, RowCounts, SumCounts


@triton.jit(
    do_not_specialize=(*RowCounts._fields, *GradientStrides._fields, *SumCounts._fields),
    do_not_specialize_on_alignment=FOREIGN_ROWS,
)
def row_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    lse2_ptr,
    sums_ptr,
    tokens,
    rows,
    heads_q,
    stride_dob,
    stride_dos,
    stride_doh,
    share,
    pieces,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
):
    """``delta = sum(out * dout) - dlse`` and ``lse2 = lse * log2(e)``, per row.

    Rows are numbered through [batch, heads_q, tokens]; see ``row_numbers``. A program also sets its
    ``share`` of the ``pieces`` of ``sums`` to 0, in which the Hopper backward sums dq. The
    parameters are the fields of ``RowTensors``, ``RowCounts``, ``GradientStrides``, ``SumCounts``
    and ``RowTile``.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = row < rows  # [BLOCK]
    batch_head = row // tokens
    token = row % tokens
    batch_id = batch_head // heads_q
    head = batch_head % heads_q
    cols = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    mask = inside[:, None] & (cols < HEAD_DIM_V)[None, :]
    # out is contiguous: [batch, tokens, heads_q, HEAD_DIM_V]
    out_at = ((batch_id * tokens + token) * heads_q + head) * HEAD_DIM_V
    dout_at = batch_id * stride_dob + token * stride_dos + head * stride_doh
    # rows of an output with a narrower dtype than q need not be whole accesses
    out_rows = tl.multiple_of(out_ptr + out_at[:, None], [ROW_BYTES, ROW_BYTES])
    dout_rows = tl.multiple_of(dout_ptr + dout_at[:, None], [ROW_BYTES, ROW_BYTES])
    # [BLOCK, BLOCK_DV]
    out = tl.load(out_rows + cols[None, :], mask=mask, other=0.0)
    dout = tl.load(dout_rows + cols[None, :], mask=mask, other=0.0)
    dlse = None
    if dlse_ptr is not None:
        dlse = tl.load(dlse_ptr + row, mask=inside, other=0.0)  # [BLOCK]
    lse = tl.load(lse_ptr + row, mask=inside, other=0.0)  # [BLOCK]
    lse2, delta = row_numbers(out, dout, lse, dlse)
    tl.store(delta_ptr + row, delta, mask=inside)
    tl.store(lse2_ptr + row, lse2, mask=inside)
    if sums_ptr is not None:
        first = tl.program_id(0) * share
        sums = sums_ptr + first.to(tl.int64) * PIECE + tl.arange(0, PIECE)
        for _ in range(first, tl.minimum(first + share, pieces)):
            tl.store(sums, tl.zeros([PIECE], tl.float32))
            sums += PIECE
