"""Results of the forward lie within the a-priori bounds of docs/numerics.md."""

from __future__ import annotations

import pytest
import torch
from prefix_prefill import _ops

from ._linked.bounds import Bounded, assert_within, attention_bounds
from ._linked.budget import DTYPES
from ._numerics import Problem, make_case, run, run_oracle

CASES = [
    (Problem(((17, 33), (1, 40), (3, 0)), 4, 2, 24, page=7), ()),
    (Problem(((20, 35), (1, 17)), 2, 1, 64), ("softcap", "sinks", "window")),
    (Problem(((5, 40),), 2, 2, 80, page=5), ("alibi", "full", "split")),
]
pytestmark = pytest.mark.eager


def bounds_of(case, lengths):
    """The bounds of a case whose keys are all in the cache: of one sequence after the other."""
    inputs, options, device = dict(case.inputs), dict(case.options), case.inputs["q"].device
    table, page = options.pop("block_table").long(), inputs["k_cache"].shape[1]
    for name in ("cu_seqlens_q", "seqlens_k", "max_seqlen_q", "max_seqlen_k", "num_splits"):
        options.pop(name, None)
    options = {"causal": True, **options, "truncates": _ops.interpreted()}
    caches = [inputs.pop(name) for name in ("k_cache", "v_cache")]
    q, first = inputs.pop("q"), 0
    found = []
    for b, (queries, keys) in enumerate(lengths):
        key = torch.arange(keys, device=device)
        k, v = (cache[table[b][key // page], key % page][None] for cache in caches)
        one = q[first : first + queries][None]
        found.append(attention_bounds(one, k, v, **inputs, **options))
        first += queries
    return {
        name: Bounded(*(torch.cat([f[name][i][0] for f in found], axis) for i in range(2)))
        for name, axis in (("out", 0), ("lse", 1))
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("problem", "features"), CASES, ids=str)
def test_within(problem, features, dtype, device):
    case = make_case(problem, dtype, device, features)
    bounds, oracle = bounds_of(case, problem.lengths), run_oracle(case)
    for name, bounded in bounds.items():
        torch.testing.assert_close(bounded.exact, oracle[name], msg=name)
    assert_within(run(case), bounds)


def test_what_is_off_is_not_within(device):
    problem, _ = CASES[0]
    case = make_case(problem, torch.float16, device)
    bounds = bounds_of(case, problem.lengths)
    wrong = case.with_options(softmax_scale=24**-0.5 * 1.02)
    for name in bounds:
        with pytest.raises(AssertionError, match="times its bound"):
            assert_within(run(wrong), {name: bounds[name]})
