"""Argument checks of the public functions: what is wrong, what was expected, what came."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._arrays import FLOATS, FP8, Array

MAX_HEAD_DIM = 128
MAX_BLOCK_SIZE = 256

FP32_MAX = float(np.finfo(np.float32).max)
LEAST_SCALE, LARGEST_SCALE = 2.0**-40, 2.0**40


def check_packed(q: Array, k: Array, v: Array, kv_cache: Array) -> None:
    """Check the tensors of a packed batch against each other."""
    if q.dtype.name not in FLOATS:
        raise TypeError(f"q must be one of {', '.join(FLOATS)}, got {q.dtype.name}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype.name}, got {x.dtype.name}")
    if kv_cache.dtype.name not in (*FLOATS, *FP8):
        allowed = ", ".join((*FLOATS, *FP8))
        raise TypeError(f"kv_cache must be one of {allowed}, got {kv_cache.dtype.name}")
    if q.ndim != 3:
        raise ValueError(f"q must be [tokens, heads, head_dim], got {list(q.shape)}")
    tokens, heads, head_dim = q.shape
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim of q must be from 1 to {MAX_HEAD_DIM}, got {head_dim}")
    if k.ndim != 3 or k.shape[0] != tokens or k.shape[2] != head_dim:
        raise ValueError(f"k must be [{tokens}, kv_heads, {head_dim}], got {list(k.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {list(k.shape)}, got {list(v.shape)}")
    kv_heads = k.shape[1]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"heads of q must be a multiple of those of k, {kv_heads}, got {heads}")
    if heads // kv_heads > 128:
        raise NotImplementedError(
            f"q may have at most 128 heads for one of k, got {heads // kv_heads}"
        )
    check_cache(kv_cache, kv_heads, head_dim)


def check_cache(kv_cache: Array, kv_heads: int, head_dim: int) -> None:
    """Check the cache's shape."""
    shape = kv_cache.shape
    if kv_cache.ndim != 5 or (shape[0], shape[2], shape[4]) != (2, kv_heads, head_dim):
        raise ValueError(
            f"kv_cache must be [2, blocks, {kv_heads}, block_size, {head_dim}], got {list(shape)}"
        )
    if not 1 <= shape[3] <= MAX_BLOCK_SIZE:
        raise ValueError(f"block_size of kv_cache must be 1 to {MAX_BLOCK_SIZE}, got {shape[3]}")


def check_lengths(
    query_lens: Any, context_lens: Any, tokens: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Check and return the lengths of the sequences."""
    found = []
    for name, x in (("query_lens", query_lens), ("context_lens", context_lens)):
        lengths = np.asarray(x)
        if lengths.ndim != 1:
            raise ValueError(f"{name} must be [batch], got {list(lengths.shape)}")
        if len(lengths) and lengths.dtype.kind not in "iu":
            raise TypeError(f"{name} must be of integers, got {lengths.dtype.name}")
        lengths = lengths.astype(np.int64)
        if (lengths < 0).any():
            raise ValueError(f"{name} must be at least 0, got {int(lengths.min())}")
        found.append(lengths)
    queries, contexts = found
    if len(queries) != len(contexts):
        raise ValueError(
            f"context_lens must be as long as query_lens, [{len(queries)}], got [{len(contexts)}]"
        )
    if queries.sum() > tokens:
        raise ValueError(f"query_lens must sum to at most q's {tokens} rows, got {queries.sum()}")
    return queries, contexts


def check_table(
    block_table: Any, contexts: np.ndarray[Any, Any], kv_cache: Array
) -> np.ndarray[Any, Any]:
    """Check and return the block table, with the entries that the contexts reach."""
    table = np.asarray(block_table)
    if table.ndim != 2 or table.shape[0] != len(contexts):
        raise ValueError(
            f"block_table must be [{len(contexts)}, max_blocks], got {list(table.shape)}"
        )
    if table.size and table.dtype.kind not in "iu":
        raise TypeError(f"block_table must be of integers, got {table.dtype.name}")
    blocks, block_size = kv_cache.shape[1], kv_cache.shape[3]
    needed = -(-contexts // block_size)
    if needed.max(initial=0) > table.shape[1]:
        raise ValueError(
            f"block_table must have {needed.max()} columns for a context of {contexts.max()} "
            f"tokens in blocks of {block_size}, got {table.shape[1]}"
        )
    used = np.arange(table.shape[1]) < needed[:, None]
    wrong = used & ((table < 0) | (table >= blocks))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"block_table[{row}, {column}] must be from 0 to {blocks - 1}, got {table[row, column]}"
        )
    return table.astype(np.int64)


def check_number(name: str, x: Any, *, positive: bool = False) -> float:
    """Check and return a number that is finite in fp32, in which the kernels compute."""
    if isinstance(x, bool) or not isinstance(x, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}")
    if not abs(x) <= FP32_MAX or (positive and x <= 0):
        kind = "positive and finite" if positive else "finite"
        raise ValueError(f"{name} must be {kind} in fp32, got {x}")
    return float(x)


def check_window(window: Any) -> int | None:
    """Check and return the window; None is all."""
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, (int, np.integer)):
        raise TypeError(f"window must be an integer or None, got {type(window).__name__}")
    if window < 1:
        raise ValueError(f"window must be at least 1, a token's own key, got {window}")
    return int(window)


def check_scales(name: str, x: Any, kv_heads: int) -> tuple[float, ...]:
    """Check and return a scale for each KV head."""
    if x is None:
        return (1.0,) * kv_heads
    scales = np.asarray(x, dtype=np.float64).reshape(-1)
    if len(scales) not in (1, kv_heads):
        raise ValueError(f"{name} must be a number or [{kv_heads}], got {list(np.shape(x))}")
    for scale in scales:
        # beyond these, products with fp32 scores lose their digits or overflow
        if not LEAST_SCALE <= scale <= LARGEST_SCALE:
            raise ValueError(
                f"{name} must be from {LEAST_SCALE:.3g} to {LARGEST_SCALE:.3g}, got {scale}"
            )
    return tuple(np.broadcast_to(scales, kv_heads).tolist())


def check_sinks(sinks: Any, heads: int) -> np.ndarray[Any, Any] | None:
    """Check and return the sinks in fp32."""
    if sinks is None:
        return None
    found = np.asarray(sinks).astype(np.float32)
    if found.shape != (heads,):
        raise ValueError(f"sinks must be [{heads}], got {list(found.shape)}")
    if np.isnan(found).any() or np.isposinf(found).any():
        raise ValueError("sinks must be below infinity and no NaN")
    return found
