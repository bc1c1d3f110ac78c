"""Which kernel serves a call, and its tile sizes; no function here needs a GPU.

A tile depends on the padded head dimension, on element sizes, and for short sequences on the number
of query heads per key head. It never depends on the batch: then the bits of a sequence's result
would depend on the other sequences. Only the number of splits follows the load, unless the caller
fixes it.

A row of a tile is one query head of one token; all rows of a tile belong to one head of keys.
"""

from __future__ import annotations

import functools
import os

import torch
from attn_common import Platform, cdiv, detect, next_power_of_2
from torch import Tensor

from .._cache.layout import is_packed, numbers_of_byte
from .._linked.host.arguments import FP32_TINY
from .._linked.host.tiles import (
    MIN_TILE,
    Table,
    Tile,
    family_of,
    find_tile,
    padded_head_dim,
)
from .call import Options, Tensors

# rows of the largest tile for short sequences
MAX_SHORT_ROWS = 64
# largest padded head dimension that allows this many rows
WIDEST_SHORT_ROWS = 256

# for the interpreter: small tiles, so that short sequences cross tile edges
_INTERPRETED = ((512, Tile(16, 16, 1, 1)),)

_LONG: Table[Tile] = {
    "cpu": _INTERPRETED,
    "hopper": (
        (128, Tile(128, 64, 8, 3)),
        (256, Tile(128, 64, 8, 2)),
        (512, Tile(32, 32, 8, 2)),
    ),
    "nvidia": (
        (64, Tile(64, 64, 4, 3)),
        (128, Tile(64, 32, 8, 3)),
        (256, Tile(32, 32, 8, 2)),
        (512, Tile(32, 16, 8, 1)),
    ),
    "amd": (
        (128, Tile(128, 64, 4, 1)),
        (256, Tile(64, 32, 4, 1)),
        (512, Tile(32, 16, 8, 1)),
    ),
    "rdna": (
        (64, Tile(64, 32, 4, 1)),
        (128, Tile(64, 16, 8, 1)),
        (256, Tile(32, 16, 8, 1)),
        (512, Tile(16, 16, 8, 1)),
    ),
    "hopper-fp32": (
        (64, Tile(64, 64, 4, 2, "tf32x3")),
        (128, Tile(128, 32, 8, 2, "tf32x3")),
        (256, Tile(64, 32, 8, 1, "tf32x3")),
        (512, Tile(16, 16, 8, 1)),
    ),
    "nvidia-fp32": (
        (64, Tile(32, 32, 4, 1, "tf32x3")),
        (128, Tile(16, 32, 4, 1, "tf32x3")),
        (256, Tile(16, 32, 8, 1, "tf32x3")),
        (512, Tile(16, 16, 8, 1)),
    ),
    "amd-fp32": (
        (64, Tile(64, 32, 4, 1)),
        (128, Tile(32, 32, 4, 1)),
        (256, Tile(16, 32, 4, 1)),
        (512, Tile(16, 16, 8, 1)),
    ),
    "rdna-fp32": (
        (64, Tile(32, 32, 8, 1)),
        (128, Tile(16, 32, 8, 1)),
        (256, Tile(16, 16, 8, 1)),
        (512, Tile(16, 16, 8, 1)),
    ),
}

