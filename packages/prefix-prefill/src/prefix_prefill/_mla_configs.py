"""Which tile serves multi-head latent attention; see ``_configs.py``. Needs no GPU."""

from __future__ import annotations

import functools

from attn_common import Platform, next_power_of_2

from ._linked.host.tiles import MIN_TILE, Tile, family_of

# a key has up to 576 numbers, which serve as 512 values, too
_TILES = {
    "cpu": Tile(16, 16, 1, 1),
    "hopper": Tile(32, 32, 8, 2),
    "nvidia": Tile(16, 32, 8, 1),
    "amd": Tile(16, 16, 4, 1),
    "rdna": Tile(16, 16, 8, 1),
    # three products of TF32 each take more registers than there are
    "hopper-fp32": Tile(16, 16, 8, 1),
    "nvidia-fp32": Tile(16, 16, 8, 1),
    "amd-fp32": Tile(16, 16, 8, 1),
    "rdna-fp32": Tile(16, 16, 8, 1),
}


@functools.cache
def mla_tile(platform: Platform, itemsize: int, heads: int) -> Tile:
    """Return the tile of a platform for elements of that size; its rows are heads of tokens."""
    tile = _TILES[family_of(platform, itemsize)]
    rows = min(tile.block_m, max(MIN_TILE, next_power_of_2(heads)))
    return Tile(rows, tile.block_n, tile.num_warps, tile.num_stages, tile.precision)
