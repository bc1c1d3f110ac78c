"""Results lie within the a-priori bounds of docs/numerics.md, and what is wrong does not."""

from __future__ import annotations

import pytest
import torch
from blocksparse_attn import BlockSparseLayout, TokenRule

from .._linked.budget import DTYPES
from .._linked.rounding import assert_within, median
from .._numerics import Shape, bounds_of, make_case, run, run_oracle

CASES = [
    (Shape(2, 33, 40, 4, 2, 24), {"block": (16, 16)}),
    (Shape(1, 40, 40, 2, 1, 16, 40), {"block": (32, 16), "causal": False, "softmax_scale": -0.7}),
    (Shape(1, 20, 70, 2, 2, 33), {"block": (16, 32), "pattern": "local", "num_splits": 3}),
    (Shape(1, 33, 40, 2, 1, 16), {"block": (16, 16), "align": "top-left", "shared": True}),
]
pytestmark = pytest.mark.eager


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "options"), CASES, ids=str)
def test_within(shape, options, dtype, device):
    case = make_case(shape, dtype, device, **options)
    got, oracle = run(case), run_oracle(case)
    bounds = bounds_of(case, got)
    assert bounds.keys() == got.keys()
    for name, bounded in bounds.items():
        torch.testing.assert_close(bounded.exact, oracle[name], msg=name)
    assert_within(got, bounds)


def test_within_by_a_token_rule(device):
    rule = TokenRule.window(20, 3)
    kept = torch.ones(1, 3, 3, dtype=torch.bool)
    layout = BlockSparseLayout.from_dense(kept, (16, 16)).with_token_rule(rule).to(device)
    case = make_case(Shape(1, 40, 40, 2, 1, 16), torch.bfloat16, device)
    case = case.with_options(layout=layout)
    got = run(case)
    assert_within(got, bounds_of(case, got))


ALL = torch.ones(1, 3, 3, dtype=torch.bool)


def test_what_is_off_is_not_within(device):
    """A block that is left out, and scores that are off by 2 %."""
    case = make_case(Shape(1, 40, 40, 2, 1, 64), torch.float16, device, causal=False)
    layout = BlockSparseLayout.from_dense(ALL, (16, 16)).to(device)
    case = case.with_options(layout=layout)
    got = run(case)
    bounds = bounds_of(case, got)
    assert_within(got, bounds)
    less = ALL.clone()
    less[0, 1, 2] = False
    without = BlockSparseLayout.from_dense(less, (16, 16)).to(device)
    for change in ({"layout": without}, {"softmax_scale": 64**-0.5 * 1.02}):
        off = run(case.with_options(**change))
        for name in ("out", "lse", "dq"):
            with pytest.raises(AssertionError, match="times its bound"):
                assert_within(off, {name: bounds[name]})


def test_the_bounds_say_something(device):
    """Half of all elements use more of their bound than this: it is not far above what happens."""
    case = make_case(Shape(1, 33, 40, 2, 1, 32), torch.bfloat16, device, "all")
    got = run(case)
    for name, bounded in bounds_of(case, got).items():
        assert median(bounded, got[name]) > 0.0003, name
