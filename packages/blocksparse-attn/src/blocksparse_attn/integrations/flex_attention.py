"""Layouts from and to the block masks of ``torch.nn.attention.flex_attention``."""

from __future__ import annotations

import torch
from attn_common import cdiv
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..layout import BlockSparseLayout


def from_block_mask(block_mask: BlockMask) -> BlockSparseLayout:
    """Make a layout of the blocks that a block mask does not skip.

    What ``mask_mod`` hides within a block is lost, but for the diagonal: causal attention over the
    layout is the same if the mask is causal, and hides nothing else in the blocks it keeps.

    Args:
        block_mask: with one batch entry, and a block size of 16, 32, 64 or 128 on either side.

    Returns:
        a layout of as many heads as the mask has; one serves all.
    """
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a BlockMask, got {type(block_mask).__name__}")
    if block_mask.kv_num_blocks.shape[0] != 1:
        raise ValueError(
            "block_mask must have one batch entry: a layout serves every sequence, got "
            f"{block_mask.kv_num_blocks.shape[0]}"
        )
    kept = block_mask.to_dense()[0].bool()
    block_q, block_k = block_mask.BLOCK_SIZE
    return BlockSparseLayout.from_dense(kept, (block_q, block_k))


def to_block_mask(layout: BlockSparseLayout, seqlen: int, *, causal: bool = True) -> BlockMask:
    """Make the block mask that attends to what a layout keeps, for as many queries as keys.

    Args:
        layout: its rows must cover ``seqlen`` positions.
        seqlen: length of the sequences.
        causal: hide keys behind a query. Default: True.

    Returns:
        a block mask on the layout's device, of its heads: for several query heads of one pattern
        the one head is broadcast.
    """
    if layout.batch is not None:
        raise NotImplementedError(
            f"layout must be one for all sequences, got one for each of {layout.batch}"
        )
    block_q, block_k = layout.block_size
    rows, cols = cdiv(seqlen, block_q), cdiv(seqlen, block_k)
    if rows > layout.num_rows:
        raise ValueError(
            f"layout must cover seqlen, {seqlen}, with its rows, got {layout.num_rows} rows of "
            f"{block_q}"
        )
    kept = torch.zeros((layout.num_heads, rows, cols), dtype=torch.bool, device=layout.device)
    width = min(cols, layout.num_cols)
    kept[:, :, :width] = layout.to_dense()[:, :rows, :width]
    first_query = torch.arange(rows, device=layout.device)[:, None] * block_q
    first_key = torch.arange(cols, device=layout.device) * block_k
    if not causal:
        empty = torch.zeros_like(kept)
        return BlockMask.from_kv_blocks(
            *_ordered(empty),
            *_ordered(kept),
            BLOCK_SIZE=(block_q, block_k),
            seq_lengths=(seqlen, seqlen),
        )
    kept &= first_key < first_query + block_q
    whole = kept & (first_key + block_k - 1 <= first_query)

    def is_seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return BlockMask.from_kv_blocks(
        *_ordered(kept & ~whole),
        *_ordered(whole),
        BLOCK_SIZE=(block_q, block_k),
        mask_mod=is_seen,
        seq_lengths=(seqlen, seqlen),
    )


def _ordered(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks in each row, and their columns ahead of all others."""
    count = kept.sum(-1, dtype=torch.int32)
    columns = torch.argsort(kept.int(), dim=-1, descending=True, stable=True)
    return count[None], columns.int()[None].contiguous()
