"""Caches of int8 and int4, with a scale for each token and head: what is read, and what is not."""

from __future__ import annotations

import itertools

import pytest
import torch
from attn_common import detect, fp8_dtype
from prefix_prefill import paged_attention_reference, paged_attn_func, shared_prefix_attn_func
from prefix_prefill._paged.call import ORDINARY, Tensors
from prefix_prefill._paged.reference import coded, unpacked
from prefix_prefill._paged.tiles import takes_hopper

from .._linked.budget import Maker, assert_no_worse_than_eager, assert_same
from .._numerics import MEDIUM, Problem, check, make_case, run, run_eager, run_oracle
from ._quantised import quantise

KINDS = ["int8", "int4"]
kinds = pytest.mark.parametrize("kind", KINDS)


def make(problem, kind, dtype, device, features=(), scale_dtype=torch.float16):
    return quantise(make_case(problem, dtype, device, features), kind, scale_dtype)


# every value of each beside every value of the others, but for the pages
PAGES, GROUPS = (1, 16, 48, 64, 544), ((4, 4), (4, 2), (5, 1))
FEATURES = [(), ("window",), ("sinks",), ("softcap",), ("window", "sinks", "softcap")]
PAIRS = [
    (1, (4, 2), "int8", ()),
    (16, (4, 4), "int4", ("window",)),
    (48, (5, 1), "int8", ("sinks",)),
    (64, (4, 2), "int4", ("softcap",)),
    (544, (4, 4), "int8", ("window", "sinks", "softcap")),
    (1, (5, 1), "int4", ("window", "sinks", "softcap")),
    (16, (4, 2), "int8", ("softcap", "window")),
    (48, (4, 4), "int4", ("sinks", "softcap")),
]


@pytest.mark.eager
@pytest.mark.parametrize(("page", "heads", "kind", "features"), PAIRS, ids=str)
def test_matches_reference(page, heads, kind, features, device):
    problem = Problem(((17, 36), (1, 21), (3, 9), (0, 4)), *heads, 24, page=page)
    check(make(problem, kind, torch.bfloat16, device, features))


@pytest.mark.eager
@kinds
@pytest.mark.parametrize(
    ("dtype", "scale_dtype"),
    [(torch.float16, torch.bfloat16), (torch.float32, torch.float32)],
    ids=str,
)
def test_dtypes(dtype, scale_dtype, kind, device):
    check(make(MEDIUM, kind, dtype, device, ["alibi"], scale_dtype))


def vllm_case(problem, kind, dtype, device, features=()):
    """Return a case over a cache in a format of vLLM, and the same over its numbers in fp32."""
    case = make_case(problem, dtype, device, features)
    stored = {
        "int8_per_token_head": torch.int8,
        "int4_per_token_head": torch.uint8,
        "fp8_per_token_head": getattr(torch, fp8_dtype(detect(device))),
    }[kind]
    inputs, options, plain = dict(case.inputs), {"kv_dtype": kind}, {}
    for x in "kv":
        numbers = inputs.pop(f"{x}_cache").float() + 0.5  # not symmetric
        codes, scales = coded(numbers, stored)
        if kind == "int4_per_token_head":
            bits = scales.view(torch.int32)
            wide = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float()
            wide = (wide - (bits & 15)[..., None]) * (bits & -16).view(torch.float32)[..., None]
        else:
            wide = codes.float() * scales[..., None]
        poison = scales.isnan()
        plain[f"{x}_cache"] = wide.masked_fill(poison[..., None], torch.nan).double()
        options |= {f"{x}_cache": codes, f"{x}_scale_cache": scales}
    whole = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    return type(case)(inputs, {**case.options, **options}), (whole | plain, case.options)


VLLM = ["int8_per_token_head", "int4_per_token_head", "fp8_per_token_head"]


