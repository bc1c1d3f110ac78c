"""FP8 caches, queries and outputs: accuracy, scales, saturation."""

from __future__ import annotations

import pytest
import torch
from attn_common import detect, fp8_dtype
from prefix_prefill import paged_attn_func, shared_prefix_attn_func

from .._linked.budget import Maker, assert_no_worse_than_eager, assert_same
from .._linked.tiers import INTERPRETED
from .._numerics import MEDIUM, PACKED, Case, Problem, check, make_case, run, run_eager, run_oracle

# interpreted stores to FP8 lose carries
on_device = pytest.mark.skipif(INTERPRETED, reason="interpreted FP8 stores round wrongly")


@pytest.fixture
def e4m3(device):
    platform = detect(device)
    if not platform.supports_fp8:
        pytest.skip(f"{platform} has no FP8")
    return getattr(torch, fp8_dtype(platform))


@pytest.fixture
def e5m2(e4m3):
    return torch.float8_e5m2fnuz if e4m3 == torch.float8_e4m3fnuz else torch.float8_e5m2


def scales(kind, heads_k, device):
    m = Maker(device, torch.float32, seed=5)
    size = {"none": 0, "scalar": 1, "per_head": heads_k}[kind]
    if not size:
        return {}
    return {f"{x}_descale": m.uniform(size, low=0.5, high=2.0) for x in "kv"}


@pytest.mark.eager
@pytest.mark.parametrize("kind", ["none", "scalar", "per_head"])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("layout", ["nhd", PACKED])
def test_fp8_cache(layout, dense, kind, e4m3, device):
    problem = MEDIUM._replace(layout=layout, dense=dense)
    case = make_case(problem, torch.float16, device, cache_dtype=e4m3)
    check(case.with_options(**scales(kind, 2, device)))


@pytest.mark.eager
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_wider_format(dtype, e5m2, device):
    case = make_case(MEDIUM, dtype, device, ["window", "sinks"], cache_dtype=e5m2)
    check(case.with_options(**scales("per_head", 2, device)))


@pytest.mark.eager
def test_new_keys_have_no_scale(e4m3, device):
    """A cache with a tiny scale beside new keys: what is new alone decides."""
    problem = Problem(((5, 25),), 2, 1, 16, page=8, dense=True)
    case = make_case(problem, torch.float16, device, cache_dtype=e4m3)
    tiny = torch.full((1,), 1e-6, device=device)
    got = check(case.with_options(v_descale=tiny, num_splits=1))
    # the same with values of 0 in the cache
    zero = torch.where(case.inputs["v_cache"].float().isnan(), float("nan"), 0.0).to(e4m3)
    want = run(case.with_inputs(v_cache=zero).with_options(num_splits=1))
    torch.testing.assert_close(got["out"], want["out"], rtol=1e-3, atol=1e-4)


@pytest.mark.eager
def test_bytes_are_e4m3(e4m3, device):
    case = make_case(MEDIUM, torch.float16, device, cache_dtype=e4m3)
    names = ("k_cache", "v_cache")
    stored = {name: case.inputs[name].view(torch.uint8) for name in names}
    assert_same(run(case.with_inputs(**stored)), run(case))


@pytest.mark.eager
def test_unused_slots_of_an_fp8_cache_may_be_nan(e4m3, device):
    case = make_case(MEDIUM, torch.float16, device, cache_dtype=e4m3)
    assert case.inputs["k_cache"].float().isnan().any()
    assert run(case)["out"].isfinite().all()


def fp8_queries(problem, e4m3, device, **options):
    """A case whose queries are FP8, too, with scales that bring all to order one."""
    case = make_case(problem, torch.float32, device, cache_dtype=e4m3)
    m = Maker(device, torch.float32, seed=7)
    q = (case.inputs["q"] * 20).to(e4m3)
    descales = {f"{x}_descale": m.uniform(problem.heads_k, low=0.5, high=1.0) for x in "kv"}
    q_descale = m.uniform(problem.heads_k, low=0.02, high=0.08)
    inputs = {**case.inputs, "q": q}
    for name in "kv":
        if name in inputs:
            inputs[name] = inputs[name].bfloat16()
    return Case(inputs, {**case.options, **descales, "q_descale": q_descale, **options})


def rounded_probabilities(case):
    """The output, with every key's part off by as much as FP8 rounds its probability."""
    m = Maker(case.inputs["q"].device, torch.float64, seed=3)
    moved = {}
    for name in ("v_cache", "v"):
        if name in case.inputs:
            wide = case.inputs[name].double()
            # a unit of e4m3 is 1/8, and half of it what rounding is off at most
            signs = m.randn(*wide.shape[: wide.ndim - 1]).sign()[..., None]
            moved[name] = wide * (1 + signs / 16)
    return run_oracle(case.with_inputs(**moved))["out"]


