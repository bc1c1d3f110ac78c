"""Versions of PyTorch and Triton that were not tested: the public way gives the same bits."""

import pytest
import torch
from flash_attn_triton import flash_attn_func, flash_attn_varlen_func

from .._linked.guards import assert_same_bits

pytestmark = pytest.mark.device


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fixed_lengths(head_dim, dtype, device):
    # a sequence of one tile of keys: on Hopper dq has one contribution, in one order
    shape = (2, 64, 4, head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in "qkv")

    def call():
        out = flash_attn_func(q, k, v, causal=True)
        return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))

    assert_same_bits("flash_attn_triton", call)


def test_packed(device):
    shape = (300, 4, 128)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in "qkv")
    starts = torch.tensor([0, 17, 17, 300], device=device, dtype=torch.int32)

    def call():
        return (flash_attn_varlen_func(q, k, v, starts, starts, 283, 283, causal=True),)

    assert_same_bits("flash_attn_triton", call)
