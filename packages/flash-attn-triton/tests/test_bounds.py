"""Results lie within the a-priori bounds of docs/numerics.md, and what is wrong does not."""

from __future__ import annotations

import pytest
import torch

from ._linked.bounds import assert_within
from ._linked.budget import DTYPES
from ._numerics import Shape, bounds_of, make_case, run, run_oracle

CASES = [
    (Shape(2, 17, 40, 4, 2, 24), ("causal",)),
    (Shape(1, 33, 20, 2, 1, 64), ("window", "softcap", "sinks")),
    (Shape(1, 20, 33, 2, 2, 16, 40), ("bias", "window_left")),
    (Shape(2, 5, 30, 2, 1, 80), ("alibi", "scale_negative")),
]
pytestmark = pytest.mark.eager


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "features"), CASES, ids=str)
def test_within(shape, features, dtype, device):
    case = make_case(shape, dtype, device, features)
    got, oracle = run(case), run_oracle(case)
    bounds = bounds_of(case, got)
    assert bounds.keys() >= {"out", "lse", "dq", "dk", "dv"}
    for name, bounded in bounds.items():
        torch.testing.assert_close(bounded.exact, oracle[name], msg=name)
    assert_within(got, bounds)


def test_what_is_off_is_not_within(device):
    """A score that is off by 2 % of one, and a key that is left out, go beyond the bound."""
    case = make_case(Shape(1, 20, 40, 2, 1, 64), torch.float16, device, ())
    got = run(case)
    bounds = bounds_of(case, got)
    assert_within(got, bounds)
    for wrong in (case.with_options(softmax_scale=64**-0.5 * 1.02), _without_a_key(case)):
        with pytest.raises(AssertionError, match="times its bound"):
            assert_within(run(wrong), {"out": bounds["out"]})
        with pytest.raises(AssertionError, match="times its bound"):
            assert_within(run(wrong), {"lse": bounds["lse"]})
        with pytest.raises(AssertionError, match="times its bound"):
            assert_within(run(wrong), {"dq": bounds["dq"]})


def _without_a_key(case):
    short = {name: case.inputs[name][:, :-1] for name in "kv"}
    return case.with_inputs(**short)
