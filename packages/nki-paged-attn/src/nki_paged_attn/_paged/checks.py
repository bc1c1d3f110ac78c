"""Argument checks; errors name the argument, what was expected, and what came."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ..sim.arrays import Array, as_array
from ..sim.targets import device_target, find_target

# dtypes of queries and caches; dtypes of caches only
FLOATS = ("float16", "bfloat16", "float32")
FP8 = ("float8_e4m3", "float8_e4m3fn", "float8_e5m2")

MAX_HEAD_DIM = 256
MAX_BLOCK_SIZE = 256
MAX_GROUP = 128
PARTITIONS = 128
MAX_WINDOW = 2**31
MAX_LENGTH = 2**31 - 1

# steps of a search for shared memory, far more than any layout of a cache takes
MOST_WORK = 10**5

FP32_MAX = float(np.finfo(np.float32).max)
LEAST_SCALE, LARGEST_SCALE = 2.0**-40, 2.0**40


def check_target(target: Any) -> str:
    """Return the generation that a cache is written for: the device's, or trn2, if None."""
    if target is None:
        # whose FP8 trn3 reads, too
        return device_target() or "trn2"
    if not isinstance(target, str):
        raise TypeError(f"target must be a string or None, got {type(target).__name__}")
    return find_target(target).name


def largest_of(dtype: str, target: str) -> float:
    """Return the limit of numbers before they are rounded to a dtype: FP8's largest, else 0.

    Up to trn2 the engines read e4m3 in the form that ends at 240, whatever the host calls it:
    larger numbers of e4m3fn are infinities and NaN to them.
    """
    if dtype not in FP8:
        return 0.0
    if dtype == "float8_e4m3fn" and find_target(target).generation < 4:
        dtype = "float8_e4m3"
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def check_dtypes(q: tuple[str, Array], others: dict[str, Array], kv_cache: Array) -> None:
    """Check the dtypes of queries, of tensors that must have the same dtype, and of the cache."""
    name, queries = q
    if queries.dtype.name not in FLOATS:
        raise TypeError(f"{name} must be one of {', '.join(FLOATS)}, got {queries.dtype.name}")
    for other, x in others.items():
        if x.dtype != queries.dtype:
            raise TypeError(
                f"{other} must have the dtype of {name}, {queries.dtype.name}, got {x.dtype.name}"
            )
    if kv_cache.dtype.name not in (*FLOATS, *FP8):
        allowed = ", ".join((*FLOATS, *FP8))
        raise TypeError(f"kv_cache must be one of {allowed}, got {kv_cache.dtype.name}")


def check_packed(q: Array, k: Array, v: Array, kv_cache: Array) -> None:
    """Check the tensors of a packed batch against each other."""
    check_dtypes(("q", q), {"k": k, "v": v}, kv_cache)
    check_shapes(q, k, v, kv_cache)


def check_shapes(q: Array, k: Array, v: Array, kv_cache: Array) -> None:
    """Check the shapes of a packed batch against each other."""
    if q.ndim != 3:
        raise ValueError(f"q must be [tokens, heads, head_dim], got {list(q.shape)}")
    tokens, heads, head_dim = q.shape
    check_head_dim(head_dim)
    if k.ndim != 3 or k.shape[0] != tokens or k.shape[2] != head_dim:
        raise ValueError(f"k must be [{tokens}, kv_heads, {head_dim}], got {list(k.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {list(k.shape)}, got {list(v.shape)}")
    kv_heads = k.shape[1]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"heads of q must be a multiple of those of k, {kv_heads}, got {heads}")
    if heads // kv_heads > MAX_GROUP:
        raise NotImplementedError(
            f"q may have at most {MAX_GROUP} heads for one of k, got {heads // kv_heads}"
        )
    check_cache(kv_cache, kv_heads, head_dim)
    check_block_size(kv_cache.shape[3])


def check_flag(name: str, x: Any) -> bool:
    """Check and return a boolean."""
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {x!r}")
    return bool(x)


def check_packing(packed_keys: Any, cache: Any, block_size: int) -> bool:
    """Return whether cached keys are interleaved in pairs: FP8, an even block size."""
    if check_flag("packed_keys", packed_keys) and str(cache).removeprefix("torch.") not in FP8:
        allowed = ", ".join(FP8)
        raise TypeError(f"packed_keys needs a kv_cache of {allowed}, got {cache}")
    if packed_keys and block_size % 2:
        raise ValueError(f"packed_keys needs blocks of an even number of tokens, got {block_size}")
    return bool(packed_keys)


