"""The CPU implementation: the reference, one sequence after the other, and its derivative.

Sequences run one after the other because products of a batch may round differently from products
of one sequence. Long sequences run in parts, so that scores stay small. The derivative is written
out, because an operator may run where autograd is off, as it is below any dispatch mode. Tests
compare it with autograd through the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .._dense.call import Grads, Options, Tensors
from . import fused
from .fixed import attention_scores, dense_attention, round_output, that_see_any, visible_keys
from .philox import dropout_keep_mask, keep_scale
from .sequences import bias_of, row_of, sequences

# queries per part
ROWS = 256


def attention_forward(
    x: Tensors, options: Options, out_dtype: torch.dtype | None, invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the output, and the LSE in fp32.

    With ``invariant``, a row's bits depend only on its own query and keys.
    """
    q, k, v = x.q, x.k, x.v
    cu_seqlens_q, cu_seqlens_k, seqused_k = x.cu_seqlens_q, x.cu_seqlens_k, x.seqused_k
    batch = q.shape[0]
    if cu_seqlens_q is None or cu_seqlens_k is None:
        cu_seqlens_q, cu_seqlens_k = _even(q), _even(k)
    with torch.no_grad():
        rows_q, rows_k, rows_v = _packed(q), _packed(k), _packed(v)
        out = q.new_zeros((*rows_q.shape[:2], v.shape[-1]), dtype=torch.float32)
        lse = q.new_full(rows_q.shape[1::-1], -math.inf, dtype=torch.float32)
        if invariant:
            from .._linked.invariant.eager import invariant_attention

            for rows, keys in sequences(cu_seqlens_q, cu_seqlens_k, seqused_k):
                out[rows], lse[:, rows] = invariant_attention(
                    rows_q[rows],
                    rows_k[keys],
                    rows_v[keys],
                    x.sinks,
                    options.softmax_scale,
                    options.window_left,
                    options.window_right,
                    options.softcap,
                )
        is_fused = not invariant and fused.serves(x, options)
        if is_fused:
            for b, (rows, keys) in enumerate(sequences(cu_seqlens_q, cu_seqlens_k, seqused_k)):
                out[rows], lse[:, rows] = fused.attend(
                    rows_q[rows],
                    rows_k[keys],
                    rows_v[keys],
                    row_of(x.alibi_slopes, b),
                    x.sinks,
                    options,
                )
        parts = _parts(cu_seqlens_q, cu_seqlens_k, seqused_k, options)
        for part in () if invariant or is_fused else parts:
            b, rows, keys = part.sequence, part.rows, part.keys
            one_out, one_lse = dense_attention(
                rows_q[rows][None],
                rows_k[keys][None],
                rows_v[keys][None],
                part.of_bias(x.bias),
                row_of(x.alibi_slopes, b),
                x.sinks,
                row_of(x.q_descale, b),
                row_of(x.k_descale, b),
                row_of(x.v_descale, b),
                x.rng_state,
                *options,
                first_sequence=b,
                position=part.position,
                corner=part.corner,
                spans=part.of_spans(x.spans),
            )
            out[rows], lse[:, rows] = one_out[0], one_lse[0]
        out = round_output(out, q.dtype, out_dtype, x.out_scale).view(*q.shape[:-1], v.shape[-1])
        if q.ndim == 4:
            lse = lse.view(q.shape[2], batch, q.shape[1]).transpose(0, 1).contiguous()
    return out, lse


