"""Triton's interpreter: from several threads, and scales below fp32's normal numbers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from flash_attn_triton import flash_attn_func
from flash_attn_triton._linked.host.forms import interpreted

pytestmark = pytest.mark.skipif(not interpreted(), reason="about the interpreter")


def test_calls_from_several_threads_give_what_one_thread_gives():
    inputs = [torch.randn(1, 10 + i, 2, 16, requires_grad=True) for i in range(8)]

    def call(x):
        out = flash_attn_func(x, x, x, causal=True)
        return out.detach(), *torch.autograd.grad(out.sum(), x)

    want = [call(x) for x in inputs]
    with ThreadPoolExecutor(4) as threads:
        got = list(threads.map(call, inputs))
    for mine, one in zip(got, want, strict=True):
        assert all(map(torch.equal, mine, one))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1e-42, -1e-42])
def test_a_scale_below_the_normal_numbers_acts_as_zero(scale, dtype):
    q, k, v = (torch.randn(1, 40, 1, 64).to(dtype) for _ in "qkv")
    got = flash_attn_func(q, k, v, softmax_scale=scale)
    torch.testing.assert_close(got, flash_attn_func(q, k, v, softmax_scale=0.0))