def check_writes(
    queries: np.ndarray[Any, Any],
    contexts: np.ndarray[Any, Any],
    table: np.ndarray[Any, Any],
    block_size: int,
    name: str = "block_table",
) -> None:
    """Check that no sequence reads or writes what another sequence of the call writes."""
    # by block: the sequence that writes it, and the first position written
    owner: dict[int, tuple[int, int]] = {}
    for i, (count, context) in enumerate(zip(queries.tolist(), contexts.tolist(), strict=True)):
        if count:
            for n in range(context // block_size, -(-(context + count) // block_size)):
                block = int(table[i, n])
                if block in owner:
                    raise ValueError(
                        f"{name} must give new tokens blocks of their own, got {block} in "
                        f"sequences {owner[block][0]} and {i}"
                    )
                owner[block] = i, max(0, context - n * block_size)
    for i, context in enumerate(contexts.tolist()):
        for n in range(-(-context // block_size)):
            other, first = owner.get(int(table[i, n]), (i, block_size))
            # a sequence that fills a block further reads the tokens before those that it writes
            if min(block_size, context - n * block_size) > first:
                raise ValueError(
                    f"{name} must give no context what the call writes, got block "
                    f"{int(table[i, n])} in sequences {i} and {other}"
                )


def check_apart(name: str, x: Array, **others: Array) -> None:
    """Check that an array to be written shares no memory with itself nor with others."""
    if _overlaps(x):
        raise ValueError(
            f"{name} must not overlap itself, for it is written, got {list(x.shape)} with strides "
            f"of {list(x.strides)} bytes"
        )
    for other, y in others.items():
        if _share(x, y):
            raise ValueError(
                f"{name} must not share memory with {other}, for it is written; got arrays that "
                "overlap"
            )


def _overlaps(x: Array) -> bool:
    """Return whether two elements of an array share memory."""
    reach, is_nested = x.itemsize, True
    for stride, size in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True)):
        if size > 1:
            is_nested = is_nested and stride >= reach
            reach += stride * (size - 1)
    if is_nested or not x.size:
        return False
    for axis, size in enumerate(x.shape):
        along = x[(0,) * axis]
        for i in range(1, size):
            parts = along[:1], along[i : i + 1]
            if _share(*parts):
                return True
            if not np.may_share_memory(*parts):
                break
    return False


def _share(x: Array, y: Array) -> bool:
    try:
        return np.shares_memory(x, y, max_work=MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False


def check_transposes(transposes: Any, dtype: str) -> bool:
    """Return whether DMA transposes the probabilities, which have this dtype."""
    if not isinstance(transposes, str) or transposes not in ("tensor", "dma"):
        raise ValueError(f"transposes must be tensor or dma, got {transposes!r}")
    if transposes == "dma" and dtype == "float32":
        raise ValueError("transposes='dma' needs queries of 2 bytes an element, got float32")
    return bool(transposes == "dma")


def check_cache(kv_cache: Array, kv_heads: int, head_dim: int) -> None:
    """Check the cache's shape."""
    shape = kv_cache.shape
    if kv_cache.ndim != 5 or (shape[0], shape[2], shape[4]) != (2, kv_heads, head_dim):
        raise ValueError(
            f"kv_cache must be [2, blocks, {kv_heads}, block_size, {head_dim}], got {list(shape)}"
        )
    check_count("block_size", shape[3])


def check_dtype(name: str, given: Any, allowed: tuple[str, ...]) -> None:
    """Check the name of a dtype."""
    if not isinstance(given, str) or given not in allowed:
        raise TypeError(f"{name} must be one of {', '.join(allowed)}, got {given!r}")


def check_count(name: str, x: Any, least: int = 1) -> None:
    """Check a number of things, at least ``least``."""
    if isinstance(x, bool) or not isinstance(x, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {type(x).__name__}")
    if x < least:
        raise ValueError(f"{name} must be at least {least}, got {_shown(x)}")
    if x >= 2**63:
        raise ValueError(f"{name} must fit into 64 bits, got {_shown(x)}")


def _shown(x: Any) -> str:
    # Python does not write integers of thousands of digits
    return f"an int of {x.bit_length()} bits" if x.__class__ is int and abs(x) >> 256 else str(x)


def check_programs(programs: Any) -> None:
    """Check the cores of a logical core."""
    check_count("programs", programs)
    if programs > 2:
        raise ValueError(f"programs must be 1 or 2, got {programs}")


def check_block_size(block_size: Any) -> None:
    """Check the tokens of a block."""
    check_count("block_size", block_size)
    if block_size > MAX_BLOCK_SIZE:
        raise ValueError(f"block_size must be from 1 to {MAX_BLOCK_SIZE}, got {block_size}")


def check_head_dim(head_dim: Any) -> None:
    """Check the head dimension, at most two pieces of 128 partitions."""
    check_count("head_dim", head_dim)
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be from 1 to {MAX_HEAD_DIM}, got {head_dim}")


def check_heads(heads: int, kv_heads: int) -> None:
    """Check the numbers of heads."""
    check_count("heads", heads)
    check_count("kv_heads", kv_heads)
    if heads % kv_heads or heads // kv_heads > MAX_GROUP:
        raise ValueError(f"heads must be 1 to {MAX_GROUP} times kv_heads, {kv_heads}, got {heads}")


def check_lengths(
    query_lens: Any, context_lens: Any, tokens: int | None, keys_name: str = "context_lens"
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Check and return the lengths of the sequences; ``tokens`` are q's rows, if known."""
    if tokens is not None:
        check_count("tokens", tokens, least=0)
    found = []
    for name, x in (("query_lens", query_lens), (keys_name, context_lens)):
        lengths = as_array(name, x)
        if lengths.ndim != 1:
            raise ValueError(f"{name} must be [batch], got {list(lengths.shape)}")
        if len(lengths) and lengths.dtype.kind not in "iu":
            raise TypeError(f"{name} must be of integers, got {lengths.dtype.name}")
        if (lengths < 0).any():
            raise ValueError(f"{name} must be at least 0, got {int(lengths.min())}")
        # sums stay in 64 bits
        if lengths.max(initial=0) > MAX_LENGTH:
            raise ValueError(f"{name} must be at most {MAX_LENGTH}, got {int(lengths.max())}")
        found.append(lengths.astype(np.int64))
    queries, contexts = found
    if len(queries) != len(contexts):
        raise ValueError(
            f"{keys_name} must be as long as query_lens, [{len(queries)}], got [{len(contexts)}]"
        )
    if tokens is not None and queries.sum() > tokens:
        raise ValueError(f"query_lens must sum to at most q's {tokens} rows, got {queries.sum()}")
    return queries, contexts


def check_table(
    block_table: Any,
    contexts: np.ndarray[Any, Any],
    block_size: int,
    blocks: int | None = None,
    name: str = "block_table",
) -> np.ndarray[Any, Any]:
    """Check and return the block table, as far as the contexts reach; ``blocks`` if known."""
    table = as_array(name, block_table)
    if table.ndim != 2 or table.shape[0] != len(contexts):
        raise ValueError(f"{name} must be [{len(contexts)}, max_blocks], got {list(table.shape)}")
    if table.size and table.dtype.kind not in "iu":
        raise TypeError(f"{name} must be of integers, got {table.dtype.name}")
    needed = -(-contexts // block_size)
    if needed.max(initial=0) > table.shape[1]:
        raise ValueError(
            f"{name} must have {needed.max()} columns for a context of {contexts.max()} "
            f"tokens in blocks of {block_size}, got {table.shape[1]}"
        )
    used = np.arange(table.shape[1]) < needed[:, None]
    end = 2**31 if blocks is None else blocks
    wrong = used & ((table < 0) | (table >= end))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"{name}[{row}, {column}] must be from 0 to {end - 1}, got {table[row, column]}"
        )
    return table.astype(np.int64)


def check_large_tile(large_tile: Any, block_size: Any) -> None:
    """Check the old kernel's sizes: a large tile is whole loads of 128 partitions."""
    check_count("LARGE_TILE_SZ", large_tile)
    check_count("block_size", block_size)
    tokens = large_tile // max(PARTITIONS, large_tile // block_size)
    if large_tile % block_size or tokens < 1 or large_tile % (PARTITIONS * tokens):
        raise ValueError(
            f"LARGE_TILE_SZ must be a multiple of block_size, {block_size}, and of {PARTITIONS} "
            f"partitions of whole tokens, got {large_tile}"
        )


def check_number(name: str, x: Any, *, positive: bool = False) -> float:
    """Check and return a number that is finite in fp32, in which the kernels compute."""
    if isinstance(x, bool) or not isinstance(x, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}")
    if not abs(x) <= FP32_MAX or (positive and x <= 0):
        kind = "positive and finite" if positive else "finite"
        raise ValueError(f"{name} must be {kind} in fp32, got {_shown(x)}")
    return float(x)


def check_window(window: Any) -> int | None:
    """Check and return the window; None is all."""
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, (int, np.integer)):
        raise TypeError(f"window must be an integer or None, got {type(window).__name__}")
    if window < 1:
        raise ValueError(f"window must be at least 1, a token's own key, got {window}")
    # at most the longest sequence, so that sums stay in 64 bits
    return min(int(window), MAX_WINDOW)


def check_scales(name: str, x: Any, kv_heads: int) -> tuple[float, ...]:
    """Check and return a scale for each KV head."""
    if x is None:
        return (1.0,) * kv_heads
    found = as_array(name, x)
    if found.dtype.kind not in "iuf" and found.dtype.name not in FLOATS:
        raise TypeError(f"{name} must be a number or numbers, got {found.dtype.name}")
    scales = found.astype(np.float64).reshape(-1)
    if len(scales) not in (1, kv_heads):
        raise ValueError(f"{name} must be a number or [{kv_heads}], got {list(found.shape)}")
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
    given = as_array("sinks", sinks)
    if given.dtype.kind not in "iuf" and given.dtype.name not in FLOATS:
        raise TypeError(f"sinks must be of numbers, got {given.dtype.name}")
    with np.errstate(over="ignore"):
        found = given.astype(np.float32)
    if found.shape != (heads,):
        raise ValueError(f"sinks must be [{heads}], got {list(found.shape)}")
    if np.isnan(found).any() or np.isposinf(found).any():
        raise ValueError("sinks must be below infinity and no NaN")
    return found
