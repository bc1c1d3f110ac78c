"""Results of the forward lie within the a-priori bounds of docs/numerics.md."""

from __future__ import annotations

import pytest
import torch
from attn_common import detect, fp8_dtype

from .._linked.budget import DTYPES, Maker
from .._linked.rounding import assert_within, median
from .._numerics import PACKED, Case, Problem, bounds_of, make_case, run, run_oracle
from ..mla import _mla

CASES = [
    (Problem(((17, 33), (1, 40), (3, 0)), 4, 2, 24, page=7), ()),
    (Problem(((20, 35), (1, 17)), 2, 1, 64), ("softcap", "sinks", "window")),
    (Problem(((5, 40),), 2, 2, 80, page=5), ("alibi", "full", "split")),
    (Problem(((17, 33), (1, 20)), 4, 2, 24, layout=PACKED, dense=True, padding=3), ("sinks",)),
]
LATENT = _mla.Problem(((3, 37), (1, 20)), 8, 16, 72, 64)
pytestmark = pytest.mark.eager


@pytest.fixture
def e4m3(device):
    platform = detect(device)
    if not platform.supports_fp8:
        pytest.skip(f"{platform} has no FP8")
    return getattr(torch, fp8_dtype(platform))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("problem", "features"), CASES, ids=str)
def test_within(problem, features, dtype, device):
    case = make_case(problem, dtype, device, features)
    bounds, oracle = bounds_of(case), run_oracle(case)
    for name, bounded in bounds.items():
        torch.testing.assert_close(bounded.exact, oracle[name], msg=name)
    assert_within(run(case), bounds)


def test_what_is_off_is_not_within(device):
    problem, _ = CASES[0]
    case = make_case(problem, torch.float16, device)
    bounds = bounds_of(case)
    wrong = case.with_options(softmax_scale=24**-0.5 * 1.02)
    for name in bounds:
        with pytest.raises(AssertionError, match="times its bound"):
            assert_within(run(wrong), {name: bounds[name]})


# ---- FP8


def scaled(case, device, names=("k", "v")):
    """The case with factors of each head."""
    heads = case.inputs["k_cache"].shape[2]
    m = Maker(device, torch.float32, seed=5)
    given = {f"{name}_descale": m.uniform(heads, low=0.5, high=1.5) for name in names}
    return case.with_options(**given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("problem", "features"), CASES[:3], ids=str)
def test_fp8_cache_within(problem, features, dtype, e4m3, device):
    case = scaled(make_case(problem, dtype, device, features, cache_dtype=e4m3), device)
    bounds, oracle = bounds_of(case), run_oracle(case)
    for name, bounded in bounds.items():
        # the definition multiplies keys with their factors in fp32
        torch.testing.assert_close(bounded.exact, oracle[name], msg=name, rtol=1e-5, atol=1e-5)
    got = run(case)
    assert_within(got, bounds)
    if dtype != torch.float32:  # whose products are finer on a CPU
        assert median(bounds["out"], got["out"]) > 0.01


def test_an_fp8_cache_that_is_off_is_not_within(e4m3, device):
    """A factor that is off by 2 %, and a key that is another one in the last bit of FP8."""
    problem, _ = CASES[0]
    case = scaled(make_case(problem, torch.float16, device, cache_dtype=e4m3), device)
    bounds = bounds_of(case)
    for name, shows in (("k_descale", ("out", "lse")), ("v_descale", ("out",))):
        got = run(case.with_options(**{name: case.options[name] * 1.02}))
        for result in shows:
            with pytest.raises(AssertionError, match="times its bound"):
                assert_within(got, {result: bounds[result]})
    codes = case.inputs["k_cache"].view(torch.uint8).clone()
    page = int(case.options["block_table"][0, 0])
    codes[page, 3] ^= 1
    got = run(case.with_inputs(k_cache=codes.view(e4m3)))
    with pytest.raises(AssertionError, match="lse"):
        assert_within(got, {"lse": bounds["lse"]})


def test_fp8_queries_within(e4m3, device):
    problem = Problem(((17, 36), (1, 21), (3, 9)), 4, 2, 32, page=8)
    case = make_case(problem, torch.float32, device, cache_dtype=e4m3)
    q = case.inputs["q"].to(e4m3)
    case = scaled(Case({**case.inputs, "q": q}, case.options), device, ("q", "k", "v"))
    bounds = bounds_of(case)
    assert_within(run(case), bounds)
    got = run(case.with_options(k_descale=case.options["k_descale"] * 1.05))
    with pytest.raises(AssertionError, match="lse"):
        assert_within(got, {"lse": bounds["lse"]})


# ---- multi-head latent attention


@pytest.mark.parametrize("stored", ["own", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latent_within(dtype, stored, e4m3, device):
    case = _mla.make_case(LATENT, dtype, device)
    if stored == "fp8":
        cache = case.inputs["kv_cache"].to(e4m3)
        case = case.with_inputs(kv_cache=cache)
        case = case.with_options(kv_descale=torch.full((1,), 0.7, device=device))
    bounds, oracle = _mla.bounds_of(case), _mla.reference(case, torch.float64)
    for name, bounded in bounds.items():
        torch.testing.assert_close(bounded.exact, oracle[name], msg=name)
    for splits in (1, 3):
        got = case(num_splits=splits)
        assert_within(got, bounds)
        if dtype != torch.float32:
            assert median(bounds["out"], got["out"]) > 0.01


def test_latent_attention_that_is_off_is_not_within(device):
    """A key that is left out, columns that are no part of the scores, and a scale off by 2 %."""
    case = _mla.make_case(LATENT, torch.float16, device, causal=False)
    bounds = _mla.bounds_of(case)
    assert_within(case(), bounds)
    short = case.with_options(seqlens_k=case.options["seqlens_k"] - 1)
    narrow = case.inputs["q"].clone()
    narrow[..., 71] = 0
    scale = case.options["softmax_scale"] * 1.02
    for wrong in (short, case.with_inputs(q=narrow), case.with_options(softmax_scale=scale)):
        for name in bounds:
            with pytest.raises(AssertionError, match="times its bound"):
                assert_within(wrong(), {name: bounds[name]})
