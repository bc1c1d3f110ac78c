"""From a layout to what a kernel walks: for every tile the blocks it has to visit, in order.

This is the definition, in plain PyTorch over the mask of blocks; ``_kernels/planning.py`` makes the
same by kernels. Sizes are bounds that shapes give. A *list* belongs to an owner, which is a tile of
queries of one head (or of several that share keys), or, transposed, a tile of keys. Its *items* are
the key blocks to visit (or the query blocks), sorted, each once, and first those that every
*member* of the owner sees whole: they need no mask. Members are the rows of blocks that a tile
holds, or the heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from attn_common import cdiv
from torch import Tensor


class Lists(NamedTuple):
    """Items of every owner; owner ``list * owners + tile`` has ``items[begin[o]:begin[o + 1]]``."""

    begin: Tensor  # int64 [lists * owners + 1]
    whole: Tensor  # int64 [lists * owners]: how many of the first items need no mask
    items: Tensor  # int32 [bound + 1]
    members: Tensor  # int32 [bound + 1]: bit m says that member m sees the item


class ListSpec(NamedTuple):
    """What lists are made from, besides the layout."""

    by_key: bool
    span: int  # positions, or keys, of an owner
    group: int  # heads that share a list's key head
    pack: int  # heads whose patterns a list unites, or, of pairs, that walk it in turn
    causal: bool
    paired: bool = False  # see ``_pairs``


class Entries(NamedTuple):
    """Kept blocks, one by one, in the order of ``col``; each ``[heads, nnz]``, int64."""

    head: Tensor
    row: Tensor
    col: Tensor
    valid: Tensor


def entries_of(crow: Tensor, col: Tensor, cols: int) -> Entries:
    """Return head, row and column of every slot of ``col``; padding is not valid."""
    heads, nnz = col.shape
    rows = crow.shape[1] - 1
    slot = torch.arange(nnz, device=col.device).expand(heads, nnz)
    head = torch.arange(heads, device=col.device)[:, None].expand(heads, nnz)
    # of rows that begin at one slot all but the last are empty
    row = torch.searchsorted(crow.long().contiguous(), slot.contiguous(), right=True) - 1
    valid = (row >= 0) & (row < rows) & (col >= 0) & (col < cols)
    return Entries(head, row, col.long(), valid)


def dense_of(crow: Tensor, col: Tensor, cols: int) -> Tensor:
    """Return the mask of blocks, bool ``[heads, rows, cols]``, or with a batch ahead."""
    leading = crow.shape[:-1]
    crow, col = crow.flatten(0, -2), col.flatten(0, -2)
    head, row, column, valid = entries_of(crow, col, cols)
    shape = (crow.shape[0], crow.shape[1] - 1, cols)
    size = shape[0] * shape[1] * shape[2]
    # one more for what is not valid
    dense = torch.zeros(size + 1, dtype=torch.bool, device=crow.device)
    at = (head * shape[1] + row) * shape[2] + column
    dense[torch.where(valid, at, size)] = True
    return dense[:size].view(*leading, *shape[1:])


def query_lists(
    crow: Tensor,
    col: Tensor,
    cols: int,
    block_size: tuple[int, int],
    span: int,
    group: int,
    pack: int,
    causal: bool,
    rule: Tensor | None = None,
) -> Lists:
    """Return the key blocks that each tile of queries visits.

    Args:
        crow: row pointers ``[heads, rows + 1]``.
        col: columns ``[heads, nnz]``.
        cols: number of key blocks.
        block_size: of queries and of keys.
        span: positions of a tile; its members are the rows of blocks within.
        group: query heads per key head.
        pack: heads of one group that a tile holds; if more than one, they are the members, and a
            tile lies within one row of blocks.
        causal: leave out what lies right of the diagonal.
        rule: what each position sees, ``[batch, positions, 2]``. Default: None (all).
    """
    block_q, block_k = block_size
    kept = kept_of(crow, col, cols, block_size, causal)
    heads, rows, _ = kept.shape
    stack = max(span // block_q, 1)
    owners = max(cdiv(rows, stack), 1)
    kept = padded(kept, 1, owners * stack)
    held = torch.tensor(stack, device=crow.device)
    if pack > 1:
        groups, packs = cdiv(heads, group), cdiv(group, pack)
        kept = padded(kept, 0, groups * group).view(groups, group, owners, cols)
        kept = padded(kept, 1, packs * pack).view(groups, packs, pack, owners, cols)
        kept = kept.transpose(2, 3).flatten(0, 2)
        # the last pack of a group may hold fewer heads
        held = (group - torch.arange(packs, device=crow.device) * pack).clamp(max=pack)
        held = held.repeat_interleave(owners).repeat(groups)[:, None]
    else:
        kept = kept.view(heads * owners, stack, cols)
    is_clear = None
    if causal:  # left of the first position
        first = torch.arange(len(kept), device=crow.device)[:, None] % owners * (stack * block_q)
        is_clear = (torch.arange(cols, device=crow.device) + 1) * block_k - 1 <= first
    if rule is not None:
        seen = padded(whole_in_rule(rule, cols, block_size)[None], 1, owners * stack)
        seen = seen.view(owners, stack, cols).all(1).repeat(len(kept) // owners, 1)
        is_clear = seen if is_clear is None else is_clear & seen
    return _listed(kept, held, is_clear, col.numel())


def key_lists(
    crow: Tensor,
    col: Tensor,
    cols: int,
    block_size: tuple[int, int],
    span: int,
    group: int,
    causal: bool,
    rule: Tensor | None = None,
) -> Lists:
    """Return the query blocks that each tile of keys visits: the transposed layout.

    An item is ``row * group + head % group``, so that one list serves all heads of a group.
    Members are the columns of blocks within ``span`` keys.
    """
    block_q, block_k = block_size
    kept = by_key(kept_of(crow, col, cols, block_size, causal), group)
    stack = max(span // block_k, 1)
    owners = max(cdiv(cols, stack), 1)
    kept = padded(kept, 1, owners * stack).view(len(kept) * owners, stack, -1, group).flatten(2)
    is_clear = None
    if causal:  # below the last key
        tile = torch.arange(len(kept), device=crow.device)[:, None] % owners
        row = torch.arange(kept.shape[2], device=crow.device) // group
        is_clear = row * block_q >= (tile + 1) * (stack * block_k) - 1
    if rule is not None:
        seen = padded(whole_in_rule(rule, cols, block_size).T[None], 1, owners * stack)
        seen = seen.view(owners, stack, -1).all(1).repeat_interleave(group, 1)
        seen = seen.repeat(len(kept) // owners, 1)
        is_clear = seen if is_clear is None else is_clear & seen
    return _listed(kept, torch.tensor(stack, device=crow.device), is_clear, col.numel())


def common_bounds(rule: Tensor, block_q: int) -> Tensor:
    """Return the range of keys that a row of blocks sees whole, of all sequences: [rows, 2]."""
    low, high = rule.view(len(rule), rule.shape[1] // block_q, block_q, 2).unbind(-1)
    return torch.stack([low.amax((0, 2)), high.amin((0, 2))], 1)


def whole_in_rule(rule: Tensor, cols: int, block_size: tuple[int, int]) -> Tensor:
    """Return of which blocks a rule hides nothing, bool ``[rows, cols]``."""
    low, high = common_bounds(rule, block_size[0]).long().unbind(1)
    first = torch.arange(cols, device=rule.device) * block_size[1]
    return (first >= low[:, None]) & (first + block_size[1] - 1 <= high[:, None])


def kept_of(
    crow: Tensor, col: Tensor, cols: int, block_size: tuple[int, int], causal: bool
) -> Tensor:
    """Return the mask of blocks ``[heads, rows, cols]``, if asked for up to the diagonal."""
    kept = dense_of(crow, col, cols)
    if causal:
        row = torch.arange(kept.shape[1], device=crow.device)[:, None]
        kept &= torch.arange(cols, device=crow.device) * block_size[1] < (row + 1) * block_size[0]
    return kept


def by_key(kept: Tensor, group: int) -> Tensor:
    """Return a mask ``[heads, rows, cols]`` as ``[lists, cols, rows, group]``."""
    lists = cdiv(len(kept), group)
    kept = padded(kept, 0, lists * group)
    return kept.view(lists, group, *kept.shape[1:]).permute(0, 3, 2, 1).contiguous()


def padded(kept: Tensor, dim: int, size: int) -> Tensor:
    """Return a mask with so much of a dimension; what is added is not kept."""
    shape = list(kept.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([kept, kept.new_zeros(shape)], dim)


def _listed(kept: Tensor, held: Tensor, is_clear: Tensor | None, bound: int) -> Lists:
    """Make lists of a mask ``[owners, members, items]``; ``held`` members there are."""
    member = torch.arange(kept.shape[1], device=kept.device)[:, None]
    seen = (kept.long() << member).sum(1)
    is_whole = (seen > 0) & (seen == (1 << held) - 1)
    if is_clear is not None:
        is_whole &= is_clear
    order = (~is_whole).long().argsort(dim=1, stable=True)
    sorted_ = seen.gather(1, order)
    used = sorted_ > 0
    result = (filled(x[used], bound + 1).int() for x in (order, sorted_))
    begin = torch.cat([held.new_zeros(1), used.sum(1).cumsum(0)])
    return Lists(begin, is_whole.sum(1), *result)


def filled(x: Tensor, size: int) -> Tensor:
    """Return numbers, and 0 behind them up to a size."""
    return torch.cat([x, x.new_zeros(size - len(x))])
