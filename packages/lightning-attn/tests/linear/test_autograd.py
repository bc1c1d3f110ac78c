"""Second derivatives raise, whatever asks for them."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from .._numerics import Shape, make_case

pytestmark = pytest.mark.eager

SHAPE = Shape(1, 40, 2, 16, 16)


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
@pytest.mark.parametrize("result", [0, 1], ids=["out", "state"])
@pytest.mark.parametrize("wanted", [("q", "k"), ("k", "v"), ("k", "initial_state"), ("decay",)])
def test_a_gradient_penalty_raises(wanted, result, watched, device):
    case = make_case(SHAPE, torch.float32, device)
    inputs = {n: t.clone().requires_grad_(n in wanted) for n, t in case.inputs.items()}

    def loss():
        results = case.function(**inputs, **case.options, output_final_state=True)
        # what arrives needs no gradient
        return results[result].sum()

    if watched:
        with Watcher():
            total = loss()
    else:
        total = loss()
    with pytest.raises(NotImplementedError, match="second derivatives are not offered"):
        penalise(total, [inputs[name] for name in wanted])


def test_a_gradient_with_a_graph_that_nobody_differentiates_is_the_gradient(device):
    case = make_case(SHAPE, torch.float32, device)
    leaves = {n: t.clone().requires_grad_() for n, t in case.inputs.items()}
    loss = case.function(**leaves, **case.options)[0].sin().sum()
    got = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    want = torch.autograd.grad(loss, list(leaves.values()))
    assert all(map(torch.equal, got, want))
