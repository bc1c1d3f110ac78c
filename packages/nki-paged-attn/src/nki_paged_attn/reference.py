"""The reference, in NumPy and float64, sequence by sequence and head by head."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._paged.checks import (
    check_lengths,
    check_number,
    check_packing,
    check_scales,
    check_shapes,
    check_sinks,
    check_table,
    check_window,
)
from .cache import unpack_keys
from .sim.arrays import to_array

Floats = np.ndarray[Any, np.dtype[np.float64]]


def gather_cache(kv_cache: Any, blocks: Any, length: int) -> tuple[Floats, Floats]:
    """Return the first keys and values of a sequence, ``[length, kv_heads, head_dim]``."""
    pages = np.asarray(kv_cache)[:, np.asarray(blocks, np.int64)].astype(np.float64)
    # [2, tokens, kv_heads, head_dim]
    flat = pages.transpose(0, 1, 3, 2, 4).reshape(2, -1, pages.shape[2], pages.shape[4])
    return flat[0, :length], flat[1, :length]


def paged_attention_reference(
    q: Any,
    k: Any,
    v: Any,
    kv_cache: Any,
    block_table: Any,
    query_lens: Any,
    context_lens: Any,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: Any = None,
    softcap: float | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    packed_keys: bool = False,
) -> tuple[Floats, Floats]:
    """Compute what ``paged_attention`` computes, with the same arguments, in float64.

    Returns:
        out ``[tokens, heads, head_dim]`` and lse ``[heads, tokens]``.

    Raises:
        TypeError, ValueError: as ``paged_attention``, but any dtype of numbers is accepted.
    """
    queries, keys, values, cache = (
        to_array(n, x) for n, x in (("q", q), ("k", k), ("v", v), ("kv_cache", kv_cache))
    )
    check_shapes(queries, keys, values, cache)
    if check_packing(packed_keys, cache.dtype, cache.shape[3]):
        cache = np.stack([unpack_keys(cache[0]), cache[1]])
    tokens, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    lens, contexts = check_lengths(query_lens, context_lens, tokens)
    table = check_table(block_table, contexts, cache.shape[3], cache.shape[1])
    window = check_window(window)
    softcap = None if softcap is None else check_number("softcap", softcap, positive=True)
    logits = check_sinks(sinks, heads)
    k_scales = np.array(check_scales("k_scale", k_scale, kv_heads))
    v_scales = np.array(check_scales("v_scale", v_scale, kv_heads))
    factor = head_dim**-0.5 if scale is None else check_number("scale", scale)
    out = np.zeros(queries.shape, np.float64)
    lse = np.full((heads, tokens), -np.inf)
    if logits is not None:
        lse[:] = logits.astype(np.float64)[:, None]
    first = 0
    for i, (count, context) in enumerate(zip(lens, contexts, strict=True)):
        used = -(-int(context) // cache.shape[3])
        old_k, old_v = gather_cache(cache, table[i, :used], int(context))
        own = slice(first, first + int(count))
        all_k = np.concatenate([old_k * k_scales[:, None], keys[own].astype(np.float64)])
        all_v = np.concatenate([old_v * v_scales[:, None], values[own].astype(np.float64)])
        place = int(context) + np.arange(int(count))[:, None]
        j = np.arange(len(all_k))[None, :]
        seen = j <= place
        if window is not None:
            seen &= j > place - window
        for h in range(heads):
            shared = h * kv_heads // heads
            s = factor * (queries[own, h].astype(np.float64) @ all_k[:, shared].T)
            if softcap is not None:
                s = softcap * np.tanh(s / softcap)
            s = np.where(seen, s, -np.inf)
            sink = -np.inf if logits is None else float(logits[h])
            top = np.maximum(s.max(axis=1, initial=-np.inf), sink)
            pivot = np.asarray(np.where(np.isfinite(top), top, 0.0))[:, None]
            p = np.exp(s - pivot)
            total = p.sum(axis=1) + np.exp(sink - pivot[:, 0])
            safe = np.where(total > 0, total, 1.0)
            # a value that no token sees may be NaN
            weights = np.where(seen, p, 0.0)
            is_seen = np.asarray(seen.any(axis=0))[:, None]
            clean = np.where(is_seen, all_v[:, shared], 0.0)
            out[own, h] = weights @ clean / safe[:, None]
            with np.errstate(divide="ignore"):
                lse[h, own] = np.log(total) + pivot[:, 0]
        first += int(count)
    return out, lse
