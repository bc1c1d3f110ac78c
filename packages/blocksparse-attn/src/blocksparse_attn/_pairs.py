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
64 tokens; a block of the layout is several of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from attn_common import cdiv
from torch import Tensor

from ._lists import entries_of

# tokens of a block, of queries and of keys
SIDE = 64
# rows of blocks are less
HEAD = 1 << 16
# what a block of keys is seen by without its neighbour stays with them up to so many items
KEPT = 16
# steps of a program that owns neighbours, and of one that owns others
LONGEST = 96
SHORTER = 48
# what programs have in common when the order among them does not matter: blocks of queries in which
# they begin, so that those at work share what is in the cache, and steps
WINDOW = 128
ALIKE = 4
# blocks of queries of lists whose programs are mixed: short ones are left for the end
MIXED = 256


class Pairs(NamedTuple):
    """Items of every program, those of program ``p`` from ``items[begin[4 * p]]`` on.

    An item is ``head * HEAD + row``, the head in its group. They have four parts: items that both
    blocks see whole; those that both see, but not whole; those of the first block alone; those of
    the second.
    """

    begin: Tensor  # int64 [4 * programs + 1]
    parts: Tensor  # int64 [lists * blocks]: how many programs own a block of keys
    items: Tensor  # int32 [bound + 1]
    owners: Tensor  # int32 [programs, 3]: list and the two blocks of keys, or -1


class _Entries(NamedTuple):
    """Who walks what: items of owners, each once; of those not ``used`` nothing else counts."""

    owner: Tensor
    item: Tensor
    member: Tensor  # the first block of the owner, the second, or 2 for both
    used: Tensor


def sizes_of(
    heads: int, nnz: int, cols: int, block_size: tuple[int, int], group: int, turns: int
) -> tuple[int, int, int]:
    """Return the number of blocks of keys of all lists, and bounds of programs and of items."""
    parts_q, parts_k = (side // SIDE for side in block_size)
    entries = heads * nnz * parts_q * parts_k
    pairs = cdiv(heads, group) * max(cdiv(cols * parts_k, 2), 1)
    others = min(pairs, entries // KEPT)
    programs = pairs + others + entries // _most(SHORTER, turns) + 1
    return 2 * pairs, programs, entries


def lists_at_once(rows: int) -> int:
    """Return of how many lists, of so many blocks of queries, the programs are mixed."""
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
        block_size: of queries and of keys, multiples of ``SIDE``.
        group: query heads that share a list; 1 if one list is for all heads.
        turns: how often a program walks its items, for one head after the other.
        causal: leave out what lies right of the diagonal.
    """
    parts_q, parts_k = (side // SIDE for side in block_size)
    heads, nnz = col.shape
    blocks, programs, _ = sizes_of(heads, nnz, cols, block_size, group, turns)
    pairs, in_list = blocks // 2, blocks // cdiv(heads, group)
    rows = max((crow.shape[1] - 1) * parts_q, 1)
    device = crow.device

    head, row, column, valid = (x[..., None, None] for x in entries_of(crow, col, cols))
    row = row * parts_q + torch.arange(parts_q, device=device)[:, None]
    column = column * parts_k + torch.arange(parts_k, device=device)
    if causal:
        valid = valid & (column <= row)
    block = head // group * in_list + column
    # by rows first, so that what is cut holds all heads of some rows
    item = row * group + head % group
    entries = _united(block // 2, item, block % 2, valid, pairs, rows * group)
    entries, owned = _moved(entries, blocks, in_list, rows * group)
    owner, item, member, used = entries

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
    parts = _counts(own.clamp(min=0), own >= 0, blocks)

    # in the order of their work, and of each first what both blocks see whole
    part = torch.where(member == 2, 0, member + 2)
    if causal:
        is_cut = item // group <= (owned % in_list).amax(1)[owner]
        part = torch.where((part == 0) & is_cut, 1, part)
    order = _order(program, part, item // group, used, own.amax(1) // in_list, rows, turns)
    rank = torch.zeros_like(order).scatter_(0, order, place)
    end = programs * 4 * HEAD * group
    # by heads first, so that programs at work read few of them
    item = item % group * HEAD + item // group
    key = torch.where(used, (rank[program] * 4 + part) * HEAD * group + item, end).sort().values
    begin = torch.arange(4 * programs + 1, device=device) * (HEAD * group)
    begin = torch.searchsorted(key, begin)
    key = torch.where(key < end, key % (HEAD * group), 0)
    of_list = own.amax(1, keepdim=True) // in_list  # -1 of a program without a block
    owners = torch.cat([of_list, torch.where(own < 0, -1, own % in_list)], 1)[order]
    return Pairs(begin, parts, torch.cat([key, key.new_zeros(1)]).int(), owners.int())


def _most(steps: int, turns: int) -> int:
    """Return how many steps a program has in one of so many turns."""
    return max(steps // turns, 1)


def _moved(entries: _Entries, blocks: int, in_list: int, items: int) -> tuple[_Entries, Tensor]:
    """Move what a block sees without its neighbour to further owners, where that is of use.

    Returns the entries, and the two blocks of each owner.
    """
    owner, item, member, used = entries
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
    further = _united(rank[block] // 2, item, rank[block] % 2, moves, pairs, items)
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
    member = torch.where(moves, rank[block] % 2, member)
    owned = torch.cat([place, torch.where(is_moved[order], order, -1)]).view(-1, 2)
    return _united(owner, item, member, used, 2 * pairs, items), owned


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
    section = torch.where(of_list < 0, programs, of_list // lists_at_once(rows))
    longest = rows * programs
    key = (section * windows + first // WINDOW) * longest + (longest - 1 - length)
    return key.sort(stable=True).indices


def _united(
    owner: Tensor, item: Tensor, member: Tensor, valid: Tensor, owners: int, items: int
) -> _Entries:
    """Sort by owner and item, and unite what differs in the member alone."""
    end = owners * items * 4
    key = torch.where(valid, (owner * items + item) * 4 + member, end).flatten().sort().values
    nobody = key.new_full((1,), -4)
    # each once
    key = torch.where(torch.cat([nobody, key[:-1]]) == key, end, key).sort().values
    pair = key // 4
    used = (key < end) & (torch.cat([nobody, pair[:-1]]) != pair)
    member = torch.where(torch.cat([pair[1:], nobody]) == pair, 2, key % 4)
    return _Entries((pair // items).clamp(max=owners - 1), pair % items, member, used)


def _counts(owner: Tensor, used: Tensor, owners: int) -> Tensor:
    """Count what each owner has."""
    counts = owner.new_zeros(owners)
    return counts.scatter_add_(0, owner.flatten(), used.flatten().long())
