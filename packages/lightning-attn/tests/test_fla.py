"""Simple GLA by flash-linear-attention's name: its conventions, held to the definition."""

from __future__ import annotations

import pytest
import torch
from lightning_attn import fla, lightning_attention_reference, lightning_attn_func

from ._linked.budget import Maker, assert_no_worse_than_eager

pytestmark = pytest.mark.eager

TOKENS, HEADS, D, E = 40, 3, 16, 32


def arguments(device, batch=2, states=2):
    m = Maker(device, torch.float32)
    shapes = {"q": D, "k": D, "v": E}
    made = {name: m.randn(batch, TOKENS, HEADS, size) for name, size in shapes.items()}
    made["g_gamma"] = torch.tensor([0.0, -0.02, -1.5], device=device)
    return {**made, "initial_state": m.randn(states, HEADS, D, E)}


def by_scores(q, k, v, g_gamma, initial_state):
    """The same in float64, without a state: token i reads ``exp(g (i - j))`` of token j."""
    q, k, v, g, first = (x.double() for x in (q, k, v, g_gamma, initial_state))
    i = torch.arange(q.shape[1], device=q.device)
    weights = torch.exp(g[:, None, None] * (i[:, None] - i).clamp(min=0)).tril()
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * weights
    out = torch.einsum("bhij,bjhe->bihe", scores, v)
    left = torch.exp(g * (i[:, None] + 1))[None, ..., None]
    out = (out + left * torch.einsum("bihd,bhde->bihe", q, first)) * q.shape[-1] ** -0.5
    kept = torch.exp(g[:, None] * (q.shape[1] - 1 - i))
    last = torch.einsum("hj,bjhd,bjhe->bhde", kept, k, v)
    return out, last + torch.exp(g * q.shape[1])[:, None, None] * first


def by_tokens(q, k, v, g_gamma, initial_state):
    """The definition of this package, in fp32, for the budget."""
    return lightning_attention_reference(
        q, k, v, -g_gamma, scale=None, initial_state=initial_state, output_final_state=True
    )


def judge(got, given):
    results = got, by_tokens(**given), by_scores(**given)
    for name, one, eager, exact in zip(("o", "state"), *results, strict=True):
        assert_no_worse_than_eager(name, one, eager, exact, factor=3.0)


def test_forward_is_the_definition(device):
    given = arguments(device)
    judge(fla.chunk_simple_gla(**given, output_final_state=True), given)
    assert fla.chunk_simple_gla(**given)[1] is None


def test_packed_is_each_sequence_alone(device):
    ends = (0, 15, 15, 40)
    given = arguments(device, batch=1, states=3)
    starts = torch.tensor(ends, device=device)
    assert starts.dtype == torch.int64
    out, states = fla.chunk_simple_gla(**given, cu_seqlens=starts, output_final_state=True)
    assert out.shape == (1, TOKENS, HEADS, E)
    for b, first, last in ((0, 0, 15), (2, 15, 40)):
        one = {name: given[name][:, first:last] for name in "qkv"}
        one |= {"g_gamma": given["g_gamma"], "initial_state": given["initial_state"][b : b + 1]}
        judge((out[:, first:last], states[b : b + 1]), one)
    assert torch.equal(states[1], given["initial_state"][1])


def test_gradients_are_those_of_the_definition(device):
    given = arguments(device)

    def run(function, **options):
        leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
        out, state = function(**leaves, **options)
        return torch.autograd.grad((out.sum(), state.sum()), list(leaves.values()))

    got = run(fla.chunk_simple_gla, output_final_state=True)
    for name, *x in zip(given, got, run(by_tokens), run(by_scores), strict=True):
        assert_no_worse_than_eager(name, *x, factor=3.0)


def test_without_decays_nothing_is_forgotten(device):
    given = arguments(device)
    del given["g_gamma"]
    zeros = torch.zeros(HEADS, device=device)
    got, _ = fla.chunk_simple_gla(**given, scale=0.5)
    state = given.pop("initial_state")
    want, _ = lightning_attn_func(**given, decay=zeros, scale=0.5, initial_state=state)
    assert torch.equal(got, want)


ERRORS = [
    ({"g": torch.zeros(2, TOKENS, HEADS)}, NotImplementedError, "g must be None: a decay of each"),
    (
        {"g_gamma": torch.ones(HEADS)},
        ValueError,
        r"the negative of g_gamma\[0\] must be at least 0, got -1",
    ),
    ({"g_gamma": torch.zeros(2)}, ValueError, r"g_gamma must be \[heads\], \[3\], got \[2\]"),
    ({"g_gamma": torch.zeros(HEADS).int()}, TypeError, "g_gamma must be of a float dtype"),
    ({"g_gamma": -0.5}, TypeError, "g_gamma must be a torch.Tensor, got float"),
    (
        {"cu_seqlens": torch.tensor([0, TOKENS])},
        ValueError,
        r"q must be \[1, tokens, heads, ...\] with",
    ),
    ({"head_first": False}, TypeError, "head_first is no argument here: leave it out"),
    ({"q": torch.zeros(TOKENS, HEADS, D)}, ValueError, r"q must be \[batch, seqlen, heads, d\]"),
]


@pytest.mark.parametrize(("changes", "error", "message"), ERRORS)
def test_messages(changes, error, message):
    with pytest.raises(error, match=f"^{message}"):
        fla.chunk_simple_gla(**{**arguments("cpu"), **changes})
