"""What CPU tensors run: the definition, one sequence after the other, and its derivative.

One after the other, because the products of a batch may round otherwise than those of a sequence
alone. The derivative is written out, as an operator may run where autograd is switched off; the
tests hold it against autograd through the definition.
"""

import math

import torch
from torch import Tensor

from ._lists import dense_of
from .reference import (
    hide_unseen,
    own_blocks,
    own_rule,
    packed_attention,
    sequences,
    visible_keys,
)

Grads = tuple[Tensor, Tensor, Tensor]


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    block_table: Tensor | None,
    crow: Tensor,
    col: Tensor,
    cols: int,
    block_size: tuple[int, int],
    softmax_scale: float,
    causal: bool,
    top_left: bool = False,
    rule: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp in fp32."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        cu_seqlens_q, cu_seqlens_k = _even(q), _even(k)
    if block_table is None:
        k, v = _packed(k), _packed(v)
    with torch.no_grad():
        out, lse = packed_attention(
            _packed(q),
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            block_table,
            dense_of(crow, col, cols),
            block_size,
            softmax_scale,
            causal,
            top_left,
            rule,
        )
        out = out.to(q.dtype).view(*q.shape[:-1], v.shape[-1])
        if q.ndim == 4:
            lse = lse.view(q.shape[2], q.shape[0], q.shape[1]).transpose(0, 1).contiguous()
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
    crow: Tensor,
    col: Tensor,
    cols: int,
    block_size: tuple[int, int],
    softmax_scale: float,
    causal: bool,
    top_left: bool = False,
    rule: Tensor | None = None,
) -> Grads:
    """Return the gradients of q, k and v, each in the dtype of its tensor."""
    tensors = q, k, v
    if cu_seqlens_q is None or cu_seqlens_k is None:
        cu_seqlens_q, cu_seqlens_k = _even(q), _even(k)
        lse = lse.transpose(0, 1).reshape(q.shape[2], -1)
        dlse = None if dlse is None else dlse.transpose(0, 1).reshape(lse.shape)
    dense = dense_of(crow, col, cols)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        dout, q, k, v = (_packed(x).float() for x in (dout, q, k, v))
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for b, (rows, keys) in enumerate(sequences(cu_seqlens_q, cu_seqlens_k)):
            lengths = rows.stop - rows.start, keys.stop - keys.start
            one, own = own_rule(rule, b), own_blocks(dense, b)
            seen = None if one is None else one[0]
            visible = visible_keys(own, block_size, *lengths, causal, top_left, seen)
            dq[rows], dk[keys], dv[keys] = _sequence_backward(
                dout[rows],
                q[rows],
                k[keys],
                v[keys],
                lse[:, rows],
                None if dlse is None else dlse[:, rows],
                visible,
                softmax_scale,
            )
    dq, dk, dv = (
        grad.to(x.dtype).reshape(x.shape).contiguous()
        for grad, x in zip((dq, dk, dv), tensors, strict=True)
    )
    return dq, dk, dv


def _sequence_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    visible: Tensor,
    softmax_scale: float,
) -> Grads:
    """Return the gradients of one sequence, in fp32."""
    heads_q, heads_k = q.shape[1], k.shape[1]
    group = heads_q // heads_k
    visible = visible.expand(heads_q, -1, -1)
    sees = visible.any(2).transpose(0, 1)[..., None]
    dout = dout.masked_fill(~sees, 0.0)
    q, k, v = (x[0] for x in hide_unseen(q[None], k[None], v[None], visible))
    wide_k, wide_v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    empty = lse == -math.inf
    scores = torch.einsum("ihd,jhd->hij", q, wide_k) * softmax_scale
    p = torch.exp(scores - lse.masked_fill(empty, 0.0)[..., None]).masked_fill(~visible, 0.0)
    dv = torch.einsum("hij,ihe->jhe", p, dout)
    dp = torch.einsum("ihe,jhe->hij", dout, wide_v)
    # what every logit of a row gets in common: from the normalisation, and from the lse
    common = -(p * dp).sum(-1)
    if dlse is not None:
        common = common + dlse.masked_fill(empty, 0.0)
    dscores = p * (dp + common[..., None]) * softmax_scale
    dq = torch.einsum("hij,jhd->ihd", dscores, wide_k)
    dk = torch.einsum("hij,ihd->jhd", dscores, q)
    dk, dv = (x.view(x.shape[0], heads_k, group, x.shape[2]).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _even(x: Tensor) -> Tensor:
    """Return where sequences of one length begin."""
    return torch.arange(x.shape[0] + 1, device=x.device) * x.shape[1]


def _packed(x: Tensor) -> Tensor:
    return x if x.ndim == 3 else x.reshape(-1, *x.shape[2:])
