"""NaN and Inf where nothing may be read, and outputs that start as NaN."""

from __future__ import annotations

import pytest
import torch
from lightning_attn import lightning_attn_decode

from .._linked.budget import assert_same
from .._linked.fences import run_fenced
from .._linked.tiers import INTERPRETED
from .._linked.views import VIEWS
from .._numerics import MEDIUM, PACKED_MEDIUM, SCHEDULES, make_case, make_packed, run

pytestmark = pytest.mark.eager
poisons = pytest.mark.parametrize("poison", [float("nan"), float("-inf")], ids=str)
schedules = pytest.mark.parametrize("schedule", SCHEDULES)
SMALL_PACKED = PACKED_MEDIUM._replace(lengths=(17, 0, 18, 3), heads=1)


def test_empty_tensors_start_as_nan():
    assert torch.empty(5).isnan().all()
    assert torch.empty(5, dtype=torch.bfloat16).isnan().all()


@poisons
@schedules
def test_padding_of_packed_tokens(schedule, poison, device):
    shape = SMALL_PACKED
    case = make_packed(shape, torch.float32, device).on(schedule)
    want = run(case)
    bad = {name: case.inputs[name].clone() for name in "qkv"}
    for t in bad.values():
        t[: shape.ahead] = poison
        t[shape.tokens - shape.padding :] = poison
    assert_same(run(case.with_inputs(**bad)), want)


@poisons
@schedules
def test_other_sequences_of_the_batch(schedule, poison, device):
    shape = SMALL_PACKED
    case = make_packed(shape, torch.float32, device).on(schedule)
    want = run(case)
    bad = {name: case.inputs[name].clone() for name in "qkv"}
    rows = shape.rows(2)
    for t in bad.values():
        t[rows] = poison
    got = run(case.with_inputs(**bad))
    others = [b for b in range(len(shape.lengths)) if b != 2]
    for name in ("o", "dq", "dk", "dv"):
        for b in others:
            assert torch.equal(got[name][shape.rows(b)], want[name][shape.rows(b)]), name
    for name in ("state", "dinitial_state"):
        assert torch.equal(got[name][others], want[name][others])
    # and the poison is where it belongs
    assert got["o"][rows].isnan().any()


@schedules
def test_memory_around_the_inputs(schedule, device):
    """Every input is a window into NaN: past its rows, heads, and columns."""
    case = make_case(MEDIUM._replace(batch=1, d=48, e=48, seqlen=17), torch.float32, device).on(
        schedule
    )
    inside = {name: VIEWS["inside"](t) for name, t in case.inputs.items()}
    assert_same(run(case.with_inputs(**inside)), run(case))


@schedules
def test_nan_reaches_what_follows_and_no_earlier_chunk(schedule, device):
    """Within a chunk 0 times NaN is NaN: what lies before the chunk, of 64 tokens at most, is not
    reached."""
    case = make_case(MEDIUM._replace(batch=1, heads=1, seqlen=80), torch.float32, device)
    bad = case.inputs["k"].clone()
    bad[:, 70] = float("nan")
    got = run(case.with_inputs(k=bad).on(schedule), grad=False)
    assert got["o"][0, 70:].isnan().all()
    assert not got["o"][0, :64].isnan().any()
    assert got["state"].isnan().all()


@poisons
def test_slots_that_no_sequence_has(poison, device):
    case = make_case(MEDIUM, torch.float32, device)
    q, k, v = (case.inputs[name][:, :2] for name in "qkv")
    slots = torch.tensor([3, 1], device=device)
    results = []
    for filler in (0.0, poison):
        cache = torch.full((5, 2, 16, 16), filler, device=device)
        cache[slots] = case.inputs["initial_state"]
        out = lightning_attn_decode(q, k, v, cache, case.inputs["decay"], slots)
        results.append({"o": out, "cache": cache[slots]})
        untouched = cache[[0, 2, 4]]
        assert torch.equal(untouched, torch.full_like(untouched, filler)) or untouched.isnan().all()
    assert_same(*results)


@poisons
def test_inputs_of_padding_rows_in_decoding(poison, device):
    case = make_case(MEDIUM, torch.float32, device)
    q, k, v = (case.inputs[name][:, :1].clone() for name in "qkv")
    for t in (q, k, v):
        t[1] = poison
    cache = case.inputs["initial_state"].clone()
    slots = torch.tensor([1, -1], device=device)
    out = lightning_attn_decode(q, k, v, cache, case.inputs["decay"], slots)
    assert not out[1].any()
    assert cache.isfinite().all()
    assert torch.equal(cache[0], case.inputs["initial_state"][0])


@pytest.mark.skipif(not INTERPRETED, reason="needs memory that faults on a CPU")
def test_no_read_beyond_a_tensor():
    code = """
import torch
from lightning_attn import lightning_attn_decode, lightning_attn_func, lightning_attn_varlen_func
decay = fenced(torch.rand(4))
starts = fenced(torch.tensor([0, 18, 19, 20], dtype=torch.int32))
for d, e, schedule in ((16, 32, "sequential"), (48, 16, "parallel")):
    for sizes, places, count in (((1, 20), (), 1), ((20,), (starts,), 3)):
        inputs = [torch.randn(*sizes, 4, n) for n in (d, d, e)] + [torch.randn(count, 4, d, e)]
        q, k, v, state = inputs = [fenced(x).requires_grad_() for x in inputs]
        function = lightning_attn_varlen_func if places else lightning_attn_func
        options = {"initial_state": state, "output_final_state": True, "schedule": schedule}
        made = function(q, k, v, decay, *places, **options)
        assert all(x.isfinite().all() for x in made)
        above = [fenced(torch.randn(x.shape)) for x in made]
        assert all(x.isfinite().all() for x in torch.autograd.grad(made, inputs, above))
    q, k, v = (fenced(torch.randn(3, 1, 4, n)) for n in (d, d, e))
    states = fenced(torch.randn(3, 4, d, e))
    slots = fenced(torch.tensor([0, 2, -1, 0], dtype=torch.int32))[1:]
    assert lightning_attn_decode(q, k, v, states, decay, slots).isfinite().all()
"""
    run_fenced(code, __file__)
