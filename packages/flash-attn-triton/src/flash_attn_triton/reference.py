"""Attention by its definition: eager, any float dtype, differentiable by plain autograd.

This is the oracle of the kernels' tests and what CPU tensors run. It holds the whole score matrix,
``O(seqlen_q * seqlen_k)`` memory, and shares no code with the kernels. Inputs in float64 are
computed in float64, all others in float32, and only the output is rounded to the output's dtype.
"""

import itertools
import math
from typing import NoReturn

import torch
from torch import Tensor

from ._checks import check_reference
from ._linked.host.arguments import FP8_DTYPES, MAX_WINDOW
from ._options import check_options, refuse_unknown
from .philox import dropout_keep_mask, keep_scale

Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    return_lse: bool = False,
    rng_state: Tensor | None = None,
    **unknown: NoReturn,
) -> Result:
    """Compute what :func:`flash_attn_func` computes, from the definition.

    The arguments are those of :func:`flash_attn_func`, and one more:

    Args:
        q: queries, ``[batch, seqlen_q, heads_q, head_dim]``; any float dtype, float64 included.
        k: keys, ``[batch, seqlen_k, heads_k, head_dim]``.
        v: values, ``[batch, seqlen_k, heads_k, head_dim_v]``.
        dropout_p: this and all others as in :func:`flash_attn_func`.
        rng_state: ``(seed, offset)`` of dropout, int64 ``[2]``. Default: drawn from torch's
            generator, as :func:`flash_attn_func` does.

    Returns:
        ``out``, ``(out, lse)`` or ``(out, lse, probabilities)`` as :func:`flash_attn_func` does;
        the log-sum-exp is float64 for float64 inputs, else float32.

    Raises:
        TypeError: on an argument's type, or a dtype that is no float.
        ValueError: on a shape of ``q``, ``k`` or ``v``, or a range.
    """
    if unknown:
        refuse_unknown(unknown)
    return _attend(
        q, k, v, None, None, None, bias, alibi_slopes, sinks, q_descale, k_descale, v_descale,
        rng_state, None, None, softmax_scale, causal, window_size, softcap, dropout_p,
        out_dtype, out_scale, deterministic, return_lse, return_attn_probs,
    )  # fmt: skip


