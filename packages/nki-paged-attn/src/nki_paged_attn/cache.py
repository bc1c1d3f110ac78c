"""Writing new keys and values into the paged cache, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._arrays import to_array


def reshape_and_cache(key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
    """Write each token's key and value to its slot, in place.

    Args:
        key, value: ``[tokens, kv_heads, head_dim]``.
        kv_cache: ``[2, blocks, kv_heads, block_size, head_dim]``; values are rounded to its dtype.
        slot_mapping: for each token ``block * block_size + place in the block``, ``[tokens]``. A
            negative slot is padding: nothing is written. Of tokens with one slot the last wins.

    Raises:
        ValueError: a shape, or a slot past the end of the cache.
    """
    keys, values, cache = (
        to_array(n, x) for n, x in (("key", key), ("value", value), ("kv_cache", kv_cache))
    )
    if keys.ndim != 3:
        raise ValueError(f"key must be [tokens, kv_heads, head_dim], got {list(keys.shape)}")
    if values.shape != keys.shape:
        raise ValueError(
            f"value must have the shape of key, {list(keys.shape)}, got {list(values.shape)}"
        )
    tokens, kv_heads, head_dim = keys.shape
    if cache.ndim != 5 or (cache.shape[0], cache.shape[2], cache.shape[4]) != (
        2, kv_heads, head_dim,
    ):  # fmt: skip
        raise ValueError(
            f"kv_cache must be [2, blocks, {kv_heads}, block_size, {head_dim}], "
            f"got {list(cache.shape)}"
        )
    slots = to_array("slot_mapping", slot_mapping)
    if slots.shape != (tokens,):
        raise ValueError(f"slot_mapping must be [{tokens}], got {list(slots.shape)}")
    if tokens and slots.dtype.kind not in "iu":
        raise TypeError(f"slot_mapping must be of integers, got {slots.dtype.name}")
    slots = slots.astype(np.int64)
    block_size = cache.shape[3]
    room = cache.shape[1] * block_size
    if slots.max(initial=-1) >= room:
        raise ValueError(f"slot_mapping must be below {room}, got {slots.max()}")
    kept = slots >= 0
    block, place = slots[kept] // block_size, slots[kept] % block_size
    with np.errstate(over="ignore"):
        cache[0, block, :, place] = keys[kept].astype(cache.dtype)
        cache[1, block, :, place] = values[kept].astype(cache.dtype)
