"""Multi-head latent attention over a paged cache: all heads share one head of keys.

Values are the first columns of the keys, so the cache holds one vector a token, which is read once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._linked.host.arguments import as_int32, check_length, check_tensor
from .._linked.host.forms import Memory, form_of
from .._paged.checks import check_no_gradients, check_table
from . import ops
from .call import MlaChecked, MlaTensors, MlaWritePlan, MlaWriteTensors
from .checks import (
    check_mla,
    check_mla_descales,
    check_mla_options,
    check_mla_out,
    check_mla_write,
    stored,
)

_known: Memory[MlaChecked] = Memory()
_writes: Memory[MlaWritePlan] = Memory()


def mla_attn_func(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    head_dim_v: int = 512,
    softmax_scale: float | None = None,
    causal: bool = True,
    q_descale: Tensor | None = None,
    kv_descale: Tensor | None = None,
    out: Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend to a cache of latent vectors (DeepSeek's MLA, with the projections absorbed).

    For each query ``q`` and head, ``softmax(softmax_scale * q @ k.T) @ k[:, :head_dim_v]``, where
    ``k`` are the cached vectors of its sequence, ``[seqlen_k, head_dim]``.

    Args:
        q: queries, ``[tokens, heads, head_dim]``: ``head_dim_v`` columns that were multiplied with
            the key projection, then those with rotary embeddings; fp16, bf16, fp32 or FP8 (e4m3).
            ``head_dim_v`` is a multiple of 8 up to 512, and ``head_dim`` a multiple of 8 up to 64
            more.
        kv_cache: ``[num_blocks, block_size, head_dim]``, pages of any size; dtype of ``q``, FP8, or
            uint8, which holds e4m3. :func:`mla_cache_write` fills it.
        block_table: the pages of each sequence, int32 or int64 ``[batch, max_blocks]``.
        cu_seqlens_q: where sequences begin in ``q``, int32 ``[batch + 1]``.
        seqlens_k: keys of each sequence, new ones included, int32 ``[batch]``.
        max_seqlen_q: the most queries that a sequence has.
        max_seqlen_k: the most keys that a sequence has.
        head_dim_v: how many of the first columns are values. Default: 512.
        softmax_scale: factor of the scores. Default: None, ``head_dim ** -0.5``; DeepSeek's models
            pass their own, that of the heads before the projections were absorbed.
        causal: query i sees key j where ``j <= i + seqlen_k - seqlen_q``. Default: True.
        q_descale: fp32, one element: FP8 queries are multiplied with it. Default: None (1.0).
        kv_descale: likewise of an FP8 cache.
        out: where the output goes, ``[tokens, heads, head_dim_v]``; fp16, bf16 or fp32. Default:
            None, a new tensor in the dtype of ``q``, or bf16 where that is FP8.
        num_splits: into how many parts to cut the keys of each sequence, which are computed side by
            side and merged. Any number but 0 makes a sequence's result bit for bit the same
            whatever shares its batch. Default: 0, by load.
        return_lse: return ``(out, lse)``. Default: False.

    Returns:
        ``out``, ``[tokens, heads, head_dim_v]``; or ``(out, lse)``, where ``lse`` is the natural
        logarithm of the denominator, fp32 ``[heads, tokens]``. A query that sees no key has output
        0 and lse -inf.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range.
        NotImplementedError: on head dimensions that are not offered; on FP8 where the hardware
            lacks it; on an input that requires a gradient.
    """
    check_tensor("q", q)
    cu_seqlens_q, seqlens_k = as_int32(cu_seqlens_q), as_int32(seqlens_k)
    table = block_table, cu_seqlens_q, seqlens_k
    rows = (q,) if out is None else (q, out)
    asked = head_dim_v, softmax_scale, causal, num_splits, return_lse, out is None
    form = form_of(rows, (kv_cache, *table, q_descale, kv_descale), asked, packed=True)
    if form is not None and out is not None and out.shape[:1] != q.shape[:1]:
        form = None
    known = None if form is None else _known.get(form)
    if known is None or kv_cache.dtype is torch.uint8:
        kv_cache = stored(kv_cache)
    if known is None:
        check_mla(q, kv_cache, head_dim_v)
        options = check_mla_options(q, softmax_scale, causal, num_splits, return_lse)
        check_table(q, *table)
    check_length("max_seqlen_q", max_seqlen_q)
    check_length("max_seqlen_k", max_seqlen_k)
    if known is None:
        check_mla_descales(q, kv_cache, q_descale, kv_descale)
        dtype = check_mla_out(q, out, head_dim_v)
        check_no_gradients(q, kv_cache)
        known = MlaChecked(options, dtype)
    tokens, heads = q.shape[:2]
    if out is None:
        out = torch.empty((tokens, heads, head_dim_v), dtype=known.out_dtype, device=q.device)
    lse = None
    if return_lse:
        lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    x = MlaTensors(q, kv_cache, *table, q_descale, kv_descale, out, lse)
    if known.plan is None and form is not None and _known.get(form) is None:
        known = _known.keep(form, known._replace(plan=ops.mla_plan_of(x, known.options)))
    if known.plan is None:
        ops.mla_attention(*x, max_seqlen_q, max_seqlen_k, *known.options)
    else:
        known.plan.run(x, max_seqlen_q, max_seqlen_k)
    return out if lse is None else (out, lse)


def mla_cache_write(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    scale: Tensor | None = None,
) -> None:
    """Write the latent vectors of new tokens into the pages of a cache.

    Token t goes to page ``slot_mapping[t] // block_size``, slot ``slot_mapping[t] % block_size``:
    first its columns of ``kv_c``, then those of ``k_pe``.

    Args:
        kv_c: compressed keys and values, ``[tokens, head_dim_v]``; fp16, bf16 or fp32. Tokens
            beyond those of ``slot_mapping`` are padding.
        k_pe: columns of the keys with rotary embeddings, ``[tokens, head_dim - head_dim_v]``; dtype
            of ``kv_c``.
        kv_cache: ``[num_blocks, block_size, head_dim]``; dtype of ``kv_c``, FP8, or uint8, which
            takes e4m3.
        slot_mapping: int32 or int64 ``[tokens]``. A token with a negative slot is not written. No
            two tokens may have the same slot.
        scale: fp32, one element: an FP8 cache stores ``x / scale``, saturated at the largest number
            of the dtype. Default: None (1.0).

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range.
        NotImplementedError: on head dimensions that are not offered; on FP8 where the hardware
            lacks it; on an input that requires a gradient.
    """
    form = form_of((kv_c, k_pe, slot_mapping), (kv_cache, scale), (), packed=True)
    if form is not None and not len(kv_c) == len(k_pe) >= len(slot_mapping):
        form = None
    plan = None if form is None else _writes.get(form)
    if plan is None or kv_cache.dtype is torch.uint8:
        kv_cache = stored(kv_cache)
    x = MlaWriteTensors(kv_c, k_pe, kv_cache, slot_mapping, scale)
    if plan is None:
        check_mla_write(x)
        check_no_gradients(kv_c, k_pe, kv_cache)
        plan = None if form is None else ops.mla_write_plan_of(x)
        if plan is None:
            ops.mla_cache_write(*x)
            return
        _writes.keep(form, plan)
    plan.run(x)
