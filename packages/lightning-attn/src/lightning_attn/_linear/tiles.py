"""Tile and schedule choices by platform and shape class: pure functions that need no GPU.

A shape class is the padded head dimensions and the dtype. A tile must not depend on lengths or on
the number of sequences: a sequence's result would then depend on its batch. Only
``schedule="auto"`` uses them.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace

from attn_common import Platform, cdiv, round_up

from .._linked.host.tiles import MIN_TILE, Table, find_tile, padded_head_dim


@dataclass(frozen=True)
class Tile:
    """Columns of the state per program and tokens per step, and how the GPU runs it."""

    # tokens per step
    chunk: int
    # columns of the state; a program has all of its rows
    block_e: int
    num_warps: int
    num_stages: int
    # terms of 16 bits of the values that are written to the state: two hold 16 bits of fraction.
    # None: products with computed operands are in fp32, by ``precision``
    terms: int | None = None
    # of fp32 products: "ieee"; "tf32x3": three on tensor cores, about as accurate; "tf32" for fp16
    # inputs, whose fractions it holds in full
    precision: str = "ieee"
    # tokens per segment of the parallel schedule
    segment: int = 1024
    # columns and warps per program if there are enough programs; they change no bit
    wide: tuple[int, int] | None = None


@dataclass(frozen=True)
class WalkPlan:
    """Tile and schedule of one walk."""

    tile: Tile
    segmented: bool
    # tokens per segment
    size: int


@dataclass(frozen=True)
class DecodeTile:
    """Columns of the state and warps per program."""

    block_e: int
    num_warps: int


# the interpreter: small tiles, so that short sequences cross tile edges
_INTERPRETED = Tile(16, 16, 1, 1, segment=32)

_CPU = {"cpu": ((256, _INTERPRETED),)}

_NVIDIA_FP16 = (
    (64, Tile(64, 32, 4, 2, precision="tf32")),
    (128, Tile(32, 32, 4, 2, precision="tf32")),
    (256, Tile(32, 16, 4, 1, precision="tf32")),
)
_NVIDIA_FP32 = (
    (64, Tile(16, 32, 8, 1, precision="tf32x3")),
    (128, Tile(16, 32, 8, 1, precision="tf32x3")),
    # tf32x3 products of such rows would spill registers
    (256, Tile(16, 16, 8, 1)),
)

_WALK: dict[str, Table[Tile]] = {
    "bf16": {
        **_CPU,
        "hopper": (
            (64, Tile(64, 64, 4, 3, terms=2)),
            (128, Tile(64, 64, 4, 3, terms=2, wide=(128, 8))),
            (256, Tile(64, 32, 8, 2, terms=2)),
        ),
        "nvidia": (
            (64, Tile(64, 32, 4, 2, terms=2)),
            (128, Tile(32, 64, 8, 2, terms=2)),
            (256, Tile(32, 32, 8, 1, terms=2)),
        ),
        "amd": (
            (64, Tile(64, 64, 4, 1, terms=2)),
            (128, Tile(64, 32, 4, 1, terms=2)),
            (256, Tile(16, 32, 4, 1, terms=2)),
        ),
        "rdna": (
            (64, Tile(32, 32, 4, 1, terms=2)),
            (128, Tile(32, 16, 8, 1, terms=2)),
            (256, Tile(16, 16, 8, 1, terms=2)),
        ),
    },
    "fp16": {
        **_CPU,
        "hopper": _NVIDIA_FP16,
        "nvidia": _NVIDIA_FP16,
        "amd": (
            (64, Tile(32, 32, 4, 1)),
            (128, Tile(32, 32, 4, 1)),
            (256, Tile(16, 16, 4, 1)),
        ),
        "rdna": (
            (64, Tile(16, 16, 4, 1)),
            (128, Tile(16, 16, 8, 1)),
            (256, Tile(16, 16, 8, 1)),
        ),
    },
    "fp32": {
        **_CPU,
        "hopper-fp32": _NVIDIA_FP32,
        "nvidia-fp32": _NVIDIA_FP32,
        "amd-fp32": (
            (64, Tile(32, 32, 4, 1)),
            (128, Tile(32, 16, 4, 1)),
            (256, Tile(16, 16, 4, 1)),
        ),
        "rdna-fp32": (
            (64, Tile(16, 16, 4, 1)),
            (128, Tile(16, 16, 8, 1)),
            (256, Tile(16, 16, 8, 1)),
        ),
    },
}


@dataclass(frozen=True)
class HopperTile:
    """How a program of the walk in Gluon divides its work; every warpgroup has 64 columns."""

    warpgroups: int
    # chunks of 64 tokens in shared memory
    stages: int

    @property
    def registers(self) -> int:
        """Registers per thread at the start."""
        return {1: 136, 2: 168}[self.warpgroups]


# 0: the portable kernel serves every call, for comparisons
HOPPER = os.environ.get("LIGHTNING_ATTN_HOPPER", "1") != "0"

# concurrent programs, one per multiprocessor
BUSY = 132
# smallest segment, in tokens, that is worth its launches and its state
SMALLEST_SEGMENT = 256


@functools.cache
def walk_tile(platform: Platform, d: int, e: int, dtype: str) -> Tile:
    """Return the tile of a walk whose states are ``d x e``; ``dtype`` is bf16, fp16 or fp32."""
    tile = find_tile(_WALK[dtype], platform, d, 4 if dtype == "fp32" else 2)
    # at most the padded width of the values
    block_e = min(tile.block_e, padded_head_dim(e))
    return tile if block_e == tile.block_e else replace(tile, block_e=block_e)


@functools.cache
def decode_tile(platform: Platform, d: int, e: int) -> DecodeTile:
    """Return the tile of a decoding step."""
    if platform.vendor == "cpu":
        return DecodeTile(16, 1)
    # 16 KiB of state per program, all in flight at once
    return DecodeTile(min(padded_head_dim(e), max(MIN_TILE, 4096 // padded_head_dim(d))), 2)


def takes_hopper_walk(platform: Platform, d: int, e: int, dtype: str) -> bool:
    """Return whether the walk in Gluon serves states of ``d x e``."""
    return (
        HOPPER
        and platform.is_hopper
        and dtype == "bf16"
        and 64 <= padded_head_dim(d) <= 128
        and padded_head_dim(e) >= 64
    )


def hopper_tile(block_e: int) -> HopperTile:
    """Return the tile of a program with ``block_e`` columns."""
    return HopperTile(2, 4) if block_e > 64 else HopperTile(1, 5)


def plan_walk(schedule: str, tile: Tile, e: int, heads: int, batch: int, tokens: int) -> WalkPlan:
    """Choose tile and schedule of a walk; ``tokens`` is the total of all sequences.

    A schedule by name depends only on the shape class and the heads. ``"auto"`` also depends on the
    batch: it takes segments, as many as the GPU has room for, if walks of whole sequences would
    leave half of it idle. Segments read keys and values twice.
    """
    if schedule != "auto":
        return WalkPlan(_for_programs(tile, e, heads), schedule == "parallel", tile.segment)
    walks = heads * batch
    segments = BUSY // (walks * cdiv(e, _wide(tile, e).block_e))
    if 2 * walks * cdiv(e, tile.block_e) > BUSY or segments < 2:
        return WalkPlan(_for_programs(tile, e, walks), False, tile.segment)
    smallest = min(SMALLEST_SEGMENT, tile.segment)
    size = max(smallest, round_up(cdiv(tokens, batch * segments), tile.chunk))
    pieces = max(walks, heads * cdiv(tokens, size))
    return WalkPlan(_for_programs(tile, e, pieces), tokens > size * batch, size)


def _wide(tile: Tile, e: int) -> Tile:
    if tile.wide is None or padded_head_dim(e) <= tile.block_e:
        return tile
    columns, warps = tile.wide
    return replace(tile, block_e=columns, num_warps=warps)


def _for_programs(tile: Tile, e: int, walks: int) -> Tile:
    """Return the tile for a number of walks of sequences or segments."""
    return _wide(tile, e) if walks * cdiv(e, tile.block_e) > BUSY else tile
