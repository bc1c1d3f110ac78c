"""Attention on the CPU in which a row's bits depend only on its query and its keys.

Matrix product libraries choose the order of additions by shapes and addresses. So this code uses
single multiplications, additions, divisions and comparisons in float64, each rounded by IEEE 754;
sums over the head dimension and over keys start with the first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# queries per block of scores
ROWS = 256
_LN2_HIGH = 0.693147180369123816490
_LN2_LOW = 1.90821492927058770002e-10


def invariant_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    position: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` of one sequence, in fp32.

    ``q`` is ``[rows, heads_q, head_dim]``, ``k`` ``[keys, heads_k, head_dim]`` and ``v``
    ``[keys, heads_k, head_dim_v]``. The first row stands at key ``position``; by default the last
    row stands at the last key. Keys at both ends that no row sees may be left out. ``out`` is
    ``[rows, heads_q, head_dim_v]`` and ``lse`` ``[heads_q, rows]``.
    """
    group = q.shape[1] // k.shape[1]
    # [heads_q, head_dim, keys] and [heads_q, keys, head_dim_v]
    wide_k = k.double().permute(1, 2, 0).repeat_interleave(group, 0).contiguous()
    wide_v = v.double().transpose(0, 1).repeat_interleave(group, 0)
    ahead = k.shape[0] - q.shape[0] if position is None else position
    outs, lses = [], []
    for first in range(0, max(1, q.shape[0]), ROWS):
        rows = q[first : first + ROWS].double().transpose(0, 1)  # [heads_q, rows, head_dim]
        # keys that no row sees would add zeros
        low, high = 0, k.shape[0]
        if window_left >= 0:
            low = min(max(first + ahead - window_left, 0), high)
        if window_right >= 0:
            high = max(min(first + rows.shape[1] + ahead + window_right, high), low)
        some_k, some_v = wide_k[..., low:high], wide_v[:, low:high]
        at = torch.arange(first, first + rows.shape[1], device=q.device)[:, None] + ahead
        key = torch.arange(low, high, device=q.device)[None, :]
        visible = torch.ones(rows.shape[1], high - low, dtype=torch.bool, device=q.device)
        if window_right >= 0:
            visible &= key <= at + window_right
        if window_left >= 0:
            visible &= key >= at - window_left
        scores = rows.new_zeros(rows.shape[0], rows.shape[1], high - low)
        for d in range(q.shape[2]):
            scores = scores + rows[:, :, d, None] * some_k[:, d, None, :]
        scores = scores * softmax_scale
        if softcap > 0.0:
            scores = _tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~visible, -math.inf)
        out, lse = _softmax(scores, some_v, visible, sinks)
        outs.append(out.transpose(0, 1).float())
        lses.append(lse.float())
    return torch.cat(outs), torch.cat(lses, 1)


def _softmax(
    scores: Tensor, v: Tensor, visible: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of rows of scores."""
    pivot = scores.new_full(scores.shape[:2], -math.inf)  # [heads_q, rows]
    if sinks is not None:
        pivot = sinks.double()[:, None].expand(pivot.shape)
    if scores.shape[2]:
        pivot = torch.maximum(pivot, scores.amax(2))
    safe = pivot.masked_fill(pivot == -math.inf, 0.0)
    p = _exp(scores - safe[..., None])
    total = torch.zeros_like(pivot)
    if sinks is not None:
        total = total + _exp(sinks.double()[:, None] - safe)
    out = scores.new_zeros(*scores.shape[:2], v.shape[2])
    # a hidden value has the weight 0, which adds NaN if the value is not finite, else nothing
    is_finite = bool(v.isfinite().all())
    for key in range(scores.shape[2]):
        total = total + p[:, :, key]
        part = p[:, :, key, None] * v[:, None, key]
        if not is_finite:
            part = part.masked_fill(~visible[:, key, None], 0.0)
        out = out + part
    is_empty = total == 0.0
    divisor = total.masked_fill(is_empty, 1.0)
    lse = (safe + _log(divisor)).masked_fill(is_empty, -math.inf)
    return out / divisor[..., None], lse


def _exp(x: Tensor) -> Tensor:
    """Return the exponential of numbers that are at most slightly positive."""
    is_nothing = x <= -700.0
    x = x.masked_fill(is_nothing, 0.0)
    steps = torch.floor(x * (1.0 / math.log(2.0)) + 0.5)
    rest = (x - steps * _LN2_HIGH) - steps * _LN2_LOW
    result = torch.ones_like(rest)
    for n in range(13, 0, -1):
        result = result * rest / float(n) + 1.0
    power = (steps.nan_to_num(0.0).to(torch.int64) + 1023) << 52
    return (result * power.view(torch.float64)).masked_fill(is_nothing, 0.0)


def _log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive numbers."""
    fraction, exponent = torch.frexp(x)
    z = (fraction - 0.75) / (fraction + 0.75)
    square = z * z
    series = torch.zeros_like(z)
    for n in range(29, 0, -2):
        series = series * square + 1.0 / n
    return exponent.double() * math.log(2.0) + (2.0 * z * series + math.log(0.75))


def _tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent."""
    square = x * x
    near = torch.zeros_like(x)
    for term in (62.0 / 2835.0, -17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0, 1.0):
        near = near * square + term
    decay = _exp(x.abs() * -2.0)
    far = (1.0 - decay) / (1.0 + decay)
    far = torch.where(x < 0, -far, far)
    return torch.where(x.abs() < 0.02, near * x, far)
