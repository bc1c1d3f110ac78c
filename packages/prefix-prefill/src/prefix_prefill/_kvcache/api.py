"""``flash_attn_with_kvcache`` of flash-attn 2: append to a cache of rows or pages, then attend."""

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .._cache.layout import head_dim_of_values
from .._linked.host.arguments import as_int32, check_flag, check_tensor, kind
from .._linked.host.forms import Memory, form_of
from .._linked.host.operators import check_written
from .._paged import checks as paged_checks
from .._paged import ops
from .._paged import options as paged_options
from .._paged.call import AppendOptions, AppendPlan, AppendTensors, RowOptions, RowPlan, RowTensors
from . import checks as kvcache_checks
from .results import returns_softmax_lse


class _Known(NamedTuple):
    """What all calls with one signature share."""

    append: AppendOptions
    attend: RowOptions
    plans: tuple[AppendPlan | None, RowPlan] | None = None  # None: calls go through the operators


_known: Memory[_Known] = Memory()


@returns_softmax_lse
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    kv_dtype: str | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    invariant: bool = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append new keys and values to a cache, then attend to it; flash-attn 2's function.

    ``k`` and ``v``, if given, are written in place after the ``cache_seqlens`` keys of each
    sequence, and the queries see them. With ``rotary_cos`` and ``rotary_sin``, ``k`` and ``q`` are
    rotated. Scores and masks are those of :func:`paged_attn_func`: if a sequence has ``seqlen_k``
    keys, new ones included, query i is at position ``i' = i + seqlen_k - seqlen_q``.

    Rotary embeddings (RoFormer: Su et al. 2021) replace the pair ``(x, y)`` of numbers at position
    p by ``(x cos[p] - y sin[p], x sin[p] + y cos[p])``, in fp32. New key i is at position
    ``cache_seqlens + i``. So is query i with ``causal`` or a window; otherwise every query is at
    ``cache_seqlens``.

    Args:
        q: queries, ``[batch, seqlen_q, heads_q, head_dim]``; fp16, bf16 or fp32. ``head_dim`` is a
            multiple of 8 up to 512.
        k_cache: keys, ``[batch_cache, seqlen_cache, heads_k, head_dim]``, or, with ``block_table``,
            ``[num_blocks, block_size, heads_k, head_dim]``; dtype of ``q``, or as ``kv_dtype``
            says. Any strides, any ``block_size``; the cache is never copied.
        v_cache: values, ``k_cache``'s shape and dtype, but for ``head_dim_v``, a multiple of 8 up
            to 512.
        k: new keys, ``[batch, seqlen_new, heads_k, head_dim]``, dtype of ``q``. Default: None.
        v: new values, ``[batch, seqlen_new, heads_k, head_dim_v]``, dtype of ``q``. Default: None.
        rotary_cos: cosines, ``[seqlen_ro, rotary_dim / 2]``, dtype of ``q`` or fp32.
            ``seqlen_ro`` is at least the slots of a sequence; ``rotary_dim`` is at most
            ``head_dim``, and the columns after it are not rotated. Needs ``k`` and ``v``.
            Default: None.
        rotary_sin: sines, shape and dtype of ``rotary_cos``.
        cache_seqlens: number of keys of each sequence in the cache, without new ones: an int for
            all or int32 ``[batch]`` (int64 is converted). It includes the ``cache_leftpad`` slots.
            Default: None, a full cache.
        cache_batch_idx: row of the cache of each sequence, int32 or int64 ``[batch]``; rows must
            differ if new keys are written. Default: None, sequence b in row b.
        cache_leftpad: number of slots without a key at the beginning of a row, int32 ``[batch]``.
            Default: None (0).
        block_table: the pages of each sequence, int32 or int64 ``[batch, max_blocks]``; excludes
            ``cache_batch_idx`` and ``cache_leftpad``. Default: None.
        softmax_scale: factor of the scores. Default: ``head_dim ** -0.5``.
        causal: hide key j from query i unless ``j <= i'``. Default: False.
        window_size: as in :func:`paged_attn_func`.
        softcap: cap of the scores; 0.0 is none. Default: 0.0.
        rotary_interleaved: a pair is two neighbours (GPT-J); if False, a number of the first half
            of ``rotary_dim`` and one of the second (GPT-NeoX). Default: True.
        alibi_slopes: fp32 ``[heads_q]`` or ``[batch, heads_q]``. Default: None.
        num_splits: as in :func:`paged_attn_func`.
        return_softmax_lse: return ``(out, lse)``. Default: False.
        kv_dtype: "int8" or "int4", as in :func:`paged_attn_func`. New keys and values are quantised
            as by :func:`reshape_and_cache`, keys after rotation. Default: None.
        k_scale_cache: the scale of each cached key, shaped like ``k_cache`` without ``head_dim``;
            fp16, bf16 or fp32. The scales of new keys are written. Required with ``kv_dtype``.
        v_scale_cache: the scale of each cached value, shape and dtype of ``k_scale_cache``.
        invariant: results equal those of :func:`paged_attn_func` with ``invariant``, bit for bit,
            on the same keys, counted from the first one after ``cache_leftpad``. Default: False.

    Returns:
        ``out``, ``[batch, seqlen_q, heads_q, head_dim_v]``; or ``(out, lse)``, ``lse`` fp32
        ``[batch, heads_q, seqlen_q]``. A fully masked row has output 0 and lse -inf.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, or if what is written shares memory. Lengths,
            rows and pages are checked on the CPU only; on a GPU they are the caller's duty. Nothing
            is written outside the cache.
        NotImplementedError: on a combination that is not supported; on an input that requires a
            gradient.
    """
    if unknown:
        kvcache_checks.refuse_unknown(unknown, flash_attn_with_kvcache)
    check_tensor("q", q)
    cache_leftpad = as_int32(cache_leftpad)
    given = kvcache_checks.Given(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_batch_idx,
        cache_leftpad,
        block_table,
        alibi_slopes,
        k_scale_cache,
        v_scale_cache,
    )
    lengths = as_int32(cache_seqlens)
    is_tensor = isinstance(lengths, Tensor)
    asked: tuple[Any, ...] = softmax_scale, causal, window_size, softcap, rotary_interleaved
    asked += num_splits, return_softmax_lse, kind(cache_seqlens), kv_dtype, invariant
    form = form_of((), (*given, lengths if is_tensor else None), asked, packed=False)
    known = None if form is None else _known.get(form)
    if known is None:
        kvcache_checks.check(given, lengths, kv_dtype)
        for name, flag in (
            ("rotary_interleaved", rotary_interleaved),
            ("return_softmax_lse", return_softmax_lse),
        ):
            check_flag(name, flag)
        options = paged_options.check_options(
            q, softmax_scale, causal, window_size, softcap, num_splits, False, invariant
        )
        if invariant:
            head_dim_v = head_dim_of_values(k_cache, v_cache)
            paged_checks.check_invariant(q, head_dim_v, q.dtype, kv_dtype, alibi_slopes)
        moves = options.window_left >= 0 or options.window_right >= 0
        new = 0 if k is None else k.shape[1]
        known = _Known(AppendOptions(bool(rotary_interleaved), moves), RowOptions.of(new, options))
    batch, seqlen_q, heads_q, head_dim = q.shape
    capacity = kvcache_checks.room(given)
    if not is_tensor:
        count = capacity
        if lengths is not None:
            count = kvcache_checks.length_of_all(lengths, known.attend.new, capacity)
        lengths = torch.full((batch,), count, dtype=torch.int32, device=q.device)
    packed = rotated = q.reshape(batch * seqlen_q, heads_q, head_dim)
    append = None
    if k is not None and v is not None:
        if rotary_cos is not None:
            rotated = torch.empty(packed.shape, dtype=q.dtype, device=q.device)
        append = AppendTensors(
            packed,
            k.flatten(0, 1),
            v.flatten(0, 1),
            k_cache,
            v_cache,
            lengths,
            cache_batch_idx,
            block_table,
            rotary_cos,
            rotary_sin,
            None if rotary_cos is None else rotated,
            k_scale_cache,
            v_scale_cache,
        )
    head_dim_v = head_dim_of_values(k_cache, v_cache)
    out = torch.empty((*q.shape[:3], head_dim_v), dtype=q.dtype, device=q.device)
    lse = None
    if return_softmax_lse:
        lse = torch.empty((heads_q, len(packed)), dtype=torch.float32, device=q.device)
    attend = RowTensors(
        rotated,
        k_cache,
        v_cache,
        lengths,
        cache_batch_idx,
        cache_leftpad,
        block_table,
        alibi_slopes,
        k_scale_cache,
        v_scale_cache,
        out.flatten(0, 1),
        lse,
    )
    if known.plans is None and form is not None and _known.get(form) is None:
        plans = ops.kvcache_plans_of(append, known.append, attend, known.attend)
        known = _known.keep(form, known._replace(plans=plans))
    if known.plans is not None:
        append_plan, row_plan = known.plans
        if append_plan is not None and append is not None:
            check_written(append)
            append_plan.run(append)
        row_plan.run(attend)
    else:
        if append is not None:
            ops.append_kvcache(*append, *known.append, cache_leftpad, known.attend.window_left)
        ops.attend_kvcache(*attend, *known.attend)
    if lse is None:
        return out
    return out, lse.view(heads_q, batch, seqlen_q).transpose(0, 1).contiguous()
