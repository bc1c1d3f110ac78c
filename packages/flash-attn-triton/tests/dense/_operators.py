"""Helpers of operators tests that other tests use too."""

from __future__ import annotations

from typing import Any

import torch
from flash_attn_triton._dense import ops
from torch.overrides import TorchFunctionMode

from .._numerics import Case

RICH = ("causal", "softcap", "alibi_batch", "bias", "sinks", "dropout")


def operator_arguments(case: Case) -> tuple[Any, ...]:
    """What the API gives to the forward operator."""
    given = {**case.inputs, **case.options}
    q = given["q"]
    dropout_p = given.get("dropout_p", 0.0)
    bias = given.get("bias")
    return (
        q,
        given["k"],
        given["v"],
        given.get("cu_seqlens_q"),
        given.get("cu_seqlens_k"),
        given.get("seqused_k"),
        bias,
        given.get("alibi_slopes"),
        given.get("sinks"),
        None,
        None,
        None,
        None,
        given.get("spans"),
        torch.tensor([5, 6], device=q.device) if dropout_p else None,
        given.get("max_seqlen_q", q.shape[1]),
        given.get("max_seqlen_k", given["k"].shape[1]),
        0.25,
        -1,
        0 if given.get("causal") else -1,
        given.get("softcap", 0.0),
        dropout_p,
        q.dtype,
    )


def backward_arguments(case: Case, *, dlse: bool, needs_dbias: bool) -> tuple[Any, ...]:
    q, k, v, *rest = operator_arguments(case)
    out, lse = ops.forward(q, k, v, *rest)
    # the backward pass takes neither the four FP8 scales nor the dtype of the output
    del rest[6:10], rest[-1]
    return (
        torch.ones_like(out),
        q,
        k,
        v,
        out,
        lse,
        torch.ones_like(lse) if dlse else None,
        *rest,
        False,
        needs_dbias,
    )


class Watcher(TorchFunctionMode):
    """See every call of PyTorch, and change none: calls then go through the operators."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
