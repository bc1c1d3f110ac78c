"""Writing new keys and values into the paged cache, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._paged.checks import (
    check_apart,
    check_cache,
    check_dtypes,
    check_packing,
    check_target,
    largest_of,
)
from .sim.arrays import Array, check_no_gradient, to_array


def pack_keys(cache: Array) -> Array:
    """Return keys ``[..., block_size, head_dim]`` with two tokens interleaved, in the same shape.

    AWS's kernels of FP8 caches take them as ``[..., block_size // 2, head_dim, 2]``.
    """
    pairs = cache.reshape(*cache.shape[:-2], cache.shape[-2] // 2, 2, cache.shape[-1])
    result: Array = np.ascontiguousarray(pairs.swapaxes(-1, -2)).reshape(cache.shape)
    return result


def unpack_keys(cache: Array) -> Array:
    """Undo ``pack_keys``."""
    pairs = cache.reshape(*cache.shape[:-2], cache.shape[-2] // 2, cache.shape[-1], 2)
    result: Array = np.ascontiguousarray(pairs.swapaxes(-1, -2)).reshape(cache.shape)
    return result


def reshape_and_cache(
    key: Any,
    value: Any,
    kv_cache: Any,
    slot_mapping: Any,
    *,
    packed_keys: bool = False,
    target: str | None = None,
) -> None:
    """Write each token's key and value to its slot, in place.

    Args:
        key, value: ``[tokens, kv_heads, head_dim]``.
        kv_cache: ``[2, blocks, kv_heads, block_size, head_dim]``; values are rounded to its dtype,
            and in FP8 limited to the target's largest number; NaN stays NaN.
        slot_mapping: for each token ``block * block_size + place in the block``, ``[tokens]``. A
            negative slot is padding: nothing is written. If tokens share a slot, the last one wins.
        packed_keys: whether ``kv_cache[0]`` has two tokens interleaved.
        target: the generation that reads the cache; e4m3 ends at 240 on ``trn2``, at 448 on
            ``trn3`` in the form e4m3fn. Default: the device's, or ``trn2``, whose numbers both
            read.

    Raises:
        TypeError: a dtype that is not offered.
        ValueError: a shape, a slot past the end of the cache, a cache that shares memory, or an
            unknown target.
    """
    keys, values, cache = (
        to_array(n, x) for n, x in (("key", key), ("value", value), ("kv_cache", kv_cache))
    )
    check_no_gradient("kv_cache", kv_cache)
    check_dtypes(("key", keys), {"value": values}, cache)
    if keys.ndim != 3:
        raise ValueError(f"key must be [tokens, kv_heads, head_dim], got {list(keys.shape)}")
    if values.shape != keys.shape:
        raise ValueError(
            f"value must have the shape of key, {list(keys.shape)}, got {list(values.shape)}"
        )
    tokens, kv_heads, head_dim = keys.shape
    check_cache(cache, kv_heads, head_dim)
    is_packed = check_packing(packed_keys, cache.dtype, cache.shape[3])
    if not cache.flags.writeable:
        raise ValueError("kv_cache must be writable, got a read-only array")
    check_apart("kv_cache", cache, key=keys, value=values)
    slots = to_array("slot_mapping", slot_mapping)
    if slots.shape != (tokens,):
        raise ValueError(f"slot_mapping must be [{tokens}], got {list(slots.shape)}")
    if tokens and slots.dtype.kind not in "iu":
        raise TypeError(f"slot_mapping must be of integers, got {slots.dtype.name}")
    block_size = cache.shape[3]
    room = cache.shape[1] * block_size
    # before the conversion to signed numbers, in which 2**64 - 1 would be padding
    if tokens and slots.max() >= room:
        raise ValueError(f"slot_mapping must be below {room}, got {slots.max()}")
    most = largest_of(cache.dtype.name, check_target(target))
    slots = slots.astype(np.int64)
    kept = slots >= 0
    block, place = slots[kept] // block_size, slots[kept] % block_size
    for half, x in zip(cache, (keys, values), strict=True):
        rounded = _round(x[kept], cache.dtype, most)
        if is_packed and x is keys:
            # a view, so that the cache itself is written
            pairs = half.view().reshape(*half.shape[:2], block_size // 2, head_dim, 2)
            if half.size and not np.shares_memory(pairs, half):
                raise ValueError("kv_cache must be contiguous for packed_keys")
            pairs[block, :, place // 2, :, place % 2] = rounded
        else:
            half[block, :, place] = rounded


def _round(x: Array, dtype: np.dtype[Any], most: float) -> Array:
    """Round to a cache's dtype; FP8 saturates, because some of its forms have no infinity."""
    if most:
        x = np.clip(x.astype(np.float32), -most, most)
    with np.errstate(over="ignore"):
        return x.astype(dtype)
