"""From a layout to what a kernel walks: for every tile the blocks it has to visit, in order.

Plain PyTorch on the layout's device, without a look at a value from the host: sizes are bounds that
shapes give. A *list* belongs to an owner, which is a tile of queries of one head (or of several
that share keys), or, transposed, a tile of keys. Its *items* are the key blocks to visit (or the
query blocks), sorted, each once, and first those that every *member* of the owner sees whole: they
need no mask. Members are the rows of blocks that a tile holds, or the heads.
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
    """
    block_q, block_k = block_size
    rows = crow.shape[1] - 1
    head, row, item, valid = entries_of(crow, col, cols)
    if causal:
        valid = valid & (item * block_k < (row + 1) * block_q)
    stack = max(span // block_q, 1)
    owners = max(cdiv(rows, stack), 1)
    packs = cdiv(group, pack)
    lists = cdiv(crow.shape[0], group) * packs
    owner = (head // group * packs + head % group // pack) * owners + row // stack
    member = head % group % pack if pack > 1 else row % stack
    if pack > 1:  # the last pack of a group may hold fewer heads
        held = (group - torch.arange(lists, device=col.device) % packs * pack).clamp(max=pack)
        all_members = ((1 << held) - 1).repeat_interleave(owners, output_size=lists * owners)
    else:
        all_members = torch.full((lists * owners,), (1 << stack) - 1, device=col.device)

    def is_clear(owner: Tensor, item: Tensor) -> Tensor:
        # left of the first position
        return (item + 1) * block_k - 1 <= owner % owners * (stack * block_q)

    return _gather(
        owner,
        item,
        member,
        valid,
        lists * owners,
        cols,
        pack if pack > 1 else stack,
        all_members,
        is_clear if causal else None,
    )


def key_lists(
    crow: Tensor,
    col: Tensor,
    cols: int,
    block_size: tuple[int, int],
    span: int,
    group: int,
    causal: bool,
) -> Lists:
    """Return the query blocks that each tile of keys visits: the transposed layout.

    An item is ``row * group + head % group``, so that one list serves all heads of a group.
    Members are the columns of blocks within ``span`` keys.
    """
    block_q, block_k = block_size
    rows = crow.shape[1] - 1
    head, row, column, valid = entries_of(crow, col, cols)
    if causal:
        valid = valid & (column * block_k < (row + 1) * block_q)
    stack = max(span // block_k, 1)
    owners = max(cdiv(cols, stack), 1)
    lists = cdiv(crow.shape[0], group)
    all_members = torch.full((lists * owners,), (1 << stack) - 1, device=col.device)

    def is_clear(owner: Tensor, item: Tensor) -> Tensor:
        # below the last key
        return item // group * block_q >= (owner % owners + 1) * (stack * block_k) - 1

    return _gather(
        head // group * owners + column // stack,
        row * group + head % group,
        column % stack,
        valid,
        lists * owners,
        rows * group,
        stack,
        all_members,
        is_clear if causal else None,
    )


def _gather(
    owner: Tensor,
    item: Tensor,
    member: Tensor,
    valid: Tensor,
    owners: int,
    items: int,
    members: int,
    all_members: Tensor,
    is_clear: object,
) -> Lists:
    """Sort by owner and item, unite what differs in the member alone, and put whole items first."""
    device = owner.device
    items = max(items, 1)
    last = owners * items * members  # behind every key
    key = torch.where(valid, (owner * items + item) * members + member, last).flatten()
    key = key.sort().values
    count = key.shape[0]
    nobody = key.new_full((1,), -1)
    before = torch.cat([nobody, key[:-1]])
    is_new = (key // members != torch.where(before < 0, -members, before) // members) & (key < last)
    bit = torch.where((key != before) & (key < last), 1 << key % members, 0)
    # sums ahead of each place, and behind the last
    bits = torch.cat([bit.new_zeros(1), bit.cumsum(0)])
    place = is_new.cumsum(0) - 1
    starts = key.new_full((count + 2,), count)
    slots = torch.arange(count, device=device)
    starts.scatter_(0, torch.where(is_new, place, count + 1), torch.where(is_new, slots, count))
    starts = starts[: count + 1]

    pair = torch.cat([key, key.new_full((1,), last)])[starts[:-1]] // members
    seen = bits[starts[1:]] - bits[starts[:-1]]
    begin = torch.searchsorted(pair, torch.arange(owners + 1, device=device) * items)
    used = pair < owners * items
    own = torch.where(used, pair // items, 0)
    thing = pair % items
    is_whole = used & (seen == all_members[own])
    if is_clear is not None:
        is_whole = is_whole & is_clear(own, thing)  # type: ignore[operator]
    whole_before = torch.cat([key.new_zeros(1), is_whole.long().cumsum(0)])
    whole = whole_before[begin[1:]] - whole_before[begin[:-1]]
    rank = whole_before[:-1] - whole_before[begin[own]]
    rest = slots - begin[own] - rank
    target = begin[own] + torch.where(is_whole, rank, whole[own] + rest)
    target = torch.where(used, target, count)
    result = [
        torch.zeros(count + 1, dtype=torch.int32, device=device).scatter_(0, target, x.int())
        for x in (thing, seen)
    ]
    return Lists(begin, whole, *result)
