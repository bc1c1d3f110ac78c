"""Tile and schedule choices by platform and shape class: pure functions that need no GPU.

A shape class is the padded head dimensions and the dtype. A tile may not depend on lengths or on
the number of sequences: a sequence's result would then depend on its neighbours in the batch. Only
``schedule="auto"`` looks at those.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from attn_common import Platform, cdiv, next_power_of_2

# the interpreter and the MMA instructions take no smaller side
MIN_TILE = 16


@dataclass(frozen=True)
class Tile:
    """What one program holds of a state and reads at a step, and how the GPU runs it."""

    # tokens of a step
    chunk: int
    # columns of the state; its rows are whole
    block_e: int
    num_warps: int
    num_stages: int
    # terms of the values as they are written to the state, in 16 bits each: two hold 16 bits of
    # fraction. None: products with what was computed have fp32 operands, and ``precision``
    terms: int | None = None
    # of fp32 operands: "ieee"; "tf32x3", tensor cores, as accurate; "tf32" for fp16 inputs, whose
    # fractions it holds in full
    precision: str = "ieee"
    # tokens of a segment of the parallel schedule
    segment: int = 1024


@dataclass(frozen=True)
class DecodeTile:
    """What one program holds of a state."""

    block_e: int
    num_warps: int


# the interpreter: small tiles, so that short sequences cross tile edges
_INTERPRETED = Tile(16, 16, 1, 1, segment=32)

# rows: widest padded ``d``, then the tile
_Table = tuple[tuple[int, Tile], ...]

_WALK: dict[str, _Table] = {
    "hopper-bf16": (
        (64, Tile(64, 64, 4, 3, terms=2)),
        (128, Tile(64, 64, 4, 2, terms=2)),
        (256, Tile(64, 32, 8, 2, terms=2)),
    ),
    "nvidia-bf16": (
        (64, Tile(64, 32, 4, 2, terms=2)),
        (128, Tile(32, 64, 8, 2, terms=2)),
        (256, Tile(32, 32, 8, 1, terms=2)),
    ),
    "amd-bf16": (
        (64, Tile(64, 64, 4, 1, terms=2)),
        (128, Tile(64, 32, 4, 1, terms=2)),
        (256, Tile(32, 32, 4, 1, terms=2)),
    ),
    "rdna-bf16": (
        (64, Tile(32, 32, 4, 1, terms=2)),
        (128, Tile(32, 16, 8, 1, terms=2)),
        (256, Tile(16, 16, 8, 1, terms=2)),
    ),
    "rdna-fp16": (
        (64, Tile(16, 16, 4, 1)),
        (128, Tile(16, 16, 8, 1)),
        (256, Tile(16, 16, 8, 1)),
    ),
    "nvidia-fp16": (
        (64, Tile(64, 32, 4, 2, precision="tf32")),
        (128, Tile(32, 32, 4, 2, precision="tf32")),
        (256, Tile(32, 16, 4, 1, precision="tf32")),
    ),
    "amd-fp16": (
        (64, Tile(32, 32, 4, 1)),
        (128, Tile(32, 32, 4, 1)),
        (256, Tile(16, 16, 4, 1)),
    ),
    "nvidia-fp32": (
        (64, Tile(16, 32, 8, 1, precision="tf32x3")),
        (128, Tile(16, 32, 8, 1, precision="tf32x3")),
        # three products of such rows leave no registers
        (256, Tile(16, 16, 8, 1)),
    ),
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
}

# Programs of the sequential schedule that keep a GPU busy, one to a multiprocessor, and segments
# below which the parallel one has nothing to gain.
BUSY = 96
FEWEST_SEGMENTS = 4


def padded(head_dim: int) -> int:
    """Return the tile width that holds a head dimension."""
    return max(MIN_TILE, next_power_of_2(head_dim))


@functools.cache
def walk_tile(platform: Platform, d: int, e: int, dtype: str) -> Tile:
    """Return the tile of a walk whose states are ``d x e``; ``dtype`` is bf16, fp16 or fp32."""
    tile = _lookup(platform, d, dtype)
    # no wider than the values
    block_e = min(tile.block_e, padded(e))
    return tile if block_e == tile.block_e else replace(tile, block_e=block_e)


@functools.cache
def decode_tile(platform: Platform, d: int, e: int) -> DecodeTile:
    """Return the tile of a decoding step."""
    if platform.vendor == "cpu":
        return DecodeTile(16, 1)
    # 16 KiB of state a program: many programs even for one sequence
    return DecodeTile(min(padded(e), max(MIN_TILE, 4096 // padded(d))), 4 if d <= 128 else 8)


def use_segments(schedule: str, tile: Tile, e: int, heads: int, batch: int, tokens: int) -> bool:
    """Decide whether a walk goes by segments; ``tokens`` are those of all sequences.

    The parallel schedule reads keys and values twice and moves a state per segment, so it has to
    win by filling what the sequential one leaves idle.
    """
    if schedule != "auto":
        return schedule == "parallel"
    programs = batch * heads * cdiv(e, tile.block_e)
    return 2 * programs <= BUSY and tokens >= FEWEST_SEGMENTS * tile.segment * batch


def _lookup(platform: Platform, d: int, dtype: str) -> Tile:
    if platform.vendor == "cpu":
        return _INTERPRETED
    family = "amd" if platform.vendor == "amd" else "nvidia"
    if platform.is_hopper and f"hopper-{dtype}" in _WALK:
        family = "hopper"
    if platform.is_rdna and f"rdna-{dtype}" in _WALK:
        family = "rdna"
    table = _WALK[f"{family}-{dtype}"]
    return next(tile for widest, tile in table if padded(d) <= widest)
