"""A-priori bounds of the error of lightning attention; docs/numerics.md derives them.

The forward and each gradient is a walk: a state decays, adds ``key^T value`` of each token, and is
multiplied by ``read`` of each token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .rounding import (
    EXP2,
    FP32,
    ROUNDING,
    TF32X3,
    TINY,
    Bounded,
    gamma,
    product_error,
    stored_unit,
)

# rates are clamped to this, so that no product with a distance overflows
LARGEST_RATE = 1e4
# an operand in TF32, which may be truncated rather than rounded
TF32 = 2.0**-10


class Rounding(NamedTuple):
    """Rounding errors of a walk's products, and the fewest and the most tokens of a chunk."""

    # scores, and the state as it is read
    read: float
    # values as they are written to the state
    written: float
    product: float
    fewest: int = 16
    most: int = 64


def rounding_of(dtype: torch.dtype, *, is_exact: bool) -> Rounding:
    """Return the rounding of walks in a dtype; ``is_exact``: the final state is returned."""
    if dtype == torch.float32:
        return Rounding(TF32X3, TF32X3, product_error(dtype))
    if dtype == torch.float16:
        return Rounding(TF32, TF32, 0.0)
    unit, _ = ROUNDING[dtype]
    # the sum of two bf16 numbers: the first truncated, the second the rounded rest
    return Rounding(unit, 2 * unit * unit if is_exact else unit, 0.0)


# one token at a time, in fp32
DECODING = Rounding(0.0, 0.0, 0.0, 1, 1)


class Walk(NamedTuple):
    """The tensors of a walk, ``[b, h, tokens, ..]`` in float64, and ``first``, ``[b, h, d, e]``.

    In ``reverse``, from the last token to the first, the state decays after a token reads it, not
    before a token writes to it.
    """

    read: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    first: Tensor
    read_scale: float = 1.0
    write_scale: float = 1.0
    reverse: bool = False


def _relative(decay: Tensor, distance: Tensor, rounding: Rounding) -> Tensor:
    """Return the relative error of a decay over a distance; both broadcast."""
    factors = 3 + distance / rounding.fewest
    return torch.expm1(3 * FP32 * decay * distance + factors * (EXP2 + 2 * FP32))


def _states_read(x: Walk, decay: Tensor) -> Tensor:
    """Return ``sum |read_id| |S_ide|`` of the states that tokens read, ``[b, h, tokens, e]``."""
    kept = torch.exp(-decay)
    state = x.first if x.reverse else kept * x.first
    found = torch.zeros_like(x.value)
    for i in range(x.key.shape[2]):
        state = state if i == 0 else kept * state
        written = x.key[:, :, i, :, None] * x.value[:, :, i, None, :]
        state = state + x.write_scale * written
        found[:, :, i] = (x.read[:, :, i, :, None].abs() * state.abs()).sum(2)
    return found


