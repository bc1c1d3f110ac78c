"""What results do not depend on, extreme values, and nothing at all."""

from __future__ import annotations

import pytest
import torch
from lightning_attn import lightning_attn_func, lightning_attn_varlen_func

from .._linked.budget import assert_same, offsets
from .._numerics import MEDIUM, SCHEDULES, Shape, check, make_case, run

schedules = pytest.mark.parametrize("schedule", SCHEDULES)
pytestmark = pytest.mark.eager


@schedules
def test_a_sequence_does_not_depend_on_its_batch(schedule, device):
    case = make_case(MEDIUM._replace(batch=3), torch.float32, device).on(schedule)
    got = run(case)
    for b in range(3):
        inputs = {n: t if n == "decay" else t[b : b + 1] for n, t in case.inputs.items()}
        alone = run(case.with_inputs(**inputs), grad=False)
        assert_same(alone, {name: got[name][b : b + 1] for name in ("o", "state")})


@schedules
def test_results_repeat_bit_for_bit(schedule, device):
    case = make_case(MEDIUM, torch.float32, device).on(schedule)
    assert_same(run(case, grad=False), run(case, grad=False))


@schedules
def test_a_prefix_does_not_depend_on_what_follows(schedule, device):
    case = make_case(MEDIUM, torch.float32, device).on(schedule)
    want = run(case, grad=False)["o"]
    changed = {name: case.inputs[name].clone() for name in "qkv"}
    for t in changed.values():
        t[:, 21:] = 100.0
    got = run(case.with_inputs(**changed), grad=False)["o"]
    assert torch.equal(got[:, :21], want[:, :21])
    assert not torch.equal(got[:, 21:], want[:, 21:])


@pytest.mark.parametrize("factor", [1e5, 1e-5, 1e12])
def test_extreme_inputs(factor, device):
    case = make_case(MEDIUM, torch.float32, device)
    check(case.with_inputs(q=case.inputs["q"] * factor, k=case.inputs["k"] * factor), grad=False)


def test_large_states_do_not_overflow_in_half_precision(device):
    """Positive keys and values without decay: states beyond the largest number of fp16."""
    case = make_case(Shape(1, 40, 1, 16, 16), torch.float16, device, "none", scale=1e-6)
    inputs = {name: case.inputs[name].abs() * 100 + 100 for name in "kv"}
    got = check(case.with_inputs(**inputs, q=case.inputs["q"].abs()), grad=False)
    assert got["state"].min() > torch.finfo(torch.float16).max
    assert got["o"].isfinite().all()


@schedules
def test_scale_zero_gives_zero(schedule, device):
    case = make_case(MEDIUM, torch.float32, device, scale=0.0).on(schedule)
    got = run(case)
    for name in ("o", "dq"):
        assert not got[name].any()
    assert got["state"].any()


@schedules
def test_no_tokens_leave_the_state_as_it_was(schedule, device):
    case = make_case(MEDIUM._replace(seqlen=0), torch.float32, device).on(schedule)
    got = run(case)
    assert torch.equal(got["state"], case.inputs["initial_state"])
    bare = run(make_case(MEDIUM._replace(seqlen=0), torch.float32, device, state=False))
    assert not bare["state"].any()


@pytest.mark.parametrize("rate", [0.0, 1e-3, 200.0])
def test_any_number_finite_in_fp32_is_a_decay(rate, device):
    case = make_case(MEDIUM, torch.float32, device)
    got = run(case.with_inputs(decay=torch.full((2,), rate, device=device)))
    for name, value in got.items():
        assert value.isfinite().all(), name


def test_a_decay_that_forgets_all_reads_the_token_alone(device):
    case = make_case(MEDIUM, torch.float32, device)
    inputs = {**case.inputs, "decay": torch.full((2,), 1e38, device=device)}
    out, state = lightning_attn_func(**inputs, output_final_state=True)
    q, k, v = (case.inputs[name] for name in "qkv")
    want = (q * k).sum(-1, keepdim=True) * v
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    last = k[:, -1, :, :, None] * v[:, -1, :, None]
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)


@schedules
def test_packed_is_bitwise_the_fixed_form(schedule, device):
    case = make_case(MEDIUM, torch.float32, device).on(schedule)
    want = run(case)
    b, t = MEDIUM.batch, MEDIUM.seqlen
    leaves = {
        name: (x.flatten(0, 1) if name in "qkv" else x).clone().requires_grad_()
        for name, x in case.inputs.items()
    }
    out, state = lightning_attn_varlen_func(
        **leaves, **case.options, cu_seqlens=offsets([t] * b, device), output_final_state=True
    )
    assert torch.equal(out, want["o"].flatten(0, 1))
    assert torch.equal(state, want["state"])
