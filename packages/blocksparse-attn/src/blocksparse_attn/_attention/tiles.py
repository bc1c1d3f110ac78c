"""Tile choices by platform and shape class: pure functions that need no GPU.

A shape class is the padded head dimension, the element size, the block size and how heads share
patterns. Nothing here may depend on lengths or on the number of sequences: a sequence's result
would then depend on its neighbours in the batch.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from attn_common import Platform, detect, has_gluon, next_power_of_2

from .._linked.host.arguments import FP32_TINY
from .._linked.host.tiles import (
    Table,
    Tile,
    family_of,
    find_tile,
    hopper_registers,
    padded_head_dim,
)
from .call import Options, Pattern, Tensors

# queries of a sequence up to which it takes the short tile, whatever shares the batch
SHORT = 8
# steps that the copies of the backward for Hopper are ahead
BACKWARD_STAGES = 4


@dataclass(frozen=True)
class HopperTile:
    """Queries and keys of a step of the kernel for Hopper, and how many the copies are ahead."""

    stages_k: int
    stages_v: int
    rows: int = 64  # of a warpgroup, of which there are two
    block_n: int = 128

    @property
    def block_m(self) -> int:
        return 2 * self.rows

    @property
    def registers(self) -> int:
        """Registers a thread, at the start."""
        return hopper_registers(2)


@dataclass(frozen=True)
class Shape:
    """What the rows of a tile of queries are, and which list it walks."""

    tile: Tile | HopperTile
    positions: int  # consecutive positions
    heads: int  # of one group: row m is position m // heads of head m % heads
    span: int  # positions that one list serves: a multiple of ``positions``
    group: int  # query heads that share a list's key head; 1 if lists are per head, or shared
    pack: int  # heads whose patterns a list unites


# the interpreter: small tiles, of two small blocks a side, so that short sequences cross tile edges
_INTERPRETED = ((256, Tile(32, 32, 1, 1)),)

# for rows of blocks that resemble each other
_TALL: Table[Tile] = {
    "cpu": _INTERPRETED,
    "hopper": ((128, Tile(128, 64, 8, 3)), (256, Tile(128, 32, 8, 2))),
    "nvidia": ((64, Tile(64, 64, 4, 3)), (128, Tile(64, 32, 4, 3)), (256, Tile(64, 32, 8, 2))),
    "amd": ((128, Tile(128, 64, 4, 1)), (256, Tile(64, 32, 4, 1))),
    "rdna": ((64, Tile(64, 32, 4, 1)), (128, Tile(64, 32, 8, 1)), (256, Tile(32, 32, 8, 1))),
    "hopper-fp32": (
        (64, Tile(64, 64, 4, 2, "tf32x3")),
        (128, Tile(32, 32, 8, 2, "tf32x3")),
        (256, Tile(16, 16, 8, 2, "tf32x3")),
    ),
    "nvidia-fp32": (
        (64, Tile(64, 32, 4, 1, "tf32x3")),
        (128, Tile(32, 32, 4, 1, "tf32x3")),
        (256, Tile(16, 32, 4, 1, "tf32x3")),
    ),
    "amd-fp32": ((64, Tile(64, 32, 4, 1)), (128, Tile(32, 32, 4, 1)), (256, Tile(16, 32, 4, 1))),
    "rdna-fp32": ((64, Tile(32, 32, 8, 1)), (128, Tile(16, 32, 8, 1)), (256, Tile(16, 16, 8, 1))),
}

# for those that do not; where no row is here, the tile above is low enough
_LOW: Table[Tile] = {
    "hopper": ((128, Tile(64, 64, 4, 3)), (256, Tile(64, 32, 8, 2))),
    "amd": ((128, Tile(64, 64, 4, 1)), (256, Tile(64, 32, 4, 1))),
}

# a few queries of all heads of a group
_SHORT: Table[Tile] = {
    "cpu": ((256, Tile(16, 32, 1, 1)),),
    "hopper": ((128, Tile(16, 64, 4, 3)), (256, Tile(16, 64, 4, 2))),
    "nvidia": ((128, Tile(16, 64, 4, 3)), (256, Tile(16, 32, 4, 2))),
    "amd": ((128, Tile(16, 64, 4, 1)), (256, Tile(16, 32, 4, 1))),
    "rdna": ((128, Tile(16, 32, 4, 1)), (256, Tile(16, 16, 4, 1))),
    "hopper-fp32": ((128, Tile(16, 32, 4, 2, "tf32x3")), (256, Tile(16, 16, 8, 2, "tf32x3"))),
    "nvidia-fp32": ((128, Tile(16, 32, 4, 2, "tf32x3")), (256, Tile(16, 16, 4, 2, "tf32x3"))),
    "amd-fp32": ((128, Tile(16, 32, 4, 1)), (256, Tile(16, 16, 4, 1))),
    "rdna-fp32": ((128, Tile(16, 16, 4, 1)), (256, Tile(16, 16, 4, 1))),
}

_BACKWARD_DKDV: Table[Tile] = {
    "cpu": _INTERPRETED,
    "hopper": ((64, Tile(64, 64, 4, 3)), (128, Tile(64, 64, 4, 2)), (256, Tile(64, 64, 8, 2))),
    "nvidia": ((64, Tile(32, 64, 4, 2)), (128, Tile(16, 64, 4, 2)), (256, Tile(16, 32, 8, 1))),
    "amd": ((128, Tile(32, 64, 4, 1)), (256, Tile(16, 32, 4, 1))),
    "rdna": ((64, Tile(32, 32, 4, 1)), (128, Tile(32, 32, 8, 1)), (256, Tile(16, 16, 8, 1))),
    "hopper-fp32": (
        (64, Tile(32, 64, 4, 1, "tf32x3")),
        (128, Tile(32, 32, 8, 1, "tf32x3")),
        (256, Tile(16, 16, 8, 1, "tf32x3")),
    ),
    "nvidia-fp32": (
        (64, Tile(32, 32, 4, 1, "tf32x3")),
        (128, Tile(16, 32, 4, 1, "tf32x3")),
        (256, Tile(16, 16, 4, 1, "tf32x3")),
    ),
    "amd-fp32": ((64, Tile(32, 32, 4, 1)), (128, Tile(16, 32, 4, 1)), (256, Tile(16, 16, 4, 1))),
    "rdna-fp32": ((64, Tile(16, 16, 4, 1)), (128, Tile(16, 16, 8, 1)), (256, Tile(16, 16, 8, 1))),
}

# for blocks of fewer than 64 queries: several a step hold an address each, for which registers fail
_BACKWARD_DKDV_SMALL: Table[Tile] = {
    "hopper": ((128, Tile(32, 64, 4, 2)), (256, Tile(32, 64, 8, 2)))
}

_BACKWARD_DQ: Table[Tile] = {
    "cpu": _INTERPRETED,
    "hopper": ((64, Tile(64, 64, 4, 3)), (128, Tile(128, 64, 8, 3)), (256, Tile(32, 64, 8, 2))),
    "nvidia": ((64, Tile(64, 32, 4, 2)), (128, Tile(64, 32, 4, 2)), (256, Tile(32, 32, 8, 1))),
    "amd": ((128, Tile(64, 32, 4, 1)), (256, Tile(32, 16, 4, 1))),
    "rdna": ((64, Tile(32, 32, 4, 1)), (128, Tile(32, 32, 8, 1)), (256, Tile(16, 16, 8, 1))),
    "hopper-fp32": (
        (64, Tile(64, 64, 4, 1, "tf32x3")),
        (128, Tile(32, 32, 8, 1, "tf32x3")),
        (256, Tile(16, 16, 8, 1, "tf32x3")),
    ),
    "nvidia-fp32": (
        (64, Tile(32, 32, 4, 1, "tf32x3")),
        (128, Tile(32, 16, 4, 1, "tf32x3")),
        (256, Tile(16, 16, 4, 1, "tf32x3")),
    ),
    "amd-fp32": ((64, Tile(32, 32, 4, 1)), (128, Tile(32, 16, 4, 1)), (256, Tile(16, 16, 4, 1))),
    "rdna-fp32": ((64, Tile(16, 16, 4, 1)), (128, Tile(16, 16, 8, 1)), (256, Tile(16, 16, 8, 1))),
}
_BACKWARD_DQ_LOW: Table[Tile] = {"hopper": ((128, Tile(64, 64, 4, 2)), (256, Tile(32, 64, 8, 2)))}


def _prefill_shape(tall: Table[Tile], low: Table[Tile]) -> Callable[..., Shape]:
    """Return what chooses tiles of many queries from two tables."""

    @functools.cache
    def choose(
        platform: Platform,
        head_dim: int,
        itemsize: int,
        block_q: int,
        group: int,
        is_shared: bool,
        rows_alike: bool,
    ) -> Shape:
        tile = find_tile(tall, platform, head_dim, itemsize)
        heads = _packed_heads(tile, block_q, group) if is_shared else 1
        is_low = not rows_alike and tile.block_m // heads > block_q
        if is_low and family_of(platform, itemsize) in low:
            tile = find_tile(low, platform, head_dim, itemsize)
            heads = _packed_heads(tile, block_q, group) if is_shared else 1
        positions = tile.block_m // heads
        return Shape(tile, positions, heads, max(positions, block_q), 1, 1)

    return choose


# the forward's tile of queries, and that of dq, for the wider of the two head dimensions
tall_shape = _prefill_shape(_TALL, _LOW)
backward_dq_shape = _prefill_shape(_BACKWARD_DQ, _BACKWARD_DQ_LOW)


@functools.cache
def short_shape(
    platform: Platform, head_dim: int, itemsize: int, block_q: int, group: int, is_shared: bool
) -> Shape:
    """Return the tile of a few queries of as many heads of a group as it holds."""
    tile = find_tile(_SHORT, platform, head_dim, itemsize)
    heads = min(next_power_of_2(group), tile.block_m)
    pack = 1 if is_shared else heads
    # a tile lies within one row of blocks: blocks have 16 queries or more
    return Shape(tile, tile.block_m // heads, heads, block_q, group if pack > 1 else 1, pack)


@functools.cache
def backward_dkdv_tile(platform: Platform, head_dim: int, itemsize: int, block_q: int) -> Tile:
    """Return the tile of the pass that makes dk and dv."""
    tile = find_tile(_BACKWARD_DKDV, platform, head_dim, itemsize)
    if block_q < tile.block_m and family_of(platform, itemsize) in _BACKWARD_DKDV_SMALL:
        return find_tile(_BACKWARD_DKDV_SMALL, platform, head_dim, itemsize)
    return tile


def _packed_heads(tile: Tile, block_q: int, group: int) -> int:
    """Return how many heads with one pattern fill a tile that a row of blocks does not."""
    heads = 1
    while group % (2 * heads) == 0 and tile.block_m // (2 * heads) >= block_q:
        heads *= 2
    return heads


# ---- the kernel for Hopper

# for comparisons, and in case of doubt: the portable kernels serve every call
HOPPER = os.environ.get("BLOCKSPARSE_ATTN_HOPPER", "1") != "0"


def takes_hopper_forward(x: Tensors, pattern: Pattern, options: Options) -> bool:
    """Say whether the kernel for Hopper serves a call's long sequences; portable ones the rest."""
    return suits_hopper(
        detect(x.q.device),
        max(x.q.shape[-1], x.v.shape[-1]),
        x.q.element_size(),
        pattern.block_q,
        pattern.block_k,
        options.causal,
    ) and walks_whole_blocks(x, options)


