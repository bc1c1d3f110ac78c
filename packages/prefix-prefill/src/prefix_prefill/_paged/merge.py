"""Merging the results of attention over disjoint sets of keys."""

import torch
from torch import Tensor

from .._linked.host.arguments import FLOAT_DTYPES, check_tensor
from . import checks, ops, tensor_checks


def merge_attn_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge two attention results over disjoint keys into the result over all of them.

    The merge is exact: with ``lse = log(exp(lse_a) + exp(lse_b))``, the output is
    ``exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b``, computed in fp32 (the rescaling step of
    FlashAttention, Dao et al. 2022). A sink must be counted in only one of the two results.

    Args:
        out_a: output over the first keys, ``[tokens, heads_q, head_dim]``; fp16, bf16 or fp32.
        lse_a: log-sum-exp over the first keys, fp32 ``[heads_q, tokens]``. -inf marks a fully
            masked row, whose output is not read. +inf means the same, because some kernels mark
            such rows with it.
        out_b: output over the other keys, shape of ``out_a``; fp16, bf16 or fp32.
        lse_b: log-sum-exp over the other keys, shape of ``lse_a``.

    Returns:
        ``(out, lse)``: the output in the dtype of ``out_a``, and the log-sum-exp in fp32. Rows that
        are fully masked in both have output 0 and lse -inf.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape or a device.
        NotImplementedError: on an input that requires a gradient.
    """
    check_states(out_a, lse_a, out_b, lse_b)
    out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty(lse_a.shape, dtype=torch.float32, device=out_a.device)
    ops.merge_states(out_a, lse_a, out_b, lse_b, None, out, lse)
    return out, lse


def check_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Check the results that are merged."""
    for name, x in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        check_tensor(name, x)
        if name.startswith("lse"):
            if x.dtype != torch.float32:
                raise TypeError(f"{name} must be torch.float32, got {x.dtype}")
        elif x.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"{name} must be torch.float16, torch.bfloat16 or torch.float32, got {x.dtype}"
            )
        tensor_checks.check_device(name, x, "out_a", out_a)
    if out_a.ndim != 3:
        raise ValueError(f"out_a must be [tokens, heads_q, head_dim], got {list(out_a.shape)}")
    if out_b.shape != out_a.shape:
        raise ValueError(
            f"out_b must have the shape of out_a, {list(out_a.shape)}, got {list(out_b.shape)}"
        )
    expected = (out_a.shape[1], out_a.shape[0])
    for name, x in (("lse_a", lse_a), ("lse_b", lse_b)):
        if x.shape != expected:
            raise ValueError(f"{name} must be {list(expected)}, got {list(x.shape)}")
    checks.check_no_gradients(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
