"""Blocks of 64 keys for the Hopper backward, made of the pieces that a layout's blocks are.

Blocks of 64 tokens or more have one piece a block. Of smaller ones several neighbours are a block,
and what sees no more than half of such a block is moved, if it is much, to blocks that are put
together from anywhere: columns of a stride, which the same queries see, fill one between them.

Plain PyTorch on the layout's device without a look at a value, as :mod:`._lists`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# tokens of a block, of queries and of keys
SIDE = 64
# what a block of keys is seen by without its neighbours stays with them up to so many items
KEPT = 16


class Blocks(NamedTuple):
    """What blocks are made of, those of a list one behind the other."""

    pieces: Tensor  # int64 [blocks, pieces of a block]: numbers within the list, or -1
    last: Tensor  # int64 [blocks]: the last 64 tokens from a multiple of 64 that it touches, or -1
    in_list: int  # blocks of a list
    whole: int  # the bits of who sees all of a block


def piece_of(block_size: tuple[int, int]) -> int:
    """Return the tokens of a piece."""
    return min(*block_size, SIDE)


def blocks_of(
    piece: Tensor,
    item: Tensor,
    sub: Tensor,
    valid: Tensor,
    pieces: int,
    in_list: int,
    items: int,
    side: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Blocks]:
    """Return ``(block, item, bits, used, blocks)``: what is kept, each block's item once.

    Args:
        piece: of keys, numbered through all lists.
        item: 64 queries of a head.
        sub: which piece of these.
        valid: which of the entries there are.
        pieces: of all lists.
        in_list: pieces of a list.
        items: more than there are.
        side: pieces of a block.
    """
    cells = side * side
    end = pieces // side * items * cells
    key = (piece // side * items + item) * cells + piece % side * side + sub
    key = _each_once(torch.where(valid, key, end).flatten(), end)
    used = key < end
    item, slot, sub = key // cells % items, key // side % side, key % side
    number = block = (key // (items * cells)).clamp(max=pieces // side - 1)
    piece = block * side + slot
    in_blocks = in_list // side
    if side > 1:
        rank, moves = _moved(key, piece, item, used, pieces, in_list, items, side)
        # of each list those of neighbours come first
        number = block // in_blocks * 2 * in_blocks + block % in_blocks
        gathered = rank // side // in_blocks * 2 * in_blocks + in_blocks + rank // side % in_blocks
        number = torch.where(moves, gathered[piece], number)
        slot = torch.where(moves, rank[piece] % side, slot)
        in_blocks *= 2
    blocks = pieces // in_list * in_blocks
    end = blocks * items * cells
    cell = torch.where(used, (number * items + item) * cells + slot * side + sub, end)
    cell, order = cell.sort()
    piece, used = piece[order], cell < end
    unit = cell // cells
    is_first = used & (torch.cat([unit.new_full((1,), -1), unit[:-1]]) != unit)
    index = (is_first.long().cumsum(0) - 1).clamp(min=0)
    bits = torch.zeros_like(cell).scatter_add_(0, index, torch.where(used, 1 << cell % cells, 0))[
        index
    ]
    number = (unit // items).clamp(max=blocks - 1)
    made = torch.full((blocks * side + 1,), -1, device=key.device)
    at = torch.where(used, number * side + cell % cells // side, blocks * side)
    made[at] = torch.where(used, piece % in_list, -1)
    made = made[:-1].view(blocks, side)
    return (
        number,
        unit % items,
        bits,
        is_first,
        Blocks(made, made.amax(1) // side, in_blocks, (1 << cells) - 1),
    )


def _moved(
    key: Tensor,
    piece: Tensor,
    item: Tensor,
    used: Tensor,
    pieces: int,
    in_list: int,
    items: int,
    side: int,
) -> tuple[Tensor, Tensor]:
    """Return in which order pieces are put together, and which entries are moved there."""
    # entries are sorted by block, item, piece
    line, unit = key // side, key // (side * side)
    nothing = key.new_full((1,), -1)
    is_line = used & (torch.cat([nothing, line[:-1]]) != line)
    is_unit = used & (torch.cat([nothing, unit[:-1]]) != unit)
    index = (is_unit.long().cumsum(0) - 1).clamp(min=0)
    lines = torch.zeros_like(key).scatter_add_(0, index, is_line.long())[index]
    is_apart = used & (2 * lines <= side)
    count = key.new_zeros(pieces).scatter_add_(0, piece, (is_apart & is_line).long())
    last = key.new_zeros(pieces).scatter_reduce_(
        0, torch.where(is_apart, piece, 0), torch.where(is_apart, item + 1, 0), "amax"
    )
    is_many = count > KEPT
    place = torch.arange(pieces, device=key.device)
    # in the order of their last ones: columns of one head end alike
    order = ((place // in_list * 2 + ~is_many) * (items + 1) + last).sort(stable=True).indices
    rank = torch.zeros_like(order).scatter_(0, order, place)
    return rank, is_apart & is_many[piece]


def _each_once(key: Tensor, end: int) -> Tensor:
    key = key.sort().values
    return torch.where(torch.cat([key.new_full((1,), -1), key[:-1]]) == key, end, key).sort().values
