"""The definition against other ways to write it: the masked quadratic form, and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from lightning_attn import (
    build_slopes,
    lightning_attention_decode_reference,
    lightning_attention_reference,
)

from .._linked.budget import Maker
from .._numerics import Shape, make_case, run

pytestmark = pytest.mark.eager


@pytest.mark.parametrize("decay", ["drawn", "none", "strong"])
def test_is_masked_attention_without_softmax(decay):
    """``o = ((q k^T) * D) v`` with ``D_ij = exp(-s (i - j))`` at and below the diagonal."""
    case = make_case(Shape(2, 20, 3, 5, 7), torch.float64, "cpu", decay)
    got = run(case, case.reference, grad=False)
    q, k, v, s = (case.inputs[name] for name in ("q", "k", "v", "decay"))
    state = case.inputs["initial_state"].double()
    i = torch.arange(20)
    weights = torch.exp(-s.double()[:, None, None] * (i[:, None] - i).clamp(min=0)).tril()
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * weights
    want = torch.einsum("bhij,bjhe->bihe", scores, v)
    since = torch.exp(-s.double() * (i[:, None] + 1))
    want = want + since[None, :, :, None] * torch.einsum("bihd,bhde->bihe", q, state)
    torch.testing.assert_close(got["o"], 0.6 * want)
    left = torch.exp(-s.double() * (19 - i[:, None]))
    final = torch.einsum("bjhd,jh,bjhe->bhde", k, left, v)
    final = final + torch.exp(-s.double() * 20)[:, None, None] * state
    torch.testing.assert_close(got["state"], final)


def test_the_state_of_ones_is_a_geometric_series():
    ones = torch.ones(1, 6, 1, 1, dtype=torch.float64)
    rate = math.log(2.0)
    o, state = lightning_attention_reference(
        ones, ones, ones, torch.tensor([rate], dtype=torch.float64), output_final_state=True
    )
    # 1, 1 + 1/2, 1 + 1/2 + 1/4, ...
    want = torch.tensor([2.0 - 2.0**-t for t in range(6)], dtype=torch.float64)
    torch.testing.assert_close(o[0, :, 0, 0], want)
    torch.testing.assert_close(state.view(1), want[-1:])


def test_gradients_are_those_of_the_function():
    m = Maker("cpu", torch.float64)
    inputs = [m.randn(1, 4, 2, 3), m.randn(1, 4, 2, 3), m.randn(1, 4, 2, 2)]
    inputs += [m.uniform(2, low=0.1, high=1.0).double(), m.randn(1, 2, 3, 2)]
    leaves = [t.requires_grad_() for t in inputs]

    def function(q, k, v, decay, state):
        return lightning_attention_reference(
            q, k, v, decay, scale=0.7, initial_state=state, output_final_state=True
        )

    assert torch.autograd.gradcheck(function, leaves)


def test_decoding_is_the_recurrence_in_place():
    m = Maker("cpu", torch.float64)
    q, k, v = m.randn(2, 3, 2, 4), m.randn(2, 3, 2, 4), m.randn(2, 3, 2, 5)
    cache, decay = m.randn(3, 2, 4, 5), m.uniform(2, low=0.1, high=1.0)
    states = torch.zeros(2, 3, 2, 4, 5, dtype=torch.float64)
    before = cache.clone()
    slots = torch.tensor([2, -1])
    out = lightning_attention_decode_reference(q, k, v, cache, decay, slots, states_out=states)
    assert torch.equal(cache, before)
    want, final = lightning_attention_reference(
        q[:1], k[:1], v[:1], decay, initial_state=cache[2:], output_final_state=True
    )
    torch.testing.assert_close(out[:1], want)
    torch.testing.assert_close(states[0, -1], final[0])
    assert not out[1].any()
    lightning_attention_decode_reference(q, k, v, cache, decay, slots)
    torch.testing.assert_close(cache[2], final[0])
    assert torch.equal(cache[:2], before[:2])


def test_slopes_of_a_power_of_two_are_alibi_s():
    want = torch.tensor([2.0 ** -(h + 1) for h in range(8)])
    torch.testing.assert_close(build_slopes(8), want, rtol=0, atol=0)
    assert build_slopes(1).tolist() == [2.0**-8]


def test_slopes_of_other_numbers_interleave_two_powers():
    got = build_slopes(6)
    assert got[:4].tolist() == [2.0 ** (-2 * (h + 1)) for h in range(4)]
    assert got[4:].tolist() == [2.0**-1, 2.0**-3]
    assert build_slopes(6).dtype == torch.float32


def test_later_layers_forget_less():
    layers = torch.stack([build_slopes(8, layer, 5) for layer in range(5)])
    factors = layers / build_slopes(8)
    want = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]) + 1e-5
    torch.testing.assert_close(factors, want[:, None].expand(5, 8))
    assert (layers > 0).all()
    # a model of one layer
    torch.testing.assert_close(build_slopes(8, 0, 1), build_slopes(8) * (1 + 1e-5))
