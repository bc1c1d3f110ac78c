"""Helpers of torch integration tests that other tests use too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flash_attn_triton.integrations.torch as integration
import pytest
import torch
from torch import Tensor

from .._linked.budget import Maker, assert_no_worse_than_eager


@pytest.fixture
def overrides(device: torch.device) -> Iterator[Any]:
    """Our kernels under the key of the device at hand."""
    held = integration._Overrides("CUDA" if device.type == "cuda" else "CPU")
    yield held
    held.remove()


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def compare(function: Any, reference: Any, inputs: list[Tensor]) -> None:
    """Hold output and gradients to the budget that eager code sets."""
    results = []
    for f, dtype in ((function, None), (reference, None), (reference, torch.float64)):
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in inputs]
        out = f(*leaves)
        dout = Maker(out.device, torch.bfloat16, seed=1).randn(*out.shape).to(out.dtype)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    for name, *values in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        assert_no_worse_than_eager(name, *values, factor=3.0)