def walk_bounds(
    x: Walk, dtype: torch.dtype, rounding: Rounding, *, truncates: bool = False
) -> tuple[Bounded, Bounded]:
    """Return each token's output and the final state, with bounds."""
    read, key, value = x.read, x.key, x.value
    if x.reverse:
        read, key, value = (t.flip(2) for t in (read, key, value))
    tokens, d = key.shape[2:]
    decay = x.decay.double().clamp(max=LARGEST_RATE)[:, None, None]
    index = torch.arange(tokens, device=key.device, dtype=torch.float64)
    apart = index[:, None] - index
    scale = abs(x.read_scale * x.write_scale)
    # ---- from other tokens
    left = torch.exp(-decay * apart.clamp(min=0)).tril()  # [h, i, j]
    magnitude = left * (read.abs() @ key.abs().mT)
    near = magnitude.masked_fill(apart >= rounding.most, 0.0)
    relative = (
        rounding.written + gamma(d) + 2 * gamma(rounding.most) + 2 * rounding.product + 4 * FP32
    )
    errors = magnitude * (_relative(decay, apart.clamp(min=0), rounding) + relative)
    errors = scale * (errors + rounding.read * near + TINY)
    out = x.read_scale * x.write_scale * ((left * (read @ key.mT)) @ value)
    out_error = errors @ value.abs()
    # ---- from the initial state
    before = 0 if x.reverse else 1
    since = (index + before)[:, None]
    faded = torch.exp(-decay * since)
    out = out + x.read_scale * faded * (read @ x.first)
    first_error = _relative(decay, since, rounding) + gamma(d) + rounding.product + 2 * FP32
    size = abs(x.read_scale) * (read.abs() @ x.first.abs())
    out_error = out_error + (faded * first_error + TINY) * size
    # ---- from rounding the state before it is read
    met = _states_read(x._replace(read=read, key=key, value=value), decay)
    out_error = out_error + abs(x.read_scale) * rounding.read * met
    bound = out_error * (1 + 4 * rounding.read) + stored_unit(dtype, truncates) * out.abs()
    bound = bound + ROUNDING[dtype][1] + TINY
    if x.reverse:
        out, bound = out.flip(2), bound.flip(2)

    # ---- the final state
    to_end = (tokens - before - index)[:, None]
    kept = torch.exp(-decay * to_end)
    last = x.write_scale * ((key * kept).mT @ value)
    relative = rounding.written + gamma(rounding.most) + rounding.product + 4 * FP32
    error = kept * (_relative(decay, to_end, rounding) + relative) + TINY
    last_error = abs(x.write_scale) * ((key.abs() * error).mT @ value.abs())
    all_tokens = torch.tensor(float(tokens), device=key.device, dtype=torch.float64)
    passed = torch.exp(-decay * tokens)
    last = last + passed * x.first
    error = passed * (_relative(decay, all_tokens, rounding) + FP32) + TINY
    last_error = last_error + error * x.first.abs() + FP32 * last.abs() + TINY
    return Bounded(out, bound), Bounded(last, last_error)


def lightning_bounds(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    dout: Tensor | None = None,
    dstate: Tensor | None = None,
    truncates: bool = False,
    decodes: bool = False,
) -> dict[str, Bounded]:
    """Return ``o`` and ``state``, and with ``dout`` the gradients except ``ddecay``, with bounds.

    ``q`` and ``k`` are ``[batch, tokens, heads, d]``, ``v`` is ``[batch, tokens, heads, e]`` in the
    dtype of the call, states are ``[batch, heads, d, e]``. The call returns the final state and
    differentiates the initial one. ``truncates``: results are truncated, not rounded, as by
    Triton's interpreter; ``decodes``: the call is ``lightning_attn_decode``.
    """
    dtype = q.dtype
    qh, kh, vh = (x.double().transpose(1, 2) for x in (q, k, v))
    zeros = qh.new_zeros((*kh.shape[:2], kh.shape[-1], vh.shape[-1]))
    first = zeros if initial_state is None else initial_state.double()
    exact = DECODING if decodes else rounding_of(dtype, is_exact=True)
    forward = Walk(qh, kh, vh, decay, first, read_scale=scale)
    out, state = walk_bounds(forward, dtype, exact, truncates=truncates)
    found = {"o": Bounded(*(x.transpose(1, 2) for x in out)), "state": state}
    if dout is None:
        return found
    do = dout.double().transpose(1, 2)
    ds = zeros if dstate is None else dstate.double()
    inexact = rounding_of(dtype, is_exact=False)
    back = {"write_scale": scale, "reverse": True}
    walks = {
        "dq": (Walk(do, vh, kh, decay, first.mT, read_scale=scale), inexact),
        "dk": (Walk(vh, do, qh, decay, ds.mT, **back), inexact),
        "dv": (Walk(kh, qh, do, decay, ds, **back), exact),
    }
    for name, (walk, rounding) in walks.items():
        rows, last = walk_bounds(walk, dtype, rounding, truncates=truncates)
        found[name] = Bounded(*(x.transpose(1, 2) for x in rows))
        if name == "dv":
            found["dinitial_state"] = last
    return found
