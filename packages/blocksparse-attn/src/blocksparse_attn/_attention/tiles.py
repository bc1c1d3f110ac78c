"""Tile choices by platform and shape class: pure functions that need no GPU.

A shape class is the padded head dimension, the element size, the block size and how heads share
patterns. Tiles must not depend on lengths or on the number of sequences: otherwise a sequence's
result would depend on its neighbours in the batch.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from attn_common import Platform, detect, next_power_of_2

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

# sequences of at most so many queries take the short tile, whatever else is in the batch
SHORT = 8
# pipeline stages of the Hopper backward
BACKWARD_STAGES = 4


@dataclass(frozen=True)
class HopperTile:
    """Queries and keys per step of the Hopper kernel, and its pipeline stages."""

    stages_k: int
    stages_v: int
    rows: int = 64  # per warpgroup; there are two
    block_n: int = 128

    @property
    def block_m(self) -> int:
        return 2 * self.rows

    @property
    def registers(self) -> int:
        """Registers per thread at the start of the kernel."""
        return hopper_registers(2)


@dataclass(frozen=True)
class Shape:
    """The rows of a tile of queries, and the list that it walks."""

    tile: Tile | HopperTile
    positions: int  # consecutive positions
    heads: int  # query heads of one group: row m is position m // heads of head m % heads
    span: int  # positions that share one list: a multiple of ``positions``
    group: int  # query heads per key head of a list; 1 if lists are per query head, or shared
    pack: int  # heads whose patterns a list unites


# the interpreter: small tiles (two small blocks per side), so that short sequences cross tile edges
_INTERPRETED = ((256, Tile(32, 32, 1, 1)),)

# for rows of blocks that keep similar blocks
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

# for rows of blocks that differ; a family without an entry uses ``_TALL``
_LOW: Table[Tile] = {
    "hopper": ((128, Tile(64, 64, 4, 3)), (256, Tile(64, 32, 8, 2))),
    "amd": ((128, Tile(64, 64, 4, 1)), (256, Tile(64, 32, 4, 1))),
}

# for a few queries of all heads of a group
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

# for blocks of fewer than 64 queries: each block of a step needs registers for an address
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
    """Return the function that chooses tiles of many queries from two tables."""

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


# tiles of queries of the forward and of dq; ``head_dim`` is the wider of the two head dimensions
tall_shape = _prefill_shape(_TALL, _LOW)
backward_dq_shape = _prefill_shape(_BACKWARD_DQ, _BACKWARD_DQ_LOW)


@functools.cache
def short_shape(
    platform: Platform, head_dim: int, itemsize: int, block_q: int, group: int, is_shared: bool
) -> Shape:
    """Return the tile of a few queries; it holds as many heads of a group as fit."""
    tile = find_tile(_SHORT, platform, head_dim, itemsize)
    heads = min(next_power_of_2(group), tile.block_m)
    pack = 1 if is_shared else heads
    # blocks have at least 16 queries, so a tile lies within one row of blocks
    return Shape(tile, tile.block_m // heads, heads, block_q, group if pack > 1 else 1, pack)


@functools.cache
def backward_dkdv_tile(platform: Platform, head_dim: int, itemsize: int, block_q: int) -> Tile:
    """Return the tile of the launch that makes dk and dv."""
    tile = find_tile(_BACKWARD_DKDV, platform, head_dim, itemsize)
    if block_q < tile.block_m and family_of(platform, itemsize) in _BACKWARD_DKDV_SMALL:
        return find_tile(_BACKWARD_DKDV_SMALL, platform, head_dim, itemsize)
    return tile


def _packed_heads(tile: Tile, block_q: int, group: int) -> int:
    """Return how many heads share a tile that is taller than a row of blocks."""
    heads = 1
    while group % (2 * heads) == 0 and tile.block_m // (2 * heads) >= block_q:
        heads *= 2
    return heads


# ---- the kernel for Hopper

# BLOCKSPARSE_ATTN_HOPPER=0 runs the portable kernels, which serve every call, for comparisons
HOPPER = os.environ.get("BLOCKSPARSE_ATTN_HOPPER", "1") != "0"


def takes_hopper_forward(x: Tensors, pattern: Pattern, options: Options) -> bool:
    """Say whether the Hopper kernel computes a call's long sequences."""
    return suits_hopper(
        detect(x.q.device),
        max(x.q.shape[-1], x.v.shape[-1]),
        x.q.element_size(),
        pattern.block_q,
        pattern.block_k,
        options.causal,
    ) and walks_whole_blocks(x, options)


