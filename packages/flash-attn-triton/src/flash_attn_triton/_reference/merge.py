"""Merge the results of attention over disjoint sets of keys."""

import math

import torch
from torch import Tensor

from .._linked.host.arguments import check_tensor


def merge_attn_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge two attention results over disjoint keys into the result over all of them.

    The merge is exact: with ``lse = log(exp(lse_a) + exp(lse_b))``, the output is
    ``exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b``, computed in fp32 (the rescaling step of
    FlashAttention, Dao et al. 2022). Only one of the two may include a sink.

    Args:
        out_a: output over the first keys, ``[batch, seqlen, heads, head_dim]`` or packed
            ``[tokens, heads, head_dim]``; any float dtype.
        lse_a: log-sum-exp of ``out_a``, ``[batch, heads, seqlen]`` or packed ``[heads, tokens]``,
            fp32 (or float64). A row of -inf saw no key: its output is ignored. +inf counts as -inf,
            because some kernels mark such rows with it.
        out_b: output over the other keys, shape of ``out_a``; any float dtype.
        lse_b: log-sum-exp of ``out_b``, shape of ``lse_a``.

    Returns:
        ``(out, lse)``: the output in the dtype of ``out_a``, and the log-sum-exp. Rows that saw no
        key on either side have output 0 and lse -inf. Both are differentiable in all four
        arguments.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape or a device.
    """
    _check(out_a, lse_a, out_b, lse_b)
    empty_a, empty_b = lse_a.isinf(), lse_b.isinf()
    lse_a, lse_b = (
        lse.masked_fill(empty, -math.inf) for lse, empty in ((lse_a, empty_a), (lse_b, empty_b))
    )
    # a constant shift cancels, so it needs no gradient; it must be finite where both are empty
    shift = torch.maximum(lse_a, lse_b).detach()
    shift = shift.masked_fill(empty_a & empty_b, 0.0)
    weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = (weight_a + weight_b).masked_fill(empty_a & empty_b, 1.0)
    lse = (shift + torch.log(total)).masked_fill(empty_a & empty_b, -math.inf)

    dtype = lse.dtype
    part_a = _per_row(weight_a / total) * out_a.to(dtype).masked_fill(_per_row(empty_a), 0.0)
    part_b = _per_row(weight_b / total) * out_b.to(dtype).masked_fill(_per_row(empty_b), 0.0)
    return (part_a + part_b).to(out_a.dtype), lse


def _per_row(x: Tensor) -> Tensor:
    """Turn ``[..., heads, rows]`` into ``[..., rows, heads, 1]``."""
    return x.transpose(-1, -2).unsqueeze(-1)


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    for name, x in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        check_tensor(name, x)
        if name.startswith("lse"):
            if x.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"{name} must be torch.float32 or torch.float64, got {x.dtype}")
        elif not x.dtype.is_floating_point:
            raise TypeError(f"{name} must have a float dtype, got {x.dtype}")
        if x.device != out_a.device:
            raise ValueError(
                f"{name} must be on the device of out_a, {out_a.device}, got {x.device}"
            )
    if lse_b.dtype != lse_a.dtype:
        raise TypeError(f"lse_b must have the dtype of lse_a, {lse_a.dtype}, got {lse_b.dtype}")
    if out_a.ndim not in (3, 4):
        raise ValueError(
            "out_a must be [batch, seqlen, heads, head_dim] or [tokens, heads, head_dim], "
            f"got {list(out_a.shape)}"
        )
    if out_b.shape != out_a.shape:
        raise ValueError(
            f"out_b must have the shape of out_a, {list(out_a.shape)}, got {list(out_b.shape)}"
        )
    rows, heads = out_a.shape[-3], out_a.shape[-2]
    expected = (*out_a.shape[:-3], heads, rows)
    for name, x in (("lse_a", lse_a), ("lse_b", lse_b)):
        if x.shape != expected:
            raise ValueError(f"{name} must be {list(expected)}, got {list(x.shape)}")