def varlen_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    return_lse: bool = False,
    seqused_k: Tensor | None = None,
    rng_state: Tensor | None = None,
    **unknown: NoReturn,
) -> Result:
    """Compute what :func:`flash_attn_varlen_func` computes, one sequence after the other.

    The arguments are those of :func:`flash_attn_varlen_func`; dtypes, ``rng_state`` and the results
    are as in :func:`attention_reference`. The sequence boundaries are read on the host.
    """
    if unknown:
        refuse_unknown(unknown)
    return _attend(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, bias, alibi_slopes, sinks, q_descale,
        k_descale, v_descale, rng_state, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
        window_size, softcap, dropout_p, out_dtype, out_scale, deterministic, return_lse,
        return_attn_probs,
    )  # fmt: skip


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    first_sequence: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attend within sequences of one length; both results are in the dtype of the computation.

    ``first_sequence`` is the index that dropout gives to the first sequence of the batch.
    """
    # under autocast the products below would be rounded to 16 bits
    with torch.autocast(q.device.type, enabled=False):
        batch, seqlen_q, heads_q, _ = q.shape
        seqlen_k = k.shape[1]
        visible = visible_keys(seqlen_q, seqlen_k, window_left, window_right, q.device)
        row_sees_any = visible.any(dim=1)[:, None, None]
        seen_by_any = visible.any(dim=0)[:, None, None]

        # what nobody sees may hold NaN, and 0 * NaN is NaN in the products and in their gradients
        q = _scaled(q, q_descale).masked_fill(~row_sees_any, 0.0)
        k = _scaled(k, k_descale).masked_fill(~seen_by_any, 0.0)
        v = _scaled(v, v_descale).masked_fill(~seen_by_any, 0.0)
        v = v.repeat_interleave(heads_q // v.shape[2], dim=2)
        scores = attention_scores(q, k, visible, bias, alibi_slopes, softmax_scale, softcap)

        # the sink is one more column, without a value
        sink = q.new_full((heads_q,), -math.inf) if sinks is None else sinks.to(q.dtype)
        sink = sink[:, None, None].expand(batch, heads_q, seqlen_q, 1)
        logits = torch.cat([scores, sink], dim=-1)

        # a constant shift cancels, so it needs no gradient; it must be finite for empty rows
        shift = logits.detach().amax(dim=-1, keepdim=True)
        shift = shift.masked_fill(shift == -math.inf, 0.0)
        weights = torch.exp(logits - shift)
        total = weights.sum(dim=-1, keepdim=True)
        empty = total == 0.0
        total = total.masked_fill(empty, 1.0)
        lse = (shift + torch.log(total)).masked_fill(empty, -math.inf).squeeze(-1)

        p = weights[..., :seqlen_k] / total
        if dropout_p > 0.0:
            if rng_state is None:
                raise ValueError("dropout needs rng_state")
            keep = dropout_keep_mask(
                rng_state, dropout_p, batch, heads_q, seqlen_q, seqlen_k, first_sequence
            )
            p = p.masked_fill(~keep, 0.0) * keep_scale(dropout_p)
        out = torch.einsum("bhij,bjhe->bihe", p, v)
        return out.masked_fill(~row_sees_any, 0.0), lse


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
) -> tuple[Tensor, Tensor]:
    """Attend within packed sequences, one by one; rows of no sequence get 0 and -inf."""
    dtype = _compute_dtype(q)
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
        )
        out[rows] = one_out[0]
        lse[:, rows] = one_lse[0]
    return out, lse


def dropout_marked_probabilities(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    rng_state: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
) -> Tensor:
    """Return ``exp(score - lse)``, negated where dropout drops the element, 0 where masked.

    It is meant for tests of dropout: ``[batch, heads_q, seqlen_q, seqlen_k]`` (packed: the maximal
    lengths, 0 outside of a sequence) in the dtype of ``q``, without gradient. The packed form reads
    the sequence boundaries on the host.
    """
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        heads_q = q.shape[-2]
        if cu_seqlens_q is None or cu_seqlens_k is None:
            pieces = [(slice(None), q, k, lse, bias, alibi_slopes)]
            marked = q.new_zeros((q.shape[0], heads_q, q.shape[1], k.shape[1]))
        else:
            pieces = []
            lengths = max_seqlen_q or 0, max_seqlen_k or 0
            marked = q.new_zeros((cu_seqlens_q.shape[0] - 1, heads_q, *lengths))
            for b, (rows, keys) in enumerate(sequences(cu_seqlens_q, cu_seqlens_k, seqused_k)):
                of_one = bias_of(bias, b, rows, keys), row_of(alibi_slopes, b)
                pieces.append(
                    (slice(b, b + 1), q[rows][None], k[keys][None], lse[None, :, rows], *of_one)
                )
        dtype = _compute_dtype(q)
        for where, one_q, one_k, one_lse, one_bias, slopes in pieces:
            sq, sk = one_q.shape[1], one_k.shape[1]
            visible = visible_keys(sq, sk, window_left, window_right, q.device)
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


def round_output(
    out: Tensor, input_dtype: torch.dtype, out_dtype: torch.dtype | None, out_scale: Tensor | None
) -> Tensor:
    """Return ``out`` in the output's dtype; an FP8 output is scaled and saturated first."""
    if out_dtype is None:
        out_dtype = torch.bfloat16 if input_dtype in FP8_DTYPES else input_dtype
    if out_scale is not None:
        out = out / out_scale
    if out_dtype in FP8_DTYPES:
        limits = torch.finfo(out_dtype)
        out = out.clamp(limits.min, limits.max)
    return out.to(out_dtype)


