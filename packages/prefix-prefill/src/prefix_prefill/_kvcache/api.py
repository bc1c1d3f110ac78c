"""Attention over a cache of rows or pages that the call appends to, as flash-attn 2 has it."""

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .._cache.layout import head_dim_of_values
from .._linked.host.arguments import as_int32, check_flag, check_tensor, is_int, kind
from .._linked.host.forms import Memory, form_of
from .._paged import checks as paged_checks
from .._paged import ops
from .._paged import options as paged_options
from .._paged.call import AppendOptions, AppendPlan, AppendTensors, RowOptions, RowPlan, RowTensors
from . import checks as kvcache_checks


class _Known(NamedTuple):
    """What is known of every call of one form."""

    append: AppendOptions
    attend: RowOptions
    # None where calls have to go through the operators
    plans: tuple[AppendPlan | None, RowPlan] | None = None


_known: Memory[_Known] = Memory()


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

    With ``k`` and ``v``, they are written in place behind the ``cache_seqlens`` keys of each
    sequence, rotated if there are ``rotary_cos`` and ``rotary_sin``, and the queries see them. The
    scores and masks are those of :func:`paged_attn_func`: with ``seqlen_k`` keys of a sequence, new
    ones included, query i stands at ``i' = i + seqlen_k - seqlen_q``.

    Rotary embeddings (RoFormer: Su et al. 2021) turn the pair ``(x, y)`` of numbers at position p
    into ``(x cos[p] - y sin[p], x sin[p] + y cos[p])``, in fp32. New key i stands at
    ``cache_seqlens + i``; query i too, under ``causal`` or a window, and at ``cache_seqlens``
    without.

    Args:
        q: queries, ``[batch, seqlen_q, heads_q, head_dim]``; fp16, bf16 or fp32. ``head_dim`` is a
            multiple of 8 up to 512.
        k_cache: keys, ``[batch_cache, seqlen_cache, heads_k, head_dim]``, or, with ``block_table``,
            ``[num_blocks, block_size, heads_k, head_dim]``; dtype of ``q``, or as ``kv_dtype``
            says. Any strides, any ``block_size``; the cache is never copied.
        v_cache: values, likewise, with a ``head_dim_v`` that is that of ``q`` or another multiple
            of 8 up to 512.
        k: new keys, ``[batch, seqlen_new, heads_k, head_dim]``, dtype of ``q``. Default: None.
        v: new values, ``[batch, seqlen_new, heads_k, head_dim_v]``, likewise.
        rotary_cos: ``[seqlen_ro, rotary_dim / 2]``, dtype of ``q`` or fp32, for as many positions
            as the cache has room for; ``rotary_dim`` is at most ``head_dim``, and the columns
            after it are not rotated. Needs ``k`` and ``v``. Default: None.
        rotary_sin: likewise.
        cache_seqlens: how many keys of each sequence the cache holds, an int for all or int32
            ``[batch]`` (int64 is converted); what ``cache_leftpad`` leaves out counts, too.
            Default: None, as many as it has room for.
        cache_batch_idx: in which row of the cache each sequence is, int32 or int64 ``[batch]``,
            all different where new keys are written. Default: None, sequence b in row b.
        cache_leftpad: how many slots at the beginning of a row hold no key, int32 ``[batch]``.
            Default: None (0).
        block_table: the pages of each sequence, int32 or int64 ``[batch, max_blocks]``. Not beside
            ``cache_batch_idx`` or ``cache_leftpad``. Default: None.
        softmax_scale: factor of the scores. Default: ``head_dim ** -0.5``.
        causal: hide key j from query i unless ``j <= i'``. Default: False.
        window_size: as in :func:`paged_attn_func`.
        softcap: cap of the scores; 0.0 is none. Default: 0.0.
        rotary_interleaved: pairs are neighbours (GPT-J), or else numbers of the first and the
            second half of ``rotary_dim`` (GPT-NeoX). Default: True.
        alibi_slopes: fp32 ``[heads_q]`` or ``[batch, heads_q]``. Default: None.
        num_splits: as in :func:`paged_attn_func`.
        return_softmax_lse: return ``(out, lse)``. Default: False.
        kv_dtype: "int8" or "int4", as in :func:`paged_attn_func`: new keys and values are quantised
            as :func:`reshape_and_cache` does it, keys once they are rotated. Default: None.
        k_scale_cache: the factor of each cached key, shaped like ``k_cache`` without ``head_dim``;
            fp16, bf16 or fp32. Those of new keys are written. Given where ``kv_dtype`` is.
        v_scale_cache: likewise of each value, dtype of ``k_scale_cache``.
        invariant: as in :func:`paged_attn_func`: results equal its, bit for bit, on the same
            keys, which count from the first behind ``cache_leftpad``. Default: False.

    Returns:
        ``out``, ``[batch, seqlen_q, heads_q, head_dim_v]``; or ``(out, lse)``, ``lse`` fp32
        ``[batch, heads_q, seqlen_q]``. A query that sees no key has output 0 and lse -inf.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range. What only a GPU knows is the caller's duty
            there: lengths, rows and pages. Nothing is written beyond the cache.
        NotImplementedError: on a combination that is not offered; on an input that requires a
            gradient.
    """
    if unknown:
        kvcache_checks.refuse_unknown(unknown)
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
        known = _Known(
            AppendOptions(rotary_interleaved, moves), RowOptions(new, *options[:5], invariant)
        )
    batch, seqlen_q, heads_q, head_dim = q.shape
    capacity = kvcache_checks.room(given)
    if not is_tensor:
        if is_int(lengths):
            kvcache_checks.check_length_of_all(lengths, known.attend.new, capacity)
        count = capacity if lengths is None else lengths
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
            append_plan.run(append)
        row_plan.run(attend)
    else:
        if append is not None:
            ops.append_kvcache(*append, *known.append)
        ops.attend_kvcache(*attend, *known.attend)
    if lse is None:
        return out
    return out, lse.view(heads_q, batch, seqlen_q).transpose(0, 1).contiguous()
