"""Forward results against the float64 reference, on a GPU or in the interpreter."""

from __future__ import annotations

import pytest
import torch
from lightning_attn import lightning_attention_reference, lightning_attn_func
from lightning_attn._linear.tiles import Tile
from lightning_attn._linked.host.forms import interpreted

from .._linked.budget import DTYPES, assert_same
from .._linked.views import VIEWS, same_values
from .._numerics import (
    DECAYS,
    LARGE,
    MEDIUM,
    SCHEDULES,
    SMALL,
    check,
    make_case,
    only_portable,
    run,
    run_oracle,
)

schedules = pytest.mark.parametrize("schedule", SCHEDULES)


@schedules
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_matches_reference(shape, schedule, device):
    check(make_case(shape, torch.float32, device).on(schedule), grad=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("decay", DECAYS)
def test_every_decay_in_every_dtype(decay, dtype, device):
    schedule = SCHEDULES[(DTYPES.index(dtype) + list(DECAYS).index(decay)) % 2]
    shape = MEDIUM._replace(batch=1, heads=3)
    check(make_case(shape, dtype, device, decay).on(schedule), grad=False)


@pytest.mark.device
@schedules
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_matches_reference_at_length(shape, dtype, schedule, device):
    check(make_case(shape, dtype, device, "slopes").on(schedule), grad=False)


@schedules
@pytest.mark.parametrize("scale", [0.0, 1, -2.5])
def test_scales(scale, schedule, device):
    check(make_case(MEDIUM, torch.float32, device, scale=scale).on(schedule), grad=False)


@schedules
def test_without_an_initial_state(schedule, device):
    check(make_case(MEDIUM, torch.float32, device, state=False).on(schedule), grad=False)


@pytest.mark.skipif(not interpreted(), reason="a GPU does so by itself, in bf16")
def test_values_are_written_to_a_state_as_two_numbers_of_16_bits(monkeypatch):
    """In fp16: the interpreter does not multiply in bf16."""
    case = make_case(MEDIUM, torch.float16, "cpu")
    exact, off = run_oracle(case, grad=False)["state"], {}
    for terms in (1, 2):
        tile = Tile(16, 16, 1, 1, terms=terms, segment=32)
        with only_portable():  # which forgets the plans of other tiles
            monkeypatch.setattr(
                "lightning_attn._linear.portable.walk_launch.tile_of", lambda *_, t=tile: t
            )
            state = run(case, grad=False)["state"]
        off[terms] = (state - exact).abs().max() / exact.abs().max()
    assert off[2] < 2.0**-17 < 2.0**-13 < off[1]


@pytest.mark.eager
@pytest.mark.parametrize("view", VIEWS)
def test_strides_do_not_change_a_bit(view, device):
    case = make_case(MEDIUM, torch.float32, device)
    for schedule in SCHEDULES:
        moved = {name: same_values(view, t) for name, t in case.inputs.items()}
        got = run(case.with_inputs(**moved).on(schedule), grad=False)
        assert_same(got, run(case.on(schedule), grad=False))


@pytest.mark.eager
def test_decays_in_any_of_their_shapes(device):
    case = make_case(MEDIUM, torch.float32, device)
    want = run(case, grad=False)
    for shape in ((2, 1, 1), (1, 2, 1, 1)):
        assert_same(run(case.with_inputs(decay=case.inputs["decay"].view(shape)), grad=False), want)


@pytest.mark.eager
def test_state_is_returned_if_asked_for(device):
    case = make_case(MEDIUM, torch.float32, device)
    out, state = lightning_attn_func(**case.inputs)
    assert state is None
    assert torch.equal(out, lightning_attn_func(**case.inputs, output_final_state=True)[0])
    assert lightning_attention_reference(**case.inputs)[1] is None


@pytest.mark.eager
def test_inputs_are_left_alone(device):
    case = make_case(MEDIUM, torch.float32, device)
    before = {name: t.clone() for name, t in case.inputs.items()}
    run(case)
    assert_same(case.inputs, before)


@pytest.mark.eager
def test_results_are_contiguous(device):
    case = make_case(MEDIUM, torch.bfloat16, device)
    turned = {
        n: t.transpose(1, 2).contiguous().transpose(1, 2)
        for n, t in case.inputs.items()
        if t.ndim == 4
    }
    for value in run(case.with_inputs(**turned), grad=False).values():
        assert value.is_contiguous()