def visible_keys(
    seqlen_q: int, seqlen_k: int, window_left: int, window_right: int, device: torch.device
) -> Tensor:
    """Return which key each query sees, bool ``[seqlen_q, seqlen_k]``; -1 is no limit."""
    position = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device=device)
    # a position and the largest integer have a sum that wraps around
    window_left = min(window_left, MAX_WINDOW)
    window_right = min(window_right, MAX_WINDOW)
    visible = torch.ones((seqlen_q, seqlen_k), dtype=torch.bool, device=device)
    if window_left >= 0:
        visible = visible & (key >= position - window_left)
    if window_right >= 0:
        visible = visible & (key <= position + window_right)
    return visible


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    rng_state: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    dropout_p: float,
    out_dtype: torch.dtype | None,
    out_scale: Tensor | None,
    deterministic: bool,
    return_lse: bool,
    return_attn_probs: bool,
) -> Result:
    """Check, resolve defaults, attend, and return what was asked for."""
    check_reference(
        q,
        k,
        v,
        4 if cu_seqlens_q is None else 3,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        out_scale=out_scale,
        rng_state=rng_state,
    )
    options = check_options(
        q,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        return_attn_probs,
        return_lse,
    )
    if rng_state is None and dropout_p > 0.0:
        rng_state = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    rest = bias, alibi_slopes, sinks, q_descale, k_descale, v_descale, rng_state, *options
    if cu_seqlens_q is None or cu_seqlens_k is None:
        out, lse = dense_attention(q, k, v, *rest)
    else:
        out, lse = packed_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, *rest)
    out = round_output(out, q.dtype, out_dtype, out_scale)
    if not return_attn_probs:
        return (out, lse) if return_lse else out
    if rng_state is None or dropout_p == 0.0:
        return out, lse, None
    return (
        out,
        lse,
        dropout_marked_probabilities(
            q,
            k,
            lse,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_k,
            bias,
            alibi_slopes,
            rng_state,
            max_seqlen_q,
            max_seqlen_k,
            *options,
        ),
    )


def attention_scores(
    q: Tensor,
    k: Tensor,
    visible: Tensor,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    softmax_scale: float,
    softcap: float,
) -> Tensor:
    """Return the scores ``[batch, heads_q, seqlen_q, seqlen_k]``, -inf where nothing is seen."""
    seqlen_q, seqlen_k = visible.shape
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * softmax_scale
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        position = torch.arange(seqlen_q, device=q.device)[:, None] + (seqlen_k - seqlen_q)
        distance = (position - torch.arange(seqlen_k, device=q.device)).abs()
        scores = scores - alibi_slopes.to(q.dtype)[..., None, None] * distance
    if bias is not None:
        scores = scores + bias.to(q.dtype)
    return scores.masked_fill(~visible, -math.inf)


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
    """Return the part of a bias over the maximal lengths that sequence ``b`` uses."""
    if bias is None:
        return None
    bias = bias[(None,) * (4 - bias.ndim)]
    bias = bias if bias.shape[0] == 1 else bias[b : b + 1]
    bias = bias if bias.shape[2] == 1 else bias[:, :, : rows.stop - rows.start]
    return bias if bias.shape[3] == 1 else bias[:, :, :, : keys.stop - keys.start]


def row_of(per_head: Tensor | None, b: int) -> Tensor | None:
    """Return what sequence ``b`` uses of a tensor that may be per batch and head."""
    if per_head is None or per_head.ndim < 2 or per_head.numel() == 1:
        return per_head
    return per_head[b : b + 1]


def _scaled(x: Tensor, descale: Tensor | None) -> Tensor:
    """Return ``x`` in the dtype of the computation, times its scale per KV head."""
    x = x.to(_compute_dtype(x))
    if descale is None:
        return x
    if descale.numel() == 1:
        return x * descale.to(x.dtype).reshape(())
    group = x.shape[2] // descale.shape[1]
    return x * descale.to(x.dtype).repeat_interleave(group, dim=1)[:, None, :, None]


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
