"""Gradients of q, k, v, the initial state and the decays against the float64 reference."""

from __future__ import annotations

import pytest
import torch
from lightning_attn import lightning_attn_func

from .._linked.budget import DTYPES, assert_same
from .._linked.views import VIEWS, same_values
from .._numerics import DECAYS, LARGE, MEDIUM, SCHEDULES, SMALL, Case, check, make_case, run

schedules = pytest.mark.parametrize("schedule", SCHEDULES)


@schedules
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_gradients_match_reference(shape, schedule, device):
    check(make_case(shape, torch.float32, device).on(schedule))


@schedules
@pytest.mark.parametrize("decay", [name for name in DECAYS if name != "drawn"])
def test_gradients_of_every_decay(decay, schedule, device):
    check(make_case(MEDIUM, torch.float32, device, decay).on(schedule))


@schedules
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_in_half_precision(dtype, schedule, device):
    check(make_case(MEDIUM, dtype, device, "slopes").on(schedule))


@pytest.mark.device
@schedules
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_gradients_at_length(shape, dtype, schedule, device):
    # the reference keeps a state per token
    shape = shape._replace(seqlen=min(shape.seqlen, 1100), heads=min(shape.heads, 2))
    check(make_case(shape, dtype, device, "slopes").on(schedule))


@pytest.mark.parametrize("scale", [0.0, -2.0])
def test_gradients_of_scales(scale, device):
    check(make_case(MEDIUM, torch.float32, device, scale=scale))


def test_gradients_without_a_state(device):
    check(make_case(MEDIUM, torch.float32, device, state=False))


@pytest.mark.eager
@pytest.mark.parametrize("used", ["o", "state"])
def test_either_result_may_go_unused(used, device):
    case = make_case(MEDIUM, torch.float32, device)

    def grads(function):
        leaves = [t.clone().requires_grad_() for t in case.inputs.values()]
        named = dict(zip(case.inputs, leaves, strict=True))
        out, state = function(**named, **case.options, output_final_state=True)
        loss = (out if used == "o" else state).sin().sum()
        return torch.autograd.grad(loss, leaves, materialize_grads=True)

    for got, want in zip(grads(case.function), grads(case.reference), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.eager
@pytest.mark.parametrize("wanted", ["q", "k", "v", "decay", "initial_state"])
def test_gradients_come_only_where_they_are_asked_for(wanted, device):
    case = make_case(MEDIUM, torch.float32, device)
    inputs = {n: t.clone().requires_grad_(n == wanted) for n, t in case.inputs.items()}
    lightning_attn_func(**inputs)[0].sum().backward()
    for name, tensor in inputs.items():
        assert (tensor.grad is not None) == (name == wanted)
    want = run(case.with_options(scale=1.0))
    assert inputs[wanted].grad.shape == want[f"d{wanted}"].shape


@pytest.mark.eager
def test_the_decay_gradient_has_the_decay_s_shape(device):
    case = make_case(MEDIUM, torch.float32, device)
    for shape in ((2,), (2, 1, 1), (1, 2, 1, 1)):
        decay = case.inputs["decay"].view(shape).clone().requires_grad_()
        case.function(**{**case.inputs, "decay": decay})[0].sum().backward()
        assert decay.grad.shape == shape


@pytest.mark.eager
@schedules
def test_gradients_repeat_bit_for_bit(schedule, device):
    case = make_case(MEDIUM, torch.float32, device).on(schedule)
    assert_same(run(case), run(case))


@pytest.mark.eager
@pytest.mark.parametrize("view", VIEWS)
def test_strides_of_what_arrives_do_not_change_a_bit(view, device):
    case = make_case(MEDIUM, torch.float32, device)

    def grads(turn):
        leaves = {n: t.detach().requires_grad_() for n, t in case.inputs.items()}
        out, state = case.function(**leaves, output_final_state=True)
        arriving = [turn(torch.ones_like(x) / 3) for x in (out, state)]
        names = [f"d{n}" for n in leaves]
        results = torch.autograd.grad((out, state), list(leaves.values()), arriving)
        return dict(zip(names, results, strict=True))

    assert_same(grads(lambda x: same_values(view, x)), grads(lambda x: x))


def test_gradcheck_by_differences(device):
    """Not against our own reference: the slope of the function itself, in fp32."""
    case = make_case(MEDIUM._replace(batch=1, seqlen=20), torch.float32, device)
    grads = run(case)
    torch.manual_seed(0)
    for name, value in case.inputs.items():
        direction = torch.randn_like(value)
        step = 1e-2
        sides = []
        for sign in (1, -1):
            moved = case.with_inputs(**{name: value + sign * step * direction})
            got = run(moved, grad=False)
            from .._numerics import incoming

            dout, dstate = incoming(got["o"], got["state"])
            sides.append(float((got["o"] * dout).sum() + (got["state"] * dstate).sum()))
        slope = (sides[0] - sides[1]) / (2 * step)
        want = float((grads[f"d{name}"] * direction).sum())
        assert slope == pytest.approx(want, rel=0.02, abs=0.02 * abs(want) + 0.05), name


@pytest.mark.eager
def test_memory_kept_for_the_backward_is_the_inputs_alone(device):
    case = make_case(MEDIUM, torch.float32, device)
    leaves = {n: t.clone().requires_grad_() for n, t in case.inputs.items()}
    saved = []

    def keep(x):
        saved.append(x.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        Case(leaves, case.options).function(**leaves, **case.options)
    assert set(saved) <= {t.data_ptr() for t in leaves.values()}