# block_m holds up to 16 query heads per key head; short_tile raises it for more
_SHORT: Table[Tile] = {
    "cpu": _INTERPRETED,
    "hopper": (
        (64, Tile(16, 128, 4, 3)),
        (128, Tile(16, 64, 4, 4)),
        (256, Tile(16, 32, 4, 3)),
        (512, Tile(16, 32, 8, 2)),
    ),
    "nvidia": (
        (64, Tile(16, 64, 4, 3)),
        (128, Tile(16, 32, 4, 3)),
        (256, Tile(16, 32, 4, 2)),
        (512, Tile(16, 16, 8, 1)),
    ),
    "amd": (
        (128, Tile(16, 64, 4, 1)),
        (256, Tile(16, 32, 4, 1)),
        (512, Tile(16, 16, 4, 1)),
    ),
    "rdna": (
        (64, Tile(16, 32, 4, 1)),
        (128, Tile(16, 32, 8, 1)),
        (256, Tile(16, 16, 8, 1)),
        (512, Tile(16, 16, 8, 1)),
    ),
    "hopper-fp32": (
        (64, Tile(16, 64, 4, 2, "tf32x3")),
        (256, Tile(16, 32, 4, 2, "tf32x3")),
        (512, Tile(16, 16, 8, 1)),
    ),
    "nvidia-fp32": (
        (128, Tile(16, 32, 4, 2, "tf32x3")),
        (256, Tile(16, 32, 8, 1, "tf32x3")),
        (512, Tile(16, 16, 8, 1)),
    ),
    "amd-fp32": (
        (128, Tile(16, 32, 4, 1)),
        (256, Tile(16, 32, 4, 1)),
        (512, Tile(16, 16, 8, 1)),
    ),
    "rdna-fp32": (
        (128, Tile(16, 32, 8, 1)),
        (256, Tile(16, 16, 8, 1)),
        (512, Tile(16, 16, 8, 1)),
    ),
}

# for caches that are read in words, where their tiles differ from _SHORT; by words_of
_RDNA = ((512, Tile(16, 16, 8, 1)),)
_SHORT_OF_WORDS: dict[str, Table[Tile]] = {
    "fp8": {
        "hopper": (
            (64, Tile(16, 128, 4, 4)),
            (128, Tile(16, 64, 4, 4)),
            (256, Tile(16, 64, 4, 3)),
            (512, Tile(16, 32, 4, 2)),
        ),
    },
    "int8": {
        "hopper": (
            (64, Tile(16, 128, 4, 4)),
            (128, Tile(16, 128, 4, 3)),
            (256, Tile(16, 64, 4, 3)),
            (512, Tile(16, 32, 4, 2)),
        ),
        "rdna": _RDNA,
    },
    "int4": {
        "hopper": (
            (128, Tile(16, 128, 4, 4)),
            (256, Tile(16, 64, 4, 4)),
            (512, Tile(16, 32, 4, 2)),
        ),
        "rdna": _RDNA,
    },
}
# for caches with a scale per token
_LONG_SCALED: Table[Tile] = {
    "hopper": (
        (64, Tile(128, 64, 8, 3)),
        (128, Tile(128, 32, 8, 3)),
        (256, Tile(64, 32, 8, 2)),
        (512, Tile(32, 32, 8, 1)),
    ),
    "nvidia": (
        (64, Tile(64, 32, 4, 3)),
        (128, Tile(64, 16, 4, 3)),
        (256, Tile(32, 16, 4, 2)),
        (512, Tile(16, 16, 8, 1)),
    ),
    "amd": (
        (128, Tile(128, 32, 4, 1)),
        (256, Tile(64, 16, 4, 1)),
        (512, Tile(16, 16, 8, 1)),
    ),
    "rdna": (
        (128, Tile(32, 16, 8, 1)),
        (256, Tile(16, 16, 8, 1)),
        (512, Tile(16, 16, 8, 1)),
    ),
}

# SMs that are assumed without a driver to ask
_PROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}
_PROCESSORS |= {"gfx90a": 104, "gfx942": 304, "gfx950": 256, "gfx1100": 48, "": 4}
_TYPICAL_PROCESSORS = 128

# programs of a short tile that one SM holds at a time, by words_of; on Hopper from their shared
# memory and registers
_SHORT_RESIDENT = {"": 2, "fp8": 4, "int8": 2, "int4": 3}
# fewest steps of a split: with fewer, merging costs more than splitting saves
_LEAST_STEPS = 4
# largest size of the partial results, unless the caller sets num_splits
_SCRATCH_BYTES = 256 * 2**20
# Splits of a short tile may take this many waves of programs, so that the last wave is full.
# Partial results of a long tile are too large for more than one wave.
_MOST_WAVES = 4
# share of the time that writing and merging of partial results takes
_MERGING = 0.05
_MOST_SPLITS = 128


