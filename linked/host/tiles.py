"""Tables of tiles by GPU family and head dimension. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from attn_common import Platform, next_power_of_2

# the smallest side of a tile that the interpreter and the MMA instructions take
MIN_TILE = 16
# the smallest inner dimension of an FP8 product
MIN_FP8_SUM = 32


@dataclass(frozen=True)
class Tile:
    """Queries and keys per step, and how the GPU runs a step."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    # of fp32 products: "ieee", or "tf32x3": three products on tensor cores, about as accurate
    precision: str = "ieee"


T = TypeVar("T")
# by family (see ``family_of``): rows of the widest padded head dimension and its tile
Table = dict[str, tuple[tuple[int, T], ...]]


def padded_head_dim(head_dim: int, itemsize: int = 2) -> int:
    """Return the tile width for a head dimension and an element size in bytes."""
    return max(MIN_FP8_SUM if itemsize == 1 else MIN_TILE, next_power_of_2(head_dim))


def family_of(platform: Platform, itemsize: int) -> str:
    """Return the family whose tiles a platform takes, such as ``cpu``, ``amd``, ``hopper-fp32``.

    ``cpu`` is the interpreter. An unknown GPU takes the careful tiles of its vendor.
    """
    if platform.vendor == "cpu":
        return "cpu"
    family = "amd" if platform.vendor == "amd" else "nvidia"
    if platform.is_hopper:
        family = "hopper"
    if platform.is_rdna:
        family = "rdna"
    return f"{family}-fp32" if itemsize == 4 else family


def find_tile(table: Table[T], platform: Platform, head_dim: int, itemsize: int) -> T:
    """Return a platform's tile for the widest head dimension and an element size in bytes."""
    width = padded_head_dim(head_dim)
    rows = table[family_of(platform, itemsize)]
    return next(tile for widest, tile in rows if width <= widest)


def hopper_registers(warpgroups: int) -> int:
    """Return the initial registers per thread of consumer warpgroups and one producer warpgroup."""
    return 65536 // (128 * (warpgroups + 1)) // 8 * 8