def walks_whole_blocks(x: Tensors, options: Options) -> bool:
    """Check the conditions of the Hopper kernel that do not concern platform, sizes and dtype."""
    # it copies whole blocks: no pages, and no keys that a token rule may hide from all queries; it
    # folds the scale into the exponential, and only a positive scale commutes with the maximum
    return (
        x.block_table is None
        and x.rule is None
        and options.softmax_scale >= FP32_TINY
        and not may_end_early(options.causal, options.top_left)
    )


def may_end_early(causal: bool, top_left: bool) -> bool:
    """Say whether no query may see some keys of a kept block on the diagonal.

    With bottom-right alignment the last query stands at the last key, so all of them are seen.
    """
    return causal and top_left


def suits_hopper(
    platform: Platform, head_dim: int, itemsize: int, block_q: int, block_k: int, causal: bool
) -> bool:
    """Say whether the Hopper forward supports these sizes; ``head_dim`` is the wider of the two."""
    # it copies whole blocks, and a block wider than block_q may hold keys after the last query
    return suits_any_hopper(platform, head_dim, itemsize) and (block_k <= block_q or not causal)


def suits_any_hopper(platform: Platform, head_dim: int, itemsize: int) -> bool:
    """Check what both Hopper kernels require; ``head_dim`` is the wider of the two."""
    return (
        HOPPER
        and platform.is_hopper
        and itemsize == 2
        and 32 < head_dim <= 128  # up to 32, half of a tile would be padding
    )


# limits of temporary memory: pairs of small blocks (32 heads, 32k tokens, blocks of 16) and pairs
# of blocks of 64 tokens (32 heads, a million tokens), whose bitmap takes 1 GiB
MOST_PIECES = 2**27
MOST_BLOCKS = 2**33


def takes_hopper_backward(x: Tensors, pattern: Pattern) -> bool:
    """Say whether the Hopper backward may run for calls of this signature.

    ``is_covered`` is checked here for sequences of one length, and at each call for packed ones,
    whose lengths are not part of the signature. Gradients that repeat also need the Hopper forward.
    """
    return (
        suits_hopper_backward(
            detect(x.q.device), max(x.q.shape[-1], x.v.shape[-1]), x.q.element_size()
        )
        and x.block_table is None
        and x.rule is None
        and not pattern.batch  # all sequences share its lists
        and pattern.rows * pattern.block_q < 2**22  # the range of an item's row
        and has_few_pieces(pattern, 1 if pattern.is_shared else x.q.shape[-2])
        and (x.cu_seqlens_q is not None or is_covered(pattern, x.k.shape[-3], 1))
    )


