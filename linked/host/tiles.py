"""Tables of tiles, by the family of a GPU and the width of a head. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from attn_common import Platform, next_power_of_2

# the interpreter and the MMA instructions take no smaller side
MIN_TILE = 16
# and no fewer numbers of 8 bits are multiplied and added at once
MIN_FP8_SUM = 32


@dataclass(frozen=True)
class Tile:
    """Rows of queries and keys that one step works on, and how the GPU runs it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    # of fp32 products: "ieee", or "tf32x3": tensor cores, three products each, as accurate
    precision: str = "ieee"


T = TypeVar("T")
# of each family, as ``family_of`` names it: the widest padded head dimension, then the tile
Table = dict[str, tuple[tuple[int, T], ...]]


def padded_head_dim(head_dim: int, itemsize: int = 2) -> int:
    """Return the tile width that holds a head dimension of elements of that size."""
    return max(MIN_FP8_SUM if itemsize == 1 else MIN_TILE, next_power_of_2(head_dim))


def family_of(platform: Platform, itemsize: int) -> str:
    """Return the family whose tiles a platform takes: ``cpu``, ``amd``, ``hopper-fp32``.

    The CPU runs the interpreter. A GPU that is not known takes the careful tiles of its vendor.
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
    """Return the tile of a platform, for the widest head dimension and the size of an element."""
    width = padded_head_dim(head_dim)
    rows = table[family_of(platform, itemsize)]
    return next(tile for widest, tile in rows if width <= widest)


def hopper_registers(warpgroups: int) -> int:
    """Return the registers a thread at the start: of those that multiply, and one that copies."""
    return 65536 // (128 * (warpgroups + 1)) // 8 * 8
