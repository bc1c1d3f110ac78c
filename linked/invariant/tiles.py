"""Tile sizes of rows and keys: a part of the law, so neither a call nor the load changes them."""

from __future__ import annotations

import functools

from attn_common import Platform

from ..host.tiles import Table, Tile, find_tile

# keys per segment: a multiple of every tile
SEGMENT = 1024
INTERPRETED_SEGMENT = 64

_TILES: Table[Tile] = {
    "cpu": ((256, Tile(16, 16, 1, 1)),),
    "hopper": (
        (128, Tile(64, 64, 4, 3)),
        (256, Tile(64, 64, 8, 2)),
    ),
    "nvidia": (
        (64, Tile(64, 64, 4, 3)),
        (128, Tile(64, 32, 4, 3)),
        (256, Tile(64, 32, 8, 2)),
    ),
    "amd": (
        (128, Tile(64, 64, 4, 1)),
        (256, Tile(64, 32, 4, 1)),
    ),
    "rdna": (
        (64, Tile(64, 32, 4, 1)),
        (128, Tile(64, 16, 8, 1)),
        (256, Tile(32, 16, 8, 1)),
    ),
    "hopper-fp32": (
        (64, Tile(64, 32, 4, 2, "tf32x3")),
        (128, Tile(32, 32, 4, 2, "tf32x3")),
        (256, Tile(16, 32, 4, 1, "tf32x3")),
    ),
    "nvidia-fp32": (
        (64, Tile(64, 32, 4, 1, "tf32x3")),
        (128, Tile(32, 32, 4, 1, "tf32x3")),
        (256, Tile(16, 32, 4, 1, "tf32x3")),
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


@functools.cache
def invariant_tile(platform: Platform, head_dim: int, itemsize: int) -> Tile:
    """Return the tile for the wider of the two head dimensions and the queries' element size."""
    return find_tile(_TILES, platform, head_dim, itemsize)


def segment_of(platform: Platform) -> int:
    """Return the keys per segment; few in the interpreter, so that tests have several segments."""
    return INTERPRETED_SEGMENT if platform.vendor == "cpu" else SEGMENT
