"""A-priori bounds of the error of softmax attention; docs/numerics.md derives them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .rounding import (
    EXP2,
    FP32,
    ROUNDING,
    TINY,
    Bounded,
    gamma,
    product_error,
    stored_unit,
)

# errors of products with FP8 weights: an instruction of Hopper adds 32 products and the previous
# sum, truncates each term at 13 fraction bits of the largest, and truncates their sum
FP8_DEPTH, FP8_CUT = 32, 2.0**-13
# relative error of a tile of 128 keys, which is four instructions
FP8_SUM = 4 * (FP8_DEPTH + 2) * FP8_CUT
OPTIONS = {
    *("softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "bias", "sinks"),
    *("visible", "tiles", "kept", "keep_scale", "q_descale", "k_descale", "v_descale"),
    *("cache", "out_dtype"),
}


class _Scores(NamedTuple):
    """Scores in natural units, their errors, and the derivative of the cap; ``[b, h, i, j]``."""

    s: Tensor
    error: Tensor
    slope: Tensor
    slope_error: Tensor


class _Forward(NamedTuple):
    """The forward's results for the backward: weights, errors of exponents, LSE; ``[b, h, i, ..]``.

    ``passed`` is dropout's factor of the weights; ``at`` is the LSE, 0 for a fully masked row.
    """

    p: Tensor
    passed: Tensor | float
    exponent: Tensor
    seen: Tensor
    at: Tensor
    out: Bounded
    lse: Bounded


def _is_fp8(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1


def _per_query_head(x: Tensor, group: int) -> Tensor:
    """``[batch, keys, heads_k, d] -> [batch, heads_q, keys, d]``."""
    return x.double().repeat_interleave(group, 2).transpose(1, 2)


def _descale(options: dict[str, Any], name: str, group: int) -> Tensor | float:
    """Return a descale, of one element or ``[b, heads_k]``, as a factor of ``[b, h, .., ..]``."""
    descale = options.get(f"{name}_descale")
    if descale is None:
        return 1.0
    wide: Tensor = descale.double()
    if wide.numel() == 1:
        return wide.view(1, 1, 1, 1)
    wide = wide.view(-1, wide.shape[-1]).repeat_interleave(group, 1)
    return wide[:, :, None, None]


def _fp8_products_error(q: Tensor, k: Tensor) -> Tensor:
    """Return error bounds of Hopper's sums of FP8 products, ``[b, h, i, j]``."""
    total = q.new_zeros((*q.shape[:-1], k.shape[-2]))
    error = torch.zeros_like(total)
    for some, others in zip(q.split(FP8_DEPTH, -1), k.split(FP8_DEPTH, -1), strict=True):
        largest = total.abs() + error
        for column in range(some.shape[-1]):
            one, other = some[..., column], others[..., column]
            largest = torch.maximum(largest, (one[..., :, None] * other[..., None, :]).abs())
        total = total + some @ others.mT
        error = error + FP8_CUT * ((FP8_DEPTH + 1) * largest + total.abs())
    return error


def _scale_of(q: Tensor, options: dict[str, Any]) -> float:
    scale = options.get("softmax_scale")
    return float(q.shape[-1] ** -0.5 if scale is None else scale)


def _hidden(s: Tensor, options: dict[str, Any]) -> Tensor:
    """Return a mask of hidden scores; it broadcasts against ``[b, h, i, j]``."""
    queries, keys = s.shape[-2:]
    # positions of queries on the axis of keys
    i = torch.arange(queries, device=s.device)[:, None] + keys - queries
    j = torch.arange(keys, device=s.device)
    left, right = options.get("window_size", (-1, -1))
    right = 0 if options.get("causal") else right
    hidden = torch.zeros(queries, keys, dtype=torch.bool, device=s.device)
    if right >= 0:
        hidden = hidden | (j > i + right)
    if left >= 0:
        hidden = hidden | (j < i - left)
    visible = options.get("visible")
    return hidden if visible is None else hidden | ~visible


