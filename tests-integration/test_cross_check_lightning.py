"""Linear attention against softmax attention where both are the same mathematics.

With one feature of keys that is constant, scores without decay are constants: ``o_t`` is the sum of
the values up to t, and causal softmax attention with scale 0 is their mean. ALiBi without products
weighs by ``exp(-slope * distance)``, as a decay does.
"""

import torch
from flash_attn_triton import flash_attn_func
from lightning_attn import lightning_attn_func


def test_alibi_without_scores_is_a_decay():
    torch.manual_seed(0)
    batch, tokens, heads, dim = 2, 50, 3, 16
    v = torch.randn(batch, tokens, heads, dim)
    rates = torch.tensor([0.0, 0.1, 0.7])
    ones = torch.zeros(batch, tokens, heads, dim)
    ones[..., 0] = 1.0
    summed, _ = lightning_attn_func(ones, ones, v, rates)
    mean, lse = flash_attn_func(
        ones, ones, v, softmax_scale=0.0, causal=True, alibi_slopes=rates, return_lse=True
    )
    weight = torch.exp(lse).transpose(1, 2)[..., None]
    torch.testing.assert_close(summed, mean * weight, rtol=1e-4, atol=1e-4)
