"""Layouts from and to the block masks of ``torch.nn.attention.flex_attention``."""

from __future__ import annotations

import torch
from attn_common import cdiv
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..layout import BlockSparseLayout

# tokens of cut blocks whose mask is computed at once
AT_ONCE = 2**24


def from_block_mask(block_mask: BlockMask, *, approximate: bool = False) -> BlockSparseLayout:
    """Make a layout of the blocks that a block mask does not skip.

    Attention over the layout is the same as over the mask if this hides nothing in the blocks that
    it keeps, or, with ``causal=True``, what lies behind the diagonal and nothing else. The host
    waits for the device to see which.

    Args:
        block_mask: with one batch entry, and a block size of 16, 32, 64 or 128 on either side.
        approximate: take every block that is kept as whole, or, with ``causal=True``, up to the
            diagonal, whatever else ``mask_mod`` hides in it. Default: False.

    Returns:
        a layout of as many heads as the mask has; one serves all.

    Raises:
        TypeError: if ``block_mask`` is none, or ``approximate`` is no bool.
        ValueError: on several batch entries, on another block size, or where a block is kept that
            is neither whole nor causal, unless ``approximate`` is set.
    """
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a BlockMask, got {type(block_mask).__name__}")
    if not isinstance(approximate, bool):
        raise TypeError(f"approximate must be a bool, got {type(approximate).__name__}")
    if block_mask.kv_num_blocks.shape[0] != 1:
        raise ValueError(
            "block_mask must have one batch entry: a layout serves every sequence, got "
            f"{block_mask.kv_num_blocks.shape[0]}"
        )
    kept = block_mask.to_dense()[0].bool()
    block_q, block_k = block_mask.BLOCK_SIZE
    layout = BlockSparseLayout.from_dense(kept, (block_q, block_k))
    if not approximate:
        _check_cut_blocks(block_mask, kept)
    return layout


def _check_cut_blocks(block_mask: BlockMask, kept: Tensor) -> None:
    """Raise if kept blocks are neither all whole nor all causal."""
    block_q, block_k = block_mask.BLOCK_SIZE
    length_q, length_k = block_mask.seq_lengths
    is_whole = _whole_blocks(block_mask)
    where = (kept & ~is_whole).nonzero()
    queries, keys = (torch.arange(side, device=kept.device) for side in (block_q, block_k))
    differs = [where.new_zeros(0, 2, dtype=torch.bool)]
    step = max(AT_ONCE // (block_q * block_k), 1)
    for begin in range(0, len(where), step):
        some = where[begin : begin + step, :, None, None]
        shape = some.shape[0], block_q, block_k
        head = some[:, 0].expand(shape)
        query = (some[:, 1] * block_q + queries[:, None]).expand(shape)
        key = (some[:, 2] * block_k + keys).expand(shape)
        there = (query < length_q) & (key < length_k)
        # a mask may look tokens up, which are no more than there are
        query_in, key_in = query.clamp(max=length_q - 1), key.clamp(max=length_k - 1)
        places = torch.zeros_like(head), head, query_in, key_in
        seen = torch.vmap(block_mask.mask_mod)(*(x.flatten() for x in places)).view(there.shape)
        rules = (torch.ones_like(there), key <= query)
        differs.append(
            torch.stack([((seen != rule) & there).flatten(1).any(1) for rule in rules], 1)
        )
    wrong = torch.cat(differs)
    # under a causal mask whole blocks have to lie at its left
    whole = (is_whole & kept).nonzero()
    is_right = (whole[:, 2] + 1) * block_k - 1 > whole[:, 1] * block_q
    is_causal = not bool((wrong[:, 1].any() | is_right.any()).item())
    if is_causal or not bool(wrong[:, 0].any().item()):
        return
    first = wrong.all(1) if bool(wrong.all(1).any().item()) else wrong[:, 0]
    head, row, col = where[first.nonzero()[0, 0]].tolist()
    raise ValueError(
        "block_mask must keep blocks whole, or all of them up to the diagonal; got a mask_mod that "
        f"cuts block ({row}, {col}) of head {head}. approximate=True takes it as whole"
    )


def _whole_blocks(block_mask: BlockMask) -> Tensor:
    """Return which blocks a mask keeps whole, ``[heads, rows, cols]``."""
    count, columns = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    heads, rows, cols = block_mask.to_dense().shape[1:]
    whole = torch.zeros(
        (heads, rows, cols + 1), dtype=torch.bool, device=block_mask.kv_indices.device
    )
    if count is None or columns is None:
        return whole[..., :-1]
    place = torch.arange(columns.shape[-1], device=columns.device)
    at = torch.where(place < count[0, ..., None], columns[0].long(), cols)
    return whole.scatter_(-1, at, True)[..., :-1]


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
