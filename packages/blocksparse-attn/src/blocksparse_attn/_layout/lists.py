"""What kernels walk of a layout: for every tile the blocks that it has to visit, in order.

Their structure and sizes stand here. ``_layout/kernels/planning.py`` makes lists, and "Lists" in
``docs/how-it-works.md`` shows them by an example. Sizes are bounds that shapes give, so that the
host waits for nothing.

A *list* belongs to an owner, which is a tile of queries of one head (or of several that share
keys), or, transposed, a tile of keys. Its *items* are the key blocks to visit (or the query
blocks), sorted, each once, and first those that every *member* of the owner sees whole: they need
no mask. Members are the rows of blocks that a tile holds, or the heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from attn_common import cdiv
from torch import Tensor

# of the backward for Hopper: tokens of a block, of queries and of keys
SIDE = 64
# what a block of keys is seen by without its neighbours stays with them up to so many items
KEPT = 16
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


# more than a list has items
COUNTED = 1 << 21


class Lists(NamedTuple):
    """Items of every owner; owner ``list * owners + tile`` has ``items[begin[o]:begin[o + 1]]``."""

    begin: Tensor  # int64 [lists * owners + 1]
    # int64 [lists * owners]: how many of the first items need no mask; see ``ListSpec.halves``
    whole: Tensor
    items: Tensor  # int32 [bound + 1]
    members: Tensor  # int32 [bound + 1]: bit m says that member m sees the item


class Pairs(NamedTuple):
    """What the programs of the Hopper backward walk: program ``p`` from ``items[begin[4 * p]]`` on.

    A program owns two blocks of 64 keys, and multiplies blocks of queries with both at once, or, of
    queries that only one of them sees, one with either. The latter takes twice the traffic, and
    comes to as many steps as the longer of two lists, so a program should own blocks that the same
    queries see. Neighbours mostly are: of a band all but the ends. What one of two neighbours sees
    alone, as a column in a stride, is walked by a second program if that owns another such block
    that the same queries see, or if the other neighbour has no such list to walk beside it. Long
    walks are cut, so that no program runs much longer than others; what several programs find of
    one block of keys is added up.

    A block of 64 is part of a block of the layout, or several of them, its *pieces*. What sees no
    more than half of such a block is moved, if it is much, to blocks that are put together from
    anywhere: columns of a stride, which the same queries see, fill one between them.

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


class ListSpec(NamedTuple):
    """What lists are made from, besides the layout."""

    by_key: bool
    span: int  # positions, or keys, of an owner
    group: int  # heads that share a list's key head
    pack: int  # heads whose patterns a list unites, or, of pairs, that walk it in turn
    causal: bool
    paired: bool = False  # see ``Pairs``
    # what needs a mask is in the order of who sees it: both halves of the members, the second one
    # alone, the first alone; ``whole`` holds how many of the latter there are in units of
    # ``COUNTED`` and of its square
    halves: bool = False


def empty_lists(
    crow: Tensor, col: Tensor, cols: int, block_size: tuple[int, int], spec: ListSpec
) -> Lists | Pairs:
    """Return the tensors of a layout's lists, without their values.

    Args:
        crow: row pointers ``[heads, rows + 1]``.
        col: columns ``[heads, nnz]``.
        cols: number of key blocks.
        block_size: of queries and of keys.
        spec: what the lists are.
    """

    def ints(*size: int) -> Tensor:
        return crow.new_empty(size, dtype=torch.int32)

    def longs(*size: int) -> Tensor:
        return crow.new_empty(size, dtype=torch.int64)

    heads, nnz = col.shape
    if spec.paired:
        pieces, programs, bound = sizes_of(heads, nnz, cols, block_size, spec.group, spec.pack)
        named = 1 + 2 * SIDE // piece_of(block_size)
        owners = ints(programs, named)
        walked = longs(4 * programs + 1), longs(pieces), ints(bound + 1)
        return Pairs(*walked, owners, ints(1), ints(bound + 1))
    blocks, side = (cols, block_size[1]) if spec.by_key else (crow.shape[1] - 1, block_size[0])
    lists = cdiv(heads, spec.group) * (1 if spec.by_key else cdiv(spec.group, spec.pack))
    total = lists * max(cdiv(blocks, max(spec.span // side, 1)), 1)
    return Lists(longs(total + 1), longs(total), ints(heads * nnz + 1), ints(heads * nnz + 1))


def piece_of(block_size: tuple[int, int]) -> int:
    """Return the tokens of a piece."""
    return min(*block_size, SIDE)


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
    programs = owners + others + entries // steps_of(SHORTER, turns) + 1
    return 2 * pairs * (SIDE // piece), programs, entries


def steps_of(steps: int, turns: int) -> int:
    """Return how many steps a program has in one of so many turns."""
    return max(steps // turns, 1)


def heads_at_once(rows: int) -> int:
    """Return of how many heads with one list, of so many blocks, the programs are mixed.

    The last heads' long walks then begin earlier; more heads would not fit into the cache.
    """
    return max(MIXED // max(rows, 1), 1)


def entries_of(crow: Tensor, col: Tensor, cols: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return head, row and column of every slot of ``col``, and which are valid: not padding.

    All are ``[heads, nnz]``; the first three int64.
    """
    heads, nnz = col.shape
    rows = crow.shape[1] - 1
    slot = torch.arange(nnz, device=col.device).expand(heads, nnz)
    head = torch.arange(heads, device=col.device)[:, None].expand(heads, nnz)
    # of rows that begin at one slot all but the last are empty
    row = torch.searchsorted(crow.long().contiguous(), slot.contiguous(), right=True) - 1
    valid = (row >= 0) & (row < rows) & (col >= 0) & (col < cols)
    return head, row, col.long(), valid


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


def common_bounds(rule: Tensor, block_q: int) -> Tensor:
    """Return the range of keys that a row of blocks sees whole, of all sequences: [rows, 2]."""
    low, high = rule.view(len(rule), rule.shape[1] // block_q, block_q, 2).unbind(-1)
    return torch.stack([low.amax((0, 2)), high.amin((0, 2))], 1)


def whole_in_rule(rule: Tensor, cols: int, block_size: tuple[int, int]) -> Tensor:
    """Return of which blocks a rule hides nothing, bool ``[rows, cols]``."""
    low, high = common_bounds(rule, block_size[0]).long().unbind(1)
    first = torch.arange(cols, device=rule.device) * block_size[1]
    return (first >= low[:, None]) & (first + block_size[1] - 1 <= high[:, None])
