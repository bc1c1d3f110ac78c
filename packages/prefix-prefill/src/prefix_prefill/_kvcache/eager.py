"""The CPU implementation of ``flash_attn_with_kvcache``: the reference, sequence by sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from .._cache.layout import INT_MAX
from .._paged import eager
from .._paged.call import AppendOptions, AppendTensors, RowOptions, RowTensors, Tensors
from .._paged.reference import quantised


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Apply rotary embeddings to ``[tokens, heads, head_dim]``; the result is rounded once.

    ``cos`` and ``sin`` are ``[seqlen_ro, rotary_dim / 2]``, ``positions`` ``[tokens]``.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = (table[positions].to(wide)[:, None] for table in (cos, sin))
    half = cos.shape[2]
    out = x.to(wide, copy=True)
    turned = out[..., : 2 * half]
    if interleaved:
        a, b = turned[..., ::2].clone(), turned[..., 1::2].clone()
        turned[..., ::2], turned[..., 1::2] = a * cos - b * sin, a * sin + b * cos
    else:
        a, b = turned[..., :half].clone(), turned[..., half:].clone()
        turned[..., :half], turned[..., half:] = a * cos - b * sin, a * sin + b * cos
    return out.to(x.dtype)


def append(x: AppendTensors, options: AppendOptions) -> None:
    """Write new keys and values after the cached ones; rotate keys and queries."""
    with torch.no_grad():
        batch = len(x.cache_seqlens)
        starts = x.cache_seqlens.to(torch.int64)[:, None]
        count, queries = len(x.k) // max(1, batch), len(x.q) // max(1, batch)
        positions = starts + torch.arange(count)
        size = x.k_cache.shape[1]
        if x.block_table is not None:
            rows = x.block_table.to(torch.int64).gather(1, positions // size).flatten()
        elif x.cache_batch_idx is not None:
            rows = x.cache_batch_idx.to(torch.int64).repeat_interleave(count)
        else:
            rows = torch.arange(batch).repeat_interleave(count)
        slots = (positions % size).flatten()
        k = x.k
        if x.rotary_cos is not None and x.rotary_sin is not None and x.rotated is not None:
            tables = x.rotary_cos, x.rotary_sin
            k = rotate(k, *tables, positions.flatten(), options.interleaved)
            where = starts + (torch.arange(queries) if options.moving else torch.zeros(queries))
            where = where.to(torch.int64).flatten()
            x.rotated.copy_(rotate(x.q, *tables, where, options.interleaved))
        for new, cache, scales in (
            (k, x.k_cache, x.k_scale_cache),
            (x.v, x.v_cache, x.v_scale_cache),
        ):
            if scales is None:
                cache[rows, slots] = new
            else:
                largest = INT_MAX[cache.dtype]
                cache[rows, slots], scales[rows, slots] = quantised(new, largest, scales.dtype)


def attend(x: RowTensors, options: RowOptions) -> None:
    """Attend to each sequence's keys; without a page table, each slot of a row is a page."""
    batch = len(x.cache_seqlens)
    queries = len(x.q) // max(1, batch)
    starts = torch.tensor([0, queries], dtype=torch.int32)
    for b, length in enumerate(x.cache_seqlens.tolist()):
        keys = length + options.new
        caches, table = (x.k_cache, x.v_cache), x.block_table
        scales = x.k_scale_cache, x.v_scale_cache
        if table is None:
            row = b if x.cache_batch_idx is None else int(x.cache_batch_idx[b])
            first = 0 if x.cache_leftpad is None else int(x.cache_leftpad[b])
            caches = x.k_cache[row, first:keys, None], x.v_cache[row, first:keys, None]
            if scales[0] is not None and scales[1] is not None:
                scales = scales[0][row, first:keys, None], scales[1][row, first:keys, None]
            keys -= first
            table = torch.arange(keys)[None]
        else:
            table = table[b : b + 1]
        slopes = x.alibi_slopes
        if slopes is not None and slopes.ndim == 2:
            slopes = slopes[b]
        rows = slice(b * queries, (b + 1) * queries)
        part = Tensors.of(
            q=x.q[rows],
            k_cache=caches[0],
            v_cache=caches[1],
            block_table=table,
            cu_seqlens_q=starts,
            seqlens_k=torch.tensor([keys], dtype=torch.int32),
            alibi_slopes=slopes,
            k_scale_cache=scales[0],
            v_scale_cache=scales[1],
            out=x.out[rows],
            lse=None if x.lse is None else x.lse[:, rows],
        )
        eager.attention(part, options.as_options())