@pytest.mark.eager
@pytest.mark.parametrize(
    ("dense", "has_sinks"), [(False, False), (True, False), (False, True)], ids=str
)
def test_fp8_queries(dense, has_sinks, e4m3, device):
    problem = Problem(((17, 36), (1, 21), (3, 9)), 4, 2, 32, page=8, dense=dense)
    case = fp8_queries(problem, e4m3, device, num_splits=1)
    if has_sinks:
        case = case.with_inputs(sinks=torch.arange(4.0, device=device))
    got = run(case)
    assert got["out"].dtype == torch.bfloat16
    want = run_oracle(case)
    eager = run_eager(case, want)
    if device.type == "cuda":
        eager["out"] = rounded_probabilities(case)
    # Hopper's tensor cores keep 13 bits of the fraction of a sum
    unit = 2.0**-13 if device.type == "cuda" else 1e-6
    assert_no_worse_than_eager("lse", got["lse"], eager["lse"], want["lse"], eps=unit)
    assert_no_worse_than_eager("out", got["out"], eager["out"], want["out"])


@pytest.mark.eager
@pytest.mark.parametrize("dense", [False, True])
def test_scales_of_each_sequence(dense, e4m3, device):
    """Beside scales of other forms; each sequence gives the bits of a call with its own."""
    problem = MEDIUM._replace(dense=dense)
    case = fp8_queries(problem, e4m3, device, num_splits=1)
    m = Maker(device, torch.float32, seed=11)
    each = {f"{x}_descale": m.uniform(3, 2, low=0.02, high=1.0) for x in "qk"}
    each["v_descale"] = m.uniform(1, low=0.5, high=2.0)
    got = run(case.with_options(**each))
    starts = case.options["cu_seqlens_q"].tolist()
    for b in range(3):
        own = {name: x[b] if x.ndim == 2 else x for name, x in each.items()}
        want = run(case.with_options(**own))
        rows = slice(starts[b], starts[b + 1])
        assert torch.equal(got["out"][rows], want["out"][rows])
        assert torch.equal(got["lse"][:, rows], want["lse"][:, rows])
    oracle = run_oracle(case.with_options(**each))
    own = {name: x[0] if x.ndim == 2 else x for name, x in each.items()}
    rows = slice(starts[0], starts[1])
    alone = run_oracle(case.with_options(**own))
    assert torch.equal(oracle["out"][rows], alone["out"][rows])


@pytest.mark.eager
def test_shared_keys_have_no_scale_of_a_sequence(e4m3, device):
    case = make_case(MEDIUM, torch.float16, device, cache_dtype=e4m3)
    shared = {"shared_pages": torch.tensor([0], device=device), "shared_len": 3}
    options = {**case.options, "k_descale": torch.ones(3, 2, device=device)}
    with pytest.raises(NotImplementedError, match=r"k_descale .* where sequences share keys"):
        shared_prefix_attn_func(**case.inputs, **options, **shared)


@pytest.mark.eager
def test_fp8_queries_of_a_cache_in_16_bits(e4m3, device):
    case = make_case(MEDIUM, torch.bfloat16, device)
    q = case.inputs["q"].to(e4m3)
    case = case.with_inputs(q=q)
    got, want = run(case), run_oracle(case)
    wide = case.with_inputs(q=q.bfloat16())
    eager = run_eager(wide, want)
    for name, value in got.items():
        assert_no_worse_than_eager(name, value, eager[name], want[name])


@pytest.mark.eager
@on_device
def test_fp8_output_is_scaled_and_saturates(e4m3, device):
    case = make_case(MEDIUM, torch.float16, device).with_options(num_splits=1)
    exact = run(case.with_inputs(q=case.inputs["q"]))["out"].float()
    scale = torch.tensor([exact.abs().max().item() / 600], device=device)
    got = case(out_scale=scale)["out"]
    assert got.dtype == e4m3
    limit = torch.finfo(e4m3).max
    assert got.float().abs().max() == limit
    assert got.float().isfinite().all()
    want = run_oracle(case)["out"] / scale.double()
    error = (got.double() - want.clamp(-limit, limit)).abs()
    # probabilities, which sum to 1, are rounded to fp16 before they meet the values; fp32 adds
    lost = 1.01 * 2.0**-11 * case.inputs["v_cache"].nan_to_num().abs().max().item() / scale.item()
    # half a unit of FP8, of a number that is not quite the exact one
    assert (error <= lost + (want.abs().clamp(max=limit) + lost) * 2.0**-4 + 2.0**-10).all()


@pytest.mark.device
@pytest.mark.parametrize("kind", ["scalar", "per_head"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("layout", ["nhd", PACKED])
def test_fp8_cache_at_length(layout, head_dim, dtype, kind, e4m3, device):
    problem = Problem(
        ((300, 900), (1, 4000), (4, 70)), 16, 4, head_dim, layout=layout, dense=kind == "scalar"
    )
    case = make_case(problem, dtype, device, cache_dtype=e4m3)
    check(case.with_options(**scales(kind, 4, device)))


@pytest.mark.device
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fp8_queries_at_length(head_dim, e4m3, device):
    problem = Problem(((300, 900), (1, 4000), (4, 70)), 16, 4, head_dim)
    case = fp8_queries(problem, e4m3, device)
    got, want = run(case), run_oracle(case)
    eager = rounded_probabilities(case)
    assert_no_worse_than_eager("out", got["out"], eager, want["out"])
    lse = want["lse"]
    assert_no_worse_than_eager("lse", got["lse"], lse.float(), lse, eps=2.0**-13)


@pytest.mark.eager
def test_fp8_output_without_an_output_given(e4m3, device):
    case = make_case(MEDIUM, torch.float16, device)
    scale = torch.ones(1, device=device)
    out = paged_attn_func(**case.inputs, **case.options, out_scale=scale)
    assert out.dtype == e4m3