@pytest.mark.eager
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("features", [(), ("window", "sinks", "softcap")], ids=str)
@pytest.mark.parametrize("kind", VLLM)
def test_formats_of_vllm(kind, features, dtype, device):
    if kind == "fp8_per_token_head" and not detect(device).supports_fp8:
        pytest.skip("no FP8")
    problem = Problem(((17, 36), (1, 21), (3, 9), (0, 4)), 4, 2, 24, page=16)
    case, (inputs, options) = vllm_case(problem, kind, dtype, device, features)
    named = {**options, **inputs, "return_lse": True}
    want, lse = paged_attention_reference(**named)
    got = run(case)
    eps = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-5}[dtype]
    seen = want.isfinite() & got["out"].isfinite()
    assert torch.equal(want.isnan(), got["out"].isnan())
    assert (got["out"].double() - want)[seen].abs().max() < eps * want[seen].abs().max()
    torch.testing.assert_close(got["lse"].double(), lse, rtol=eps, atol=eps)
    # the reference knows the formats, too
    again, _ = paged_attention_reference(**{**case.options, **case.inputs, "return_lse": True})
    assert (again.double() - want)[seen].abs().max() < eps * want[seen].abs().max()


@pytest.mark.parametrize("kind", VLLM)
def test_formats_of_vllm_in_splits(kind, device):
    if kind == "fp8_per_token_head" and not detect(device).supports_fp8:
        pytest.skip("no FP8")
    problem = Problem(((1, 150), (2, 90)), 4, 2, 24, page=16)
    case, _ = vllm_case(problem, kind, torch.bfloat16, device, ("window",))
    want, got = run(case), run(case.with_options(num_splits=3))
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=2e-2, atol=2e-2)


@pytest.mark.eager
@pytest.mark.parametrize("kind", VLLM)
def test_formats_of_vllm_behind_a_shared_prefix(kind, device):
    if kind == "fp8_per_token_head" and not detect(device).supports_fp8:
        pytest.skip("no FP8")
    problem = Problem(((17, 36), (1, 21), (3, 9)), 4, 2, 24, page=16)
    case, (inputs, options) = vllm_case(problem, kind, torch.float16, device)
    pages = case.options["block_table"][0, :1]
    given = {**case.inputs, **case.options, "shared_pages": pages, "shared_len": 16}
    got = shared_prefix_attn_func(**given)
    table = torch.cat([pages.expand(3, -1), options["block_table"]], 1)
    longer = {"block_table": table, "seqlens_k": options["seqlens_k"] + 16, "max_seqlen_k": 52}
    want = paged_attention_reference(**{**options, **inputs, **longer})
    assert (got.double() - want).abs().max() < 2e-3 * want.abs().max()


@pytest.mark.eager
@pytest.mark.parametrize(
    ("stored", "zero_points", "served"),
    [
        (torch.int8, False, True),
        (torch.uint8, False, True),
        (torch.uint8, True, False),
        (torch.float8_e4m3fn, False, False),
    ],
    ids=str,
)
def test_hopper_serves_scales_of_tokens_of_integers(stored, zero_points, served, monkeypatch):
    """Its kernel knows neither zero points nor FP8 beside such scales."""
    monkeypatch.setenv("ATTN_COMMON_PLATFORM", "nvidia:sm_90")
    detect.cache_clear()
    width = 64 if stored == torch.uint8 else 128
    cache = torch.empty(9, 16, 2, width, dtype=stored, device="meta")
    scales = torch.empty(9, 16, 2, device="meta")
    q = torch.empty(64, 4, 128, dtype=torch.bfloat16, device="meta")
    given = {"k_scale_cache": scales, "v_scale_cache": scales, "out": q}
    x = Tensors.of(q=q, k_cache=cache, v_cache=cache, **given)
    try:
        assert takes_hopper(x, ORDINARY._replace(zero_points=zero_points)) == served
    finally:
        detect.cache_clear()


@pytest.mark.eager
@kinds
def test_numbers_with_gaps_in_fp16(kind, device):
    """Those are not read in words, and weights in fp16 are scaled otherwise."""
    case = make(MEDIUM, kind, torch.float16, device)
    moved = {}
    for name in ("k_cache", "v_cache"):
        cache = case.options[name]
        wide = torch.zeros(*cache.shape[:3], 2 * cache.shape[3], dtype=cache.dtype, device=device)
        moved[name] = wide[..., ::2]
        moved[name].copy_(cache)
    want, got = run(case), run(case.with_options(**moved))
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-3)


@pytest.mark.eager
@kinds
def test_new_keys_have_no_scale(kind, device):
    check(make(MEDIUM._replace(dense=True), kind, torch.float16, device, ["sinks"]))


@kinds
@pytest.mark.parametrize("features", [(), ("window",)], ids=str)
def test_splits(features, kind, device):
    problem = Problem(((1, 150), (2, 90)), 4, 2, 24, page=7)
    case = make(problem, kind, torch.bfloat16, device, features)
    check(case.with_options(num_splits=3))


