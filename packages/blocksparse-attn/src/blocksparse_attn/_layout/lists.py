"""Structure and sizes of lists: for every tile, the blocks that a kernel visits, in order.

``_layout/kernels/planning.py`` makes lists; "Lists" in ``docs/how-it-works.md`` has an example.
Sizes are upper bounds from shapes, so that the host need not wait for the device.

A *list* belongs to an *owner*: a tile of queries of one head (or of several that share keys), or a
tile of keys. Its *items* are the key blocks (or query blocks) to visit, each once. First come the
items that every *member* of the owner sees whole, which need no mask; each part is sorted. Members
are the rows of blocks of a tile, or its heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from attn_common import cdiv
from torch import Tensor

# the Hopper backward: tokens per block of queries and per block of keys
SIDE = 64
# up to so many items that see a block of keys without its neighbour stay with the neighbours
KEPT = 16
# an item is head * HEAD + row; rows of blocks are less than HEAD
HEAD = 1 << 16
# most steps of a program that owns neighbours, and of one that owns other blocks
LONGEST = 96
SHORTER = 48
# programs count as equal in the sort if they begin in the same WINDOW blocks of queries, so that
# programs at work share the cache, and if their steps differ by less than ALIKE
WINDOW = 128
ALIKE = 4
# programs of heads that share a list are interleaved, up to so many blocks of queries in all
MIXED = 256
# no list has so many items
COUNTED = 1 << 21


class Lists(NamedTuple):
    """Items of every owner; owner ``list * owners + tile`` has ``items[begin[o]:begin[o + 1]]``."""

    begin: Tensor  # int64 [lists * owners + 1]
    # int64 [lists * owners]: number of the first items that need no mask; see ``ListSpec.halves``
    whole: Tensor
    items: Tensor  # int32 [bound + 1]
    members: Tensor  # int32 [bound + 1]: bit m: member m sees the item


class Pairs(NamedTuple):
    """The lists of the Hopper backward; program ``p`` begins at ``items[begin[4 * p]]``.

    A program owns two blocks of 64 keys. Blocks of queries that see both are multiplied with both
    at once. For queries that see only one, the two warpgroups take different blocks of queries:
    that takes twice the traffic, and as many steps as the longer of the two lists. So a program
    should own blocks that the same queries see. Neighbours mostly are such blocks: all but the ends
    of a band. If many queries see one of two neighbours without the other, as in a column of a
    stride, a further program walks them, provided that it owns another such block that the same
    queries see, or that the other neighbour has no such list to walk at the same time. Long walks
    are cut, so that no program runs much longer than the rest; the contributions of several
    programs to one block of keys are summed.

    A block of 64 tokens is a part of a block of the layout, or several blocks, its *pieces*. If
    many items see at most half of the pieces of such a block, these pieces move to blocks that are
    put together from pieces of any position: columns of a stride that the same queries see.

    An item is ``head * HEAD + row``, with the head's index in its group. Each program has four
    parts: items that see both blocks whole; items that see both, but not whole; items that see
    only the first block; items that see only the second block.
    """

    begin: Tensor  # int64 [4 * programs + 1]
    parts: Tensor  # int64 [lists * pieces]: number of programs that own a piece
    items: Tensor  # int32 [bound + 1]
    # int32 [programs, 1 + pieces]: list and the pieces of the two blocks of keys, or -1
    owners: Tensor
    real: Tensor  # int32 [1]: number of programs; the rest up to the bound is unused
    # int32 [bound + 1]: 16 bits for the first block, 16 for the second. With n pieces per block,
    # bit ``i * n + j``: piece j of the queries sees piece i of the keys
    bits: Tensor


class ListSpec(NamedTuple):
    """All that determines lists, apart from the layout."""

    by_key: bool
    span: int  # positions, or keys, per owner
    group: int  # heads that share a list's key head
    pack: int  # heads whose patterns a list unites; for pairs, heads that walk a list one by one
    causal: bool
    paired: bool = False  # see ``Pairs``
    # items that need a mask are sorted by who sees them: both halves of the members, only the
    # second half, only the first; ``whole`` then holds the numbers of the last two kinds as well,
    # times ``COUNTED`` and its square
    halves: bool = False


def empty_lists(
    crow: Tensor, col: Tensor, cols: int, block_size: tuple[int, int], spec: ListSpec
) -> Lists | Pairs:
    """Return the tensors of a layout's lists, without their values.

    Args:
        crow: row pointers ``[heads, rows + 1]``.
        col: columns ``[heads, nnz]``.
        cols: number of key blocks.
        block_size: tokens per block, ``(q, k)``.
        spec: the kind of lists.
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


def by_sequence(x: Tensor, batch: int) -> Tensor:
    """View a tensor with a row per sequence and head as ``[batch, heads, ...]``; 0: as it is."""
    return x.view(batch, len(x) // batch, *x.shape[1:]) if batch else x


def piece_of(block_size: tuple[int, int]) -> int:
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
    """Return the number of steps of a program for each of ``turns`` heads."""
    return max(steps // turns, 1)


def heads_at_once(rows: int) -> int:
    """Return for how many heads that share a list of ``rows`` rows the programs are interleaved.

    Then the last heads' long walks begin earlier; more heads would not fit into the cache.
    """
    return max(MIXED // max(rows, 1), 1)


def entries_of(crow: Tensor, col: Tensor, cols: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return head, row and column of every entry of ``col``, and which are valid (not padding).

    All are ``[heads, nnz]``; the first three are int64.
    """
    heads, nnz = col.shape
    rows = crow.shape[1] - 1
    slot = torch.arange(nnz, device=col.device).expand(heads, nnz)
    head = torch.arange(heads, device=col.device)[:, None].expand(heads, nnz)
    # if several rows begin at one entry, all but the last are empty
    row = torch.searchsorted(crow.long().contiguous(), slot.contiguous(), right=True) - 1
    valid = (row >= 0) & (row < rows) & (col >= 0) & (col < cols)
    return head, row, col.long(), valid


def dense_of(crow: Tensor, col: Tensor, cols: int) -> Tensor:
    """Return the mask of blocks, bool ``[heads, rows, cols]`` or ``[batch, heads, rows, cols]``."""
    leading = crow.shape[:-1]
    crow, col = crow.flatten(0, -2), col.flatten(0, -2)
    head, row, column, valid = entries_of(crow, col, cols)
    shape = (crow.shape[0], crow.shape[1] - 1, cols)
    size = shape[0] * shape[1] * shape[2]
    # one more element, for invalid entries
    dense = torch.zeros(size + 1, dtype=torch.bool, device=crow.device)
    at = (head * shape[1] + row) * shape[2] + column
    dense[torch.where(valid, at, size)] = True
    return dense[:size].view(*leading, *shape[1:])


def common_bounds(rule: Tensor, block_q: int) -> Tensor:
    """Return the keys that all queries of a row of blocks see, in all sequences: [rows, 2]."""
    low, high = rule.view(len(rule), rule.shape[1] // block_q, block_q, 2).unbind(-1)
    return torch.stack([low.amax((0, 2)), high.amin((0, 2))], 1)


def whole_in_rule(rule: Tensor, cols: int, block_size: tuple[int, int]) -> Tensor:
    """Return the blocks in which a token rule hides nothing, bool ``[rows, cols]``."""
    low, high = common_bounds(rule, block_size[0]).long().unbind(1)
    first = torch.arange(cols, device=rule.device) * block_size[1]
    return (first >= low[:, None]) & (first + block_size[1] - 1 <= high[:, None])
