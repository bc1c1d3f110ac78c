"""Layouts from and to the block masks of ``torch.nn.attention.flex_attention``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attn_common import cdiv
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .._layout.lists import whole_in_rule
from .._linked.host.arguments import check_flag
from ..layout import BlockSparseLayout
from ..token_rule import END

# the mask of so many pairs of tokens in cut blocks is computed at once
AT_ONCE = 2**24


def from_block_mask(block_mask: BlockMask, *, approximate: bool = False) -> BlockSparseLayout:
    """Make a layout of the blocks that a block mask does not skip.

    Attention over the layout with ``causal=False`` equals attention over the mask; if the mask has
    other numbers of queries and keys, with ``align="top-left"``. ``causal=True`` changes nothing,
    or raises where the mask shows keys after a query: see ``BlockSparseLayout.causal``. If the mask
    leaves each query one range of keys, the same for all heads (windows, documents, prefixes), the
    layout gets a token rule. The host waits for the device to find this out.

    Args:
        block_mask: a block mask with one batch entry and block sizes of 16, 32, 64 or 128.
        approximate: treat every kept block as whole (with ``causal=True``, up to the diagonal),
            whatever else ``mask_mod`` hides in it; ``causal`` of the call then says which.
            Default: False.

    Returns:
        a layout with the heads of the mask; one head is for all query heads.

    Raises:
        TypeError: if ``block_mask`` is not a ``BlockMask``, or ``approximate`` is not a bool.
        ValueError: if there are several batch entries, if a block size is not supported, or,
            without ``approximate``, if a query does not see one range of the kept keys.
    """
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a BlockMask, got {type(block_mask).__name__}")
    check_flag("approximate", approximate)
    if block_mask.kv_num_blocks.shape[0] != 1:
        raise ValueError(
            "block_mask must have one batch entry: a layout serves every sequence, got "
            f"{block_mask.kv_num_blocks.shape[0]}"
        )
    kept = block_mask.to_dense()[0].bool()
    block_q, block_k = block_mask.BLOCK_SIZE
    layout = BlockSparseLayout.from_dense(kept, (block_q, block_k))
    if approximate:
        return layout
    whole = _whole_blocks(block_mask) & kept
    cut = (kept & ~whole).nonzero()
    is_whole = _are_whole(block_mask, cut)
    if not is_whole and _are_causal(block_mask, cut, whole):
        return layout._of_mask(None, causal=True)
    causal = False if _shows_later_keys(block_mask, cut, whole) else None
    if is_whole:
        return layout._of_mask(None, causal)
    bounds = _bounds_of(block_mask, cut, whole)
    for places, query, key, seen in _tokens_of(block_mask, cut):
        low, high = bounds[query].unbind(-1)
        wrong = (seen != (key >= low) & (key <= high)).flatten(1).any(1).nonzero()
        if len(wrong):
            head, row, col = places[int(wrong[0])].tolist()
            raise ValueError(
                "block_mask must leave one range of the keys that it keeps to each query, the same "
                f"for all heads; got a mask_mod that cuts block ({row}, {col}) of head {head} "
                "otherwise. approximate=True takes it as whole"
            )
    return layout._of_mask(bounds[None], causal)


# (head, row, col) of cut blocks, [blocks, 3]; then the queries, the keys and the mask of their
# tokens, which broadcast to [blocks, queries, keys]
Tokens = tuple[Tensor, Tensor, Tensor, Tensor]


def _tokens_of(block_mask: BlockMask, cut: Tensor) -> Iterator[Tokens]:
    """Compute the mask of cut blocks, a few blocks at a time."""
    block_q, block_k = block_mask.BLOCK_SIZE
    length_q, length_k = block_mask.seq_lengths
    queries, keys = (torch.arange(side, device=cut.device) for side in (block_q, block_k))
    step = max(AT_ONCE // (block_q * block_k), 1)
    for places in torch.split(cut, step) if len(cut) else ():
        head, row, col = places[:, :, None, None].unbind(1)
        query, key = row * block_q + queries[:, None], col * block_k + keys
        shape = len(places), block_q, block_k
        # a mask_mod may index tensors by token, so tokens past the end are clamped
        inside = query.clamp(max=length_q - 1), key.clamp(max=length_k - 1)
        given = (x.expand(shape).flatten() for x in (torch.zeros_like(head), head, *inside))
        seen = torch.vmap(block_mask.mask_mod)(*given).view(shape)
        # tokens past the end have the mask of the last token
        yield places, *inside, seen


def _are_whole(block_mask: BlockMask, cut: Tensor) -> bool:
    """Say whether the mask hides nothing in cut blocks."""
    return all(bool(seen.all()) for *_, seen in _tokens_of(block_mask, cut))


def _are_causal(block_mask: BlockMask, cut: Tensor, whole: Tensor) -> bool:
    """Say whether the mask hides exactly the keys after the diagonal in kept blocks."""
    block_q, block_k = block_mask.BLOCK_SIZE
    _, row, col = whole.nonzero().unbind(1)
    if bool(((col + 1) * block_k - 1 > row * block_q).any()):
        return False
    return all(
        bool((seen == (key <= query)).all()) for _, query, key, seen in _tokens_of(block_mask, cut)
    )


def _shows_later_keys(block_mask: BlockMask, cut: Tensor, whole: Tensor) -> bool:
    """Say whether a query sees a key after itself."""
    block_q, block_k = block_mask.BLOCK_SIZE
    _, row, col = whole.nonzero().unbind(1)
    last = ((col + 1) * block_k).clamp(max=block_mask.seq_lengths[1]) - 1
    if bool((last > row * block_q).any()):
        return True
    return any(
        bool((seen & (key > query)).any()) for _, query, key, seen in _tokens_of(block_mask, cut)
    )


def _bounds_of(block_mask: BlockMask, cut: Tensor, whole: Tensor) -> Tensor:
    """Return the first and the last key that each query sees, int32 ``[positions, 2]``."""
    block_q, block_k = block_mask.BLOCK_SIZE
    rows = whole.shape[1]
    low = torch.full((rows * block_q,), END, device=whole.device)
    high = torch.full_like(low, -1)
    for _, query, key, seen in _tokens_of(block_mask, cut):
        place = query.flatten()
        low.scatter_reduce_(0, place, torch.where(seen, key, END).amin(2).flatten(), "amin")
        high.scatter_reduce_(0, place, torch.where(seen, key, -1).amax(2).flatten(), "amax")
    # the first and the last column of the whole blocks of all heads
    column = torch.arange(whole.shape[2], device=whole.device)
    first = torch.where(whole, column * block_k, END).amin((0, 2))
    last = torch.where(whole, (column + 1) * block_k - 1, -1).amax((0, 2))
    low = torch.minimum(low, first.repeat_interleave(block_q))
    high = torch.maximum(high, last.repeat_interleave(block_q))
    return torch.stack([low, high], -1).int()


def _whole_blocks(block_mask: BlockMask) -> Tensor:
    """Return which blocks a block mask keeps whole, ``[heads, rows, cols]``."""
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
    """Make the block mask of a layout, for as many queries as keys.

    Args:
        layout: a layout whose rows cover ``seqlen`` positions.
        seqlen: length of the sequences.
        causal: hide keys after a query, as in a call. Default: True.

    Returns:
        a block mask on the layout's device, with its heads; the head of a layout with one head is
        broadcast.

    Raises:
        NotImplementedError: if each sequence has its own layout or token rule.
        ValueError: if the layout does not cover ``seqlen``.
    """
    if layout.batch is not None:
        raise NotImplementedError(
            f"layout must be one for all sequences, got one for each of {layout.batch}; "
            "convert each sequence's by itself"
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
    bounds = layout._rule
    if bounds is not None and len(bounds) != 1:
        raise NotImplementedError(
            f"layout must have one token rule for all sequences, got {len(bounds)}; "
            "convert each sequence's by itself"
        )
    form: dict[str, Any] = {"BLOCK_SIZE": (block_q, block_k), "seq_lengths": (seqlen, seqlen)}
    causal = layout._causal_of(causal)
    if not causal and bounds is None:
        return BlockMask.from_kv_blocks(*_ordered(torch.zeros_like(kept)), *_ordered(kept), **form)
    whole = kept.clone()
    if causal:
        kept &= first_key < first_query + block_q
        whole &= first_key + block_k - 1 <= first_query
    if bounds is not None:
        whole &= whole_in_rule(bounds, cols, layout.block_size)[:rows]

    def is_seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key if causal else key >= 0
        if bounds is not None:
            seen = seen & (key >= bounds[0, query, 0]) & (key <= bounds[0, query, 1])
        return seen

    cut = _ordered(kept & ~whole)
    return BlockMask.from_kv_blocks(*cut, *_ordered(whole), mask_mod=is_seen, **form)


def _ordered(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of kept blocks in each row, and all columns, kept columns first."""
    count = kept.sum(-1, dtype=torch.int32)
    columns = torch.argsort(kept.int(), dim=-1, descending=True, stable=True)
    return count[None], columns.int()[None].contiguous()
