"""A-priori bounds of the error of softmax attention; docs/numerics.md derives them.

``attention_bounds`` computes, in float64, what a call has to give, and for every element how far a
kernel may be off that rounds as the document says. The bound is made of the data and of the
precision of each step; nothing in it is measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

FP32 = 2.0**-24  # one rounding to nearest
SUM = 2.0**-23  # one addition of a tensor core, which may cut off
EXP2 = 2.0**-22  # relative, of the hardware's exponential; absolute, of its logarithm
TINY = 2.0**-126
# the smallest distance of numbers, halved, and one rounding to nearest
ROUNDING = {
    torch.bfloat16: (2.0**-8, 2.0**-134),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.float32: (2.0**-24, 2.0**-150),
}
# a product of fp32 is three of TF32; else it is exact
PRODUCT = {torch.bfloat16: 0.0, torch.float16: 0.0, torch.float32: 2.0**-21}
# weights lie within 2**8 of the largest that a row's pivot allows
PIVOT = 2.0**8


class Bounded(NamedTuple):
    """What is exact, and how far from it a kernel may be, element by element."""

    exact: Tensor
    bound: Tensor

    def ratio(self, got: Tensor) -> Tensor:
        """Return measured error over bound where both are finite; NaN where ``got`` is."""
        wide = got.double()
        finite = torch.isfinite(self.exact)
        error = torch.where(finite, (wide - self.exact).abs(), 0.0)
        wrong = torch.where(finite, ~torch.isfinite(wide), wide != self.exact)
        ratio = torch.where(error > 0, error / self.bound.clamp_min(1e-300), 0.0)
        return torch.where(wrong, torch.inf, ratio)


def assert_within(got: dict[str, Tensor], bounds: dict[str, Bounded]) -> None:
    """Require that no element is further from the exact one than its bound; NaN fails."""
    for name, bounded in bounds.items():
        ratio = bounded.ratio(got[name])
        assert ratio.numel() == 0 or bool(ratio.max() <= 1), (
            f"{name}: {float(ratio.max()):.3g} times its bound"
        )


def _gamma(terms: int) -> float:
    """Return the relative error of a sum of so many terms, in any order."""
    return terms * SUM / (1 - terms * SUM)


def _per_query_head(x: Tensor, group: int) -> Tensor:
    """``[batch, keys, heads_k, d] -> [batch, heads_q, keys, d]``."""
    return x.double().repeat_interleave(group, 2).transpose(1, 2)


class _Scores(NamedTuple):
    """Scores in natural units, their errors, and the derivative of the cap; ``[b, h, i, j]``."""

    s: Tensor
    error: Tensor
    slope: Tensor
    slope_error: Tensor


def _scores(q: Tensor, k: Tensor, dtype: torch.dtype, options: dict[str, Any]) -> _Scores:
    """Compute scores, ``-inf`` where a key is hidden."""
    d = q.shape[-1]
    scale = options.get("softmax_scale")
    scale = d**-0.5 if scale is None else scale
    s = scale * (q @ k.mT)
    magnitude = abs(scale) * (q.abs() @ k.mT.abs())
    error = (_gamma(d) + PRODUCT[dtype]) * magnitude + 4 * FP32 * s.abs()
    slope, slope_error = torch.ones_like(s), torch.zeros_like(s)
    if cap := options.get("softcap", 0.0):
        t = torch.tanh(s / cap)
        slope = 1 - t * t
        slope_error = 2 * t.abs() * error / cap + 16 * EXP2
        s, error = cap * t, error + 4 * EXP2 * cap * t.abs()
    queries, keys = s.shape[-2:]
    # counted as keys are
    i = torch.arange(queries, device=s.device)[:, None] + keys - queries
    j = torch.arange(keys, device=s.device)
    for added in (options.get("alibi_slopes"), options.get("bias")):
        if added is None:
            continue
        if added is options.get("alibi_slopes"):
            added = -added.double().reshape(-1, s.shape[1], 1, 1) * (i - j).abs()
        added = added.double()
        s = s + added
        error = error + 3 * FP32 * (s.abs() + added.abs())
    left, right = options.get("window_size", (-1, -1))
    right = 0 if options.get("causal") else right
    hidden = torch.zeros(queries, keys, dtype=torch.bool, device=s.device)
    if right >= 0:
        hidden |= j > i + right
    if left >= 0:
        hidden |= j < i - left
    return _Scores(s.masked_fill(hidden, -torch.inf), error, slope, slope_error)


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
    """Return ``out`` and ``lse``, and with ``dout`` also ``dq``, ``dk`` and ``dv``, with bounds.

    ``q`` is ``[batch, queries, heads_q, d]``, ``k`` and ``v`` are ``[batch, keys, heads_k, d]``, in
    the dtype of the call; ``dout`` is like the output, ``dlse`` ``[batch, heads_q, queries]``.
    Options are ``softmax_scale``, ``causal``, ``window_size``, ``softcap``, ``alibi_slopes``,
    ``bias`` and ``sinks``, as in flash-attn-triton; another one is a ``TypeError``. ``truncates``
    says that results are cut off rather than rounded, as Triton's interpreter does.
    """
    known = "softmax_scale causal window_size softcap alibi_slopes bias sinks"
    if unknown := set(options) - set(known.split()):
        raise TypeError(f"no bound is known with {', '.join(sorted(unknown))}")
    dtype = q.dtype
    unit, least = ROUNDING[dtype]
    stored = 2 * unit if truncates and dtype != torch.float32 else unit
    # fp32 weights are split for their product like any operand
    weight_unit = max(unit, PRODUCT[dtype])
    group = q.shape[2] // max(1, k.shape[2])
    qh = q.double().transpose(1, 2)
    kh, vh = _per_query_head(k, group), _per_query_head(v, group)
    keys, dv = kh.shape[-2], vh.shape[-1]
    s, s_error, slope, slope_error = _scores(qh, kh, dtype, options)

    # ---- forward
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
    # of the exponent, and of corrections at each of at most `keys` new maxima
    exponent = s_error + 4 * FP32 * (finite.abs() + 2 * top)
    e = torch.expm1(exponent) + (2 + 2 * keys / 16) * (EXP2 + FP32)
    sum_error = (p * e).sum(-1, keepdim=True) + _gamma(keys + 1)
    floor = PIVOT * least
    out = p @ vh
    size = p @ vh.abs()
    out_error = (p * (e + weight_unit)) @ vh.abs() + floor * vh.abs().sum(-2, keepdim=True)
    out_error = out_error + (_gamma(keys) + 2 * FP32) * size + (sum_error + 2 * FP32) * out.abs()
    second = 1 + 2 * (e.amax() if e.numel() else 0.0) + 4 * weight_unit
    out_bound = out_error * second + stored * out.abs() + least + TINY
    lse_error = sum_error.squeeze(-1) * second + 8 * FP32 * (at + top).abs().squeeze(-1)
    lse_bound = lse_error + 4 * EXP2 + 4 * FP32 * at.abs().squeeze(-1)
    found = {
        "out": Bounded(out.transpose(1, 2), out_bound.transpose(1, 2)),
        "lse": Bounded(lse, torch.where(seen.squeeze(-1), lse_bound, TINY)),
    }
    if dout is None:
        return found

    # ---- backward
    do = dout.double().transpose(1, 2)
    dl = torch.zeros_like(lse) if dlse is None else torch.where(seen.squeeze(-1), dlse.double(), 0)
    dp = do @ vh.mT
    dp_error = (_gamma(dv) + PRODUCT[dtype]) * (do.abs() @ vh.abs().mT)
    delta = ((do * out).sum(-1) - dl)[..., None]
    delta_error = (do.abs() * out_bound).sum(-1) + _gamma(dv + 1) * (do * out).abs().sum(-1)
    delta_error = (delta_error + 2 * FP32 * dl.abs())[..., None]
    f = torch.expm1(exponent + lse_bound[..., None] + 4 * FP32 * at.abs()) + EXP2
    ds = p * (dp - delta) * slope
    ds_error = p * slope.abs() * (dp_error + delta_error + 2 * FP32 * (dp.abs() + delta.abs()))
    ds_error = ds_error + p * (dp - delta).abs() * (slope * (f + 4 * FP32) + slope_error)
    ds_error = (
        ds_error * (1 + 2 * (f.amax() if f.numel() else 0.0)) + weight_unit * ds.abs() + least
    )
    scale = options.get("softmax_scale")
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def product(a: Tensor, error: Tensor, b: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """``factor * a @ b``, and its error where ``a`` has one and ``b`` none."""
        terms = a.shape[-1] * (group if a is not ds else 1)
        rest = (_gamma(terms) + PRODUCT[dtype] + 4 * FP32) * (a.abs() @ b.abs())
        return factor * (a @ b), abs(factor) * (error @ b.abs() * (1 + weight_unit) + rest)

    def finished(value: Tensor, error: Tensor, groups: int) -> Bounded:
        b, h, n, width = value.shape
        value, error = (x.view(b, h // groups, groups, n, width).sum(2) for x in (value, error))
        bound = error + stored * value.abs() + least + TINY
        return Bounded(value.transpose(1, 2), bound.transpose(1, 2))

    p_error = p * (f + weight_unit) + least
    found["dq"] = finished(*product(ds, ds_error, kh, scale), 1)
    found["dk"] = finished(*product(ds.mT, ds_error.mT, qh, scale), group)
    found["dv"] = finished(*product(p.mT, p_error.mT, do, 1.0), group)
    return found
