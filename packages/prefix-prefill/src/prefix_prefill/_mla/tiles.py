"""Which kernel and tile serve multi-head latent attention; see ``_paged/tiles.py``."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from attn_common import Platform, detect, next_power_of_2

from .._linked.host.arguments import FP32_TINY
from .._linked.host.tiles import MIN_TILE, Tile, family_of
from .._paged import tiles
from .._paged.tiles import MIN_PIECE, copied_keys, is_mappable
from .call import MlaOptions, MlaTensors

# a key has up to 576 numbers, the first 512 of which are also its value
_TILES = {
    "cpu": Tile(16, 16, 1, 1),
    "hopper": Tile(32, 32, 8, 2),
    "nvidia": Tile(16, 32, 8, 1),
    "amd": Tile(16, 16, 4, 1),
    "rdna": Tile(16, 16, 8, 1),
    # tf32x3, three TF32 products each, would not fit the registers
    "hopper-fp32": Tile(16, 16, 8, 1),
    "nvidia-fp32": Tile(16, 16, 8, 1),
    "amd-fp32": Tile(16, 16, 8, 1),
    "rdna-fp32": Tile(16, 16, 8, 1),
}


@functools.cache
def mla_tile(platform: Platform, itemsize: int, heads: int) -> Tile:
    """Return the tile of a platform; a row is one head of one token."""
    tile = _TILES[family_of(platform, itemsize)]
    rows = min(tile.block_m, max(MIN_TILE, next_power_of_2(heads)))
    return Tile(rows, tile.block_n, tile.num_warps, tile.num_stages, tile.precision)


# ---- the kernel for Hopper


class HopperTile(NamedTuple):
    """How a program of the Hopper kernel divides its work."""

    rows: int
    block_n: int
    stages: int  # tiles of keys in shared memory
    registers: int  # registers per thread when a program begins


# the queries and each of two tiles of keys take 72 KiB of the 227 KiB of shared memory
HOPPER_TILE = HopperTile(64, 64, 2, 168)
# the only head_dim and head_dim_v of the Hopper kernels
HOPPER_HEAD_DIMS = 576, 512


def takes_hopper_mla(x: MlaTensors, options: MlaOptions) -> bool:
    """Return whether a Hopper kernel serves a call; the portable kernel serves the rest."""
    return (
        tiles.HOPPER
        and x.q.device.type != "cpu"
        and detect(x.q.device).is_hopper
        and (x.q.shape[2], x.out.shape[2]) == HOPPER_HEAD_DIMS
        and is_mappable(x.kv_cache[:, :, None])
        and (_takes_fp8(x) or _takes_16_bits(x, options))
    )


def _takes_fp8(x: MlaTensors) -> bool:
    return x.kv_cache.element_size() == 1 and x.q.element_size() <= 2


def _takes_16_bits(x: MlaTensors, options: MlaOptions) -> bool:
    return (
        x.q.dtype in (torch.float16, torch.bfloat16)
        and x.kv_cache.dtype == x.q.dtype
        and copied_keys(x.kv_cache.shape[1], -1, MIN_PIECE) == MIN_PIECE
        # the scale is folded into the exponential; only a positive one commutes with the maximum
        and options.softmax_scale >= FP32_TINY
    )
