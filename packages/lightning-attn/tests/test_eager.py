"""CPU tensors without the interpreter: the eager operators against the definition."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from lightning_attn import _ops

from ._linked.budget import DTYPES
from ._numerics import DECAYS, PACKED, SMALL, Shape, check, make_case, make_packed

pytestmark = [
    pytest.mark.eager,
    pytest.mark.skipif(_ops.interpreted(), reason="about a process without the interpreter"),
]

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [*SMALL, Shape(2, 150, 2, 32, 48)], ids=str)
def test_fixed_form(shape):
    check(make_case(shape, torch.float32, CPU))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("decay", DECAYS)
def test_every_decay_in_every_dtype(decay, dtype):
    check(make_case(Shape(1, 70, 3, 16, 16), dtype, CPU, decay))


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("shape", PACKED, ids=str)
def test_packed_form(shape, state):
    check(make_packed(shape, torch.float32, CPU, state=state))


def test_no_kernel_is_imported():
    """In a process of its own: other tests here import kernels."""
    code = """
import sys, torch
from lightning_attn import build_slopes, lightning_attn_func
x = torch.randn(1, 5, 2, 16, requires_grad=True)
lightning_attn_func(x, x, x, build_slopes(2))[0].sum().backward()
sys.exit(any("._kernels" in name or name == "triton" for name in sys.modules))
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