def _scores(q: Tensor, k: Tensor, dtype: torch.dtype, options: dict[str, Any]) -> _Scores:
    """Compute scores, ``-inf`` where a key is hidden; ``q`` and ``k`` without their descales."""
    group = options["group"]
    descales = _descale(options, "q", group) * _descale(options, "k", group)
    scale = _scale_of(q, options) * descales
    s = scale * (q @ k.mT)
    if _is_fp8(dtype):
        error = abs(scale) * _fp8_products_error(q, k)
    else:
        magnitude = abs(scale) * (q.abs() @ k.mT.abs())
        error = (gamma(q.shape[-1]) + product_error(dtype)) * magnitude
    factors = 4 if isinstance(descales, float) else 6
    error = error + factors * FP32 * s.abs()
    slope, slope_error = torch.ones_like(s), torch.zeros_like(s)
    if cap := options.get("softcap", 0.0):
        t = torch.tanh(s / cap)
        slope = 1 - t * t
        slope_error = 2 * t.abs() * error / cap + 16 * EXP2
        s, error = cap * t, error + 4 * EXP2 * cap * t.abs()
    queries, keys = s.shape[-2:]
    i = torch.arange(queries, device=s.device)[:, None] + keys - queries
    j = torch.arange(keys, device=s.device)
    for added in (options.get("alibi_slopes"), options.get("bias")):
        if added is None:
            continue
        if added is options.get("alibi_slopes"):
            added = -added.double().reshape(-1, s.shape[1], 1, 1) * (i - j).abs()
        added = added.double()
        s = s + added
        # a bias of -inf hides a key and causes no rounding
        error = error + 3 * FP32 * torch.where(torch.isfinite(s), s.abs() + added.abs(), 0.0)
    return _Scores(s.masked_fill(_hidden(s, options), -torch.inf), error, slope, slope_error)


def _weight_rounding(dtype: torch.dtype, options: dict[str, Any]) -> tuple[float, float]:
    """Return the rounding error of weights: relative, and relative to the row's largest weight.

    A pivot is no larger than the largest score, so the largest weight is at least 1 when rounded,
    and the underflow error of smaller weights is relative to it.
    """
    unit, least = ROUNDING[dtype]
    if _is_fp8(dtype):
        # the largest weight is the largest power of two of the format
        return unit, 2.0**-18
    # fp16 holds every key of 8 bits exactly, so kernels may use fp16 weights with them
    is_narrow = options.get("cache") is not None and dtype == torch.bfloat16
    lost = ROUNDING[torch.float16][1] if is_narrow else least
    # fp32 weights are split for the product like any operand
    return max(unit, product_error(dtype)), max(least, lost)


def _forward(
    scores: _Scores, v: Tensor, dtype: torch.dtype, truncates: bool, options: dict[str, Any]
) -> _Forward:
    s, keys = scores.s, v.shape[-2]
    sinks = options.get("sinks")
    all_s = s
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        all_s = torch.cat((s, column), -1)
    lse = torch.logsumexp(all_s, -1) if all_s.shape[-1] else s.sum(-1) - torch.inf
    seen = torch.isfinite(lse)[..., None]
    at = torch.where(seen, lse[..., None], 0.0)
    p = torch.exp(s - at)
    finite = torch.where(torch.isfinite(s), s, 0.0)
    top = finite.abs().amax(-1, keepdim=True) if keys else torch.zeros_like(at)
    if sinks is not None:
        top = torch.maximum(top, sinks.double().abs().view(1, -1, 1, 1))
    # of the exponent, and of the corrections at new maxima, at most one per tile
    exponent = scores.error + 4 * FP32 * (finite.abs() + 2 * top)
    tiles = options.get("tiles", keys / 16)
    e = torch.expm1(exponent) + (2 + 2 * tiles) * (EXP2 + FP32)
    sum_error = (p * e).sum(-1, keepdim=True) + gamma(keys + 1)

    passed: Tensor | float = 1.0
    if options.get("kept") is not None:
        passed = options["kept"].double() * options["keep_scale"]
    relative, of_largest = _weight_rounding(dtype, options)
    floor = torch.zeros_like(p)
    if keys:
        largest = torch.exp(all_s.amax(-1, keepdim=True) - at)
        floor = torch.where(p > 0, of_largest * largest, TINY) * passed
    through = p * passed
    out, size = through @ v, through @ v.abs()
    # dropout's factor and the descale of values are one more rounding each
    more = FP32 * sum(options.get(name) is not None for name in ("kept", "v_descale"))
    lost = gamma(keys) + 2 * FP32 + (FP8_SUM if _is_fp8(dtype) else 0.0)
    error = (through * (e + relative + e * relative) + floor) @ v.abs()
    error = error + lost * (1 + relative) * size + (sum_error + 2 * FP32 + more) * out.abs()
    # second-order term of the division by an inexact sum
    second = 1 + 2 * (e.amax() if e.numel() else 0.0) + 4 * gamma(keys + 1)
    to = options.get("out_dtype") or (torch.bfloat16 if _is_fp8(dtype) else dtype)
    least = ROUNDING[to][1]
    out_bound = error * second + stored_unit(to, truncates) * out.abs() + least + TINY
    lse_bound = sum_error.squeeze(-1) * second + 8 * FP32 * (at.abs() + top).squeeze(-1)
    lse_bound = lse_bound + 4 * EXP2 + 4 * FP32 * at.abs().squeeze(-1)
    lse_bound = torch.where(seen.squeeze(-1), lse_bound, TINY)
    return _Forward(p, passed, exponent, seen, at, Bounded(out, out_bound), Bounded(lse, lse_bound))


