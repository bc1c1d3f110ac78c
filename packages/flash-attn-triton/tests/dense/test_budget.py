"""What the error budgets take for granted of products in fp32."""

from __future__ import annotations

import pytest
import torch
from flash_attn_triton import flash_attn_func
from torch import Tensor

from .._linked.budget import TF32X3_UNIT, Maker

# bits of fp32 that TF32 does not have
LOWER = 13


def cut(x: Tensor) -> Tensor:
    """Return what tensor cores read of an fp32 operand."""
    return (x.view(torch.int32) >> LOWER << LOWER).view(torch.float32)


def rounded(x: Tensor) -> Tensor:
    """Return the nearest TF32 number."""
    return cut((x.view(torch.int32) + (1 << (LOWER - 1))).view(torch.float32))


@pytest.mark.eager
def test_three_products_of_tf32_miss_a_unit_at_most():
    m = Maker("cpu", torch.float32)
    x, y = (m.uniform(1_000_000, low=1.0, high=2.0) for _ in range(2))
    # the worst there is: lower halves with every bit set
    x[0] = y[0] = 1 + 2**-11 - 2**-23
    (x_high, x_low), (y_high, y_low) = (
        (rounded(t).double(), cut(t - rounded(t)).double()) for t in (x, y)
    )
    assert ((x_high + x_low) / x.double() - 1).abs().max() <= 2**-23
    product = x_high * y_high + x_high * y_low + x_low * y_high
    missing = (product / (x.double() * y.double()) - 1).abs()
    assert 0.99 * TF32X3_UNIT < missing.max() <= TF32X3_UNIT
    # and two products would not do
    assert (x_high * (y_high + y_low) / (x.double() * y.double()) - 1).abs().max() > 2**-12


def test_a_product_is_as_exact_as_its_parts_allow(device):
    """The LSE of one key is its score, here of one product."""
    m = Maker(device, torch.float32)
    q, k = (m.uniform(size, low=1.0, high=2.0) for size in (64, 16))
    out, lse = flash_attn_func(
        q.view(1, 64, 1, 1).expand(16, -1, -1, -1),
        k.view(16, 1, 1, 1),
        k.view(16, 1, 1, 1),
        softmax_scale=1.0,
        return_lse=True,
    )
    want = k.double()[:, None, None] * q.double()
    # to base 2 and back: two constants, two products and the sum of one probability
    unit = 2.5 * torch.finfo(torch.float32).eps
    three_products = TF32X3_UNIT if device.type == "cuda" else 0.0
    assert (lse.double() / want - 1).abs().max() < unit + three_products
    # one probability, which is 1
    assert (out / k.view(16, 1, 1, 1) - 1).abs().max() <= three_products