def has_few_pieces(pattern: Pattern, heads: int) -> bool:
    """Say whether the temporary memory of making the lists of so many heads is acceptable."""
    piece = min(pattern.block_q, pattern.block_k)
    rows, cols = pattern.rows * pattern.block_q, pattern.cols * pattern.block_k
    pieces = heads * (rows // piece) * (cols // piece)
    return pieces <= (MOST_PIECES if piece < 64 else MOST_BLOCKS)


def is_covered(pattern: Pattern, tokens: int, sequences: int) -> bool:
    """Say whether the mean sequence fills at least a quarter of what the layout covers.

    Each sequence starts all programs of the layout, even those that find no work.
    """
    return sequences * pattern.cols * pattern.block_k <= 4 * tokens


class ShortRows(NamedTuple):
    """Mean number of keys per row up to which dq has its own launch."""

    grouped: int  # if several query heads share a key head
    alone: int  # if none do


# A launch of its own takes 7 products instead of 5, but no sums of dq are cleared, added to in
# memory and rounded. So the limit depends on the memory bandwidth; measured on an H100 and an H200,
# see benchmarks/NOTES.md
SHORT_ROWS = ShortRows(832, 416)
SHORT_ROWS_FAST = ShortRows(512, 0)
# bandwidth per multiprocessor, in bytes per second, of fast memory: an H100 has 25e9, an H200 36e9
FAST_BYTES = 30e9


def has_short_rows(
    pattern: Pattern, slots: int, head_dim: int, group: int, device: torch.device
) -> bool:
    """Say whether rows are so short that the Hopper backward is faster without sums of dq.

    The answer depends on the layout's shapes and on the GPU, not on the layout's values or on a
    call's sequences: ``slots``, the entries of ``col`` per head, bounds the number of kept blocks.
    Blocks of fewer than 64 tokens and head dimensions up to 64 were faster with sums.
    """
    if min(pattern.block_q, pattern.block_k) < 64 or head_dim <= 64:
        return False
    limits = SHORT_ROWS_FAST if has_fast_memory(device) else SHORT_ROWS
    most = limits.grouped if group > 1 else limits.alone
    return slots * pattern.block_k <= most * pattern.rows


def has_fast_memory(device: torch.device) -> bool:
    """Say whether the bandwidth per multiprocessor is high, by the clocks that the driver gives."""
    if device not in _FAST:
        # ahead-of-time builds without a GPU are for an H100
        _FAST[device] = device.type == "cuda" and _bytes_a_second(device) >= FAST_BYTES
    return _FAST[device]


# cached answers; torch.compile treats them as constants
_FAST: dict[torch.device, bool] = {}
has_fast_memory._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _bytes_a_second(device: torch.device) -> float:
    """Return the memory bandwidth per multiprocessor."""
    gpu = torch.cuda.get_device_properties(device)
    # the clock is in kHz, with two transfers per cycle
    rate = 2e3 * gpu.memory_clock_rate * gpu.memory_bus_width / 8
    return rate / gpu.multi_processor_count


def repeats() -> bool:
    """Say whether PyTorch was asked for results that repeat bit for bit."""
    # dynamo does not support the warn_only query
    return torch.are_deterministic_algorithms_enabled() and (
        torch.compiler.is_compiling() or not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def suits_hopper_backward(platform: Platform, head_dim: int, itemsize: int) -> bool:
    """Say whether the Hopper backward supports these sizes; ``head_dim`` is the wider one."""
    return suits_any_hopper(platform, head_dim, itemsize)


@functools.cache
def hopper_dq_tile(head_dim: int) -> HopperTile:
    """Return the tile of dq's own launch, for the wider of the two head dimensions."""
    # dout takes the shared memory of one stage
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


# half steps are faster in layouts of up to so many keys; longer layouts have longer rows
HALVED = 8192


def has_halves(shape: Shape, pattern: Pattern, causal: bool) -> bool:
    """Say whether the Hopper kernel's lists name the blocks that only one half of a tile sees.

    The answer depends on the layout, not on a sequence's length, so that a packed sequence has the
    same bits as a fixed one. It needs a causal mask: without one, lists are searched and must be
    sorted. With smaller blocks the copying warp would need more numbers than it has registers.
    """
    is_half = 2 * pattern.block_q == 2 * pattern.block_k == shape.tile.block_m
    is_short = pattern.cols * pattern.block_k <= HALVED
    return causal and shape.heads == 1 and is_half and is_short
