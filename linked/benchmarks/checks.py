"""Attention in fp32, a chunk of rows at a time, and the comparison that results have to pass.

Deliberately apart from the packages under test: it is the benchmarks' own arbiter.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# rows of one head whose error is judged together: a wrong tile must not drown in a long sequence
BLOCK_ROWS = 64


class Chunk(NamedTuple):
    """What some rows come to: the output, and the gradients if their output's is given."""

    out: Tensor  # [group, rows, Dv]
    dq: Tensor | None = None  # [group, rows, D]
    dk: Tensor | None = None  # [keys, D]
    dv: Tensor | None = None  # [keys, Dv]
    ds: Tensor | None = None  # [group, rows, keys], of the scaled scores


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    scale: float,
    bias: Tensor | float = 0.0,
    hidden: Tensor | None = None,
) -> Chunk:
    """Compute attention of the query heads of one key head.

    Args:
        q: fp32 ``[group, rows, D]``.
        k: fp32 ``[keys, D]``.
        v: fp32 ``[keys, Dv]``.
        dout: The output's gradient, or None.
        scale: Factor of the scores.
        bias: What is added to the scaled scores.
        hidden: Which keys a row does not see, or None.
    """
    p = torch.matmul(q, k.t()).mul_(scale).add_(bias)
    if hidden is not None:
        p.masked_fill_(hidden, -math.inf)
    p = torch.softmax(p, dim=-1)
    out = torch.matmul(p, v)
    if dout is None:
        return Chunk(out)
    dv = torch.einsum("grk,grd->kd", p, dout)
    ds = torch.matmul(dout, v.t()).sub_((dout * out).sum(-1, keepdim=True)).mul_(p)
    scaled = ds * scale
    dk = torch.einsum("grk,grd->kd", scaled, q)
    return Chunk(out, torch.matmul(scaled, k), dk, dv, ds)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error (Frobenius) of a tensor."""
    difference = actual.detach().reshape(expected.shape).float() - expected.float()
    return float(difference.norm() / expected.float().norm())


def errors(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the relative error of ``[tokens, heads, D]`` and of its worst block of rows."""
    if actual.numel() != expected.numel():
        raise ValueError(f"expected {expected.numel()} numbers, got {tuple(actual.shape)}")
    difference = actual.detach().reshape(expected.shape).float() - expected
    # [tokens, heads]: squares summed over the head dimension
    wrong, right = _squares(difference), _squares(expected)
    whole = (wrong.sum() / right.sum()).sqrt().item()
    tokens = wrong.shape[0] // BLOCK_ROWS * BLOCK_ROWS
    if tokens == 0:
        return whole, whole
    blocks = [t[:tokens].reshape(-1, BLOCK_ROWS, t.shape[1]).sum(1) for t in (wrong, right)]
    # max() passes NaN on
    return whole, (blocks[0] / blocks[1]).max().sqrt().item()


def _squares(x: Tensor) -> Tensor:
    squares = x.square().sum(-1)
    # a bias has its rows behind its heads
    return squares.flatten(0, 1).t() if x.ndim == 4 else squares