def words_of(x: Tensors) -> str:
    """Return "fp8", "int8" or "int4" for a cache that is read in words of numbers, else ""."""
    cache = x.k_cache
    if cache.element_size() > 1 or cache.dtype == x.q.dtype or is_packed(cache):
        return ""
    if cache.dtype.is_floating_point:
        return "fp8"
    return "int4" if numbers_of_byte(cache) == 2 else "int8"


@functools.cache
def long_tile(platform: Platform, head_dim: int, itemsize: int, is_scaled: bool = False) -> Tile:
    """Return the tile for sequences with many queries; ``is_scaled``: each key has a scale."""
    family = family_of(platform, itemsize)
    table = _LONG_SCALED if is_scaled and family in _LONG_SCALED else _LONG
    return find_tile(table, platform, head_dim, itemsize)


@functools.cache
def short_tile(
    platform: Platform, head_dim: int, itemsize: int, group: int, words: str = ""
) -> Tile:
    """Return the tile for few queries (decoding, drafts); for ``words`` see ``words_of``."""
    narrow = _SHORT_OF_WORDS.get(words, {})
    table = narrow if family_of(platform, itemsize) in narrow else _SHORT
    tile = find_tile(table, platform, head_dim, itemsize)
    # above 256 columns, the accumulators of more rows do not fit the registers
    most = MAX_SHORT_ROWS if padded_head_dim(head_dim) <= WIDEST_SHORT_ROWS else tile.block_m
    rows = min(most, max(tile.block_m, next_power_of_2(group)))
    return Tile(rows, tile.block_n, tile.num_warps, tile.num_stages, tile.precision)


