"""CPU tensors without the interpreter: the eager operators against the definition."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from lightning_attn import build_slopes, lightning_attn_decode, lightning_attn_func
from lightning_attn._linear import ops

from .._linked.budget import DTYPES, Maker
from .._linked.views import VIEWS, same_values
from .._numerics import DECAYS, PACKED, SMALL, Shape, check, make_case, make_packed

pytestmark = [
    pytest.mark.eager,
    pytest.mark.skipif(ops.interpreted(), reason="about a process without the interpreter"),
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
sys.exit(any(name.split(".")[-1] == "launch" or name == "triton" for name in sys.modules))
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


@pytest.mark.parametrize("view", VIEWS)
def test_strides_do_not_change_a_bit_of_wide_products(view):
    m = Maker("cpu", torch.float32)
    decay = m.uniform(2, low=0.1, high=0.5)
    for tokens in (9, 66):
        given = [m.randn(1, tokens, 2, 128) for _ in range(3)] + [m.randn(1, 2, 128, 128)]
        slots = torch.zeros(1, dtype=torch.int64)
        results = []
        for q, k, v, state in (given, [same_values(view, x) for x in given]):
            out, final = lightning_attn_func(
                q, k, v, decay, initial_state=state, output_final_state=True
            )
            step = lightning_attn_decode(*(x[:, :3] for x in (q, k, v)), state, decay, slots)
            results.append((out, final, step, state))
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)


def test_slopes_are_on_the_cpu_whatever_the_default():
    before = build_slopes(4)
    torch.set_default_device("meta")
    try:
        found = build_slopes(4)
    finally:
        torch.set_default_device(None)
    assert torch.equal(found, before)