def walks_whole_blocks(x: Tensors, options: Options) -> bool:
    """Say whether nothing but its form could keep a call from the kernel for Hopper."""
    # its copies take whole blocks, and neither pages nor keys that a rule may hide from all; the
    # scale is folded into the exponential, where only a positive one commutes with the maximum
    return (
        x.block_table is None
        and x.rule is None
        and options.softmax_scale >= FP32_TINY
        and not may_end_early(options.causal, options.top_left)
    )


def may_end_early(causal: bool, top_left: bool) -> bool:
    """Say whether keys of a block on the diagonal may face no query that sees them.

    Where the last query stands at the last key, all keys of a block that is kept are seen.
    """
    return causal and top_left


def suits_hopper(
    platform: Platform, head_dim: int, itemsize: int, block_q: int, block_k: int, causal: bool
) -> bool:
    """Say whether the kernel for Hopper takes calls of a form, by the wider head dimension."""
    # whole blocks are copied: under a causal mask, a wide one may hold keys that no row sees
    return suits_any_hopper(platform, head_dim, itemsize) and (block_k <= block_q or not causal)


def suits_any_hopper(platform: Platform, head_dim: int, itemsize: int) -> bool:
    """Say what the kernels for Hopper ask of a form alike, by the wider head dimension."""
    return (
        HOPPER
        and platform.is_hopper
        and itemsize == 2
        and 32 < head_dim <= 128  # of less, half of a tile would be padding
        and has_gluon()
    )


