"""Argument checks of ``flash_attn_with_kvcache``; see ``_paged/checks.py``."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .._cache import checks as cache_checks
from .._cache.layout import head_dim_of_values
from .._cache.scales import check_scale_caches
from .._linked.host import arguments
from .._linked.host.arguments import (
    DEVICES,
    FLOAT_DTYPES,
    as_length,
    check_groups,
    check_tensor,
    is_symbol,
    kind,
)
from .._paged import checks as paged_checks
from .._paged import tensor_checks
from .._paged.call import AppendTensors, CheckedAppend, RowOptions, RowTensors
from .._paged.values import check_entry

_ROWS = "[batch_cache, seqlen_cache, heads_k, head_dim]"
_PAGES = "[num_blocks, block_size, heads_k, head_dim]"
# argument names of other attention functions: what to use here
_ELSEWHERE = {
    "block_tables": "use block_table",
    "cu_seqlens_q": "every sequence has seqlen_q queries; paged_attn_func takes packed ones",
    "page_table": "use block_table",
    "return_lse": "use return_softmax_lse",
    "scale": "use softmax_scale",
    "seqused_k": "use cache_seqlens, which does not count new keys",
    "seqlens_k": "use cache_seqlens, which does not count new keys",
    "sinks": "paged_attn_func takes them",
    "sm_scale": "use softmax_scale",
}


class Given(NamedTuple):
    """The tensors of a call without ``cache_seqlens``, which may be a number."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None
    alibi_slopes: Tensor | None
    k_scale_cache: Tensor | None
    v_scale_cache: Tensor | None


def refuse_unknown(names: Iterable[str], function: Callable[..., Any]) -> NoReturn:
    """Raise for unknown keyword arguments; the message names the argument to use instead."""
    arguments.refuse_unknown(names, _ELSEWHERE, function)


def room(x: Given | AppendTensors | RowTensors) -> int:
    """Return how many slots a sequence has in the cache."""
    size: int = x.k_cache.shape[1]
    return size if x.block_table is None else size * x.block_table.shape[1]


def check(x: Given, cache_seqlens: Any, kv_dtype: str | None) -> None:
    """Check the tensors of a call."""
    q = x.q
    if q.dtype not in FLOAT_DTYPES:
        raise TypeError(f"q must be torch.float16, torch.bfloat16 or torch.float32, got {q.dtype}")
    if q.device.type not in DEVICES:
        raise NotImplementedError(f"q must be on a CPU or a CUDA or HIP device, got {q.device}")
    if q.ndim != 4:
        raise ValueError(f"q must be [batch, seqlen_q, heads_q, head_dim], got {list(q.shape)}")
    paged_checks.check_head_dim(q.shape[3])
    _check_caches(x, kv_dtype)
    scales = x.k_scale_cache, x.v_scale_cache
    check_scale_caches(x.k_cache, *scales, kv_dtype, None, None)
    _check_table(x)
    _check_new(x, cache_seqlens)
    _check_rotary(x)
    _check_places(x, cache_seqlens)
    paged_checks.check_extras(
        q[:, :0].flatten(0, 1),
        q.shape[0],
        x.k_cache.shape[2],
        x.alibi_slopes,
        None,
        None,
        None,
        None,
    )
    paged_checks.check_no_gradients(**x._asdict())


def _check_caches(x: Given, kv_dtype: str | None) -> None:
    cache_checks.check_kv_dtype(kv_dtype, is_own=True)
    q, form = x.q, _ROWS if x.block_table is None else _PAGES
    stored, of = q.dtype, "of q"
    if kv_dtype is not None:
        stored, of = cache_checks.KV_DTYPES[kv_dtype], f"of kv_dtype {kv_dtype!r}"
    head_dim, width = q.shape[3], "the head_dim of q"
    if kv_dtype == "int4":
        head_dim, width = head_dim // 2, "half the head_dim of q"
    for name, cache in (("k_cache", x.k_cache), ("v_cache", x.v_cache)):
        check_tensor(name, cache)
        if cache.dtype != stored:
            raise TypeError(f"{name} must have the dtype {of}, {stored}, got {cache.dtype}")
        tensor_checks.check_device(name, cache, "q", q)
    shape = x.k_cache.shape
    if len(shape) != 4 or shape[3] != head_dim or 0 in shape[1:3]:
        raise ValueError(f"k_cache must be {form} with {width}, {head_dim}, got {list(shape)}")
    if x.v_cache.ndim != 4 or x.v_cache.shape[:3] != shape[:3]:
        raise ValueError(
            f"v_cache must be shaped like k_cache but for its head_dim, {list(shape)}, got "
            f"{list(x.v_cache.shape)}"
        )
    paged_checks.check_head_dim(head_dim_of_values(x.k_cache, x.v_cache), "v_cache")
    check_groups(q.shape[2], x.k_cache.shape[2])


