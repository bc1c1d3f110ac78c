"""What a result does not depend on: its batch, strides, layouts, splits but for rounding."""

from __future__ import annotations

import pytest
import torch

from .._linked.budget import assert_no_worse_than_eager, assert_same
from .._linked.views import VIEWS
from .._numerics import MEDIUM, PACKED, Case, Problem, check, make_case, run, run_eager, run_oracle

LENGTHS = ((17, 36), (1, 21), (3, 9), (1, 50))


def alone(case: Case, problem: Problem, b: int) -> Case:
    """One sequence of a case, by itself."""
    starts = case.options["cu_seqlens_q"]
    rows = slice(int(starts[b]), int(starts[b + 1]))
    inputs = {name: t[rows] if name in "qkv" else t for name, t in case.inputs.items()}
    queries, keys = problem.lengths[b]
    options = {
        **case.options,
        "block_table": case.options["block_table"][b : b + 1],
        "cu_seqlens_q": torch.tensor([0, queries], dtype=torch.int32, device=starts.device),
        "seqlens_k": case.options["seqlens_k"][b : b + 1],
        "max_seqlen_q": queries,
        "max_seqlen_k": keys,
    }
    return Case(inputs, options)


@pytest.mark.eager
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dense", [False, True])
def test_a_sequence_does_not_depend_on_its_batch(dense, splits, device):
    problem = MEDIUM._replace(lengths=LENGTHS, dense=dense)
    case = make_case(problem, torch.float32, device).with_options(num_splits=splits)
    got = run(case)
    at = 0
    for b, (queries, _) in enumerate(problem.lengths):
        want = run(alone(case, problem, b))
        rows = slice(at, at + queries)
        assert torch.equal(got["out"][rows], want["out"]), b
        assert torch.equal(got["lse"][:, rows], want["lse"]), b
        at += queries


@pytest.mark.eager
def test_bounds_of_lengths_may_be_larger(device):
    case = make_case(MEDIUM, torch.float32, device).with_options(num_splits=1)
    loose = case.with_options(max_seqlen_q=1000, max_seqlen_k=10_000)
    assert_same(run(loose), run(case))


@pytest.mark.eager
@pytest.mark.parametrize("layout", ["nhd", PACKED])
@pytest.mark.parametrize("view", VIEWS)
def test_strides_do_not_change_a_bit(view, layout, device):
    problem = Problem(((9, 20), (1, 19)), 4, 2, 24, page=5, layout=layout, dense=True)
    case = make_case(problem, torch.float32, device, ["alibi", "sinks"])
    moved = {name: VIEWS[view](t) for name, t in case.inputs.items()}
    assert_same(run(case.with_inputs(**moved)), run(case))


def test_layouts_do_not_change_a_bit(device):
    want = run(make_case(MEDIUM, torch.float32, device))
    assert_same(run(make_case(MEDIUM._replace(layout=PACKED), torch.float32, device)), want)


def test_new_keys_are_as_good_as_cached_ones(device):
    """The same keys, in the cache or beside it: the same attention."""
    problem = MEDIUM._replace(dense=True)
    case = make_case(problem, torch.float32, device)
    cached = make_case(MEDIUM, torch.float32, device)
    caches = {name: cached.inputs[name].clone() for name in ("k_cache", "v_cache")}
    table, at = cached.options["block_table"], 0
    for b, (queries, keys) in enumerate(problem.lengths):
        for i in range(keys):
            page, slot, context = table[b, i // 7], i % 7, keys - queries
            for name in "kv":
                if i >= context:
                    value = case.inputs[name][at + i - context]
                else:
                    source = case.options["block_table"][b, i // 7]
                    value = case.inputs[f"{name}_cache"][source, slot]
                caches[f"{name}_cache"][page, slot] = value
        at += queries
    other = cached.with_inputs(q=case.inputs["q"], **caches)
    oracle = run_oracle(case)
    for name, value in run_oracle(other).items():
        torch.testing.assert_close(value, oracle[name], rtol=1e-12, atol=1e-12)
    got, eager = run(other), run_eager(case, oracle)
    for name, value in got.items():
        assert_no_worse_than_eager(name, value, eager[name], oracle[name])


@pytest.mark.parametrize("splits", [2, 5, 40])
@pytest.mark.parametrize("features", [(), ("window", "sinks")], ids=str)
def test_any_number_of_splits(splits, features, device):
    problem = Problem(((3, 100), (1, 9)), 4, 2, 16, page=7)
    check(make_case(problem, torch.float32, device, features).with_options(num_splits=splits))


@pytest.mark.parametrize("splits", [2, 9])
def test_splits_of_long_sequences_and_both_sources(splits, device):
    problem = Problem(((9, 80), (20, 20)), 2, 1, 16, page=7, dense=True)
    check(make_case(problem, torch.float32, device).with_options(num_splits=splits))


def test_the_load_decides_by_default(device):
    # more keys than a split has at least, and one sequence
    problem = Problem(((2, 600),), 2, 1, 16, page=16)
    case = make_case(problem, torch.float32, device)
    got = check(case)
    assert not torch.equal(got["out"], case(num_splits=1)["out"])


@pytest.mark.eager
def test_a_call_repeats_bit_for_bit(device):
    case = make_case(MEDIUM, torch.float32, device, ["split", "sinks"])
    assert_same(run(case), run(case))


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dense", [False, True])
def test_independence_at_length(dense, dtype, device):
    lengths = ((300, 900), (1, 2000), (4, 77), (1, 1), (130, 4000))
    problem = Problem(lengths, 8, 2, 128, dense=dense)
    case = make_case(problem, dtype, device).with_options(num_splits=1)
    got, at = run(case), 0
    for b, (queries, _) in enumerate(lengths):
        want = run(alone(case, problem, b))
        assert torch.equal(got["out"][at : at + queries], want["out"]), b
        at += queries
