"""PyTorch's fused attention for the CPU, for calls in which it equals the reference.

It computes in the dtype of its inputs, so it gets them in fp32, and it returns the LSE. Each
sequence is a separate call; if a mask has to be written out, each ``ROWS`` queries with the keys
that they see are a separate call. So memory grows linearly with the length, and neither the batch
nor the strides change a bit of a sequence's result.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._dense.call import Options, Tensors
from .fixed import visible_keys

# queries per call with a written-out mask
ROWS = 256

# a private operator, because scaled_dot_product_attention does not return the LSE
_operator: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def serves(x: Tensors, options: Options) -> bool:
    """Tell whether the operator can compute a call's scores.

    It cannot take a bias or spans, which may hide whole rows. It masks keys before it scales, so
    the scale must be positive to keep -inf.
    """
    is_scaled = options.softmax_scale > 0.0 and options.softcap == 0.0
    is_plain = x.bias is x.spans is None and is_scaled and options.dropout_p == 0.0
    return _operator is not None and is_plain and x.q.dtype.itemsize >= 2


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Compute attention of one sequence.

    Args:
        q: ``[seqlen_q, heads_q, head_dim]``.
        k: ``[seqlen_k, heads_k, head_dim]``.
        v: ``[seqlen_k, heads_k, head_dim_v]``.
        alibi_slopes: fp32 ``[1, heads_q]``, or None.
        sinks: ``[heads_q]``, or None.
        options: those of the call, for which ``serves`` is true.

    Returns:
        The output ``[seqlen_q, heads_q, head_dim_v]`` and the log-sum-exp ``[heads_q, seqlen_q]``,
        in fp32.
    """
    seqlen_q, seqlen_k = q.shape[0], k.shape[0]
    heads = q.shape[1]
    out = q.new_zeros((seqlen_q, heads, v.shape[-1]), dtype=torch.float32)
    lse = q.new_full((heads, seqlen_q), -math.inf, dtype=torch.float32)
    scale, window = options.softmax_scale, (options.window_left, options.window_right)
    with torch.autocast("cpu", enabled=False):
        if seqlen_q > 0 and seqlen_k > 0:
            width = max(q.shape[-1], v.shape[-1])
            q = _heads_first(q, 1, width)
            k, v = (_heads_first(x, heads // k.shape[1], width) for x in (k, v))
            _attend_parts(q, k, v, alibi_slopes, scale, window, out, lse)
        if sinks is not None:
            sinks = sinks.float()[:, None]
            total = torch.logaddexp(lse, sinks)
            out *= torch.exp(lse - total).masked_fill(lse == -math.inf, 0.0).T[..., None]
            lse = total
    return out, lse


def _attend_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    scale: float,
    window: tuple[int, int],
    out: Tensor,
    lse: Tensor,
) -> None:
    """Fill ``out`` and ``lse``; q, k, v are ``[1, heads_q, tokens, head_dim]``, fp32."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    ahead = seqlen_k - seqlen_q
    left, right = window
    is_left_open = left < 0 or left >= seqlen_k - 1
    is_right_open = right < 0 or right >= seqlen_q - 1
    is_whole = alibi_slopes is None and is_left_open
    if is_whole and (is_right_open or (right == 0 and ahead == 0)):
        _call(q, k, v, scale, None, not is_right_open, out, lse)
        return
    for start in range(0, seqlen_q, ROWS):
        stop = min(start + ROWS, seqlen_q)
        first = 0 if left < 0 else min(max(0, start + ahead - left), seqlen_k)
        last = seqlen_k if right < 0 else max(first, min(stop + ahead + right, seqlen_k))
        if first == last:
            continue
        position = start + ahead - first
        visible = visible_keys(stop - start, last - first, left, right, q.device, position)
        mask = torch.zeros(visible.shape, dtype=torch.float32, device=q.device)
        mask = mask.masked_fill_(~visible, -math.inf)[None, None]
        if alibi_slopes is not None:
            places = torch.arange(position, position + stop - start, device=q.device)[:, None]
            distance = (places - torch.arange(last - first, device=q.device)).abs()
            mask = mask - alibi_slopes[..., None, None] * distance
        keys = k[:, :, first:last], v[:, :, first:last]
        _call(q[:, :, start:stop], *keys, scale, mask, False, out[start:stop], lse[:, start:stop])
        nothing = ~visible.any(dim=1)
        out[start:stop].masked_fill_(nothing[:, None, None], 0.0)
        lse[:, start:stop].masked_fill_(nothing, -math.inf)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None,
    is_causal: bool,
    out: Tensor,
    lse: Tensor,
) -> None:
    got, got_lse = _operator(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    out.copy_(got[0, :, :, : out.shape[-1]].transpose(0, 1))
    lse.copy_(got_lse[0])


def _heads_first(x: Tensor, group: int, width: int) -> Tensor:
    """Return ``[1, heads, tokens, width]`` in fp32, contiguous."""
    wide = pad(x.float(), (0, width - x.shape[-1]))
    return wide.repeat_interleave(group, dim=1).transpose(0, 1).contiguous()[None]