def _check_new(x: Given, cache_seqlens: Any) -> None:
    q = x.q
    if x.k is None and x.v is None:
        return
    if x.k is None or x.v is None:
        raise ValueError(
            f"k and v must be given together or not at all, got k {kind(x.k)} and v {kind(x.v)}"
        )
    if cache_seqlens is None:
        raise ValueError("cache_seqlens must say behind which keys k and v go, got None")
    head_dim_v = head_dim_of_values(x.k_cache, x.v_cache)
    for name, new, width, size in (
        ("k", x.k, "head_dim", q.shape[3]),
        ("v", x.v, "head_dim_v", head_dim_v),
    ):
        check_tensor(name, new)
        if new.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {new.dtype}")
        tensor_checks.check_device(name, new, "q", q)
        new_keys = x.k.shape[1] if x.k.ndim == 4 else 0
        expected = [q.shape[0], new_keys, x.k_cache.shape[2], size]
        if list(new.shape) != expected:
            raise ValueError(
                f"{name} must be [batch, seqlen_new, heads_k, {width}], [{q.shape[0]}, "
                f"seqlen_new, {x.k_cache.shape[2]}, {size}], got {list(new.shape)}"
            )
    if x.k.shape[1] > room(x):
        raise ValueError(
            f"k must have at most as many keys as the cache has room for, {room(x)}, got "
            f"{x.k.shape[1]}"
        )


def _check_rotary(x: Given) -> None:
    cos, sin = x.rotary_cos, x.rotary_sin
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        raise ValueError(
            "rotary_cos and rotary_sin must be given together or not at all, got rotary_cos "
            f"{kind(cos)} and rotary_sin {kind(sin)}"
        )
    if x.k is None:
        raise ValueError("k and v must be given beside rotary_cos and rotary_sin, got None")
    most, least = x.q.shape[3] // 2, room(x)
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_tensor(name, table)
        if table.dtype not in (x.q.dtype, torch.float32):
            raise TypeError(
                f"{name} must have the dtype of q, {x.q.dtype}, or be torch.float32, got "
                f"{table.dtype}"
            )
        tensor_checks.check_device(name, table, "q", x.q)
        if table.ndim != 2 or not 1 <= table.shape[1] <= most or table.shape[0] < least:
            raise ValueError(
                f"{name} must be [seqlen_ro, rotary_dim / 2], at least {least} and at most {most}, "
                f"got {list(table.shape)}"
            )
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        raise ValueError(
            f"rotary_sin must be like rotary_cos, {list(cos.shape)} of {cos.dtype}, got "
            f"{list(sin.shape)} of {sin.dtype}"
        )


def _check_table(x: Given) -> None:
    """Check the page table, which says how much room there is."""
    if x.block_table is None:
        return
    batch = x.q.shape[0]
    tensor_checks.check_indices("block_table", x.block_table, "q", x.q, 2)
    if x.block_table.shape[0] != batch:
        raise ValueError(
            f"block_table must be [batch, max_blocks], [{batch}, max_blocks], got "
            f"{list(x.block_table.shape)}"
        )


def _check_places(x: Given, cache_seqlens: Any) -> None:
    """Check lengths, rows and left padding."""
    q, batch = x.q, x.q.shape[0]
    if isinstance(cache_seqlens, Tensor):
        tensor_checks.check_lengths("cache_seqlens", cache_seqlens, q)
        _check_batch("cache_seqlens", cache_seqlens, batch)
    elif cache_seqlens is not None:
        as_length("cache_seqlens", cache_seqlens)
    if x.block_table is not None:
        for name in ("cache_batch_idx", "cache_leftpad"):
            if getattr(x, name) is not None:
                raise NotImplementedError(
                    f"{name} must be None beside block_table, got Tensor; a row of block_table "
                    "says where a sequence lies"
                )
        return
    if x.cache_batch_idx is not None:
        tensor_checks.check_indices("cache_batch_idx", x.cache_batch_idx, "q", q, 1)
        _check_batch("cache_batch_idx", x.cache_batch_idx, batch)
    elif batch > x.k_cache.shape[0]:
        raise ValueError(
            f"k_cache must have a row for each of the {batch} sequences of q, got "
            f"{x.k_cache.shape[0]}"
        )
    if x.cache_leftpad is not None:
        tensor_checks.check_lengths("cache_leftpad", x.cache_leftpad, q)
        _check_batch("cache_leftpad", x.cache_leftpad, batch)


