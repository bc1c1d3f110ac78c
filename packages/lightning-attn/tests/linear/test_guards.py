"""Versions of PyTorch and Triton that were not tested: the public way gives the same bits."""

import pytest
import torch
from lightning_attn import build_slopes, lightning_attn_decode, lightning_attn_func

from .._linked.guards import assert_same_bits

pytestmark = pytest.mark.device


def test_forward_and_backward(device):
    shape = (2, 300, 4, 128)
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"
    )
    decay = build_slopes(4).to(device)

    def call():
        out, state = lightning_attn_func(q, k, v, decay, output_final_state=True)
        return out, state, *torch.autograd.grad(out.float().square().sum(), (q, k, v))

    assert_same_bits("lightning_attn", call)


def test_decode(device):
    q, k, v = (torch.randn(3, 1, 4, 128, device=device, dtype=torch.bfloat16) for _ in "qkv")
    cache = torch.randn(5, 4, 128, 128, device=device)
    decay = build_slopes(4).to(device)
    slots = torch.tensor([4, -1, 0], device=device, dtype=torch.int32)

    def call():
        states = cache.clone()
        return lightning_attn_decode(q, k, v, states, decay, slots), states

    assert_same_bits("lightning_attn", call)
