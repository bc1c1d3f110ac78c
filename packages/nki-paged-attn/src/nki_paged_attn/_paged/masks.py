"""The old kernel's block tables and masks, read and written.

The old kernel took a dense mask over the tokens of all active blocks and of all new tokens. It read
cached tokens in its own order, into which ``reorder_context_mask`` brings a mask: within a large
tile, column ``load * 128 * t + i * 128 + p`` holds token ``(load * 128 + p) * t + i``, where ``t``
is the number of consecutive tokens in a partition.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from attn_common import cdiv

from ..sim.arrays import Array, like, to_array
from .checks import PARTITIONS, check_count, check_large_tile
from .sequences import MAX_POSITION, Ints, Packed, Sequence, places_of


def tokens_per_partition(large_tile: int, block_size: int) -> int:
    """Return how many consecutive tokens the old kernel put into a partition."""
    return large_tile // max(PARTITIONS, large_tile // block_size)


def column_order(large_tile: int, block_size: int, columns: int) -> Array:
    """Return the token of each reordered column."""
    tokens = tokens_per_partition(large_tile, block_size)
    if tokens <= 1:
        return np.arange(columns)
    if columns % large_tile:
        raise ValueError(
            f"the context's columns must be a multiple of LARGE_TILE_SZ, {large_tile}, "
            f"got {columns}"
        )
    order = np.arange(columns).reshape(-1, PARTITIONS, tokens)
    result: Array = order.transpose(0, 2, 1).reshape(-1)
    return result


def reorder_context_mask(mask: Any, LARGE_TILE_SZ: int, block_size: int) -> Any:
    """Bring the context's columns of a mask into the order in which the old kernel read tokens.

    Args:
        mask: ``[seq_q, context + seq_q]``; the last ``seq_q`` columns stay.
        LARGE_TILE_SZ: tokens of a large tile.
        block_size: tokens of a block.
    """
    check_large_tile(LARGE_TILE_SZ, block_size)
    array = to_array("mask", mask)
    if array.ndim != 2 or array.shape[1] < array.shape[0]:
        raise ValueError(f"mask must be [seq_q, context + seq_q], got {list(array.shape)}")
    context = array.shape[1] - array.shape[0]
    order = column_order(LARGE_TILE_SZ, block_size, context)
    return like(np.concatenate([array[:, order], array[:, context:]], axis=1), mask)


def load_block_tables(block_tables: Any, num_tiles: int, num_blocks_per_tile: int) -> Any:
    """Return a flat table as ``[tiles / 128, 128, blocks per tile]``, padded with block 0."""
    check_count("num_tiles", num_tiles, least=0)
    check_count("num_blocks_per_tile", num_blocks_per_tile)
    table = to_array("block_tables", block_tables)
    if table.shape != (num_tiles * num_blocks_per_tile,):
        raise ValueError(
            f"block_tables must be [{num_tiles * num_blocks_per_tile}], got {list(table.shape)}"
        )
    if table.dtype.kind not in "iu":
        raise TypeError(f"block_tables must be of integers, got {table.dtype.name}")
    groups = -(-num_tiles // PARTITIONS)
    result = np.zeros((groups * PARTITIONS, num_blocks_per_tile), np.int32)
    result[:num_tiles] = table.reshape(num_tiles, num_blocks_per_tile)
    return like(result.reshape(groups, PARTITIONS, num_blocks_per_tile), block_tables)


def transform_block_tables_for_indirect_load(
    block_tables: Any, block_size_tiling_factor: int, num_head: int, head_id: int
) -> Any:
    """Return the rows of a pool ``[blocks * heads * factor, ...]`` to gather, by partition.

    Args:
        block_tables: of ``load_block_tables``.
        block_size_tiling_factor: pieces that each block is cut into.
        num_head, head_id: KV heads, and which one of them.

    Returns:
        int32 ``[loads, 128, tiles padded to 128]``; computed exactly, also past 2**24.
    """
    table = to_array("block_tables", block_tables)
    if table.ndim != 3 or table.shape[1] != PARTITIONS:
        raise ValueError(
            f"block_tables must be [groups, {PARTITIONS}, blocks per tile], got {list(table.shape)}"
        )
    if table.dtype.kind not in "iu":
        raise TypeError(f"block_tables must be of integers, got {table.dtype.name}")
    check_count("block_size_tiling_factor", block_size_tiling_factor)
    check_count("num_head", num_head)
    check_count("head_id", head_id, least=0)
    if head_id >= num_head:
        raise ValueError(f"head_id must be from 0 to {num_head - 1}, got {head_id}")
    tiles = table.shape[0] * PARTITIONS
    if table.shape[2] * block_size_tiling_factor % PARTITIONS:
        raise ValueError(
            f"blocks per tile times block_size_tiling_factor must be a multiple of {PARTITIONS}, "
            f"got {table.shape[2]} * {block_size_tiling_factor}"
        )
    blocks = table.astype(np.int64).reshape(tiles, table.shape[2], 1)
    rows = (blocks * num_head + head_id) * np.int64(block_size_tiling_factor)
    rows = (rows + np.arange(block_size_tiling_factor)).reshape(
        tiles, rows.shape[1] * block_size_tiling_factor
    )
    if rows.max(initial=0) > np.iinfo(np.int32).max:
        raise ValueError(f"a row of the pool must be below 2**31, got {rows.max()}")
    result = (
        np.ascontiguousarray(rows.T)
        .reshape(rows.shape[1] // PARTITIONS, PARTITIONS, tiles)
        .astype(np.int32)
    )
    return like(result, block_tables)


def _ranges(seen: Array, what: str) -> Ints:
    """Return the first and end column that each row sees; a row must see one range."""
    some = seen.any(axis=1)
    first = np.where(some, seen.argmax(axis=1), 0) if seen.shape[1] else np.zeros(len(seen), int)
    end = np.where(some, seen.shape[1] - seen[:, ::-1].argmax(axis=1), 0) if some.any() else first
    holes = seen.sum(axis=1) != end - first
    if holes.any():
        row = int(np.flatnonzero(holes)[0])
        raise NotImplementedError(
            f"attn_mask must let a row see one range of {what}; row {row} has a gap"
        )
    return np.stack([first, end], axis=1).astype(np.int64)


def pack_mask(mask: Array, context: int, blocks: Array, block_size: int) -> Packed:
    """Pack the sequences of a mask over tokens in order.

    Args:
        mask: booleans ``[seq_q, context + new]``, columns in the order of tokens.
        context: columns of cached tokens.
        blocks: the active blocks.
    """
    cache = _ranges(mask[:, :context], "cached tokens")
    new = _ranges(mask[:, context:], "new tokens")
    meet = [np.maximum(r[1:, 0], r[:-1, 0]) < np.minimum(r[1:, 1], r[:-1, 1]) for r in (cache, new)]
    nothing = (cache[:, 0] >= cache[:, 1]) & (new[:, 0] >= new[:, 1])
    # neighbours of one sequence share keys; rows that see nothing stay together
    joined = meet[0] | meet[1] | (nothing[1:] & nothing[:-1])
    edges = [0, *(np.flatnonzero(~joined) + 1), len(mask)] if len(mask) else [0]
    found: list[Sequence] = []
    for start, end in itertools.pairwise(edges):
        found += _sequences(start, cache[start:end], new[start:end], blocks, block_size)
    # sequences that begin with the same new key share the places of their keys
    lengths: dict[int, int] = {}
    for x in found:
        lengths[x.place] = max(lengths.get(x.place, 0), x.new)
    order = [places_of(first, length) for first, length in lengths.items() if length]
    starts = np.cumsum([0, *(len(x) for x in order)]).tolist()
    places = dict(zip((first for first, n in lengths.items() if n), starts, strict=False))
    found = [replace(x, place=places.get(x.place, 0)) for x in found]
    longest = max((x.cached + x.new for x in found), default=0)
    needed = len(found), max(len(mask), starts[-1]), longest
    return Packed(tuple(found), np.concatenate([*order, np.zeros(0, np.int64)]), len(mask), needed)


def _sequences(
    first: int, cache: Ints, new: Ints, blocks: Array, block_size: int
) -> list[Sequence]:
    """Return rows that share keys as one sequence; its ``place`` is its first new token.

    A row's cached and new keys are one range if it sees the last cached and the first new key. If
    no such range serves all rows, each row is a sequence of its own.
    """
    has_cached, has_new = (r[:, 0] < r[:, 1] for r in (cache, new))
    end = int(cache[has_cached, 1].max(initial=0))
    start = int(min(new[has_new, 0], default=0))
    both = has_cached & has_new
    if len(cache) > 1 and ((cache[both, 1] != end) | (new[both, 0] != start)).any():
        return [
            one
            for i in range(len(cache))
            for one in _sequences(first + i, cache[i : i + 1], new[i : i + 1], blocks, block_size)
        ]
    base = int(cache[has_cached, 0].min(initial=end)) // block_size * block_size
    ranges = np.zeros((len(cache), 2), np.int64)
    ranges[has_new] = new[has_new] - start + end - base
    ranges[has_cached, 0] = cache[has_cached, 0] - base
    ranges[has_cached & ~has_new, 1] = cache[has_cached & ~has_new, 1] - base
    if ranges.max(initial=0) > MAX_POSITION:
        raise NotImplementedError(f"a sequence may have at most {MAX_POSITION} keys")
    own = blocks[base // block_size : cdiv(end, block_size)]
    count = int(new[has_new, 1].max(initial=start)) - start
    return [Sequence(first, len(cache), ranges, end - base, end - base, own, start, count)]
