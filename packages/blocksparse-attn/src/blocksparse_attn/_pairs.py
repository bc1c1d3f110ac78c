"""Which two blocks of keys a program of the Hopper backward owns, and the queries that it walks.

A program owns two blocks of keys, and multiplies blocks of queries with both at once, or, of
queries that only one of them sees, one with either. The latter takes twice the traffic, and comes
to as many steps as the longer of two lists, so a program should own blocks that the same queries
see. Neighbours mostly are: of a band all but the ends. What one of two neighbours sees alone, as a
column in a stride, is walked by a second program if that owns another such block that the same
queries see, or if the other neighbour has no such list to walk beside it. Long walks are cut, so
that no program runs much longer than others; what several programs find of one block of keys is
added up.

Plain PyTorch on the layout's device without a look at a value, as :mod:`._lists`. Blocks here have
64 tokens; a block of the layout is several of them, or, if it is small, a *piece* of one. Of pieces
:mod:`._pieces` makes blocks, which then differ in what of them a query sees: see ``Pairs.bits``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from attn_common import cdiv
from torch import Tensor

from ._lists import entries_of
from ._pieces import KEPT, SIDE, blocks_of, piece_of

# rows of blocks are less
HEAD = 1 << 16
# steps of a program that owns neighbours, and of one that owns others
LONGEST = 96
SHORTER = 48
# what programs have in common when the order among them does not matter: blocks of queries in which
# they begin, so that those at work share what is in the cache, and steps
WINDOW = 128
ALIKE = 4
# blocks of queries of the heads with one list whose programs are mixed
MIXED = 256


class Pairs(NamedTuple):
    """Items of every program, those of program ``p`` from ``items[begin[4 * p]]`` on.

    An item is ``head * HEAD + row``, the head in its group. They have four parts: items that both
    blocks see whole; those that both see, but not whole; those of the first block alone; those of
    the second.
    """

    begin: Tensor  # int64 [4 * programs + 1]
    parts: Tensor  # int64 [lists * pieces]: how many programs own a piece
    items: Tensor  # int32 [bound + 1]
    # int32 [programs, 1 + pieces]: list and the pieces of the two blocks of keys, or -1
    owners: Tensor
    real: Tensor  # int32 [1]: how many programs there are, the first ones
    # int32 [bound + 1], of the first block, and 16 bits on of the second: bit ``i * n + j`` says
    # that of n pieces of the queries the j-th sees the i-th of the keys
    bits: Tensor


class _Entries(NamedTuple):
    """Who walks what: items of owners, each once; of those not ``used`` nothing else counts."""

    owner: Tensor
    item: Tensor
    member: Tensor  # the first block of the owner, the second, or 2 for both
    bits: Tensor
    used: Tensor


def sizes_of(
    heads: int, nnz: int, cols: int, block_size: tuple[int, int], group: int, turns: int
) -> tuple[int, int, int]:
    """Return the number of pieces of keys of all lists, and bounds of programs and of items."""
    piece = piece_of(block_size)
    parts_q, parts_k = (side // piece for side in block_size)
    entries = heads * nnz * parts_q * parts_k
    pairs = cdiv(heads, group) * max(cdiv(cols * block_size[1], 2 * SIDE), 1)
    owners = pairs if piece == SIDE else 2 * pairs
    others = min(owners, entries // KEPT)
    programs = owners + others + entries // _most(SHORTER, turns) + 1
    return 2 * pairs * (SIDE // piece), programs, entries


def heads_at_once(rows: int) -> int:
    """Return of how many heads with one list, of so many blocks, the programs are mixed.

    The last heads' long walks then begin earlier; more heads would not fit into the cache.
    """
    return max(MIXED // max(rows, 1), 1)


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
    pieces, programs, _ = sizes_of(heads, nnz, cols, block_size, group, turns)
    in_list = pieces // cdiv(heads, group)
    rows = max(cdiv((crow.shape[1] - 1) * parts_q, side), 1)
    device = crow.device

    head, row, column, valid = (x[..., None, None] for x in entries_of(crow, col, cols))
    row = row * parts_q + torch.arange(parts_q, device=device)[:, None]
    column = column * parts_k + torch.arange(parts_k, device=device)
    if causal:
        valid = valid & (column <= row)
    # by rows first, so that what is cut holds all heads of some rows
    item = row // side * group + head % group
    block, item, bits, used, made = blocks_of(
        head // group * in_list + column,
        item,
        row % side,
        valid,
        pieces,
        in_list,
        rows * group,
        side,
    )
    blocks, in_blocks = made.pieces.shape[0], made.in_list
    pairs = blocks // 2
    bits = bits << 16 * (block % 2)
    entries = _united(block // 2, item, block % 2, bits, used, pairs, rows * group)
    entries, owned = _moved(entries, blocks, in_blocks, rows * group)
    owner, item, member, bits, used = entries

    # cut into programs, numbered as they come
    # in halves of a step: of neighbours either walks what it sees alone beside the other
    weight = torch.where(used, torch.where((member == 2) | (owner >= pairs), 2, 1), 0)
    weights = item.new_zeros(2 * pairs).scatter_add_(0, owner, weight)
    most = torch.full_like(weights, 2 * _most(LONGEST, turns))
    most[pairs:] = 2 * _most(SHORTER, turns)
    cuts = (weights + most - 1) // most
    ends = cuts.cumsum(0)
    ahead = weight.cumsum(0) - weight - (weights.cumsum(0) - weights)[owner]
    program = (ends - cuts)[owner] + ahead * cuts[owner] // weights.clamp(min=1)[owner]
    program = program.clamp(max=programs - 1)
    place = torch.arange(programs, device=device)
    own = torch.searchsorted(ends, place, right=True).clamp(max=2 * pairs - 1)
    own = torch.where((place < ends[-1])[:, None], owned[own], -1)
    of_list = own.amax(1, keepdim=True) // in_blocks  # -1 of a program without a block
    mine = torch.where(own[..., None] < 0, -1, made.pieces[own.clamp(min=0)]).flatten(1)
    parts = _counts(of_list.clamp(min=0) * in_list + mine.clamp(min=0), mine >= 0, pieces)

    # in the order of their work, and of each first what both blocks see whole
    part = torch.where(member == 2, 0, member + 2)
    is_cut = bits != made.whole * ((1 << 16) + 1)
    if causal:
        last = torch.where(owned < 0, -1, made.last[owned.clamp(min=0)]).amax(1)
        is_cut |= item // group <= last[owner]
    part = torch.where((part == 0) & is_cut, 1, part)
    order = _order(program, part, item // group, used, of_list[:, 0], rows, turns)
    rank = torch.zeros_like(order).scatter_(0, order, place)
    end = programs * 4 * HEAD * group
    # by heads first, so that programs at work read few of them
    item = item % group * HEAD + item // group
    key = torch.where(used, (rank[program] * 4 + part) * HEAD * group + item, end)
    key, place = key.sort()
    begin = torch.arange(4 * programs + 1, device=device) * (HEAD * group)
    begin = torch.searchsorted(key, begin)
    bits = torch.where(key < end, bits[place], 0)
    key = torch.where(key < end, key % (HEAD * group), 0)
    owners = torch.cat([of_list, mine], 1)[order]
    nothing = key.new_zeros(1)
    items, bits = (torch.cat([x, nothing]).int() for x in (key, bits))
    return Pairs(begin, parts, items, owners.int(), ends[-1:].int(), bits)


def _most(steps: int, turns: int) -> int:
    """Return how many steps a program has in one of so many turns."""
    return max(steps // turns, 1)


def _moved(entries: _Entries, blocks: int, in_list: int, items: int) -> tuple[_Entries, Tensor]:
    """Move what a block sees without its neighbour to further owners, where that is of use.

    Returns the entries, and the two blocks of each owner.
    """
    owner, item, member, bits, used = entries
    pairs = blocks // 2
    block = owner * 2 + member % 2
    is_alone = used & (member < 2)
    alone = _counts(block, is_alone, blocks)
    # blocks of many such items, in the order of their last ones, two and two
    last = item.new_zeros(blocks).scatter_reduce_(
        0, torch.where(is_alone, block, 0), torch.where(is_alone, item + 1, 0), "amax"
    )
    place = torch.arange(blocks, device=item.device)
    is_many = alone > KEPT
    order = ((place // in_list * 2 + ~is_many) * (items + 1) + last).sort(stable=True).indices
    rank = torch.zeros_like(order).scatter_(0, order, place)
    moves = is_alone & is_many[block]
    further = _united(rank[block] // 2, item, rank[block] % 2, bits, moves, pairs, items)
    shared, apart = (
        _counts(further.owner, further.used & (further.member // 2 == kind), pairs)
        for kind in (1, 0)
    )
    is_alike = is_many & (2 * shared >= apart)[rank // 2]
    # where one of two neighbours moves, the other is left without what to walk beside
    is_uneven = (alone - torch.where(is_alike, 0, alone).view(-1, 2).flip(1).flatten()) > KEPT
    is_moved = is_alike | is_uneven
    moves = moves & is_moved[block]
    owner = torch.where(moves, pairs + rank[block] // 2, owner)
    # what is one block's comes to the place of that block
    bits = torch.where(moves, bits >> 16 * member << 16 * (rank[block] % 2), bits)
    member = torch.where(moves, rank[block] % 2, member)
    owned = torch.cat([place, torch.where(is_moved[order], order, -1)]).view(-1, 2)
    return _united(owner, item, member, bits, used, 2 * pairs, items), owned


def _order(
    program: Tensor, part: Tensor, row: Tensor, used: Tensor, of_list: Tensor, rows: int, turns: int
) -> Tensor:
    """Return the order of programs: by lists, by the first row, and then the longest first."""
    programs = of_list.shape[0]
    count = _counts(program * 4 + part, used, 4 * programs).view(-1, 4)
    length = (count[:, :2].sum(1) + count[:, 2:].amax(1)) * turns // ALIKE
    first = torch.full_like(length, rows).scatter_reduce_(
        0, program, torch.where(used, row, rows), "amin"
    )
    windows = rows // WINDOW + 1
    # those that there are not come last; as their number they would take the key beyond int64
    section = torch.where(of_list < 0, of_list.amax() + 1, of_list)
    longest = rows * programs
    key = (section * windows + first // WINDOW) * longest + (longest - 1 - length)
    return key.sort(stable=True).indices


def _united(
    owner: Tensor,
    item: Tensor,
    member: Tensor,
    bits: Tensor,
    valid: Tensor,
    owners: int,
    items: int,
) -> _Entries:
    """Sort by owner and item, and unite what differs in the member alone."""
    end = owners * items * 4
    key, place = torch.where(valid, (owner * items + item) * 4 + member, end).sort()
    pair = key // 4
    nobody = key.new_full((1,), -4)
    used = (key < end) & (torch.cat([nobody, pair[:-1]]) != pair)
    has_next = torch.cat([pair[1:], nobody]) == pair
    bits = bits[place]
    bits = torch.where(has_next, bits | torch.cat([bits[1:], bits[:1]]), bits)
    member = torch.where(has_next, 2, key % 4)
    return _Entries((pair // items).clamp(max=owners - 1), pair % items, member, bits, used)


def _counts(owner: Tensor, used: Tensor, owners: int) -> Tensor:
    """Count what each owner has."""
    counts = owner.new_zeros(owners)
    return counts.scatter_add_(0, owner.flatten(), used.flatten().long())
