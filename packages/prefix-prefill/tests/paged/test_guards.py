"""Versions of PyTorch and Triton that were not tested: the public way gives the same bits."""

import pytest
import torch
from prefix_prefill import paged_attn_func, reshape_and_cache

from .._linked.guards import assert_same_bits

pytestmark = pytest.mark.device


@pytest.mark.parametrize("lengths", [(1, 1), (200, 120)], ids=["decode", "prefill"])
def test_attention_and_writes(lengths, device):
    def draw(*shape):
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    tokens, page = sum(lengths), 16
    q, k, v = draw(tokens, 8, 128), draw(tokens, 2, 128), draw(tokens, 2, 128)
    k_cache, v_cache = draw(64, page, 2, 128), draw(64, page, 2, 128)
    table = torch.arange(64, device=device, dtype=torch.int32).view(2, 32)
    starts = torch.tensor([0, lengths[0], tokens], device=device, dtype=torch.int32)
    seqlens_k = torch.tensor([300, 250], device=device, dtype=torch.int32)
    slots = torch.arange(tokens, device=device)

    def call():
        reshape_and_cache(k, v, k_cache, v_cache, slots)
        rest = table, starts, seqlens_k, max(lengths), 300
        return paged_attn_func(q, k_cache, v_cache, *rest), k_cache, v_cache

    assert_same_bits("prefix_prefill", call)
