"""Blocks of 64 keys for the Hopper backward, made of the pieces that a layout's blocks are.

Blocks of 64 tokens or more have one piece a block. Of smaller ones several neighbours are a block,
and what sees no more than half of such a block is moved, if it is much, to blocks that are put
together from anywhere: columns of a stride, which the same queries see, fill one between them.
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

    # int64 [blocks, items]: bit ``i * n + j`` says that of n pieces of the item the j-th sees the
    # i-th of the block
    cells: Tensor
    pieces: Tensor  # int64 [blocks, pieces of a block]: numbers within the list, or -1
    last: Tensor  # int64 [blocks]: the last 64 tokens from a multiple of 64 that it touches, or -1
    in_list: int  # blocks of a list


def piece_of(block_size: tuple[int, int]) -> int:
    """Return the tokens of a piece."""
    return min(*block_size, SIDE)


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
        order, is_many = in_order(is_apart, in_list, KEPT)
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
