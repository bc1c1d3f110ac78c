"""The functions under which inference engines know this kernel family."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._paged.backends import choose_backend
from ._paged.call import Options
from ._paged.checks import (
    check_block_size,
    check_cache,
    check_dtypes,
    check_flag,
    check_head_dim,
    check_heads,
    check_large_tile,
    check_number,
)
from ._paged.forms import Buckets
from ._paged.launch import launch_form
from ._paged.masks import column_order, pack_mask
from .sim.arrays import like, to_array


def flash_attn_varlen_nkifunc(
    query: Any,
    key: Any,
    value: Any,
    kv_cache: Any,
    block_table: Any,
    attn_mask: Any,
    n_kv_head: int | None = None,
    head_size: int | None = None,
    LARGE_TILE_SZ: int = 2048,
    mixed_precision: bool = True,
) -> Any:
    """Attend packed queries to active blocks and to the new tokens, by a mask.

    Args:
        query: ``[1, heads, head_dim, seq_q]``.
        key: ``[1, kv_heads, head_dim, seq_k]``.
        value: ``[1, kv_heads, seq_k, head_dim]``.
        kv_cache: ``[2, blocks, kv_heads, block_size, head_dim]``.
        block_table: the active blocks of all sequences, ``[active_blocks]``.
        attn_mask: nonzero where visible, ``[seq_q, active_blocks * block_size + seq_k]``; its
            context in the order of ``reorder_context_mask``. A row must see one range of the cached
            tokens and one of the new tokens.
        n_kv_head, head_size: must agree with the tensors, if given.
        LARGE_TILE_SZ: the size for which the mask was reordered.
        mixed_precision: whether operands of products are bf16; else they have query's dtype.

    Returns:
        ``[1, heads, seq_q, head_dim]`` in query's dtype. A row that sees nothing gives 0.
    """
    return _attend(
        query,
        key,
        value,
        kv_cache,
        block_table,
        attn_mask,
        None,
        n_kv_head,
        head_size,
        LARGE_TILE_SZ,
        mixed_precision,
    )


def _attend(
    query: Any,
    key: Any,
    value: Any,
    kv_cache: Any,
    block_table: Any,
    mask: Any,
    softmax_scale: float | None,
    n_kv_head: int | None,
    head_size: int | None,
    large_tile: int,
    mixed_precision: bool,
) -> Any:
    names = ("query", "key", "value", "kv_cache", "block_table", "attn_mask")
    given = (query, key, value, kv_cache, block_table, mask)
    q, k, v, cache, table, seen = (to_array(n, x) for n, x in zip(names, given, strict=True))
    check_dtypes(("query", q), {"key": k, "value": v}, cache)
    if q.ndim != 4 or q.shape[0] != 1:
        raise ValueError(f"query must be [1, heads, head_dim, seq_q], got {list(q.shape)}")
    _, heads, head_dim, seq_q = q.shape
    if k.ndim != 4 or (k.shape[0], k.shape[2]) != (1, head_dim):
        raise ValueError(f"key must be [1, kv_heads, {head_dim}, seq_k], got {list(k.shape)}")
    kv_heads, seq_k = k.shape[1], k.shape[3]
    if v.shape != (1, kv_heads, seq_k, head_dim):
        raise ValueError(f"value must be [1, {kv_heads}, {seq_k}, {head_dim}], got {list(v.shape)}")
    if n_kv_head not in (None, kv_heads):
        raise ValueError(f"n_kv_head must be key's {kv_heads}, got {n_kv_head}")
    if head_size not in (None, head_dim):
        raise ValueError(f"head_size must be query's {head_dim}, got {head_size}")
    check_flag("mixed_precision", mixed_precision)
    check_head_dim(head_dim)
    check_heads(heads, kv_heads)
    check_cache(cache, kv_heads, head_dim)
    check_block_size(cache.shape[3])
    if table.ndim != 1:
        raise ValueError(f"block_table must be [active_blocks], got {list(table.shape)}")
    if table.size and table.dtype.kind not in "iu":
        raise TypeError(f"block_table must be of integers, got {table.dtype.name}")
    if seen.dtype.kind not in "biuf":
        raise TypeError(f"attn_mask must be of booleans or numbers, got {seen.dtype.name}")
    block_size = cache.shape[3]
    check_large_tile(large_tile, block_size)
    context = len(table) * block_size
    if seen.shape != (seq_q, context + seq_k):
        raise ValueError(f"attn_mask must be [{seq_q}, {context + seq_k}], got {list(seen.shape)}")
    # back into the order of tokens
    order = column_order(large_tile, block_size, context)
    plain = np.empty(seen.shape, bool)
    plain[:, order] = seen[:, :context] != 0
    plain[:, context:] = seen[:, context:] != 0
    used = plain[:, :context].reshape(seq_q, len(table), block_size).any(axis=(0, 2))
    wrong = used & ((table < 0) | (table >= cache.shape[1]))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"block_table[{at}] must be from 0 to {cache.shape[1] - 1}, got {table[at]}"
        )
    batch = pack_mask(plain, context, table.astype(np.int64), block_size)
    scale = (
        head_dim**-0.5 if softmax_scale is None else check_number("softmax_scale", softmax_scale)
    )
    dtype = "bfloat16" if mixed_precision else q.dtype.name
    options = Options.plain(scale, kv_heads, dtype)
    out, _ = launch_form(
        np.ascontiguousarray(q[0].transpose(2, 0, 1)),
        k[0].transpose(2, 0, 1),
        v[0].transpose(1, 0, 2),
        cache,
        batch,
        options,
        Buckets(),
        choose_backend(),
    )
    return like(np.ascontiguousarray(out.transpose(1, 0, 2))[None], query)


class FlashPagedAttention:
    """``flash_paged_attention[1, n_kv_head](...)``: the old kernel's call; the grid is ignored."""

    def __getitem__(self, grid: Any) -> FlashPagedAttention:
        return self

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        block_tables: Any,
        mask: Any,
        softmax_scale: float | None = None,
        mixed_precision: bool = True,
        LARGE_TILE_SZ: int = 2048,
        return_debug_tensors: bool = False,
    ) -> Any:
        """Compute ``flash_attn_varlen_nkifunc`` with a scale, which may be 0.0."""
        if return_debug_tensors:
            raise NotImplementedError("return_debug_tensors is not offered; use the simulator")
        return _attend(
            query,
            key,
            value,
            kv_cache,
            block_tables,
            mask,
            softmax_scale,
            None,
            None,
            LARGE_TILE_SZ,
            mixed_precision,
        )


flash_paged_attention = FlashPagedAttention()