@pytest.mark.eager
@kinds
@pytest.mark.parametrize("size", [1e-8, 1e8])
def test_values_of_any_size(size, kind, device):
    """Weights are rounded with their scale on them, and fp16 holds few numbers of such sizes."""
    case = make(MEDIUM, kind, torch.float16, device, scale_dtype=torch.float32)
    case = case.with_options(num_splits=1)
    scales = case.inputs["v_scale_cache"]
    wide = torch.empty(case.inputs["q"].shape, device=device)
    want = case(out=torch.empty_like(wide))["out"]
    got = case.with_inputs(v_scale_cache=scales * size)(out=wide)["out"] / size
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.eager
@kinds
def test_values_beside_a_scale_that_is_far_larger(kind, device):
    """Of a key of their tile whose own values are 0."""
    case = make(MEDIUM, kind, torch.float16, device, scale_dtype=torch.float32)
    case.options["v_cache"][:, 0] = 0
    scales = case.inputs["v_scale_cache"].clone()
    scales[:, 0] = 1.0
    want = run(case.with_inputs(v_scale_cache=scales))
    scales[:, 0] = 2.0**10
    got = run(case.with_inputs(v_scale_cache=scales))
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-3)


@pytest.mark.eager
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_queries_of_any_size(size, device):
    """Queries in bf16 meet the numbers of a cache in fp16, which knows none of these sizes."""
    case = make(MEDIUM, "int8", torch.bfloat16, device)
    q = (case.inputs["q"].float() * size).bfloat16()
    q[3] = 0.0
    check(case.with_inputs(q=q).with_options(softmax_scale=24**-0.5 / size))


@pytest.mark.eager
@kinds
@pytest.mark.parametrize("view", ["even", "odd", "strided"])
def test_strides_are_free(view, kind, device):
    """Rows that begin between two words, and numbers with gaps."""
    case = make(MEDIUM, kind, torch.float32, device)
    moved = {}
    for name in ("k_cache", "v_cache"):
        cache = case.options[name]
        shape, last = cache.shape[:3], cache.shape[3]
        if view == "strided":
            wide = torch.zeros(*shape, 2 * last, dtype=cache.dtype, device=device)
            moved[name] = wide[..., ::2]
        else:
            gap = 2 if view == "even" else 1
            wide = torch.zeros(*shape, last + 2 + gap, dtype=cache.dtype, device=device)
            moved[name] = wide[..., gap : gap + last]
        moved[name].copy_(cache)
    for name in ("k_scale_cache", "v_scale_cache"):
        scales = case.inputs[name]
        moved[name] = scales.transpose(0, 2).contiguous().transpose(0, 2)
    want, got = run(case), run(case.with_options(**moved))
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)