def attention_backward(
    x: Tensors,
    options: Options,
    out: Tensor | None,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Grads:
    """Return the gradients of q, k, v, bias and sinks in their dtypes; empty for absent tensors.

    ``out`` must be given if ``out`` and ``lse`` are over more keys than ``k``.
    """
    q, k, v, bias, sinks = x.q, x.k, x.v, x.bias, x.sinks
    cu_seqlens_q, cu_seqlens_k = x.cu_seqlens_q, x.cu_seqlens_k
    absent = q.new_empty((0,))
    tensors = q, k, v, absent if bias is None else bias, absent if sinks is None else sinks
    if cu_seqlens_q is None or cu_seqlens_k is None:
        cu_seqlens_q, cu_seqlens_k = _even(q), _even(k)
        lse = lse.transpose(0, 1).reshape(q.shape[2], -1)
        dlse = None if dlse is None else dlse.transpose(0, 1).reshape(lse.shape)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        dout, q, k, v = (_packed(t).float() for t in (dout, q, k, v))
        delta = None if out is None else (dout * _packed(out)).sum(-1)
        dq, dk, dv, dbias, dsinks = (
            torch.zeros_like(t, dtype=torch.float32) for t in (q, k, v, *tensors[3:])
        )
        for part in _parts(cu_seqlens_q, cu_seqlens_k, x.seqused_k, options):
            b, rows, keys = part.sequence, part.rows, part.keys
            dq[rows], one_dk, one_dv, one_dbias, one_dsinks = _part_backward(
                part,
                dout[rows][None],
                q[rows][None],
                k[keys][None],
                v[keys][None],
                lse[None, :, rows],
                None if dlse is None else dlse[None, :, rows],
                part.of_bias(bias),
                row_of(x.alibi_slopes, b),
                sinks,
                x.rng_state,
                options,
                None if delta is None else delta[rows].T[None],
                part.of_spans(x.spans),
            )
            dk[keys] += one_dk[0]
            dv[keys] += one_dv[0]
            used = part.of_bias(None if bias is None else dbias)
            if used is not None:
                used += one_dbias
            dsinks += one_dsinks
    dq, dk, dv, dbias, dsinks = (
        grad.to(t.dtype).reshape(t.shape).contiguous()
        for grad, t in zip((dq, dk, dv, dbias, dsinks), tensors, strict=True)
    )
    return dq, dk, dv, dbias, dsinks


class EagerPlan(NamedTuple):
    """The launcher of a signature on the CPU, without the operators."""

    options: Options
    out_dtype: torch.dtype
    invariant: bool = False

    def forward(self, x: Tensors) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``."""
        return attention_forward(x, self.options, self.out_dtype, self.invariant)

    def backward(
        self,
        x: Tensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        needs_dbias: bool,
    ) -> Grads:
        """Return the gradients, including dbias even if it is not needed."""
        return attention_backward(x, self.options, out, lse, dout, dlse)

    @property
    def merge(self) -> None:
        """None: ``merge_eagerly`` merges results over some keys."""
        return None

    def fits(self, x: Tensors) -> bool:
        """Return True: eager code takes any strides."""
        return True


class _Part(NamedTuple):
    """Some queries of a sequence, and the range of keys that they see."""

    sequence: int
    rows: slice
    keys: slice
    # position of the first query among these keys
    position: int
    # the whole sequence
    all_rows: slice
    all_keys: slice

    @property
    def corner(self) -> tuple[int, int]:
        """Return the first query's and the first key's index in the sequence."""
        return self.rows.start - self.all_rows.start, self.keys.start - self.all_keys.start

    def of_bias(self, bias: Tensor | None) -> Tensor | None:
        """Return this part of a bias over the maximal lengths."""
        bias = bias_of(bias, self.sequence, self.all_rows, self.all_keys)
        for axis, some, everything in (2, self.rows, self.all_rows), (3, self.keys, self.all_keys):
            if bias is not None and bias.shape[axis] != 1:
                start = some.start - everything.start
                bias = bias.narrow(axis, start, some.stop - some.start)
        return bias

    def of_spans(self, spans: Tensor | None) -> Tensor | None:
        """Return the spans of these queries, ``[1, rows, n, 2]``; the part has all keys."""
        if spans is None:
            return None
        if spans.ndim == 3:
            return spans[self.rows][None]
        first = self.corner[0]
        of_one = spans[min(self.sequence, spans.shape[0] - 1)]
        return of_one[first : first + self.rows.stop - self.rows.start][None]


def _parts(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    options: Options,
) -> Iterator[_Part]:
    """Split sequences into parts with few scores, without the keys that a part does not see."""
    left, right = options.window_left, options.window_right
    for b, (rows, keys) in enumerate(sequences(cu_seqlens_q, cu_seqlens_k, seqused_k)):
        count = keys.stop - keys.start
        ahead = count - (rows.stop - rows.start)
        for start in range(0, rows.stop - rows.start, ROWS):
            stop = min(start + ROWS, rows.stop - rows.start)
            first, last = 0, count
            if left >= 0:
                first = min(max(0, start + ahead - left), count)
            if right >= 0:
                last = max(first, min(stop + ahead + right, count))
            some = slice(keys.start + first, keys.start + last)
            part = slice(rows.start + start, rows.start + stop)
            yield _Part(b, part, some, start + ahead - first, rows, keys)


def _even(x: Tensor) -> Tensor:
    """Return the offsets of sequences of one length."""
    return torch.arange(x.shape[0] + 1, device=x.device) * x.shape[1]


def _packed(x: Tensor) -> Tensor:
    return x if x.ndim == 3 else x.reshape(-1, *x.shape[2:])


def _part_backward(
    part: _Part,
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
    options: Options,
    delta: Tensor | None,
    spans: Tensor | None,
) -> Grads:
    """Return the gradients of a part of a sequence, in fp32."""
    softmax_scale, window_left, window_right, softcap, dropout_p = options
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k, heads_k = k.shape[1], k.shape[2]
    group = heads_q // heads_k
    visible = visible_keys(
        seqlen_q, seqlen_k, window_left, window_right, q.device, part.position, spans
    )
    row_sees_any, seen_by_any = that_see_any(visible)
    # unseen rows and keys may hold NaN, and 0 * NaN is NaN
    q, dout = q.masked_fill(~row_sees_any, 0.0), dout.masked_fill(~row_sees_any, 0.0)
    k, v = k.masked_fill(~seen_by_any, 0.0), v.masked_fill(~seen_by_any, 0.0)
    wide_k, wide_v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)

    empty = lse == -math.inf
    scores = attention_scores(
        q, k, visible, bias, alibi_slopes, softmax_scale, softcap, part.position
    )
    p = torch.exp(scores - lse.masked_fill(empty, 0.0)[..., None])
    kept = torch.ones_like(p)
    if dropout_p > 0.0 and rng_state is not None:
        keep = dropout_keep_mask(
            rng_state, dropout_p, batch, heads_q, seqlen_q, seqlen_k, part.sequence, part.corner
        )
        kept = keep * keep_scale(dropout_p)

    dv = torch.einsum("bhij,bihe->bjhe", p * kept, dout)
    dp = torch.einsum("bihe,bjhe->bhij", dout, wide_v) * kept
    # the gradient that all logits of a row share: from the normalisation, and from the LSE
    common = -(p * dp).sum(dim=-1)
    if delta is not None:
        common = -delta.masked_fill(~row_sees_any[..., 0].transpose(-1, -2), 0.0)
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