def _check_batch(name: str, x: Tensor, batch: int) -> None:
    if x.shape[0] != batch:
        raise ValueError(f"{name} must be [batch], [{batch}], got {list(x.shape)}")


def length_of_all(length: Any, new: int, capacity: int) -> int:
    """Check a number that is ``cache_seqlens`` of every sequence; return it as an int."""
    number = as_length("cache_seqlens", length)
    if not is_symbol(number) and number + new > capacity:
        raise ValueError(
            f"cache_seqlens must leave room for {new} new keys of {capacity}, got {number}"
        )
    return number


# ---- tensor data, which the operators check on the CPU


def check_append_values(given: CheckedAppend) -> None:
    """Check lengths, left padding, and the pages or rows of new and of visible keys."""
    x, options = given.call
    lengths = x.cache_seqlens.tolist()
    new, queries = (len(t) // max(1, len(lengths)) for t in (x.k, x.q))
    _check_keys(x, given.cache_leftpad, new, queries, given.window_left)
    appended = [(n, n + new) for n in lengths]
    _check_pages(x, appended)
    _check_slots(x, appended)
    if x.rotary_cos is not None:
        queries = queries if options.moving else 1
        for b, length in enumerate(lengths):
            if length + queries > x.rotary_cos.shape[0]:
                raise ValueError(
                    f"rotary_cos must hold the position of every query, up to "
                    f"{length + queries - 1} of sequence {b}, got {list(x.rotary_cos.shape)}"
                )


def check_row_values(x: RowTensors, options: RowOptions) -> None:
    """Check lengths, left padding, and the pages or rows of visible keys."""
    queries = len(x.q) // max(1, len(x.cache_seqlens))
    _check_keys(x, x.cache_leftpad, options.new, queries, options.window_left)


def _check_keys(
    x: AppendTensors | RowTensors, pads: Tensor | None, new: int, queries: int, window_left: int
) -> None:
    lengths = x.cache_seqlens.tolist()
    _check_lengths(lengths, new, room(x))
    given = [0] * len(lengths) if pads is None else pads.tolist()
    for b, (pad, length) in enumerate(zip(given, lengths, strict=True)):
        if not 0 <= pad <= length:
            raise ValueError(
                f"cache_leftpad[{b}] must be from 0 to cache_seqlens[{b}], {length}, got {pad}"
            )
    seen = []
    for length in lengths:
        last = length + new
        first = last - queries - window_left if window_left >= 0 else 0
        seen.append((min(max(0, first), last), last))
    _check_pages(x, seen)


def _check_lengths(lengths: list[int], new: int, capacity: int) -> None:
    for b, length in enumerate(lengths):
        if not 0 <= length <= capacity - new:
            raise ValueError(
                f"cache_seqlens[{b}] must be from 0 to {capacity - new}, which leaves room for "
                f"{new} new keys of {capacity}, got {length}"
            )


def _check_pages(x: AppendTensors | RowTensors, keys: list[tuple[int, int]]) -> None:
    """Check the pages or the row of a range of keys of each sequence."""
    count, size = x.k_cache.shape[:2]
    if x.block_table is not None:
        table = x.block_table.tolist()
        for b, (first, last) in enumerate(keys):
            for i in range(first // size, -(-last // size) if first < last else 0):
                check_entry(f"block_table[{b}, {i}]", table[b][i], count, "num_blocks")
    elif x.cache_batch_idx is not None:
        for b, row in enumerate(x.cache_batch_idx.tolist()):
            check_entry(f"cache_batch_idx[{b}]", row, count, "batch_cache")


def _check_slots(x: AppendTensors, keys: list[tuple[int, int]]) -> None:
    """Check that new keys of a sequence go to a row of its own, or all to slots of their own."""
    taken: dict[tuple[int, int], int] = {}
    size = x.k_cache.shape[1]
    if x.block_table is not None:
        table = x.block_table.tolist()
        for b, (first, last) in enumerate(keys):
            for key in range(first, last):
                page, slot = table[b][key // size], key % size
                if (page, slot) in taken:
                    raise ValueError(
                        f"block_table[{b}, {key // size}] must give new keys slots of their own, "
                        f"got page {page}, to whose slot {slot} a new key of sequence "
                        f"{taken[page, slot]} goes"
                    )
                taken[page, slot] = b
    elif x.cache_batch_idx is not None and len(x.k):
        for b, row in enumerate(x.cache_batch_idx.tolist()):
            if (row, 0) in taken:
                raise ValueError(
                    f"cache_batch_idx[{b}] must be a row of its own where keys are written, got "
                    f"{row}, which is cache_batch_idx[{taken[row, 0]}]"
                )
            taken[row, 0] = b