@functools.cache
def tree_tile(platform: Platform, head_dim: int, itemsize: int, is_scaled: bool = False) -> Tile:
    """Return the tile for sequences with many queries and a ``tree_mask``, at most 64 queries.

    The masks of the rows take registers, which a long tile with a large head dimension lacks.
    """
    if head_dim <= 128 and itemsize < 4:
        return long_tile(platform, head_dim, itemsize, is_scaled)
    return short_tile(platform, head_dim, itemsize, MAX_SHORT_ROWS // 2)


def short_tokens(group: int) -> int:
    """Return the most queries of a sequence that runs the short tile, whatever its batch."""
    return max(1, MIN_TILE // group)


def processors(platform: Platform) -> int:
    """Return how many SMs a platform has, without asking a driver."""
    return _PROCESSORS.get(platform.arch, _TYPICAL_PROCESSORS)


@functools.lru_cache(maxsize=4096)
def choose_splits(
    units: int, is_short: bool, steps: int, scratch_bytes: int, processors: int, words: str = ""
) -> int:
    """Return the number of splits for ``units`` programs, or 1.

    ``steps`` are the tiles of keys of the longest sequence, ``scratch_bytes`` the partial results
    of one split. An SM holds several programs of a short tile, as many as ``words`` allow.
    """
    resident, waves = processors, 1
    if is_short:
        resident, waves = _SHORT_RESIDENT[words] * processors, _MOST_WAVES
    most = min(_MOST_SPLITS, steps // _LEAST_STEPS, _SCRATCH_BYTES // max(1, scratch_bytes))
    if units == 0 or most < 2:
        return 1
    most = min(most, waves * resident // units)
    # estimated time for 1, 2, ... splits: waves of programs times steps of the longest sequence
    times = [cdiv(units, resident) * steps * (1.0 - _MERGING)]
    times += [cdiv(units * splits, resident) * cdiv(steps, splits) for splits in range(2, most + 1)]
    return 1 + times.index(min(times))


# ---- the kernel for Hopper

# 0 turns the Hopper kernels off, for comparisons and debugging; portable kernels serve every call
HOPPER = os.environ.get("PREFIX_PREFILL_HOPPER", "1") != "0"

# fewest keys of a page that one TMA copy should bring
MIN_PIECE = 16
# with more columns, too few tiles of keys fit shared memory
MAX_HOPPER_HEAD_DIM = 256
# most rows of a cache's tensor map
MAX_ROWS = 2**30


def takes_hopper(x: Tensors, options: Options) -> bool:
    """Return whether the Hopper kernel serves the call's sequences with many queries.

    The portable kernel serves the rest: layouts that TMA cannot read, FP8 queries, values with
    another head dimension than keys. A cache is never copied. ``HopperTile.least_tokens`` defines
    many; it is more than one, so the queries' keys are new ones if the call has new keys.
    """
    return (
        HOPPER
        and x.q.device.type != "cpu"
        and detect(x.q.device).is_hopper
        and x.q.dtype in (torch.float16, torch.bfloat16)
        and x.out.dtype in (x.q.dtype, torch.float32)
        and (x.k_cache.dtype == x.q.dtype or words_of(x) != "")
        and not options.zero_points
        and (x.k_scale_cache is None or words_of(x) != "fp8")
        and x.out_scale is None
        and x.positions is None
        and x.tree_mask is None  # at most 64 queries; tree masks would cost all calls registers
        and x.out.shape[-1] == x.q.shape[-1]  # tiles of keys and values have one shape
        and 32 < x.q.shape[-1] <= MAX_HOPPER_HEAD_DIM  # up to 32, half of a tile would be padding
        and not is_packed(x.k_cache)
        and (
            x.k_cache.element_size() == 1  # the widening warps read key by key
            or copied_keys(x.k_cache.shape[1], options.window_left, MIN_PIECE) == MIN_PIECE
        )
        # TMA copies new keys, whatever the dtype of the cache
        and (x.k is None or copied_keys(MIN_PIECE, options.window_left, MIN_PIECE) == MIN_PIECE)
        and is_mappable(x.k_cache)
        and is_mappable(x.v_cache)
        # signed and unsigned ALiBi agree under a causal mask
        and (x.alibi_slopes is None or options.window_right == 0 or not options.signed_alibi)
        # the scale is folded into the exponential; only a positive one commutes with the maximum
        and options.softmax_scale >= FP32_TINY
        and options.num_splits <= 1
    )


def copied_keys(page: int, window_left: int, most: int) -> int:
    """Return how many keys of a page one copy brings (a piece): a power of two that divides it.

    A copy can leave out keys at one end of a piece only: those before the first row's window, or
    those past the last key. At least ``window_left + 1`` keys lie between the two.
    """
    piece = min(page & -page, most)
    if window_left >= 0:
        piece = min(piece, 1 << (window_left + 2).bit_length() - 1)
    return piece


def rows_of_page(cache: Tensor) -> int:
    """Return the distance of neighbouring pages in slots; 0 for a cache of one page."""
    return cache.stride(0) // cache.stride(1) if cache.shape[0] > 1 else 0


def rows_of_cache(cache: Tensor) -> int:
    """Return how many slots a cache spans, with the gaps between its pages."""
    return (cache.shape[0] - 1) * rows_of_page(cache) + cache.shape[1]


def is_mappable(cache: Tensor) -> bool:
    """Return whether TMA can read a cache in place, as rows of one head each."""
    page, slot, head, inner = cache.stride()
    heads = head if cache.shape[2] > 1 else slot
    unit = 16 // cache.element_size()
    return (
        cache.numel() > 0
        and cache.data_ptr() % 16 == 0
        and (inner == 1 and slot > 0 and heads > 0)
        and slot % unit == heads % unit == 0
        and (cache.shape[0] == 1 or (page > 0 and page % slot == 0))
        and rows_of_cache(cache) < MAX_ROWS
    )
