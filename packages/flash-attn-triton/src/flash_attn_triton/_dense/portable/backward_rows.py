"""First step of the backward: two numbers per row, which every tile of the row needs.

The backward recomputes the probabilities from the saved LSE. One kernel makes dk and dv by blocks
of keys, one dq by blocks of queries, and one the bias gradient, if asked for, by blocks of the
bias. The method is that of FlashAttention-2 (Dao, 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import entry
from .arguments import RowNumbers, RowTensors, RowTile
from .primitives import row_numbers


@entry(triton.jit)
def row_kernel(tensors: RowTensors, numbers: RowNumbers, TILE: RowTile):
    """``delta = sum(out * dout) - dlse`` and ``lse2 = lse * log2(e)``, per row.

    Rows are numbered through [batch, heads_q, tokens]; see ``row_numbers``. A program also sets its
    ``share`` of the ``pieces`` of ``sums`` to 0, in which the Hopper backward sums dq.
    """
    row = tl.program_id(0).to(tl.int64) * TILE.BLOCK + tl.arange(0, TILE.BLOCK)  # [BLOCK]
    inside = row < numbers.rows  # [BLOCK]
    batch_head = row // numbers.tokens
    token = row % numbers.tokens
    batch_id = batch_head // numbers.heads_q
    head = batch_head % numbers.heads_q
    cols = tl.arange(0, TILE.BLOCK_DV)  # [BLOCK_DV]
    mask = inside[:, None] & (cols < TILE.HEAD_DIM_V)[None, :]
    # out is contiguous: [batch, tokens, heads_q, HEAD_DIM_V]
    out_at = ((batch_id * numbers.tokens + token) * numbers.heads_q + head) * TILE.HEAD_DIM_V
    dout_at = batch_id * numbers.dout.batch + token * numbers.dout.token + head * numbers.dout.head
    # rows of an output with a narrower dtype than q need not be whole accesses
    out_rows = tl.multiple_of(tensors.out_ptr + out_at[:, None], [TILE.ROW_BYTES, TILE.ROW_BYTES])
    dout_rows = tl.multiple_of(
        tensors.dout_ptr + dout_at[:, None], [TILE.ROW_BYTES, TILE.ROW_BYTES]
    )
    # [BLOCK, BLOCK_DV]
    out = tl.load(out_rows + cols[None, :], mask=mask, other=0.0)
    dout = tl.load(dout_rows + cols[None, :], mask=mask, other=0.0)
    dlse = None
    if tensors.dlse_ptr is not None:
        dlse = tl.load(tensors.dlse_ptr + row, mask=inside, other=0.0)  # [BLOCK]
    lse = tl.load(tensors.lse_ptr + row, mask=inside, other=0.0)  # [BLOCK]
    lse2, delta = row_numbers(out, dout, lse, dlse)
    tl.store(tensors.delta_ptr + row, delta, mask=inside)
    tl.store(tensors.lse2_ptr + row, lse2, mask=inside)
    if tensors.sums_ptr is not None:
        first = tl.program_id(0) * numbers.share
        sums = tensors.sums_ptr + first.to(tl.int64) * TILE.PIECE + tl.arange(0, TILE.PIECE)
        for _ in range(first, tl.minimum(first + numbers.share, numbers.pieces)):
            tl.store(sums, tl.zeros([TILE.PIECE], tl.float32))
            sums += TILE.PIECE
