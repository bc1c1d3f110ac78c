"""The reference for packed sequences, one after the other."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from .._dense.call import Options, Tensors
from .fixed import attention_scores, compute_dtype, dense_attention, visible_keys
from .philox import dropout_keep_mask


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    rng_state: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    spans: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of packed sequences, one by one; padding gets output 0 and LSE -inf."""
    dtype = compute_dtype(q)
    out = q.new_zeros((*q.shape[:2], v.shape[-1]), dtype=dtype)
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=dtype)
    for b, (rows, keys) in enumerate(sequences(cu_seqlens_q, cu_seqlens_k, seqused_k)):
        one_out, one_lse = dense_attention(
            q[rows][None],
            k[keys][None],
            v[keys][None],
            bias_of(bias, b, rows, keys),
            row_of(alibi_slopes, b),
            sinks,
            row_of(q_descale, b),
            row_of(k_descale, b),
            row_of(v_descale, b),
            rng_state,
            softmax_scale,
            window_left,
            window_right,
            softcap,
            dropout_p,
            first_sequence=b,
            spans=None if spans is None else spans[rows][None],
        )
        out[rows] = one_out[0]
        lse[:, rows] = one_lse[0]
    return out, lse


def dropout_marked_probabilities(
    x: Tensors,
    lse: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    options: Options,
) -> Tensor:
    """Return ``exp(score - lse)``, negated where dropout drops the element, 0 where masked.

    For tests of dropout. The result is ``[batch, heads_q, seqlen_q, seqlen_k]`` (packed: the
    maximal lengths, 0 outside of a sequence) in the dtype of ``q``, without gradient. Offsets of
    packed sequences are read on the host.
    """
    q, k, cu_seqlens_q, cu_seqlens_k = x.q, x.k, x.cu_seqlens_q, x.cu_seqlens_k
    rng_state: Any = x.rng_state
    softmax_scale, window_left, window_right, softcap, dropout_p = options
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        heads_q = q.shape[-2]
        if cu_seqlens_q is None or cu_seqlens_k is None:
            pieces = [(slice(None), q, k, lse, x.bias, x.alibi_slopes, x.spans)]
            marked = q.new_zeros((q.shape[0], heads_q, q.shape[1], k.shape[1]))
        else:
            pieces = []
            lengths = max_seqlen_q or 0, max_seqlen_k or 0
            marked = q.new_zeros((cu_seqlens_q.shape[0] - 1, heads_q, *lengths))
            for b, (rows, keys) in enumerate(sequences(cu_seqlens_q, cu_seqlens_k, x.seqused_k)):
                of_one = bias_of(x.bias, b, rows, keys), row_of(x.alibi_slopes, b)
                spans = None if x.spans is None else x.spans[rows][None]
                own = q[rows][None], k[keys][None], lse[None, :, rows]
                pieces.append((slice(b, b + 1), *own, *of_one, spans))
        dtype = compute_dtype(q)
        for where, one_q, one_k, one_lse, one_bias, slopes, spans in pieces:
            sq, sk = one_q.shape[1], one_k.shape[1]
            visible = visible_keys(sq, sk, window_left, window_right, q.device, spans=spans)
            scores = attention_scores(
                one_q.to(dtype), one_k.to(dtype), visible, one_bias, slopes, softmax_scale, softcap
            )
            shift = one_lse.masked_fill(one_lse == -math.inf, 0.0)
            p = torch.exp(scores - shift[..., None])
            keep = dropout_keep_mask(
                rng_state, dropout_p, p.shape[0], heads_q, sq, sk, where.start or 0
            )
            marked[where, :, :sq, :sk] = torch.where(keep | ~visible, p, -p).to(q.dtype)
        return marked


def sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_k: Tensor | None
) -> list[tuple[slice, slice]]:
    """Return the rows and the keys of each sequence."""
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    ends_k = starts_k[1:]
    if seqused_k is not None:
        used = seqused_k.tolist()
        ends_k = [start + count for start, count in zip(starts_k[:-1], used, strict=True)]
    rows = (slice(*pair) for pair in itertools.pairwise(starts_q))
    keys = (slice(*pair) for pair in zip(starts_k[:-1], ends_k, strict=True))
    return list(zip(rows, keys, strict=True))


def bias_of(bias: Tensor | None, b: int, rows: slice, keys: slice) -> Tensor | None:
    """Return the part of a bias, over the maximal lengths, that sequence ``b`` uses."""
    if bias is None:
        return None
    bias = bias[(None,) * (4 - bias.ndim)]
    bias = bias if bias.shape[0] == 1 else bias[b : b + 1]
    bias = bias if bias.shape[2] == 1 else bias[:, :, : rows.stop - rows.start]
    return bias if bias.shape[3] == 1 else bias[:, :, :, : keys.stop - keys.start]


def row_of(per_head: Tensor | None, b: int) -> Tensor | None:
    """Return the row of sequence ``b``, if the tensor has one row per sequence."""
    if per_head is None or per_head.ndim < 2 or per_head.numel() == 1:
        return per_head
    return per_head[b : b + 1]
