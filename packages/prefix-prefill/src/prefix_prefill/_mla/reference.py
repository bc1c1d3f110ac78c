"""Reference of multi-head latent attention: eager, any float dtype, sequence by sequence.

The kernels are tested against it, and CPU tensors run it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._cache.layout import gather_pages
from .._linked.host.arguments import (
    as_int32,
    as_length,
    check_given,
    check_no_gradient,
    check_readable,
    check_tensor,
)
from .._linked.host.overlap import check_no_overlap
from .._linked.host.results import returns_lse
from .._paged.checks import check_table
from .._paged.reference import compute_dtype, out_dtype_of, scaled, visible_keys
from .._paged.tensor_checks import check_device
from .call import MlaOptions, MlaTensors
from .checks import check_mla_options, check_mla_values, check_shapes, stored


@returns_lse
def mla_attention_reference(
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
    """Compute the formulas of :func:`mla_attn_func` in eager PyTorch.

    Args:
        q: queries, ``[tokens, heads, head_dim]``; any float dtype, float64 included.
        kv_cache: this and all later arguments as in :func:`mla_attn_func`, but with any
            ``head_dim`` and any ``head_dim_v`` up to it; ``num_splits`` has no effect.

    Returns:
        ``out`` or ``(out, lse)`` as :func:`mla_attn_func` does; the log-sum-exp is float64 for
        float64 queries, else float32.

    Raises:
        TypeError: on an argument's type, or a dtype that is not a float dtype.
        ValueError: on a shape, or a range.
    """
    check_tensor("q", q)
    kv_cache = stored(kv_cache)
    check_shapes(q, kv_cache, head_dim_v)
    for name, x in (("q", q), ("kv_cache", kv_cache)):
        if not x.dtype.is_floating_point:
            raise TypeError(f"{name} must be of a float dtype, got {x.dtype}")
        check_device(name, x, "q", q)
    as_length("max_seqlen_q", max_seqlen_q)
    as_length("max_seqlen_k", max_seqlen_k)
    cu_seqlens_q, seqlens_k = as_int32(cu_seqlens_q), as_int32(seqlens_k)
    check_table(q, block_table, cu_seqlens_q, seqlens_k)
    check_readable(block_table=block_table, cu_seqlens_q=cu_seqlens_q, seqlens_k=seqlens_k)
    check_given("q_descale", q_descale, q, ())
    check_given("kv_descale", kv_descale, q, ())
    check_given("out", out, q, (*q.shape[:2], head_dim_v))
    options = check_mla_options(q, softmax_scale, causal, num_splits, return_lse)
    target = q.new_empty((*q.shape[:2], head_dim_v), dtype=out_dtype_of(q, out, None))
    given = kv_cache, block_table, cu_seqlens_q, seqlens_k, q_descale, kv_descale
    tensors = MlaTensors(q, *given, target, None)
    check_mla_values(tensors, max_seqlen_q, max_seqlen_k)
    result, lse = attend(tensors, options)
    result = result.to(target.dtype)
    if out is not None:
        check_no_overlap("out", out)
        check_no_gradient("out", out)
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def attend(x: MlaTensors, options: MlaOptions, at_once: int | None = None) -> tuple[Tensor, Tensor]:
    """Attend sequence by sequence, ``at_once`` queries at a time, by default all of a sequence.

    Both results are in the dtype of the computation. Padding rows get out 0 and lse -inf.
    """
    dtype, page = compute_dtype(x.q), x.kv_cache.shape[1]
    out = x.q.new_zeros(x.out.shape, dtype=dtype)
    lse = x.q.new_full((x.q.shape[1], x.q.shape[0]), -math.inf, dtype=dtype)
    starts, lengths = x.cu_seqlens_q.tolist(), x.seqlens_k.tolist()
    for b, seqlen_k in enumerate(lengths):
        rows = slice(starts[b], starts[b + 1])
        seqlen_q = rows.stop - rows.start
        if seqlen_q == 0 or seqlen_k <= 0:
            continue
        pages = x.block_table[b, : -(-seqlen_k // page)].to(torch.int64)
        keys = gather_pages(x.kv_cache, pages, False)[:seqlen_k]
        keys = scaled(keys[:, None], x.kv_descale, dtype)[:, 0]
        queries = scaled(x.q[rows], x.q_descale, dtype)
        size = seqlen_q if at_once is None else at_once
        for start in range(0, seqlen_q, size):
            stop = min(start + size, seqlen_q)
            ahead = seqlen_k - seqlen_q
            last = min(max(stop + ahead, 0), seqlen_k) if options.causal else seqlen_k
            if last == 0:
                continue
            position = torch.arange(start, stop, device=x.q.device) + ahead
            some = slice(rows.start + start, rows.start + stop)
            out[some], lse[:, some] = _attend_sequence(
                queries[start:stop],
                keys[:last],
                visible_keys(position, last, -1, 0 if options.causal else -1),
                options.softmax_scale,
                x.out.shape[2],
            )
    return out, lse


def _attend_sequence(
    q: Tensor, keys: Tensor, visible: Tensor, softmax_scale: float, head_dim_v: int
) -> tuple[Tensor, Tensor]:
    """Attend within one sequence; ``visible`` is the mask, bool ``[queries, keys]``."""
    # under autocast the products below would be rounded to 16 bits
    with torch.autocast(q.device.type, enabled=False):
        # a key that no query sees may hold NaN, and 0 * NaN is NaN
        keys = keys.masked_fill(~visible.any(0)[:, None], 0.0)
        scores = torch.einsum("ihd,jd->hij", q, keys) * softmax_scale
        scores = scores.masked_fill(~visible, -math.inf)
        shift = scores.amax(dim=-1, keepdim=True)
        shift = shift.masked_fill(shift == -math.inf, 0.0)
        weights = (scores - shift).exp_()
        del scores  # frees as much memory as the weights take
        total = weights.sum(dim=-1, keepdim=True)
        empty = total == 0.0
        total = total.masked_fill(empty, 1.0)
        lse = (shift + torch.log(total)).masked_fill(empty, -math.inf).squeeze(-1)
        return torch.einsum("hij,jd->ihd", weights / total, keys[:, :head_dim_v]), lse
