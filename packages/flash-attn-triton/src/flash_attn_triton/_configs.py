"""Tile choices by platform and shape class: pure functions that need no GPU.

A shape class is the padded head dimension and the element size. Nothing here may depend on lengths
or on the number of sequences: a sequence's result would then depend on its neighbours in the batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from attn_common import Platform, next_power_of_2

# the interpreter and the MMA instructions take no smaller side
MIN_TILE = 16


@dataclass(frozen=True)
class Tile:
    """Queries and keys that one step works on, and how the GPU runs it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    # of fp32 products: "ieee", or "tf32x3": tensor cores, three products each, as accurate
    precision: str = "ieee"


def padded_head_dim(head_dim: int) -> int:
    """Return the tile width that holds a head dimension."""
    return max(MIN_TILE, next_power_of_2(head_dim))


# the interpreter: small tiles, so that short sequences cross tile edges
_INTERPRETED = Tile(16, 16, 1, 1)

# rows: widest padded head dimension, then the tile
_Table = tuple[tuple[int, Tile], ...]

_FORWARD: dict[str, _Table] = {
    "hopper": (
        (128, Tile(128, 64, 8, 3)),
        (256, Tile(128, 64, 8, 2)),
    ),
    "nvidia": (
        (64, Tile(64, 64, 4, 3)),
        (128, Tile(64, 32, 4, 3)),
        (256, Tile(64, 32, 8, 2)),
    ),
    "amd": (
        (128, Tile(128, 64, 4, 1)),
        (256, Tile(64, 32, 4, 1)),
    ),
    "rdna": (
        (64, Tile(64, 32, 4, 1)),
        (128, Tile(64, 32, 8, 1)),
        (256, Tile(32, 32, 8, 1)),
    ),
    "hopper-fp32": (
        (64, Tile(64, 64, 4, 2, "tf32x3")),
        (128, Tile(128, 32, 8, 2, "tf32x3")),
        (256, Tile(16, 32, 8, 1, "tf32x3")),
    ),
    "nvidia-fp32": (
        (64, Tile(64, 32, 4, 1, "tf32x3")),
        (128, Tile(32, 32, 8, 1, "tf32x3")),
        (256, Tile(16, 32, 8, 1, "tf32x3")),
    ),
    "amd-fp32": (
        (64, Tile(64, 32, 4, 1)),
        (128, Tile(32, 32, 4, 1)),
        (256, Tile(16, 32, 4, 1)),
    ),
    "rdna-fp32": (
        (64, Tile(32, 32, 8, 1)),
        (128, Tile(16, 32, 8, 1)),
        (256, Tile(16, 16, 8, 1)),
    ),
}

_BACKWARD_DKDV: dict[str, _Table] = {
    "hopper": (
        (64, Tile(64, 64, 4, 3)),
        (128, Tile(64, 64, 4, 2)),
        (256, Tile(64, 64, 8, 2)),
    ),
    "nvidia": (
        (64, Tile(32, 64, 4, 2)),
        (128, Tile(16, 64, 4, 2)),
        (256, Tile(16, 32, 8, 1)),
    ),
    "amd": (
        (128, Tile(32, 64, 4, 1)),
        (256, Tile(16, 32, 4, 1)),
    ),
    "rdna": (
        (64, Tile(32, 32, 4, 1)),
        (128, Tile(32, 32, 8, 1)),
        (256, Tile(16, 16, 8, 1)),
    ),
    "hopper-fp32": (
        (64, Tile(32, 32, 4, 1, "tf32x3")),
        (128, Tile(32, 32, 8, 1, "tf32x3")),
        (256, Tile(16, 16, 8, 1, "tf32x3")),
    ),
    "nvidia-fp32": (
        (64, Tile(32, 32, 4, 1, "tf32x3")),
        (128, Tile(16, 32, 8, 1, "tf32x3")),
        (256, Tile(16, 16, 8, 1, "tf32x3")),
    ),
    "amd-fp32": (
        (64, Tile(32, 32, 4, 1)),
        (128, Tile(16, 32, 4, 1)),
        (256, Tile(16, 16, 4, 1)),
    ),
    "rdna-fp32": (
        (64, Tile(16, 16, 4, 1)),
        (128, Tile(16, 16, 8, 1)),
        (256, Tile(16, 16, 8, 1)),
    ),
}

_BACKWARD_DQ: dict[str, _Table] = {
    "hopper": (
        (64, Tile(64, 64, 4, 3)),
        (128, Tile(128, 64, 8, 3)),
        (256, Tile(128, 32, 8, 3)),
    ),
    "nvidia": (
        (64, Tile(64, 32, 4, 2)),
        (128, Tile(64, 32, 4, 2)),
        (256, Tile(32, 32, 8, 1)),
    ),
    "amd": (
        (128, Tile(64, 32, 4, 1)),
        (256, Tile(32, 16, 4, 1)),
    ),
    "rdna": (
        (64, Tile(32, 32, 4, 1)),
        (128, Tile(32, 32, 8, 1)),
        (256, Tile(16, 16, 8, 1)),
    ),
    "hopper-fp32": (
        (64, Tile(64, 32, 4, 1, "tf32x3")),
        (128, Tile(32, 32, 8, 1, "tf32x3")),
        (256, Tile(16, 16, 8, 1, "tf32x3")),
    ),
    "nvidia-fp32": (
        (64, Tile(32, 32, 4, 1, "tf32x3")),
        (128, Tile(32, 16, 8, 1, "tf32x3")),
        (256, Tile(16, 16, 8, 1, "tf32x3")),
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


@functools.cache
def forward_tile(platform: Platform, head_dim: int, itemsize: int) -> Tile:
    """Return the forward tile for the wider of the two head dimensions."""
    return _lookup(_FORWARD, platform, head_dim, itemsize)


@functools.cache
def backward_dkdv_tile(platform: Platform, head_dim: int, itemsize: int) -> Tile:
    """Return the tile of the pass that makes dk and dv."""
    return _lookup(_BACKWARD_DKDV, platform, head_dim, itemsize)


@functools.cache
def backward_dq_tile(platform: Platform, head_dim: int, itemsize: int) -> Tile:
    """Return the tile of the pass that makes dq."""
    return _lookup(_BACKWARD_DQ, platform, head_dim, itemsize)


@functools.cache
def bias_gradient_tile(platform: Platform, head_dim: int, itemsize: int) -> Tile:
    """Return the tile of the bias gradient: that of dq, but where three TF32 products overflow."""
    if platform.vendor == "nvidia" and itemsize == 4 and head_dim > 64:
        return Tile(16, 32, 8, 1, "tf32x3")
    return backward_dq_tile(platform, head_dim, itemsize)


def _lookup(tables: dict[str, _Table], platform: Platform, head_dim: int, itemsize: int) -> Tile:
    if platform.vendor == "cpu":
        return _INTERPRETED
    family = "amd" if platform.vendor == "amd" else "nvidia"
    if platform.is_hopper:
        family = "hopper"
    if platform.is_rdna:
        family = "rdna"
    table = tables[f"{family}-fp32" if itemsize == 4 else family]
    width = padded_head_dim(head_dim)
    return next(tile for widest, tile in table if width <= widest)
