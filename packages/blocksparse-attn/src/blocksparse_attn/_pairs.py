"""Which two blocks of keys a program of the Hopper backward owns, and the queries that it walks.

A program owns two blocks of keys, and multiplies blocks of queries with both at once, or, of
queries that only one of them sees, one with either. The latter takes twice the traffic, and comes
to as many steps as the longer of two lists, so a program should own blocks that the same queries
see. Neighbours mostly are: of a band all but the ends. What one of two neighbours sees alone, as a
column in a stride, is walked by a second program if that owns another such block that the same
queries see, or if the other neighbour has no such list to walk beside it. Long walks are cut, so
that no program runs much longer than others; what several programs find of one block of keys is
added up.

This is the definition, in plain PyTorch; see :mod:`._lists`. Blocks here have 64 tokens; a block of
the layout is several of them, or, if it is small, a *piece* of one. Of pieces :mod:`._pieces` makes
blocks, which then differ in what of them a query sees: see ``Pairs.bits``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from attn_common import cdiv
from torch import Tensor

from ._lists import by_key, filled, kept_of, padded
from ._pieces import KEPT, SIDE, Blocks, blocks_of, in_order, piece_of

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
    most = torch.full_like(weights, 2 * _most(LONGEST, turns))
    most[pairs:] = 2 * _most(SHORTER, turns)
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


def _most(steps: int, turns: int) -> int:
    """Return how many steps a program has in one of so many turns."""
    return max(steps // turns, 1)


def _shared_out(made: Blocks) -> tuple[Tensor, Tensor]:
    """Give neighbours an owner, and move what a block sees without its own where that is of use.

    Returns the cells that each owner walks of two blocks, ``[owners, 2, items]``, and these blocks.
    """
    cells = made.cells
    blocks, items = cells.shape
    other = cells.view(-1, 2, items).flip(1).view(blocks, items)
    is_alone = (cells != 0) & (other == 0)
    # blocks of many such items, in the order of their last ones, two and two
    order, is_many = in_order(is_alone, made.in_list, KEPT)
    place = torch.arange(blocks, device=cells.device)
    rank = torch.zeros_like(order).scatter_(0, order, place)
    moves = (is_alone & is_many[:, None])[order].view(-1, 2, items)
    shared, apart = (moves.sum(1) == count for count in (2, 1))
    is_alike = is_many & (2 * shared.sum(1) >= apart.sum(1))[rank // 2]
    # where one of two neighbours moves, the other is left without what to walk beside
    alone = is_alone.sum(1)
    left = torch.where(is_alike, 0, alone).view(-1, 2).flip(1).flatten()
    is_moved = is_many & (is_alike | (alone - left > KEPT))
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