def attention_bounds(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    truncates: bool = False,
    **options: Any,
) -> dict[str, Bounded]:
    """Return exact results and their bounds: ``out``, ``lse`` and, with ``dout``, gradients.

    The gradients are ``dq``, ``dk`` and ``dv``, and ``dbias`` if there is a bias.

    ``q`` is ``[batch, queries, heads_q, d]``, ``k`` and ``v`` are ``[batch, keys, heads_k, d]``, in
    the dtype of the call; ``dout`` is like the output, ``dlse`` ``[batch, heads_q, queries]``.
    ``truncates``: results are truncated, not rounded, as by Triton's interpreter. Options (any
    other is a ``TypeError``):

    - ``softmax_scale``, ``causal``, ``window_size``, ``softcap``, ``alibi_slopes``, ``bias`` and
      ``sinks``, as in flash-attn-triton;
    - ``visible``: a further mask of visible keys, bool, broadcasts to ``[b, h, i, j]``;
    - ``tiles``: the largest number of tiles in which a row sees keys. Default: keys / 16;
    - ``kept``, ``keep_scale``: mask of the weights that dropout keeps, and their factor;
    - ``q_descale``, ``k_descale``, ``v_descale``: factors, of one element or ``[b, heads_k]``;
    - ``cache``: dtype of keys and values of 8 bits, if ``q`` has more bits;
    - ``out_dtype``: dtype of the output. Default: dtype of ``q``, bf16 for FP8.
    """
    if unknown := set(options) - OPTIONS:
        raise TypeError(f"no bound is known with {', '.join(sorted(unknown))}")
    dtype = q.dtype
    if _is_fp8(dtype) and dout is not None:
        raise TypeError("FP8 has no backward")
    group = q.shape[2] // max(1, k.shape[2])
    options["group"] = group
    qh = q.double().transpose(1, 2)
    kh, vh = _per_query_head(k, group), _per_query_head(v, group)
    scores = _scores(qh, kh, dtype, options)
    vh = vh * _descale(options, "v", group)
    kh, qh = kh * _descale(options, "k", group), qh * _descale(options, "q", group)
    forward = _forward(scores, vh, dtype, truncates, options)
    out, lse = forward.out, forward.lse
    found = {"out": Bounded(*(x.transpose(1, 2) for x in out)), "lse": lse}
    if dout is None:
        return found
    do = dout.double().transpose(1, 2)
    dl = torch.zeros_like(lse.exact)
    if dlse is not None:
        dl = torch.where(forward.seen.squeeze(-1), dlse.double(), 0.0)
    gradient = _Gradient(dtype, truncates, group, abs(_scale_of(q, options)))
    sign = -1.0 if _scale_of(q, options) < 0 else 1.0
    f = gradient.of_weights(forward)
    capped = gradient.of_capped(forward, f, vh, do, dl)
    if (bias := options.get("bias")) is not None:
        found["dbias"] = gradient.shared(*capped, bias)
    ds, ds_error = gradient.of_scores(scores, f, *capped)
    found["dq"] = gradient.finished(sign * ds, ds_error, kh, 1, is_scaled=True)
    found["dk"] = gradient.finished(sign * ds.mT, ds_error.mT, qh, group, is_scaled=True)
    weights = forward.p * forward.passed
    p_error = weights * (f + gradient.rounded) + gradient.least * forward.passed
    if options.get("kept") is not None:  # the factor is one more rounding
        p_error = p_error + FP32 * weights
    found["dv"] = gradient.finished(weights.mT, p_error.mT, do, group)
    return found


