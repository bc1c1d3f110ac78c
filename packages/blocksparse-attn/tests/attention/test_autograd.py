"""Derivatives: second ones raise, torch.func and exported graphs give the first."""

from __future__ import annotations

import pytest
import torch
from blocksparse_attn import BlockSparseLayout, TokenRule, blocksparse_attn_func
from torch.overrides import TorchFunctionMode

from .._linked.budget import Maker
from .._numerics import Shape, make_case
from ._operators import traced_alike

pytestmark = pytest.mark.eager

SHAPE = Shape(1, 20, 40, 4, 2, 16)


class Watcher(TorchFunctionMode):
    """See every call of PyTorch, and change none: calls then go through the operators."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def penalise(loss, leaves):
    """Differentiate the gradient, along which nothing asks for a gradient but the inputs."""
    squares = sum((leaf**2).sum() for leaf in leaves)
    grads = torch.autograd.grad(loss + squares, leaves, create_graph=True)
    sum(grad.pow(2).sum() for grad in grads).backward()


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("result", [0, 1], ids=["out", "lse"])
@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_a_gradient_penalty_raises(wanted, result, watched, device):
    if wanted == "v" and result == 1:
        pytest.skip("the log-sum-exp does not depend on the values")
    case = make_case(SHAPE, torch.float32, device)
    inputs = {n: t.clone().requires_grad_(n == wanted) for n, t in case.inputs.items()}

    def loss():
        results = case.function(**inputs, **case.options, return_lse=True)
        return results[result].masked_fill(results[result].isinf(), 0.0).sum()

    if watched:
        with Watcher():
            total = loss()
    else:
        total = loss()
    with pytest.raises(NotImplementedError, match="second derivatives are not offered"):
        penalise(total, [inputs[wanted]])


def test_a_gradient_with_a_graph_that_nobody_differentiates_is_the_gradient(device):
    case = make_case(SHAPE, torch.float32, device)
    leaves = {n: t.clone().requires_grad_() for n, t in case.inputs.items()}
    loss = case.function(**leaves, **case.options).sin().sum()
    got = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    want = torch.autograd.grad(loss, list(leaves.values()))
    assert all(map(torch.equal, got, want))


class Attention(torch.nn.Module):
    """Attention of one tensor with itself, over a layout."""

    def __init__(self, layout, scale):
        super().__init__()
        self.options = {"layout": layout, "softmax_scale": scale}

    def forward(self, x):
        return blocksparse_attn_func(x, x[:, :, :2], x[:, :, :2], **self.options)


@pytest.fixture
def layer(device):
    layout = BlockSparseLayout.local_strided(4, 32, 16, 1, 3, device=device)
    return Attention(layout.with_token_rule(TokenRule.window(9, 0)), 0.3)


@pytest.fixture
def x(device):
    return Maker(device, torch.float32).randn(1, 20, 4, 16)


def grad_of(layer, x):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(layer(leaf).sin().sum(), leaf)[0]


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(f)(x),
        lambda f, x: torch.func.vjp(f, x)[1](torch.ones((), device=x.device))[0],
    ],
    ids=["grad", "vjp"],
)
def test_transforms_give_the_gradient(transform, layer, x):
    want = grad_of(layer, x)
    got = transform(lambda y: layer(y).sin().sum(), x)
    torch.testing.assert_close(got, want)
    # the lists that it made are not those of a later call
    assert torch.equal(grad_of(layer, x), want)


def test_transforms_refuse_second_derivatives(layer, x):
    def first(y):
        return torch.func.grad(lambda z: layer(z).sin().sum())(y).sum()

    with pytest.raises(NotImplementedError, match="second derivatives are not offered"):
        torch.func.grad(first)(x)
    with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
        torch.func.jvp(lambda y: layer(y), (x,), (x,))


@traced_alike
def test_exported_graphs_have_gradients(layer, x):
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(grad_of(exported, x), grad_of(layer, x))
