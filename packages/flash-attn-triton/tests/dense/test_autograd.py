"""Derivatives: second ones raise, torch.func's transforms and exported graphs give the first."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import flash_attn_triton
import pytest
import torch
from flash_attn_triton import attention_reference, flash_attn_func, flash_attn_varlen_func
from flash_attn_triton._dense import ops
from flash_attn_triton._dense.call import Given, Tensors
from flash_attn_triton._linked.host.forms import interpreted
from torch import Tensor
from torch.library import opcheck

from .._numerics import (
    Packed,
    Shape,
    compare,
    incoming,
    make_case,
    make_packed,
    run_eager,
    run_oracle,
)
from ._operators import RICH, Watcher, backward_arguments, operator_arguments

pytestmark = [
    pytest.mark.eager,
    # vmap runs an operator once per entry, and says so
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]

SHAPE = Shape(2, 5, 7, 4, 2, 16, 8)
PACKED = Packed((5, 0, 7), (6, 3, 7), 4, 2, 16, padding=2)

traced_alike = pytest.mark.skipif(
    interpreted(), reason="tracing sees the operators alone, and the interpreter is slow"
)


def penalise(loss: Tensor, leaves: list[Tensor]) -> None:
    """Differentiate the gradient, along which nothing asks for a gradient but the inputs."""
    squares = sum((leaf**2).sum() for leaf in leaves)
    grads = torch.autograd.grad(loss + squares, leaves, create_graph=True)
    sum(grad.pow(2).sum() for grad in grads).backward()


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("result", [0, 1], ids=["out", "lse"])
@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "sinks"])
def test_a_gradient_penalty_raises(wanted, result, watched, device):
    if wanted == "v" and result == 1:
        pytest.skip("the log-sum-exp does not depend on the values")
    case = make_case(SHAPE, torch.float32, device, ["bias", "sinks"])
    inputs = {n: t.clone().requires_grad_(n == wanted) for n, t in case.inputs.items()}
    call = lambda: flash_attn_func(**inputs, return_lse=True)[result].sum()  # noqa: E731
    if watched:
        with Watcher():
            loss = call()
    else:
        loss = call()
    with pytest.raises(NotImplementedError, match="second derivatives are not offered"):
        penalise(loss, [inputs[wanted]])


def test_a_gradient_penalty_of_packed_sequences_raises(device):
    case = make_packed(PACKED, torch.float32, device)
    leaves = [t.clone().requires_grad_() for t in case.inputs.values()]
    out = flash_attn_varlen_func(*leaves, **case.options)
    with pytest.raises(NotImplementedError, match="second derivatives are not offered"):
        penalise(out.sum(), leaves)


def test_a_gradient_with_a_graph_that_nobody_differentiates_is_the_gradient(device):
    case = make_case(SHAPE, torch.float32, device, ["bias", "sinks"])
    leaves = {n: t.clone().requires_grad_() for n, t in case.inputs.items()}
    loss = flash_attn_func(**leaves).sin().sum()
    got = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    want = torch.autograd.grad(loss, list(leaves.values()))
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("present", [(), (6,), (8,), (3, 4, 7), (6, 7, 8, 14), range(3, 15)])
def test_tensors_that_are_given_find_their_fields(present):
    x = Tensors(*(i if i < 3 or i in present else None for i in range(15)))
    given = Given(i is not None for i in x)
    assert given.of(x) == (0, 1, 2, *present)
    assert given.spread(given.of(x)) == x


@pytest.mark.parametrize(
    "features", [(), ("alibi", "sinks"), ("bias", "alibi", "sinks", "dropout")], ids="-".join
)
def test_gradients_do_not_depend_on_what_is_returned(features, device):
    case = make_case(SHAPE, torch.float32, device, features)
    leaves = {n: t.clone().requires_grad_() for n, t in case.inputs.items()}

    def results(**options: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        out = flash_attn_func(**leaves, **case.options, **options)
        if options:
            out = out[0] + 0.0 * out[1].transpose(1, 2)[..., None]  # the lse has a gradient too
        return out, *torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))

    got, want = results(), results(return_lse=True)
    for name, ours, theirs in zip(("out", *leaves), got, want, strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
        assert ours.shape == theirs.shape


def loss_of(attention, x: Tensor) -> Tensor:
    out, lse = attention(x, x, x, causal=True, return_lse=True)
    return out.sin().sum() + lse.sin().sum()


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones((), device=x.device)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda y: f(y[None])))(x),
    "grad of vmap": lambda f, x: torch.func.grad(
        lambda y: torch.func.vmap(lambda z: f(z[None]))(y).sum()
    )(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_give_the_gradient(transform, device):
    x = torch.randn(2, 3, 2, 8, device=device)
    got = transform(lambda y: loss_of(flash_attn_func, y), x)
    want = transform(lambda y: loss_of(attention_reference, y), x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@traced_alike
# the operators' loop over a vmap's entries breaks the graph
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("name", ["grad", "vmap of grad"])
def test_compiled_transforms_give_the_gradient(name, device):
    torch.compiler.reset()
    x = torch.randn(2, 3, 2, 8, device=device)

    def function(y: Tensor) -> Tensor:
        return TRANSFORMS[name](lambda z: loss_of(flash_attn_func, z), y)

    got = torch.compile(function, backend="aot_eager")(x)
    torch.testing.assert_close(got, function(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inner", [torch.func.grad, torch.func.jacrev])
def test_a_second_derivative_by_transforms_raises(inner, device):
    x = torch.randn(1, 2, 1, 4, device=device)
    first = inner(lambda y: loss_of(flash_attn_func, y))
    with pytest.raises(NotImplementedError, match="second derivatives are not offered"):
        torch.func.grad(lambda y: first(y).sum())(x)
    with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
        torch.func.jacfwd(first)(x)


class Model(torch.nn.Module):
    """A projection, attention, and what the test wants of the call."""

    def __init__(self, **options):
        super().__init__()
        self.project = torch.nn.Linear(16, 48)
        self.options = options

    def forward(self, x):
        q, k, v = self.project(x).view(2, 6, 3, 2, 8).unbind(2)
        return flash_attn_func(q, k, v, causal=True, **self.options)


@traced_alike
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_graph_trains(strict, device):
    model = Model().to(device)
    x = torch.randn(2, 6, 16, device=device)
    model(x).square().sum().backward()
    exported = torch.export.export(model, (x,), strict=strict)
    assert any(node.target is ops.forward for node in exported.graph.nodes)
    module = exported.module()
    module(x).square().sum().backward()
    got = dict(module.named_parameters())["project.weight"].grad
    torch.testing.assert_close(got, model.project.weight.grad)


@traced_alike
@pytest.mark.parametrize("deterministic", [False, True])
def test_an_exported_graph_keeps_that_gradients_repeat(deterministic, device, monkeypatch):
    seen, operator = [], ops._call_backward

    def backward(*arguments):
        seen.append(arguments[-2])
        return operator(*arguments)

    monkeypatch.setattr(ops, "_call_backward", backward)
    x = torch.randn(2, 6, 16, device=device)
    model = Model(deterministic=deterministic).to(device)
    torch.export.export(model, (x,)).module()(x).sum().backward()
    assert seen == [deterministic]


@traced_alike
@pytest.mark.parametrize("features", [(), RICH], ids=["plain", "rich"])
@pytest.mark.parametrize(("make", "shape"), [(make_case, SHAPE), (make_packed, PACKED)])
def test_operators_pass_opcheck_with_gradients(make, shape, features, device):
    case = make(shape, torch.float32, device, features)
    wanted = set(map(id, case.inputs.values()))

    def wants(x):
        return x.clone().requires_grad_() if id(x) in wanted and x.is_floating_point() else x

    utils = "test_autograd_registration", "test_aot_dispatch_dynamic"
    opcheck(ops.forward, tuple(map(wants, operator_arguments(case))), test_utils=utils)
    arguments = backward_arguments(case, dlse=True, needs_dbias="bias" in features)
    opcheck(ops.backward, arguments, test_utils=utils)


def test_gradients_of_some_keys_take_the_output_and_lse_of_all(device):
    """As in a ring: each step has some keys, and what came out over those of all steps."""
    half = 12
    case = make_case(Shape(2, 9, 2 * half, 4, 2, 16, 8), torch.float32, device, ["sinks"])
    _, q, k, v, out, lse, _, *rest = backward_arguments(case, dlse=True, needs_dbias=False)
    dout, dlse = incoming(out, lse)
    steps = []
    for keys in slice(half), slice(half, 2 * half):
        some = dout, q, k[:, keys].contiguous(), v[:, keys].contiguous(), out, lse, dlse
        steps.append(ops.backward(*some, *rest))
    dq, dk, dv, _, dsinks = zip(*steps, strict=True)
    # every step has that of all sinks
    grads = {"dq": sum(dq), "dk": torch.cat(dk, 1), "dv": torch.cat(dv, 1), "dsinks": dsinks[0]}
    oracle = run_oracle(case)
    compare(case, {"out": out, "lse": lse, **grads}, oracle, run_eager(case, oracle))


def test_a_second_copy_of_the_package_works_beside_the_first(device):
    file = Path(flash_attn_triton.__file__)
    spec = importlib.util.spec_from_file_location("copy_of_attention", file)
    copy = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(copy)
        assert copy._dense.ops.forward is not ops.forward
        q = torch.randn(1, 5, 2, 8, device=device)
        results = []
        for package in (flash_attn_triton, copy):
            leaf = q.clone().requires_grad_()
            with Watcher():
                out = package.flash_attn_func(leaf, leaf, leaf, causal=True)
            results.append((out, *torch.autograd.grad(out.sum(), leaf)))
        assert all(map(torch.equal, *results))
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == spec.name]:
            del sys.modules[name]
