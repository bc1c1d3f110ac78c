"""What CPU tensors run: the definition, one sequence after the other, and its derivative.

One after the other, because the products of a batch may round otherwise than those of a sequence
alone. The derivative is written out: autograd through the definition would do but for one thing,
that an operator may run where autograd is switched off, as below any dispatch mode. The tests hold
the two against each other.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ._call import Grads, Options, Tensors
from ._definition import attention_scores, round_output, visible_keys
from ._sequences import bias_of, packed_attention, row_of, sequences
from .philox import dropout_keep_mask, keep_scale


def attention_forward(
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
    out_scale: Tensor | None,
    rng_state: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp in fp32."""
    batch = q.shape[0]
    if cu_seqlens_q is None or cu_seqlens_k is None:
        cu_seqlens_q, cu_seqlens_k = _even(q), _even(k)
    with torch.no_grad():
        out, lse = packed_attention(
            _packed(q),
            _packed(k),
            _packed(v),
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_k,
            bias,
            alibi_slopes,
            sinks,
            q_descale,
            k_descale,
            v_descale,
            rng_state,
            softmax_scale,
            window_left,
            window_right,
            softcap,
            dropout_p,
        )
        out = round_output(out, q.dtype, out_dtype, out_scale).view(*q.shape[:-1], v.shape[-1])
        if q.ndim == 4:
            lse = lse.view(q.shape[2], batch, q.shape[1]).transpose(0, 1).contiguous()
    return out, lse


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
) -> Grads:
    """Return the gradients of q, k, v, bias and sinks; an absent tensor has one without elements.

    Each is in the dtype of its tensor.
    """
    options = rng_state, softmax_scale, window_left, window_right, softcap, dropout_p
    absent = q.new_empty((0,))
    tensors = q, k, v, absent if bias is None else bias, absent if sinks is None else sinks
    if cu_seqlens_q is None or cu_seqlens_k is None:
        cu_seqlens_q, cu_seqlens_k = _even(q), _even(k)
        lse = lse.transpose(0, 1).reshape(q.shape[2], -1)
        dlse = None if dlse is None else dlse.transpose(0, 1).reshape(lse.shape)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        dout, q, k, v = (_packed(x).float() for x in (dout, q, k, v))
        dq, dk, dv, dbias, dsinks = (
            torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v, *tensors[3:])
        )
        for b, (rows, keys) in enumerate(sequences(cu_seqlens_q, cu_seqlens_k, seqused_k)):
            dq[rows], dk[keys], dv[keys], one_dbias, one_dsinks = _sequence_backward(
                b,
                dout[rows][None],
                q[rows][None],
                k[keys][None],
                v[keys][None],
                lse[None, :, rows],
                None if dlse is None else dlse[None, :, rows],
                bias_of(bias, b, rows, keys),
                row_of(alibi_slopes, b),
                sinks,
                *options,
            )
            used = bias_of(None if bias is None else dbias, b, rows, keys)
            if used is not None:
                used += one_dbias
            dsinks += one_dsinks
    dq, dk, dv, dbias, dsinks = (
        grad.to(x.dtype).reshape(x.shape).contiguous()
        for grad, x in zip((dq, dk, dv, dbias, dsinks), tensors, strict=True)
    )
    return dq, dk, dv, dbias, dsinks


class EagerPlan(NamedTuple):
    """How calls of one form run on the CPU, without the operators."""

    options: Options
    out_dtype: torch.dtype

    def forward(self, x: Tensors) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``."""
        return attention_forward(*x, *self.options, self.out_dtype)

    def backward(
        self,
        x: Tensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        needs_dbias: bool,
    ) -> Grads:
        """Return the gradients; that of the bias comes even if nobody needs it."""
        others = *x[3:9], x.rng_state
        return attention_backward(dout, x.q, x.k, x.v, lse, dlse, *others, *self.options)

    def fits(self, x: Tensors) -> bool:
        """Say yes: strides are free here."""
        return True


def _even(x: Tensor) -> Tensor:
    """Return where sequences of one length begin."""
    return torch.arange(x.shape[0] + 1, device=x.device) * x.shape[1]


def _packed(x: Tensor) -> Tensor:
    return x if x.ndim == 3 else x.reshape(-1, *x.shape[2:])


def _sequence_backward(
    first_sequence: int,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    rng_state: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
) -> Grads:
    """Return the gradients of sequences of one length, here one sequence, in fp32."""
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k, heads_k = k.shape[1], k.shape[2]
    group = heads_q // heads_k
    visible = visible_keys(seqlen_q, seqlen_k, window_left, window_right, q.device)
    row_sees_any = visible.any(dim=1)[:, None, None]
    seen_by_any = visible.any(dim=0)[:, None, None]
    # what nobody sees may hold NaN, and 0 * NaN is NaN
    q, dout = q.masked_fill(~row_sees_any, 0.0), dout.masked_fill(~row_sees_any, 0.0)
    k, v = k.masked_fill(~seen_by_any, 0.0), v.masked_fill(~seen_by_any, 0.0)
    wide_k, wide_v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)

    empty = lse == -math.inf
    scores = attention_scores(q, k, visible, bias, alibi_slopes, softmax_scale, softcap)
    p = torch.exp(scores - lse.masked_fill(empty, 0.0)[..., None])
    kept = torch.ones_like(p)
    if dropout_p > 0.0 and rng_state is not None:
        keep = dropout_keep_mask(
            rng_state, dropout_p, batch, heads_q, seqlen_q, seqlen_k, first_sequence
        )
        kept = keep * keep_scale(dropout_p)

    dv = torch.einsum("bhij,bihe->bjhe", p * kept, dout)
    dp = torch.einsum("bihe,bjhe->bhij", dout, wide_v) * kept
    # what every logit of a row gets in common: from the normalisation, and from the lse
    common = -(p * dp).sum(dim=-1)
    if dlse is not None:
        common = common + dlse.masked_fill(empty, 0.0)
    dscores = p * (dp + common[..., None])
    dbias = q.new_zeros((0,)) if bias is None else dscores.sum_to_size(bias.shape)
    dsinks = q.new_zeros((0,))
    if sinks is not None:
        p_sink = torch.exp(sinks.float()[:, None] - lse.masked_fill(empty, 0.0))
        dsinks = (p_sink.masked_fill(empty, 0.0) * common).sum(dim=(0, 2))
    if softcap > 0.0:
        products = torch.einsum("bihd,bjhd->bhij", q, wide_k) * softmax_scale
        dscores = dscores * (1.0 - torch.tanh(products / softcap) ** 2)
    dq = torch.einsum("bhij,bjhd->bihd", dscores, wide_k) * softmax_scale
    dk = torch.einsum("bhij,bihd->bjhd", dscores, q) * softmax_scale
    dk, dv = (x.view(batch, seqlen_k, heads_k, group, x.shape[-1]).sum(dim=3) for x in (dk, dv))
    return dq, dk, dv, dbias, dsinks
