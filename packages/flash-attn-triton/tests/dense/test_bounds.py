"""Results lie within the a-priori bounds of docs/numerics.md, and what is wrong does not."""

from __future__ import annotations

import pytest
import torch
from flash_attn_triton import attention_reference

from .._linked.bounds import attention_bounds
from .._linked.budget import DTYPES, Maker
from .._linked.rounding import assert_within, median
from .._numerics import Shape, bounds_of, make_case, run, run_oracle
from ..tree import _trees
from ._fp8 import hopper_products

CASES = [
    (Shape(2, 17, 40, 4, 2, 24), ("causal",)),
    (Shape(1, 33, 20, 2, 1, 64), ("window", "softcap", "sinks")),
    (Shape(1, 20, 33, 2, 2, 16, 40), ("bias", "window_left")),
    (Shape(6, 9, 20, 2, 1, 32), ("bias_keys", "softcap")),
    (Shape(2, 5, 30, 2, 1, 80), ("alibi", "scale_negative")),
    (Shape(1, 17, 40, 2, 1, 24), ("causal", "dropout", "sinks")),
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


def test_within_where_a_bias_hides_keys(device):
    """Some keys of each row, and all of some rows."""
    case = make_case(Shape(1, 17, 24, 2, 1, 32), torch.bfloat16, device, ("bias", "alibi"))
    bias = case.inputs["bias"]
    bias[..., 3:9] = -torch.inf
    bias[:, :, 5:7] = -torch.inf
    got = run(case)
    assert_within(got, bounds_of(case, got))


def test_a_bias_gradient_without_a_sequence_is_not_within(device):
    """The sum over all sequences that share the bias but one."""
    case = make_case(Shape(6, 9, 20, 2, 1, 32), torch.bfloat16, device, ("bias_fp32",))
    got = run(case)
    bounds = bounds_of(case, got)
    assert_within(got, bounds)
    case.inputs.update({name: case.inputs[name][:-1] for name in "qkv"})
    with pytest.raises(AssertionError, match="times its bound"):
        assert_within({"dbias": run(case)["dbias"]}, {"dbias": bounds["dbias"]})


@pytest.mark.parametrize("features", [(), ("dropout",), ("bias_fp32",)], ids=str)
def test_the_bounds_say_something(features, device):
    """Half of all elements use more of their bound than this: it is not far above what happens."""
    case = make_case(Shape(1, 17, 24, 2, 1, 32), torch.bfloat16, device, features)
    got = run(case)
    for name, bounded in bounds_of(case, got).items():
        assert median(bounded, got[name]) > 0.0003, name


def test_another_mask_of_dropout_is_not_within(device):
    """A few weights that are not kept and should be."""
    case = make_case(Shape(1, 17, 24, 2, 1, 32), torch.bfloat16, device, ("dropout",))
    got = run(case)
    bounds = bounds_of(case, got)
    assert_within(got, bounds)
    seen = bounds_of(case.with_options(dropout_p=0.29), got)
    for name in ("out", "dq", "dk", "dv"):
        with pytest.raises(AssertionError, match="times its bound"):
            assert_within(got, {name: seen[name]})


TREE = _trees.Tree((17, 5, 20), (-1, 0, 0), padding=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_trees_within(dtype, device):
    case = _trees.make(TREE, dtype, device, ("softcap", "sinks"))
    got, oracle = run(case), run_oracle(case)
    bounds = _trees.bounds_of(case, got)
    for name, bounded in bounds.items():
        torch.testing.assert_close(bounded.exact, oracle[name], msg=name)
    assert_within(got, bounds)


def test_a_tree_that_is_off_is_not_within(device):
    """A branch below another segment than it says, whose keys it does not see."""
    case = _trees.make(TREE, torch.bfloat16, device)
    got = run(case)
    bounds = _trees.bounds_of(case, got)
    assert_within(got, bounds)
    parents = torch.tensor([-1, 0, 1], dtype=torch.int32, device=device)
    off = run(case.with_options(parents=parents))
    for name in ("out", "lse", "dq", "dk", "dv"):
        with pytest.raises(AssertionError, match="times its bound"):
            assert_within(off, {name: bounds[name]})


def _weighed(inputs, products, round_to):
    """Causal attention with given products, weights as ``round_to`` makes them, and its LSE."""
    v = inputs["v"].double().repeat_interleave(2, 2).transpose(1, 2)
    scores = products * v.shape[-1] ** -0.5
    scores = scores.masked_fill(~torch.ones_like(scores).tril().bool(), -torch.inf)
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    out = (round_to(256 * e) / 256 @ v / e.sum(-1, keepdim=True)).transpose(1, 2)
    return {"out": out.bfloat16(), "lse": torch.logsumexp(scores, -1)}


def test_fp8_within_where_hopper_cuts_sums_off(device):
    """What Hopper's tensor cores do is within: sums of 14 bits, weights in FP8; less is not."""
    m = Maker(device, torch.float32)
    drawn = m.randn(1, 40, 4, 64), m.randn(1, 40, 2, 64), m.randn(1, 40, 2, 64)
    inputs = {n: x.to(torch.float8_e4m3fn) for n, x in zip("qkv", drawn, strict=True)}
    bounds = attention_bounds(**inputs, causal=True)
    wide = {name: x.double() for name, x in inputs.items()}
    out, lse = attention_reference(**wide, causal=True, return_lse=True)
    torch.testing.assert_close(bounds["out"].exact, out)
    torch.testing.assert_close(bounds["lse"].exact, lse)
    products = hopper_products(inputs["q"], inputs["k"])

    def in_fp8(x):
        return x.float().to(torch.float8_e4m3fn).double()

    def in_one_bit(x):
        fraction, exponent = torch.frexp(x)
        return torch.ldexp((4 * fraction).round() / 4, exponent)

    got = _weighed(inputs, products, in_fp8)
    assert_within(got, bounds)
    assert median(bounds["out"], got["out"]) > 0.01
    with pytest.raises(AssertionError, match="out"):
        assert_within(_weighed(inputs, products, in_one_bit), bounds)
    without = torch.cat((products[..., :10], products[..., 11:12], products[..., 11:]), -1)
    with pytest.raises(AssertionError, match="out"):
        assert_within(_weighed(inputs, without, in_fp8), {"out": bounds["out"]})
    rounded = (products * 4).round() / 4
    with pytest.raises(AssertionError, match="lse"):
        assert_within(_weighed(inputs, rounded, in_fp8), {"lse": bounds["lse"]})


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
