"""Launchers of ``flash_attn_with_kvcache``: the append, and attention over rows as pages.

Rows become pages without a copy. The view of a cache has a page beginning at every slot, so pages
overlap; the page table of a sequence has every ``SLOTS``-th page of its row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from attn_common import cdiv
from torch import Tensor

from ..._cache.kernels.addressing import CacheForm, row_strides, strides_of
from ..._cache.kernels.arguments import AngleStrides, Options, SlotStrides, TableStrides
from ..._cache.layout import INT_MAX
from ..._linked.host.operators import structured
from ..._linked.launch.entries import flat
from ..._linked.launch.kernels import Kernel
from ..._linked.launch.runtime import Launch, aligned, dense, is_aligned, row_bytes
from ..._paged.call import (
    AppendOptions,
    AppendTensors,
    CheckedAppend,
    Plan,
    RowCall,
    RowOptions,
    RowTensors,
    Tensors,
)
from ..._paged.invariant import InvariantAttention
from ..._paged.launch import AttentionPlan
from ..checks import room
from .arguments import Numbers, PageNumbers, PageTensors

append_kernel = Kernel(__package__, ".append", "append_kernel")
pages_kernel = Kernel(__package__, ".append", "pages_kernel")

# tokens of one head that a program appends
BLOCK_T = 16
# slots per page of a row: a multiple of every tile of keys, so that a tile has one page
SLOTS = 128
# entries of a table that are written at once
ENTRIES = 256
MAX_INT32 = 2**31 - 1


def launch_append(*arguments: Any) -> None:
    """Run the operator that appends to a cache on checked inputs."""
    (x, options), cache_leftpad, _ = structured(CheckedAppend, arguments)
    if cache_leftpad is not None:
        # raises now if the attention that follows would
        pages_of_rows(x, cache_leftpad)
    x = x._replace(q=aligned(x.q), k=aligned(x.k), v=aligned(x.v))
    AppendPlan(x, options).run(x)


def launch_attend(*arguments: Any) -> None:
    """Run the operator that attends to the rows of a cache on checked inputs."""
    x, options = structured(RowCall, arguments)
    x = x._replace(q=aligned(x.q))
    RowPlan(x, options).run(x)


def plans_of(
    append: AppendTensors | None,
    append_options: AppendOptions,
    attend: RowTensors,
    options: RowOptions,
) -> tuple[AppendPlan | None, RowPlan] | None:
    """Return launchers for calls like this one, or None if tensors have to be copied first."""
    new = [attend.q] if append is None else [append.q, append.k, append.v, attend.q]
    if not all(map(is_aligned, new)):
        return None
    first = None if append is None else AppendPlan(append, append_options)
    return first, RowPlan(attend, options, is_kept=True)


class AppendPlan:
    """Launcher of the appends with one signature."""

    def __init__(self, x: AppendTensors, options: AppendOptions) -> None:
        """Prepare appends like ``x``, whose new tokens are aligned (see ``aligned``)."""
        heads_q, heads_k = x.q.shape[1], x.k.shape[1]
        cache = CacheForm(x.k_cache, x.v_cache)
        batch = len(x.cache_seqlens)
        seqlen_new, seqlen_q = (len(t) // max(1, batch) for t in (x.k, x.q))
        numbers = Numbers(
            batch=batch,
            seqlen_new=seqlen_new,
            seqlen_q=seqlen_q,
            page=cache.page,
            room=room(x),
            pages=x.k_cache.shape[0],
            seqlen_ro=0 if x.rotary_cos is None else len(x.rotary_cos),
            q=row_strides(x.q),
            k=row_strides(x.k),
            v=row_strides(x.v),
            k_cache=cache.k,
            v_cache=cache.v,
            table=strides_of(TableStrides, x.block_table),
            cos=strides_of(AngleStrides, x.rotary_cos),
            sin=strides_of(AngleStrides, x.rotary_sin),
            k_scales=strides_of(SlotStrides, x.k_scale_cache),
            v_scales=strides_of(SlotStrides, x.v_scale_cache),
        )
        self._numbers = flat(numbers)
        key, value = cache.vectors(x.k, x.v)
        asked = Options(
            KEY=key,
            VALUE=value,
            HEADS=heads_k,
            ROW_BYTES=min(map(row_bytes, (x.q, x.k, x.v))),
            INT_MAX=0 if x.k_scale_cache is None else INT_MAX[x.k_cache.dtype],
            BLOCK_T=BLOCK_T,
            HEADS_Q=heads_q,
            ROTARY_DIM=0 if x.rotary_cos is None else 2 * x.rotary_cos.shape[1],
            INTERLEAVED=options.interleaved,
            MOVING=options.moving,
        )
        self._grid = cdiv(len(x.k), BLOCK_T) * 2 * heads_k
        if asked.ROTARY_DIM:
            self._grid += cdiv(len(x.q), BLOCK_T) * heads_q
        constants = {"OPTIONS": asked, "num_warps": 4, "num_stages": 1}
        self._append = Launch(append_kernel, constants)

    def run(self, x: AppendTensors) -> None:
        """Launch one append."""
        x = x._replace(
            cache_seqlens=x.cache_seqlens.contiguous(), cache_batch_idx=dense(x.cache_batch_idx)
        )
        # AppendTensors has the fields of Tensors
        self._append(self._grid, x, self._numbers)


class Pages(NamedTuple):
    """A cache of rows as pages: the views, and the numbers that make its page table."""

    k_cache: Tensor
    v_cache: Tensor
    k_scale_cache: Tensor | None
    v_scale_cache: Tensor | None
    row_pages: int
    step: int
    pages: int  # pages of a sequence


class RowPlan:
    """Launcher of attention over rows with one signature."""

    def __init__(self, x: RowTensors, options: RowOptions, is_kept: bool = False) -> None:
        """Prepare calls like ``x``, with aligned queries; ``is_kept``: the launcher is reused."""
        self._batch = len(x.cache_seqlens)
        self._seqlen_q = len(x.q) // max(1, self._batch)
        self._has_table = x.block_table is not None
        self._room = room(x)
        self._fill = Launch(pages_kernel, {"BLOCK": ENTRIES, "num_warps": 4, "num_stages": 1})
        pages = None if self._has_table else pages_of_rows(x, x.cache_leftpad)
        self._views = None
        counts = PageNumbers(seqlen_q=self._seqlen_q, new=options.new)
        if pages is not None:
            counts = counts._replace(row_pages=pages.row_pages, step=pages.step, pages=pages.pages)
            self._views = [
                None if view is None else (view.size(), view.stride()) for view in pages[:4]
            ]
        self._counts = counts
        make = InvariantAttention if options.invariant else AttentionPlan
        self._attention: Plan = make(self._tensors(x), options.as_options(), is_kept)

    def _tensors(self, x: RowTensors) -> Tensors:
        """Return the tensors of the attention kernel; ``pages_kernel`` fills tables and lengths."""
        batch = self._batch
        caches, table = _caches(x), x.block_table
        pages = self._counts.pages
        scratch = x.q.new_empty((2 * batch + 1 + batch * pages,), dtype=torch.int32)
        starts, lengths = scratch[: batch + 1], scratch[batch + 1 : 2 * batch + 1]
        if self._views is not None:
            table = scratch[2 * batch + 1 :].view(batch, pages)
            caches = tuple(
                None if cache is None or form is None else cache.as_strided(*form)
                for cache, form in zip(caches, self._views, strict=True)
            )
        return Tensors.of(
            q=x.q,
            k_cache=caches[0],
            v_cache=caches[1],
            k_scale_cache=caches[2],
            v_scale_cache=caches[3],
            block_table=table,
            cu_seqlens_q=starts,
            seqlens_k=lengths,
            alibi_slopes=x.alibi_slopes,
            out=x.out,
            lse=x.lse,
        )

    def run(self, x: RowTensors) -> None:
        """Launch one call."""
        if len(x.q) == 0:
            return
        y = self._tensors(x)
        pointers = PageTensors(
            x.cache_seqlens.contiguous(),
            dense(x.cache_batch_idx),
            dense(x.cache_leftpad),
            y.cu_seqlens_q,
            y.seqlens_k,
            None if self._has_table else y.block_table,
        )
        self._fill(self._batch, pointers, self._counts)
        self._attention.run(y, self._seqlen_q, self._room)


def pages_of_rows(x: AppendTensors | RowTensors, cache_leftpad: Tensor | None) -> Pages:
    """Return a cache of rows as ``Pages``; if that is impossible, one page per row."""
    rows, slots, _, _ = x.k_cache.shape
    caches = _caches(x)
    ratios = {_slots_of_row(cache) for cache in caches if cache is not None}
    ratio = ratios.pop()
    # page numbers are int32, and the same for keys, values and scales
    if ratio is None or ratios or (total := (rows - 1) * ratio + slots) > MAX_INT32:
        if cache_leftpad is not None:
            raise NotImplementedError(
                "cache_leftpad: k_cache and v_cache must be alike in how many slots their rows lie "
                f"apart, got strides {x.k_cache.stride()} and {x.v_cache.stride()}"
            )
        return Pages(x.k_cache, x.v_cache, x.k_scale_cache, x.v_scale_cache, 1, 0, 1)
    page = min(SLOTS, 1 << total.bit_length() - 1)
    views = []
    for cache in caches:
        if cache is None:
            views.append(None)
            continue
        _, slot, *inner = cache.stride()
        size = (total - page + 1, page, *cache.shape[2:])
        views.append(cache.as_strided(size, (slot, slot, *inner)))
    return Pages(*views, ratio, page, cdiv(slots, page))


def _caches(x: AppendTensors | RowTensors) -> tuple[Tensor | None, ...]:
    return x.k_cache, x.v_cache, x.k_scale_cache, x.v_scale_cache


def _slots_of_row(cache: Tensor) -> int | None:
    """Return the distance of neighbouring rows in slots, or None if it is no whole number."""
    row, slot = cache.stride()[:2]
    if cache.shape[0] <= 1:
        return cache.shape[1]
    return row // slot if slot > 0 and row % slot == 0 else None
