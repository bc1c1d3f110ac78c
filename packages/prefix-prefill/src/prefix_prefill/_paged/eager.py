"""The CPU implementation: the reference, sequence by sequence, written into given outputs.

Sequences are not batched, because the products of a batch may be rounded differently.
"""

import math

import torch
from torch import Tensor

from .._cache.layout import INT_MAX, head_dim_of_values, is_packed
from .call import Options, Tensors
from .reference import attend, coded, quantised, round_output, scaled, seen_keys

# queries whose scores are computed at a time
ROWS = 256


def attention(x: Tensors, options: Options) -> None:
    """Write the output, and the log-sum-exp in fp32.

    With ``long_only``, each query of the only sequence is computed as a sequence of its own: the
    queries come from different sequences, which share their keys.
    """
    with torch.no_grad():
        if options.long_only:
            first, last = x.cu_seqlens_q.tolist()
            x = x._replace(
                block_table=x.block_table.expand(last - first, -1),
                cu_seqlens_q=torch.arange(first, last + 1, dtype=torch.int32),
                seqlens_k=x.seqlens_k.expand(last - first),
            )
        if options.invariant:
            result, result_lse = attend_by_law(x, options)
        else:
            result, result_lse = attend(x, options, at_once=ROWS)
        result = round_output(result, x.out.dtype, x.out_scale)
        starts = x.cu_seqlens_q.to(torch.int64)
        token = torch.arange(x.q.shape[0], device=x.q.device)
        written = (token >= starts[0]) & (token < starts[-1])
        if options.fill_padding:
            written = torch.ones_like(written)
        if options.skip_decode:
            single = starts[:-1][starts[1:] - starts[:-1] == 1]
            written[single] = False
        # copies by a mask do not support FP8
        rows = written.nonzero()[:, 0].tolist()
        for row in rows:
            x.out[row] = result[row]
        if x.lse is not None:
            x.lse[:, rows] = result_lse[:, rows].float()


def attend_by_law(x: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Compute ``invariant=True``: a row's bits depend only on the row and its keys."""
    from .._linked.invariant.eager import invariant_attention

    head_dim_v = head_dim_of_values(x.k_cache, x.v_cache)
    result = x.q.new_zeros((*x.q.shape[:2], head_dim_v), dtype=torch.float32)
    lse = x.q.new_full((x.q.shape[1], x.q.shape[0]), -math.inf, dtype=torch.float32)
    starts = x.cu_seqlens_q.tolist()
    for b, seqlen_k in enumerate(x.seqlens_k.tolist()):
        rows = slice(starts[b], starts[b + 1])
        queries = rows.stop - rows.start
        if queries == 0:
            continue
        ahead = seqlen_k - queries
        in_cache = x.k is None or (options.decode_from_cache and queries == 1)
        context = seqlen_k if in_cache else ahead
        # pages before the first visible key may be freed
        left, right = options.window_left, options.window_right
        first = 0 if left < 0 else min(max(ahead - left, 0), seqlen_k)
        last = seqlen_k if right < 0 else min(max(seqlen_k + right, first), seqlen_k)
        k, v = (seen_keys(x, which, b, first, last, context).to(x.q.dtype) for which in ("k", "v"))
        result[rows], lse[:, rows] = invariant_attention(
            x.q[rows],
            k,
            v,
            x.sinks,
            options.softmax_scale,
            left,
            right,
            options.softcap,
            ahead - first,
        )
    return result, lse


def reshape_and_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_scale_cache: Tensor | None,
    v_scale_cache: Tensor | None,
    per_token_head: bool = False,
) -> None:
    """Write tokens into their slots."""
    with torch.no_grad():
        packed = is_packed(k_cache)
        size = k_cache.shape[3] if packed else k_cache.shape[1]
        kept = slot_mapping >= 0
        kept &= slot_mapping < k_cache.shape[0] * size
        slots = slot_mapping[kept].to(torch.int64)
        pages, in_page = slots // size, slots % size
        for x, cache, scale, scales in (
            (k, k_cache, k_scale, k_scale_cache),
            (v, v_cache, v_scale, v_scale_cache),
        ):
            values = x[: slot_mapping.shape[0]][kept]
            if scales is not None and per_token_head:
                values, made = coded(values, cache.dtype)
                scales[pages, in_page] = made.to(scales.dtype)
                if values.dtype.is_floating_point:
                    values, cache = values.view(torch.uint8), cache.view(torch.uint8)
            elif scales is not None:
                values, scales[pages, in_page] = quantised(
                    values, INT_MAX[cache.dtype], scales.dtype
                )
            elif cache.element_size() == 1:
                limits = torch.finfo(cache.dtype)
                per_head = None if scale is None else 1.0 / scale.double()
                values = scaled(values, per_head, torch.float64)
                # rounded to fp32 first, as in the kernel
                values = values.float().clamp(limits.min, limits.max).to(cache.dtype)
                # indexing does not support FP8
                values, cache = values.view(torch.uint8), cache.view(torch.uint8)
            if not packed:
                cache[pages, in_page] = values
            elif cache.ndim == 5:
                split = *values.shape[:2], cache.shape[2], cache.shape[4]
                cache[pages, :, :, in_page] = values.reshape(split)
            else:
                cache[pages, :, :, in_page] = values


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    out_scale: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Merge two results over disjoint keys."""
    with torch.no_grad():
        # some kernels mark fully masked rows with +inf
        empty_a, empty_b = lse_a.isinf(), lse_b.isinf()
        lse_a = lse_a.masked_fill(empty_a, -math.inf)
        lse_b = lse_b.masked_fill(empty_b, -math.inf)
        shift = torch.maximum(lse_a, lse_b).masked_fill(empty_a & empty_b, 0.0)
        weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
        total = (weight_a + weight_b).masked_fill(empty_a & empty_b, 1.0)
        parts = [
            _per_row(weight / total) * part.to(lse_a.dtype).masked_fill(_per_row(empty), 0.0)
            for weight, part, empty in ((weight_a, out_a, empty_a), (weight_b, out_b, empty_b))
        ]
        out.copy_(round_output(parts[0] + parts[1], out.dtype, out_scale))
        if lse is not None:
            lse.copy_((shift + torch.log(total)).masked_fill(empty_a & empty_b, -math.inf))


def _per_row(x: Tensor) -> Tensor:
    """Turn ``[heads, tokens]`` into ``[tokens, heads, 1]``."""
    return x.T.unsqueeze(-1)
