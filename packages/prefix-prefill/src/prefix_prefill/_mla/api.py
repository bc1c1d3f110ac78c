"""Multi-head latent attention over a paged cache: all heads share one head of keys.

The first columns of the keys are the values, so the cache holds one vector per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._linked.host.arguments import as_int32, as_length, check_tensor
from .._linked.host.forms import Memory, form_of
from .._linked.host.operators import check_written
from .._linked.host.results import returns_lse
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


@returns_lse
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
        q: queries, ``[tokens, heads, head_dim]``: ``head_dim_v`` columns that are already
            multiplied by the key projection, then the rotary columns; fp16, bf16, fp32 or FP8
            (e4m3). ``head_dim_v`` is a multiple of 8 up to 512; the rotary columns are a multiple
            of 8 up to 64.
        kv_cache: ``[num_blocks, block_size, head_dim]``, pages of any size; dtype of ``q``, FP8, or
            uint8, which holds e4m3. :func:`mla_cache_write` fills it.
        block_table: the pages of each sequence, int32 or int64 ``[batch, max_blocks]``.
        cu_seqlens_q: offsets of the sequences in ``q``, int32 ``[batch + 1]``.
        seqlens_k: keys of each sequence, new ones included, int32 ``[batch]``.
        max_seqlen_q: the most queries of a sequence.
        max_seqlen_k: the most keys of a sequence.
        head_dim_v: the first ``head_dim_v`` columns of the keys are the values. Default: 512.
        softmax_scale: factor of the scores. Default: None, ``head_dim ** -0.5``. DeepSeek's models
            pass the scale of the heads before the projections were absorbed.
        causal: query i sees key j where ``j <= i + seqlen_k - seqlen_q``. Default: True.
        q_descale: factor of FP8 queries, fp32, one element. Default: None (1.0).
        kv_descale: factor of an FP8 cache, fp32, one element. Default: None (1.0).
        out: output tensor, ``[tokens, heads, head_dim_v]``; fp16, bf16 or fp32. Default: None, a
            new tensor in the dtype of ``q``, or in bf16 if ``q`` is FP8.
        num_splits: number of parts into which the keys of each sequence are cut; parts are computed
            in parallel and merged. With any number but 0, the bits of a sequence's result do not
            depend on the other sequences of the batch. Default: 0, by load.
        return_lse: return ``(out, lse)``. Default: False.

    Returns:
        ``out``, ``[tokens, heads, head_dim_v]``; or ``(out, lse)``, where ``lse`` is the natural
        logarithm of the denominator, fp32 ``[heads, tokens]``. A fully masked row has output 0 and
        lse -inf.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, or if what is written shares memory.
        NotImplementedError: on unsupported head dimensions; on FP8 if the hardware lacks it; on an
            input that requires a gradient.
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
    max_seqlen_q = as_length("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = as_length("max_seqlen_k", max_seqlen_k)
    if known is None:
        check_mla_descales(q, kv_cache, q_descale, kv_descale)
        dtype = check_mla_out(q, out, head_dim_v)
        given = {"q": q, "kv_cache": kv_cache, "q_descale": q_descale, "kv_descale": kv_descale}
        check_no_gradients(**given, out=out)
        known = MlaChecked(options, dtype)
    tokens, heads = q.shape[:2]
    is_given = out is not None
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
        if is_given:
            check_written(x)
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
    the columns of ``kv_c``, then the columns of ``k_pe``.

    Args:
        kv_c: compressed keys and values, ``[tokens, head_dim_v]``; fp16, bf16 or fp32. There may be
            more tokens than in ``slot_mapping``: the rest is padding.
        k_pe: rotary columns of the keys, ``[tokens, head_dim - head_dim_v]``; dtype of ``kv_c``.
        kv_cache: ``[num_blocks, block_size, head_dim]``; dtype of ``kv_c``, FP8, or uint8, which
            holds e4m3.
        slot_mapping: int32 or int64 ``[tokens]``. A token with a negative slot is not written. No
            two tokens may have the same slot.
        scale: fp32, one element: an FP8 cache stores ``x / scale``, saturated at the largest number
            of the dtype. Default: None (1.0).

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, or if what is written shares memory.
        NotImplementedError: on unsupported head dimensions; on FP8 if the hardware lacks it; on an
            input that requires a gradient.
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
        check_no_gradients(**x._asdict())
        plan = None if form is None else ops.mla_write_plan_of(x)
        if plan is None:
            ops.mla_cache_write(*x)
            return
        _writes.keep(form, plan)
    check_written(x)
    plan.run(x)
