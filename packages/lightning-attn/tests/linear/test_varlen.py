"""Packed sequences: against the reference, each alone, and with a cache of states."""

from __future__ import annotations

import pytest
import torch
from lightning_attn import lightning_attention_varlen_reference, lightning_attn_func

from .._linked.budget import DTYPES, assert_same
from .._linked.views import VIEWS, same_values
from .._numerics import PACKED, PACKED_MEDIUM, SCHEDULES, Packed, check, make_packed, run
from ._varlen import cached

schedules = pytest.mark.parametrize("schedule", SCHEDULES)


@schedules
@pytest.mark.parametrize("shape", PACKED, ids=str)
def test_matches_reference(shape, schedule, device):
    check(make_packed(shape, torch.float32, device).on(schedule))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_half_precision(dtype, device):
    for schedule in SCHEDULES:
        check(make_packed(PACKED_MEDIUM, dtype, device, "slopes").on(schedule), grad=False)


@pytest.mark.device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@schedules
def test_at_length(schedule, dtype, device):
    shape = Packed((2500, 0, 1, 700, 64, 1300), 3, 128, 128, padding=70)
    check(make_packed(shape, dtype, device, "slopes").on(schedule), grad=False)


@pytest.mark.eager
@schedules
def test_each_sequence_is_bitwise_itself_alone(schedule, device):
    case = make_packed(PACKED_MEDIUM, torch.float32, device).on(schedule)
    got = run(case)
    for b in range(len(PACKED_MEDIUM.lengths)):
        rows = PACKED_MEDIUM.rows(b)
        out, state = lightning_attn_func(
            *(case.inputs[name][None, rows] for name in "qkv"),
            case.inputs["decay"],
            scale=case.options["scale"],
            initial_state=case.inputs["initial_state"][b : b + 1],
            output_final_state=True,
            schedule=schedule,
        )
        assert torch.equal(out[0], got["o"][rows])
        assert torch.equal(state[0], got["state"][b])


@pytest.mark.eager
@schedules
def test_padding_gives_nothing(schedule, device):
    shape = PACKED_MEDIUM
    got = run(make_packed(shape, torch.float32, device).on(schedule))
    for rows in (slice(0, shape.ahead), slice(shape.tokens - shape.padding, None)):
        for name in ("o", "dq", "dk", "dv"):
            assert not got[name][rows].any(), name


@pytest.mark.parametrize("sequences", [127, 128, 129])
def test_more_sequences_than_one_search_step(sequences, device):
    shape = Packed((1,) * sequences, 1, 16, 16)
    case = make_packed(shape, torch.float32, device)
    want = run(case, case.reference, grad=False)
    got = run(case.on("parallel"), grad=False)
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=1e-5, atol=1e-5)


@pytest.mark.eager
@schedules
def test_a_cache_is_read_and_written_in_place(schedule, device):
    case = make_packed(PACKED_MEDIUM, torch.float32, device).on(schedule)
    want = run(case, grad=False)
    slots = [5, 0, 3, 6]
    inputs, options, cache = cached(case, slots, device=device)
    out, states = case.function(**inputs, **options, output_final_state=True)
    assert torch.equal(out, want["o"])
    assert torch.equal(cache[slots], want["state"])
    assert torch.equal(states, want["state"])
    assert cache[[1, 2, 4]].isnan().all()
    assert case.function(**inputs, **options)[1] is None


@pytest.mark.eager
@schedules
def test_a_negative_slot_is_padding(schedule, device):
    case = make_packed(PACKED_MEDIUM, torch.float32, device).on(schedule)
    want = run(case, grad=False)
    inputs, options, cache = cached(case, [-1, 2, 4, -7], device=device)
    out, states = case.function(**inputs, **options, output_final_state=True)
    for b, slot in enumerate((-1, 2, 4, -7)):
        rows = PACKED_MEDIUM.rows(b)
        expected = want["o"][rows] if slot >= 0 else torch.zeros_like(want["o"][rows])
        assert torch.equal(out[rows], expected)
        expected = want["state"][b] if slot >= 0 else torch.zeros_like(want["state"][b])
        assert torch.equal(states[b], expected)
    assert cache[[0, 1, 3, 5, 6]].isnan().all()


@pytest.mark.eager
@schedules
def test_a_state_is_used_only_where_there_is_one(schedule, device):
    case = make_packed(PACKED_MEDIUM, torch.float32, device).on(schedule)
    flags = [True, False, False, True]
    there = torch.tensor(flags, device=device)[:, None, None, None]
    kept = torch.where(there, case.inputs["initial_state"], 0.0)
    want = run(case.with_inputs(initial_state=kept), grad=False)
    # the states that are not used hold NaN
    poisoned = torch.where(there, case.inputs["initial_state"], float("nan"))
    case = case.with_inputs(initial_state=poisoned)
    inputs, options, cache = cached(case, [5, 0, 3, 6], flags, device)
    out, _ = case.function(**inputs, **options)
    assert torch.equal(out, want["o"])
    assert torch.equal(cache[[5, 0, 3, 6]], want["state"])
    flagged = case.with_options(has_initial_state=torch.tensor(flags, device=device))
    assert_same(run(flagged, grad=False), want)


@pytest.mark.eager
def test_without_indices_sequence_b_has_slot_b(device):
    case = make_packed(PACKED_MEDIUM, torch.float32, device)
    inputs, options, cache = cached(case, [0, 1, 2, 3], device=device)
    options.pop("state_indices")
    out, states = case.function(**inputs, **options, output_final_state=True)
    want = run(case, grad=False)
    assert torch.equal(out, want["o"])
    assert torch.equal(states, want["state"])
    assert torch.equal(cache[:4], want["state"])


@pytest.mark.eager
@pytest.mark.parametrize("view", VIEWS)
def test_a_cache_of_any_strides(view, device):
    case = make_packed(PACKED_MEDIUM, torch.float32, device)
    want = run(case, grad=False)
    inputs, options, cache = cached(case, [5, 0, 3, 6], device=device)
    moved = same_values(view, cache)
    out, _ = case.function(**inputs, **{**options, "state_cache": moved})
    assert torch.equal(out, want["o"])
    assert torch.equal(moved[[5, 0, 3, 6]], want["state"])


@pytest.mark.eager
def test_the_reference_with_a_cache(device):
    case = make_packed(PACKED_MEDIUM, torch.float64, device)
    want = run(case, case.reference, grad=False)
    inputs, options, cache = cached(case, [5, -1, 3, 6], device=device)
    out, states = lightning_attention_varlen_reference(**inputs, **options, output_final_state=True)
    kept = torch.ones(PACKED_MEDIUM.tokens, dtype=torch.bool)
    kept[PACKED_MEDIUM.rows(1)] = False
    assert torch.equal(out[kept], want["o"][kept])
    assert not states[1].any()
    torch.testing.assert_close(cache[[5, 3, 6]].double(), want["state"][[0, 2, 3]])