class _Gradient(NamedTuple):
    """Parameters and rounding errors of the gradients."""

    dtype: torch.dtype
    truncates: bool
    group: int
    scale: float

    @property
    def rounded(self) -> float:
        """Relative error of weights and gradients of scores, rounded for a product."""
        return max(ROUNDING[self.dtype][0], product_error(self.dtype))

    @property
    def least(self) -> float:
        return ROUNDING[self.dtype][1]

    def of_weights(self, forward: _Forward) -> Tensor:
        """Return the relative error of weights that the backward recomputes from the LSE."""
        lse_bound, at = forward.lse.bound[..., None], forward.at
        return torch.expm1(forward.exponent + lse_bound + 4 * FP32 * at.abs()) + EXP2

    def of_capped(
        self, forward: _Forward, f: Tensor, v: Tensor, do: Tensor, dl: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of capped scores, which is also the bias gradient, and its error."""
        p, passed, width = forward.p, forward.passed, v.shape[-1]
        dp = do @ v.mT * passed
        dp_error = (gamma(width) + product_error(self.dtype)) * (do.abs() @ v.abs().mT) * passed
        out, out_bound = forward.out
        delta = ((do * out).sum(-1) - dl)[..., None]
        delta_error = (do.abs() * out_bound).sum(-1) + gamma(width + 1) * (do * out).abs().sum(-1)
        delta_error = (delta_error + 2 * FP32 * dl.abs())[..., None]
        error = dp_error + delta_error + 2 * FP32 * (dp.abs() + delta.abs())
        if isinstance(passed, Tensor):  # the factor of dropout
            error = error + FP32 * dp.abs()
        value = p * (dp - delta)
        return value, (p * error + value.abs() * (f + 4 * FP32)) * self.second(f)

    def second(self, f: Tensor) -> float:
        """Return a factor that covers products of the weights' error and another one."""
        return 1 + 2 * (f.amax().item() if f.numel() else 0.0)

    def of_scores(
        self, scores: _Scores, f: Tensor, value: Tensor, error: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the rounded gradient of scores, and its error, from the one of capped scores."""
        ds = value * scores.slope
        error = error * scores.slope.abs() + value.abs() * scores.slope_error * self.second(f)
        return ds, error + self.rounded * ds.abs() + self.least

    def shared(self, value: Tensor, error: Tensor, bias: Tensor) -> Bounded:
        """Return the gradient of a bias, summed over the dimensions that share the bias.

        Terms have the dtype of the call; each is a sum of up to four, rounded once per term.
        """
        terms = value.numel() // max(1, bias.numel())
        rounded = min(terms, 4)
        grown = (1 + stored_unit(self.dtype, self.truncates)) ** rounded
        error = error * grown + (grown - 1 + gamma(terms)) * value.abs() + rounded * self.least
        total = value.sum_to_size(bias.shape)
        unit = stored_unit(bias.dtype, self.truncates)
        least = ROUNDING[bias.dtype][1] + TINY
        return Bounded(total, error.sum_to_size(bias.shape) + unit * total.abs() + least)

    def finished(
        self, a: Tensor, error: Tensor, b: Tensor, groups: int, *, is_scaled: bool = False
    ) -> Bounded:
        """Return ``a @ b``, summed over ``groups`` heads; only ``a`` has an error."""
        factor = self.scale if is_scaled else 1.0
        terms = a.shape[-1] * groups
        rest = (gamma(terms) + product_error(self.dtype) + 4 * FP32) * (a.abs() @ b.abs())
        value = factor * (a @ b)
        error = factor * (error @ b.abs() * (1 + self.rounded) + rest)
        batch, h, n, width = value.shape
        shape = batch, h // groups, groups, n, width
        value, error = (x.view(shape).sum(2) for x in (value, error))
        unit = stored_unit(self.dtype, self.truncates)
        bound = error + unit * value.abs() + self.least + TINY
        return Bounded(value.transpose(1, 2), bound.transpose(1, 2))
