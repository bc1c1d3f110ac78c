"""The hyperbolic tangent of the kernels, portable and for Hopper, to the accuracy of fp32."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from flash_attn_triton._dense import ops
from flash_attn_triton._linked.portable import primitives

pytestmark = pytest.mark.skipif(not ops.interpreted(), reason="about the interpreters")


@triton.jit
def _tanh_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, primitives.tanh(tl.load(x_ptr + at)))


def portable(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _tanh_kernel[(len(x) // 1024,)](x, out, BLOCK=1024)
    return out


def hopper(x: torch.Tensor) -> torch.Tensor:
    from flash_attn_triton._linked.hopper.softmax import tanh

    from .._linked.gluon import as_python, register

    return as_python(tanh)["tanh"](register(x)).as_subclass(torch.Tensor)


@pytest.mark.parametrize("function", [portable, hopper])
def test_error_is_a_few_units(function):
    """Also where the polynomial ends, and near 0, relative to the tangent itself."""
    x = torch.cat([torch.linspace(-0.5, 0.5, 4096), torch.logspace(-9, 2, 2048)])
    exact = torch.tanh(x.double())
    error = (function(x).double() - exact).abs() / exact.abs()
    is_near = x.abs() < 0.35  # where the polynomial is taken
    assert error[is_near].max() < 2 * 2**-24
    assert error.max() < 6 * 2**-24
    assert function(torch.zeros(1024)).abs().max() == 0
