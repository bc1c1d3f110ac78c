"""Versions of PyTorch and Triton that were not tested: the public way gives the same bits."""

import pytest
import torch
from blocksparse_attn import BlockSparseLayout, blocksparse_attn_func

from .._linked.guards import assert_same_bits

pytestmark = pytest.mark.device


@pytest.mark.parametrize("head_dim", [64, 128])
def test_forward_and_backward(head_dim, device):
    layout = BlockSparseLayout.local_strided(4, 512, 64, 2, 4, device=device)
    shape = (1, 64, 4, head_dim)
    # 64 queries: every sum of a gradient has one order
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"
    )

    def call():
        out = blocksparse_attn_func(q, k, v, layout)
        return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))

    assert_same_bits("blocksparse_attn", call)


def test_forward_of_many_blocks(device):
    layout = BlockSparseLayout.local_strided(4, 512, 64, 2, 4, device=device)
    q, k, v = (torch.randn(2, 512, 4, 128, device=device, dtype=torch.bfloat16) for _ in "qkv")
    assert_same_bits("blocksparse_attn", lambda: (blocksparse_attn_func(q, k, v, layout),))