@pytest.mark.eager
@kinds
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_slots_that_nobody_sees_may_hold_anything(poison, kind, device):
    """Before the first window, behind the end, in pages of nobody; also entries of the table."""
    problem = Problem(((5, 60), (1, 33)), 2, 1, 24, page=7)
    case = make(problem, kind, torch.float16, device).with_options(window_size=(8, 0))
    want = run(case)
    table = case.options["block_table"].clone()
    pages = table[0].tolist()
    changed = {n: case.inputs[n].clone() for n in ("k_scale_cache", "v_scale_cache")}
    for scales in changed.values():
        for key in range(60 - 5 - 8):
            scales[pages[key // 7], key % 7] = poison
        scales[scales.isnan()] = poison
    table[0, : (60 - 5 - 8) // 7] = 2**30
    table[:, -1] = -1
    codes = {}
    for name in ("k_cache", "v_cache"):
        codes[name] = case.options[name].clone()
        codes[name][pages[0]] = 85
    assert_same(run(case.with_inputs(**changed).with_options(block_table=table, **codes)), want)


@pytest.mark.eager
@kinds
def test_a_scale_that_is_nan_reaches_the_rows_that_see_it(kind, device):
    problem = Problem(((33, 33),), 1, 1, 24, page=8)
    case = make(problem, kind, torch.float32, device, ["window"])
    scales = case.inputs["k_scale_cache"].clone()
    scales[case.options["block_table"][0, 2], 4] = float("nan")  # key 20
    got = run(case.with_inputs(k_scale_cache=scales))
    rows = torch.arange(33, device=device)
    assert torch.equal(got["lse"][0].isnan(), (rows >= 20) & (rows - 9 <= 20))


@pytest.mark.eager
@kinds
def test_a_shared_prefix(kind, device):
    case = make(MEDIUM, kind, torch.float16, device)
    pages = case.options["block_table"][0, :2]
    shared = {"shared_pages": pages, "shared_len": 14}
    given = {**case.inputs, **case.options}
    got = shared_prefix_attn_func(**given, **shared)
    table = torch.cat([pages.expand(3, -1), given["block_table"]], 1)
    longer = {"block_table": table, "seqlens_k": given["seqlens_k"] + 14, "max_seqlen_k": 50}
    want = run_oracle(case.with_options(**longer))
    eager = run_eager(case.with_options(**longer), want)
    assert_no_worse_than_eager("out", got, eager["out"], want["out"])


@pytest.mark.eager
@kinds
def test_fp8_queries(kind, device):
    """Queries of e4m3 beside codes: both are widened."""
    case = make(MEDIUM, kind, torch.bfloat16, device)
    q = case.inputs["q"].to(torch.float8_e4m3fn)
    got, want = run(case.with_inputs(q=q)), run_oracle(case.with_inputs(q=q))
    eager = run_eager(case.with_inputs(q=q.bfloat16()), want)
    for name, value in got.items():
        assert_no_worse_than_eager(name, value, eager[name], want[name])


@pytest.mark.eager
def test_the_first_of_two_numbers_lies_in_the_low_bits():
    codes = torch.tensor([[0x8F, 0x70]], dtype=torch.uint8)
    assert unpacked(codes).tolist() == [[-1, -8, 0, 7]]


@pytest.mark.eager
@kinds
def test_the_same_bits_whatever_shares_the_batch(kind, device):
    case = make(MEDIUM, kind, torch.bfloat16, device).with_options(num_splits=1)
    want = run(case)
    one = {
        "block_table": case.options["block_table"][1:2],
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32, device=device),
        "seqlens_k": case.options["seqlens_k"][1:2],
    }
    got = run(case.with_inputs(q=case.inputs["q"][17:18]).with_options(**one))
    assert torch.equal(got["out"], want["out"][17:18])


PRODUCT = list(
    itertools.product(["int8", "int4", "fp8"], PAGES, ((32, 8), (8, 8), (64, 8), (10, 2)), FEATURES)
)


@pytest.mark.device
@pytest.mark.parametrize(("kind", "page", "heads", "features"), PRODUCT, ids=str)
def test_product_at_length(kind, page, heads, features, device):
    problem = Problem(((1, 1300), (70, 600), (3, 40), (1, 17)), *heads, 128, page=page)
    if kind == "fp8":
        check(make_case(problem, torch.bfloat16, device, features, cache_dtype=torch.float8_e4m3fn))
    else:
        check(make(problem, kind, torch.bfloat16, device, features))


@pytest.mark.device
@kinds
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 80, 256])
def test_head_dims_at_length(head_dim, dtype, kind, device):
    problem = Problem(
        ((1, 1300), (70, 600), (3, 40)), 8, 2, head_dim, dense=dtype != torch.bfloat16
    )
    check(make(problem, kind, dtype, device))
    check(make(problem._replace(dense=False), kind, dtype, device).with_options(num_splits=4))


@pytest.mark.device
@kinds
def test_a_graph_of_writing_and_reading(kind, device):
    from prefix_prefill import reshape_and_cache

    case = make(Problem(((1, 500), (1, 70)), 8, 2, 128), kind, torch.bfloat16, device)
    k, v = (torch.randn(2, 2, 128, dtype=torch.bfloat16, device=device) for _ in "kv")
    last = case.options["seqlens_k"].long() - 1
    slots = (
        case.options["block_table"].long().gather(1, (last // 16)[:, None])[:, 0] * 16 + last % 16
    )
    given = {**case.inputs, **case.options}
    scales = {n: given[n] for n in ("k_scale_cache", "v_scale_cache")}

    def step():
        reshape_and_cache(k, v, given["k_cache"], given["v_cache"], slots, kv_dtype=kind, **scales)
        return paged_attn_func(**given)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    m = Maker(device, torch.bfloat16, 3)
    for _ in range(2):
        k.copy_(m.randn(2, 2, 128))
        v.copy_(m.randn(2, 2, 128))
        graph.replay()
        got = out.clone()
        assert torch.equal(got, step())
