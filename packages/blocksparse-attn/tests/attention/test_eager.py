"""The CPU implementation, which users without a GPU get: all of the forms, at sizes of use."""

from __future__ import annotations

import math

import pytest
import torch
from blocksparse_attn import (
    BlockSparseLayout,
    blocksparse_attention_reference,
    blocksparse_attn_func,
    patterns,
)
from blocksparse_attn._attention import ops
from blocksparse_attn._attention.call import Bounds, Options, Tensors
from blocksparse_attn._attention.eager import attention_backward, attention_forward
from blocksparse_attn._linked.host.forms import interpreted
from blocksparse_attn.token_rule import TokenRule
from torch.utils._python_dispatch import TorchDispatchMode

from .._linked.budget import DTYPES
from .._linked.views import VIEWS, same_values
from .._numerics import PATTERNS, Packed, Shape, check, make_case, make_packed, run

pytestmark = [
    pytest.mark.eager,
    # there the same is in the tests of each feature
    pytest.mark.skipif(interpreted(), reason="too long for the interpreter"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_fixed(causal, pattern, dtype, device):
    shape = Shape(2, 130, 170, 4, 2, 32, 24)
    check(make_case(shape, dtype, device, pattern, (64, 32), causal=causal))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed(dtype, device):
    shape = Packed((100, 0, 1, 40), (130, 5, 99, 40), 4, 2, 32, padding=3)
    check(make_packed(shape, dtype, device, "local", (16, 64)))


class Sizes(TorchDispatchMode):
    """Counts matrix products and their multiplications, and the elements of the largest tensor."""

    def __init__(self):
        super().__init__()
        self.calls = self.products = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.largest = max(self.largest, made.numel())
        if func is torch.ops.aten.bmm.default:
            self.calls += 1
            self.products += args[0].numel() * args[1].shape[2]
        return made


@pytest.mark.parametrize("rule", [None, TokenRule.window(60, 0)], ids=["whole", "window"])
def test_what_nobody_sees_costs_nothing(rule):
    """As many products as keys are seen by some query of a tile, and no tensor of all scores."""
    tokens, heads, width = 1024, 2, 16
    layout = patterns.sliding_window(tokens, 2, 0, 64).with_token_rule(rule)
    q = torch.randn(1, tokens, heads, width)
    x = Tensors(q, q, q, rule=layout._rule)
    call = ops._call_of(x, layout, Bounds(tokens, tokens), Options(0.25, True, 1, False))
    with Sizes() as forward:
        out, lse = attention_forward(x, call)
    with Sizes() as backward:
        attention_backward(x, call, out, lse, None)
    # a tile has 128 queries, and one block of keys ahead of it
    most = tokens * 192 * heads * width
    assert most < forward.products <= 2 * most
    assert 2 * most < backward.products <= 5 * most
    assert max(forward.largest, backward.largest) <= max(q.numel(), heads * 128 * 192)


def test_short_sequences_are_a_tile_of_all_heads():
    """With layouts of their own, too: a tile costs more than the few scores that it has."""
    layout = BlockSparseLayout.local_strided(8, 256, 16, 2, 4)
    q = torch.randn(1, 128, 8, 16)
    x = Tensors(q, q, q)
    call = ops._call_of(x, layout, Bounds(128, 128), Options(0.25, True, 1, False))
    with Sizes() as forward:
        attention_forward(x, call)
    assert forward.calls == 2


@pytest.mark.parametrize("view", VIEWS)
def test_strides_do_not_change_bits(view):
    case = make_packed(Packed((300, 9), (300, 40), 4, 2, 32), torch.float32, "cpu", "local")
    odd = case.with_inputs(**{name: same_values(view, x) for name, x in case.inputs.items()})
    want, got = run(case), run(odd)
    assert all(torch.equal(value, got[name]) for name, value in want.items())


def test_neighbours_in_the_batch_do_not_change_bits():
    lengths = (131, 300), (140, 300)
    case = make_packed(Packed(*lengths, 4, 2, 32), torch.float32, "cpu", "local", causal=False)
    want = run(case, grad=False)
    inputs = {name: x[131 if name == "q" else 140 :] for name, x in case.inputs.items()}
    starts = torch.tensor([0, 300], dtype=torch.int32)
    alone = case.with_inputs(**inputs).with_options(cu_seqlens_q=starts, cu_seqlens_k=starts)
    got = run(alone, grad=False)
    assert torch.equal(got["out"], want["out"][131:])
    assert torch.equal(got["lse"], want["lse"][:, 131:])


def test_heads_that_share_a_tile_read_their_own_keys():
    """A few queries of several heads are a tile; what one head sees may be NaN for another."""
    layout = BlockSparseLayout.from_dense(
        torch.eye(2, dtype=torch.bool)[:, None].repeat(1, 2, 1), 16
    )
    q, k, v = (torch.randn(1, n, 2, 16) for n in (3, 32, 32))
    want = blocksparse_attention_reference(q, k, v, layout, causal=False)
    for x in (k, v):
        x[:, 16:, 0] = x[:, :16, 1] = math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = blocksparse_attn_func(*leaves, layout, causal=False)
    torch.testing.assert_close(out, want)
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    assert dq.isfinite().all()
    for grad in (dk, dv):
        assert grad.isfinite().all()
        assert not grad[:, 16:, 0].any()
        assert not grad[:, :16, 1].any()
