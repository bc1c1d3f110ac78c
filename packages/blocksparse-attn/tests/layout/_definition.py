"""The lists that kernels make, by their definition: plain PyTorch over the mask of blocks.

See ``blocksparse_attn._layout.lists`` for what they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from attn_common import cdiv
from blocksparse_attn._layout import lists as layout_lists
from blocksparse_attn._layout.lists import (
    ALIKE,
    COUNTED,
    HEAD,
    SIDE,
    WINDOW,
    Lists,
    ListSpec,
    Pairs,
    dense_of,
    piece_of,
    sizes_of,
    steps_of,
    whole_in_rule,
)
from torch import Tensor


def defined_lists(
    crow: Tensor,
    col: Tensor,
    cols: int,
    block_size: tuple[int, int],
    spec: ListSpec,
    rule: Tensor | None = None,
) -> Lists | Pairs:
    """Return the lists of a layout."""
    if spec.paired:
        return key_pairs(crow, col, cols, block_size, spec.group, spec.pack, spec.causal)
    made_of, rest = (crow, col, cols, block_size, spec.span, spec.group), (spec.causal, rule)
    if spec.by_key:
        return key_lists(*made_of, *rest)
    return query_lists(*made_of, spec.pack, *rest, halves=spec.halves)


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
    *,
    halves: bool = False,
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
        halves: see ``ListSpec``. Default: False.
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
    return _listed(kept, held, is_clear, col.numel(), stack // 2 if halves else 0)


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


def _listed(
    kept: Tensor, held: Tensor, is_clear: Tensor | None, bound: int, half: int = 0
) -> Lists:
    """Make lists of a mask ``[owners, members, items]``; ``held`` members there are.

    ``half``: how many are the first half, by which the rest is put in order; 0 if it is not.
    """
    member = torch.arange(kept.shape[1], device=kept.device)[:, None]
    seen = (kept.long() << member).sum(1)
    is_whole = (seen > 0) & (seen == (1 << held) - 1)
    if is_clear is not None:
        is_whole &= is_clear
    part = (~is_whole).long()
    if half:
        first, second = (x.any(1) for x in (kept[:, :half], kept[:, half:]))
        part = torch.where(second & ~first, 2, torch.where(first & ~second, 3, part))
    order = part.argsort(dim=1, stable=True)
    sorted_ = seen.gather(1, order)
    used = sorted_ > 0
    result = (filled(x[used], bound + 1).int() for x in (order, sorted_))
    begin = torch.cat([held.new_zeros(1), used.sum(1).cumsum(0)])
    whole = is_whole.sum(1)
    for unit, mine in (COUNTED, 2), (COUNTED**2, 3):
        whole += ((part == mine) & (seen > 0)).sum(1) * unit
    return Lists(begin, whole, *result)


def filled(x: Tensor, size: int) -> Tensor:
    """Return numbers, and 0 behind them up to a size."""
    return torch.cat([x, x.new_zeros(size - len(x))])


class Blocks(NamedTuple):
    """What blocks are made of, those of a list one behind the other."""

    # int64 [blocks, items]: bit ``i * n + j`` says that of n pieces of the item the j-th sees the
    # i-th of the block
    cells: Tensor
    pieces: Tensor  # int64 [blocks, pieces of a block]: numbers within the list, or -1
    last: Tensor  # int64 [blocks]: the last 64 tokens from a multiple of 64 that it touches, or -1
    in_list: int  # blocks of a list


def blocks_of(kept: Tensor, in_list: int) -> Blocks:
    """Return the blocks of a mask ``[pieces of keys, items, side]``; a block has ``side`` pieces.

    Args:
        kept: which of the pieces of an item see which of keys, these numbered through all lists.
        in_list: pieces of a list.
    """
    pieces, items, side = kept.shape
    bit = torch.arange(side, device=kept.device)
    fields = (kept.long() << bit).sum(-1)
    names = torch.arange(pieces, device=kept.device) % in_list
    in_blocks = in_list
    if side > 1:
        lines = (fields.view(-1, side, items) != 0).sum(1)
        is_apart = (fields != 0) & (2 * lines <= side).repeat_interleave(side, 0)
        order, is_many = in_order(is_apart, in_list, layout_lists.KEPT)
        moves = is_apart & is_many[:, None]
        # of each list those of neighbours come first
        stay, gone = torch.where(moves, 0, fields), torch.where(moves, fields, 0)[order]
        fields, names = (
            torch.stack([x.view(-1, in_list, *x.shape[1:]) for x in both], 1).flatten(0, 2)
            for both in ((stay, gone), (names, names[order]))
        )
        in_blocks = in_list // side * 2
    fields = fields.view(-1, side, items)
    made = torch.where((fields != 0).any(-1), names.view(-1, side), -1)
    cells = (fields << side * bit[:, None]).sum(1)
    return Blocks(cells, made, made.amax(1) // side, in_blocks)


def in_order(alone: Tensor, in_list: int, kept: int) -> tuple[Tensor, Tensor]:
    """Return in which order blocks, or pieces, of lists go together, and which ones are many.

    Args:
        alone: bool ``[blocks, items]``: what is seen without neighbours.
        in_list: blocks of a list.
        kept: more items than so many are many.
    """
    items = alone.shape[1]
    is_many = alone.sum(1) > kept
    place = torch.arange(len(alone), device=alone.device)
    # by the last ones: columns of one head end alike
    last = (alone * torch.arange(1, items + 1, device=alone.device)).amax(1)
    key = (place // in_list * 2 + ~is_many) * (items + 1) + last
    return key.sort(stable=True).indices, is_many


def key_pairs(
    crow: Tensor,
    col: Tensor,
    cols: int,
    block_size: tuple[int, int],
    group: int,
    turns: int,
    causal: bool,
) -> Pairs:
    """Return what each program of the Hopper backward walks.

    Args:
        crow: row pointers ``[heads, rows + 1]``.
        col: columns ``[heads, nnz]``.
        cols: number of key blocks.
        block_size: of queries and of keys.
        group: query heads that share a list; 1 if one list is for all heads.
        turns: how often a program walks its items, for one head after the other.
        causal: leave out what lies right of the diagonal.
    """
    piece = piece_of(block_size)
    side = SIDE // piece
    parts_q, parts_k = (tokens // piece for tokens in block_size)
    heads, nnz = col.shape
    pieces, programs, entries = sizes_of(heads, nnz, cols, block_size, group, turns)
    in_list = pieces // cdiv(heads, group)
    rows = max(cdiv((crow.shape[1] - 1) * parts_q, side), 1)
    device = crow.device

    kept = kept_of(crow, col, cols, block_size, False)
    kept = kept.repeat_interleave(parts_q, 1).repeat_interleave(parts_k, 2)
    kept = kept.tril() if causal else kept
    kept = by_key(padded(padded(kept, 1, rows * side), 2, in_list), group)
    # by rows first, so that what is cut holds all heads of some rows
    kept = kept.view(pieces, rows, side, group).transpose(2, 3).reshape(pieces, rows * group, side)
    made = blocks_of(kept, in_list)
    pairs = len(made.cells) // 2
    walked, owned = _shared_out(made)
    owner, item = (walked != 0).any(1).nonzero(as_tuple=True)
    first, second = walked[owner, :, item].unbind(1)

    # cut into programs, numbered as they come
    # in halves of a step: of neighbours either walks what it sees alone beside the other
    weight = torch.where((first != 0) & (second != 0) | (owner >= pairs), 2, 1)
    weights = _counts(owner, weight, 2 * pairs)
    most = torch.full_like(weights, 2 * steps_of(layout_lists.LONGEST, turns))
    most[pairs:] = 2 * steps_of(layout_lists.SHORTER, turns)
    cuts = (weights + most - 1) // most
    ends = cuts.cumsum(0)
    ahead = weight.cumsum(0) - weight - (weights.cumsum(0) - weights)[owner]
    program = (ends - cuts)[owner] + ahead * cuts[owner] // weights[owner]
    place = torch.arange(programs, device=device)
    own = torch.searchsorted(ends, place, right=True).clamp(max=2 * pairs - 1)
    own = torch.where((place < ends[-1])[:, None], owned[own], -1)
    of_list = own.amax(1, keepdim=True) // made.in_list  # -1 of a program without a block
    mine = torch.where(own[..., None] < 0, -1, made.pieces[own.clamp(min=0)]).flatten(1)
    parts = _counts((of_list.clamp(min=0) * in_list + mine.clamp(min=0)), mine >= 0, pieces)

    # in the order of their work, and of each first what both blocks see whole
    whole = (1 << side * side) - 1
    is_cut = (first != whole) | (second != whole)
    if causal:
        last = torch.where(owned < 0, -1, made.last[owned.clamp(min=0)]).amax(1)
        is_cut |= item // group <= last[owner]
    part = torch.where(second == 0, 2, torch.where(first == 0, 3, is_cut.long()))
    order = _order(program, part, item // group, of_list[:, 0], rows, turns)
    rank = torch.zeros_like(order).scatter_(0, order, place)
    # by heads first, so that programs at work read few of them
    item = item % group * HEAD + item // group
    key = (rank[program] * 4 + part) * HEAD * group + item
    key, place = key.sort()
    begin = torch.arange(4 * programs + 1, device=device) * (HEAD * group)
    begin = torch.searchsorted(key, begin)
    owners = torch.cat([of_list, mine], 1)[order]
    bits = (first | second << 16)[place]
    items, bits = (filled(x, entries + 1).int() for x in (key % (HEAD * group), bits))
    return Pairs(begin, parts, items, owners.int(), ends[-1:].int(), bits)


def _shared_out(made: Blocks) -> tuple[Tensor, Tensor]:
    """Give neighbours an owner, and move what a block sees without its own where that is of use.

    Returns the cells that each owner walks of two blocks, ``[owners, 2, items]``, and these blocks.
    """
    cells = made.cells
    blocks, items = cells.shape
    other = cells.view(-1, 2, items).flip(1).view(blocks, items)
    is_alone = (cells != 0) & (other == 0)
    # blocks of many such items, in the order of their last ones, two and two
    order, is_many = in_order(is_alone, made.in_list, layout_lists.KEPT)
    place = torch.arange(blocks, device=cells.device)
    rank = torch.zeros_like(order).scatter_(0, order, place)
    moves = (is_alone & is_many[:, None])[order].view(-1, 2, items)
    shared, apart = (moves.sum(1) == count for count in (2, 1))
    is_alike = is_many & (2 * shared.sum(1) >= apart.sum(1))[rank // 2]
    # where one of two neighbours moves, the other is left without what to walk beside
    alone = is_alone.sum(1)
    left = torch.where(is_alike, 0, alone).view(-1, 2).flip(1).flatten()
    is_moved = is_many & (is_alike | (alone - left > layout_lists.KEPT))
    moves = is_alone & is_moved[:, None]
    walked = torch.cat([torch.where(moves, 0, cells), torch.where(moves, cells, 0)[order]])
    owned = torch.cat([place, torch.where(is_moved[order], order, -1)])
    return walked.view(-1, 2, items), owned.view(-1, 2)


def _order(
    program: Tensor, part: Tensor, row: Tensor, of_list: Tensor, rows: int, turns: int
) -> Tensor:
    """Return the order of programs: by lists, by the first row, and then the longest first."""
    programs = of_list.shape[0]
    count = _counts(program * 4 + part, torch.ones_like(part), 4 * programs).view(-1, 4)
    length = (count[:, :2].sum(1) + count[:, 2:].amax(1)) * turns // ALIKE
    first = torch.full_like(length, rows).scatter_reduce_(0, program, row, "amin")
    windows = rows // WINDOW + 1
    # those that there are not come last; as their number they would take the key beyond int64
    section = torch.where(of_list < 0, of_list.amax() + 1, of_list)
    longest = rows * programs
    key = (section * windows + first // WINDOW) * longest + (longest - 1 - length)
    return key.sort(stable=True).indices


def _counts(owner: Tensor, weight: Tensor, owners: int) -> Tensor:
    """Add up what each owner has."""
    return owner.new_zeros(owners).scatter_add_(0, owner.flatten(), weight.flatten().long())