# pairs of small blocks, as 32 heads have over 32k tokens in blocks of 16: more would need too much
# memory for a moment
MOST_PIECES = 2**27
# likewise of pairs of blocks of 64 tokens, as 32 heads have over a million: their bits take 1 GiB
MOST_BLOCKS = 2**33


def takes_hopper_backward(x: Tensors, pattern: Pattern) -> bool:
    """Say whether the backward for Hopper serves calls of a form; the portable one has the rest.

    It serves what ``is_covered``: of packed calls, whose lengths are no part of the form, that is
    asked at each. What repeats, it makes of calls that the forward for Hopper serves, too.
    """
    return (
        suits_hopper_backward(
            detect(x.q.device), max(x.q.shape[-1], x.v.shape[-1]), x.q.element_size()
        )
        and x.block_table is None
        and x.rule is None
        and not pattern.batch  # its lists are for all sequences
        and pattern.rows * pattern.block_q < 2**22  # as many as items can tell apart
        and has_few_pieces(pattern, 1 if pattern.is_shared else x.q.shape[-2])
        and (x.cu_seqlens_q is not None or is_covered(pattern, x.k.shape[-3], 1))
    )


def has_few_pieces(pattern: Pattern, heads: int) -> bool:
    """Say whether lists can be made of all blocks of so many heads, if they are small."""
    piece = min(pattern.block_q, pattern.block_k)
    rows, cols = pattern.rows * pattern.block_q, pattern.cols * pattern.block_k
    pieces = heads * (rows // piece) * (cols // piece)
    return pieces <= (MOST_PIECES if piece < 64 else MOST_BLOCKS)


def is_covered(pattern: Pattern, tokens: int, sequences: int) -> bool:
    """Say whether sequences are, in the mean, a good part of what the layout covers.

    Each has all programs of the layout, also those that then find nothing to do.
    """
    return sequences * pattern.cols * pattern.block_k <= 4 * tokens


class ShortRows(NamedTuple):
    """Keys of a row in the mean up to which dq has a launch of its own."""

    grouped: int  # where several query heads share a key head
    alone: int


# 7 products in place of 5, but nothing of dq is cleared, added up in memory and rounded, which
# takes as long for few keys. So it depends on the memory; measured on an H100 and an H200, see the
# notes
SHORT_ROWS = ShortRows(832, 416)
SHORT_ROWS_FAST = ShortRows(512, 0)
# bytes a second for each multiprocessor from which memory is fast: an H100's brings 25e9, an
# H200's 36e9
FAST_BYTES = 30e9


def has_short_rows(
    pattern: Pattern, slots: int, head_dim: int, group: int, device: torch.device
) -> bool:
    """Say whether rows are so short that the backward for Hopper is faster without sums of dq.

    That depends on the layout's shapes and on the GPU, not on the layout's values, and not on the
    sequences of a call: the slots that a head has for its kept blocks are a bound of them. Blocks
    of fewer than 64 tokens, and head dimensions up to 64, keep their sums, which were faster.
    """
    if min(pattern.block_q, pattern.block_k) < 64 or head_dim <= 64:
        return False
    limits = SHORT_ROWS_FAST if has_fast_memory(device) else SHORT_ROWS
    most = limits.grouped if group > 1 else limits.alone
    return slots * pattern.block_k <= most * pattern.rows


def has_fast_memory(device: torch.device) -> bool:
    """Say whether memory brings much to each multiprocessor, by the clocks of the driver."""
    if device not in _FAST:
        # kernels that are built for no GPU are built for an H100
        _FAST[device] = device.type == "cuda" and _bytes_a_second(device) >= FAST_BYTES
    return _FAST[device]


# the answers; torch.compile takes them for constants, as it does with ``has_gluon``
_FAST: dict[torch.device, bool] = {}
has_fast_memory._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _bytes_a_second(device: torch.device) -> float:
    """Return how many bytes memory brings in a second to each multiprocessor."""
    gpu = torch.cuda.get_device_properties(device)
    # in kHz, and twice a clock
    rate = 2e3 * gpu.memory_clock_rate * gpu.memory_bus_width / 8
    return rate / gpu.multi_processor_count


def repeats() -> bool:
    """Say whether PyTorch was asked for results that repeat bit for bit."""
    # dynamo does not know of the second switch
    return torch.are_deterministic_algorithms_enabled() and (
        torch.compiler.is_compiling() or not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def suits_hopper_backward(platform: Platform, head_dim: int, itemsize: int) -> bool:
    """Say whether the backward for Hopper takes calls of a form, by the wider head dimension."""
    return suits_any_hopper(platform, head_dim, itemsize)


@functools.cache
def hopper_dq_tile(head_dim: int) -> HopperTile:
    """Return the tile of dq in a launch of its own, for the wider of the two head dimensions."""
    # the output's gradient takes the place of a stage
    return HopperTile(3, 3) if padded_head_dim(head_dim) <= 64 else HopperTile(2, 2)


@functools.cache
def hopper_tile(head_dim: int) -> HopperTile:
    """Return the tile for the wider of the two head dimensions."""
    return HopperTile(3, 3) if padded_head_dim(head_dim) <= 64 else HopperTile(3, 2)


@functools.cache
def hopper_shape(head_dim: int, block_q: int, group: int, is_shared: bool) -> Shape:
    """Return the Hopper kernel's tile of queries: two heads of one pattern, or one head."""
    tile = hopper_tile(head_dim)
    heads = 2 if is_shared and group % 2 == 0 and block_q <= tile.rows else 1
    positions = tile.block_m // heads
    return Shape(tile, positions, heads, max(positions, block_q), 1, 1)


# keys that a layout covers, up to which half steps are faster: rows are longer in longer layouts
HALVED = 8192


def has_halves(shape: Shape, pattern: Pattern, causal: bool) -> bool:
    """Say whether the Hopper kernel's lists tell what either half of a tile sees alone.

    That depends on the layout, not on a sequence's length, so that a packed sequence has the bits
    of the same one in the fixed form. Only under a causal mask: without one lists are searched, and
    have to be sorted. Of smaller blocks the copying warp would have to know more numbers than it
    has registers.
    """
    is_half = 2 * pattern.block_q == 2 * pattern.block_k == shape.tile.block_m
    is_short = pattern.cols * pattern.block_k <= HALVED
    return causal and shape.heads == 1 and is_half and is_short
