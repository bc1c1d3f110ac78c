"""Values with a head dimension of their own: attention to them, and writing them into caches."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from attn_common import detect, fp8_dtype
from prefix_prefill import (
    paged_attention_reference,
    paged_attn_func,
    reshape_and_cache,
    shared_prefix_attn_func,
    validate_paged,
)
from prefix_prefill._cache.kernels.addressing import has_narrow_words
from prefix_prefill._paged import tiles as paged_tiles
from prefix_prefill._paged.call import ORDINARY, Tensors
from prefix_prefill._paged.launch import AttentionPlan
from prefix_prefill._paged.reference import quantised, unpacked
from prefix_prefill._paged.tiles import choose_splits, long_tile, short_tile
from torch import Tensor
from torch.library import opcheck
from torch.nn.functional import scaled_dot_product_attention

from .._dropin import BOTH, judge
from .._linked.budget import Maker, assert_no_worse_than_eager, assert_same
from .._linked.gpus import absent_gpu, recording
from .._numerics import (
    PACKED,
    Problem,
    check,
    in_layout,
    make_case,
    run,
    run_eager,
    run_oracle,
)
from ..kvcache import _kvcache, test_kvcache_quantised
from ..kvcache._kvcache import Call
from . import test_operators
from ._quantised import quantise
from ._reference import bias_of, rows_of

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CPU = torch.device("cpu")
LENGTHS = ((17, 36), (1, 21), (3, 9))
MEDIUM = Problem(LENGTHS, 4, 2, 24, page=7, head_dim_v=40)
NARROW = MEDIUM._replace(head_dim=40, head_dim_v=16)

# ---- the definition


@pytest.mark.eager
@pytest.mark.parametrize("layout", ["nhd", PACKED])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("feature", [(), ("window",), ("alibi",)], ids=str)
@pytest.mark.parametrize("problem", [MEDIUM, NARROW], ids=str)
def test_the_definition_agrees_with_torch(problem, feature, dense, layout):
    problem = problem._replace(dense=dense, layout=layout)
    case = make_case(problem, torch.float64, CPU, feature)
    out = paged_attention_reference(**case.inputs, **case.options)
    assert out.shape == (21, 4, problem.head_dim_v)
    for b, (queries, keys) in enumerate(LENGTHS):
        q, k, v, rows = rows_of(case, problem, b)
        bias = bias_of(case, queries, keys, 4, b)
        want = scaled_dot_product_attention(q[None], k[None], v[None], bias[None], enable_gqa=True)
        torch.testing.assert_close(out[rows].transpose(0, 1), want[0], rtol=1e-12, atol=1e-12)


# ---- attention

WIDE = ((17, 20), (1, 33))
CASES = [
    (Problem(WIDE, 4, 2, 64, page=16, head_dim_v=128), BF16, ("window",)),
    (Problem(WIDE, 2, 2, 192, page=48, head_dim_v=128), F16, ("sinks",)),
    (Problem(WIDE, 5, 1, 96, page=1, head_dim_v=40), F32, ("softcap", "window", "sinks")),
    (Problem(WIDE, 2, 1, 320, page=16, head_dim_v=64), BF16, ("split",)),
    (Problem(WIDE, 2, 1, 64, page=16, head_dim_v=512), F16, ("split", "window")),
    (Problem(WIDE, 4, 2, 96, page=16, layout=PACKED, head_dim_v=40), BF16, ("softcap",)),
    (Problem(WIDE, 4, 2, 64, page=48, layout=PACKED, head_dim_v=128), F32, ("split", "sinks")),
    (Problem(WIDE, 4, 2, 40, 7, dense=True, padding=2, head_dim_v=96), BF16, ("window", "split")),
    (Problem(WIDE, 4, 1, 192, dense=True, layout=PACKED, head_dim_v=128), F16, ("sinks",)),
    (Problem(WIDE, 4, 2, 16, page=1, dense=True, padding=3, head_dim_v=8), F32, ("alibi_batch",)),
]


@pytest.mark.eager
@pytest.mark.parametrize(("problem", "dtype", "features"), CASES, ids=str)
def test_matches_reference(problem, dtype, features, device):
    got = check(make_case(problem, dtype, device, features))
    assert got["out"].shape == (problem.tokens, problem.heads_q, problem.head_dim_v)
    assert got["out"].is_contiguous()


@pytest.mark.eager
@pytest.mark.parametrize("problem", [MEDIUM, NARROW._replace(dense=True)], ids=str)
def test_what_each_token_sees_of_a_tree(problem, device):
    problem = problem._replace(lengths=((5, 20), (1, 9), (9, 30)))
    rows = [1 << i | 1 << i // 2 | 1 for queries in problem.queries for i in range(queries)]
    mask = torch.tensor(rows, dtype=torch.int64, device=device)
    check(make_case(problem, F32, device, ["window"]).with_options(tree_mask=mask))


@pytest.mark.eager
@pytest.mark.parametrize("layout", ["nhd", PACKED])
@pytest.mark.parametrize("problem", [MEDIUM, NARROW._replace(dense=True)], ids=str)
def test_fp8_caches(problem, layout, device):
    platform = detect(device)
    if not platform.supports_fp8:
        pytest.skip(f"{platform} has no FP8")
    cache = getattr(torch, fp8_dtype(platform))
    problem = problem._replace(layout=layout)
    check(make_case(problem, F16, device, ["split"], cache_dtype=cache))


@pytest.mark.eager
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(
    ("problem", "dtype", "features"),
    [
        (MEDIUM, BF16, ("window", "sinks")),
        (NARROW, F16, ("split",)),
        (NARROW._replace(dense=True), F32, ("softcap",)),
        (MEDIUM._replace(head_dim=64, head_dim_v=128, page=16), F16, ()),
    ],
    ids=str,
)
def test_quantised_caches(problem, dtype, features, kind, device):
    check(quantise(make_case(problem, dtype, device, features), kind))


@pytest.mark.eager
@pytest.mark.parametrize("queries", ["alone", "beside new keys"])
def test_fp8_queries(queries, device):
    platform = detect(device)
    if not platform.supports_fp8:
        pytest.skip(f"{platform} has no FP8")
    problem = NARROW._replace(dense=queries != "alone")
    case = make_case(problem, BF16, device)
    q = case.inputs["q"].to(getattr(torch, fp8_dtype(platform)))
    got = run(case.with_inputs(q=q))
    want = run_oracle(case.with_inputs(q=q))
    eager = run_eager(case.with_inputs(q=q.bfloat16()), want)
    assert got["out"].dtype == BF16
    for name, value in got.items():
        assert_no_worse_than_eager(name, value, eager[name], want[name])


@pytest.mark.eager
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("problem", [MEDIUM, NARROW], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_what_lies_behind_a_value_is_not_read(problem, dense, poison, splits, device):
    """Keys and values as parts of wider rows, as many columns as a tile has; nor is it written."""
    case = make_case(problem._replace(dense=dense), F32, device).with_options(num_splits=splits)
    framed = {name: framed_in(t, poison) for name, t in case.inputs.items()}
    frame = torch.full((21, 4, 128), 7.0, device=device)
    out = frame[..., : problem.head_dim_v]
    got = case.with_inputs(**framed)(out=out)
    assert got["out"] is out
    assert (frame[..., problem.head_dim_v :] == 7.0).all()
    assert_same(got, run(case))


def framed_in(x: Tensor, poison: float, size: int = 128) -> Tensor:
    """Return the same numbers as the first columns of rows of ``size``."""
    wide = x.new_full((*x.shape[:-1], size), poison)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


@pytest.mark.eager
@pytest.mark.parametrize("problem", [MEDIUM, NARROW], ids=str)
def test_values_are_computed_one_by_one(problem, device):
    """The first columns of values have the results that they have without the others."""
    case = make_case(problem, F32, device)
    half = problem.head_dim_v // 2 // 8 * 8
    want = run(case)
    got = run(case.with_inputs(v_cache=case.inputs["v_cache"][..., :half]))
    torch.testing.assert_close(got["out"], want["out"][..., :half], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got["lse"], want["lse"], rtol=1e-6, atol=1e-6)


@pytest.mark.eager
@pytest.mark.parametrize("layout", ["nhd", PACKED])
@pytest.mark.parametrize("problem", [MEDIUM, NARROW], ids=str)
def test_invariant_calls_have_the_bits_of_any_chunk(problem, layout, device):
    problem = problem._replace(lengths=((40, 40),), layout=layout)
    case = make_case(problem, F16, device)
    oracle = run_oracle(case)
    eager = run_eager(case, oracle)
    case = case.with_options(invariant=True)
    whole = run(case)
    for name, value in whole.items():
        assert_no_worse_than_eager(name, value, eager[name], oracle[name])
    for first, last in ((0, 17), (17, 18), (18, 40)):
        part = case.with_inputs(q=case.inputs["q"][first:last]).with_options(
            cu_seqlens_q=torch.tensor([0, last - first], dtype=torch.int32, device=device),
            seqlens_k=torch.tensor([last], dtype=torch.int32, device=device),
        )
        got = run(part)
        assert torch.equal(got["out"], whole["out"][first:last])
        assert torch.equal(got["lse"], whole["lse"][:, first:last])


@pytest.mark.eager
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("problem", [MEDIUM, NARROW], ids=str)
def test_a_shared_prefix(problem, dense, device):
    case = make_case(
        problem._replace(lengths=((17, 50), (1, 35), (3, 23)), dense=dense), F32, device
    )
    table = case.options["block_table"]
    table[:, :2] = table[:1, :2]
    got = shared_prefix_attn_func(
        **case.inputs,
        **case.options
        | {
            "block_table": table[:, 2:],
            "seqlens_k": case.options["seqlens_k"] - 14,
            "max_seqlen_k": case.options["max_seqlen_k"] - 14,
        },
        shared_pages=table[0, :2].clone(),
        shared_len=14,
        return_lse=True,
    )
    oracle = run_oracle(case)
    eager = run_eager(case, oracle)
    for name, value in zip(("out", "lse"), got, strict=True):
        assert_no_worse_than_eager(name, value, eager[name], oracle[name])


@BOTH
@pytest.mark.eager
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("layout", ["nhd", PACKED])
def test_drop_ins(function, layout, dense, device):
    problem = NARROW._replace(layout=layout, dense=dense)
    judge(function, make_case(problem, F16, device), problem)


# ---- a cache that the call appends to

ROWS = Call(head_dim=24, head_dim_v=40)
CALLS = [
    (ROWS._replace(rotary=12), {"causal": True}),
    (ROWS._replace(page=7, head_dim=40, head_dim_v=16, rotary=16), {"window_size": (6, 2)}),
    (ROWS._replace(lengths=(33, 16), pads=(1, 16), rows=(2, 0), head_dim_v=8), {"softcap": 1.5}),
    (ROWS._replace(lengths=(40,), slots=150, queries=1, new=90), {"num_splits": 3}),
    (ROWS._replace(page=16, heads_q=2, heads_k=1, head_dim=192, head_dim_v=128), {}),
    (ROWS._replace(head_dim_v=16), {"causal": True, "invariant": True}),
]


@pytest.mark.eager
@pytest.mark.parametrize(("call", "options"), CALLS, ids=str)
def test_a_cache_that_a_call_appends_to(call, options, device):
    _kvcache.check(call, F32, device, **options)


@pytest.mark.eager
@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (ROWS._replace(rotary=12), "int8"),
        (ROWS._replace(page=7, head_dim=40, head_dim_v=16), "int4"),
        (ROWS, "int4"),
    ],
    ids=str,
)
def test_a_quantised_cache_that_a_call_appends_to(call, kind, device):
    test_kvcache_quantised.check(call, kind, F16, device, causal=True)


# ---- writing


@pytest.mark.eager
@pytest.mark.parametrize("layout", ["nhd", PACKED])
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("d", "dv"), [(24, 40), (64, 16)])
def test_every_token_goes_to_its_slot(d, dv, dtype, layout, device):
    """Behind a value of a row, and in slots of no token, the cache stays as it is."""
    if dtype.itemsize == 1:
        platform = detect(device)
        if not platform.supports_fp8:
            pytest.skip(f"{platform} has no FP8")
        dtype = getattr(torch, fp8_dtype(platform))
    m = Maker(device, F32 if dtype.itemsize == 1 else dtype)
    # as the cache holds them: the interpreter rounds FP8 otherwise
    new = {n: m.randn(9, 2, width).to(dtype).to(m.dtype) for n, width in (("k", d), ("v", dv))}
    slots = torch.tensor([3, 29, 0, -1, 7, 8, 12, 20, 21], device=device)
    shapes = {name: (6, 5, 2, x.shape[2]) for name, x in new.items()}
    caches = {
        n: in_layout(torch.full(shape, 7.0).to(dtype), layout, n).to(device, copy=True)
        for n, shape in shapes.items()
    }
    reshape_and_cache(*new.values(), *caches.values(), slots)
    for name, x in new.items():
        want = torch.full(shapes[name], 7.0).to(dtype).float()
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                want[slot // 5, slot % 5] = x[token].to(dtype).float().cpu()
        found = caches[name].float().cpu()
        if layout == PACKED:
            found = (
                found.permute(0, 3, 1, 2, 4).flatten(3)
                if name == "k"
                else found.permute(0, 3, 1, 2)
            )
        assert torch.equal(found, want)


@pytest.mark.eager
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(("d", "dv"), [(24, 40), (64, 16)])
def test_codes_of_keys_and_values(d, dv, kind, device):
    largest, of_byte = (127, 1) if kind == "int8" else (7, 2)
    stored = torch.int8 if kind == "int8" else torch.uint8
    m = Maker(device, F32)
    new = {"k": m.randn(9, 2, d), "v": m.randn(9, 2, dv)}
    slots = torch.tensor([3, 29, 0, -1, 7, 8, 12, 20, 21], device=device)
    caches = {
        f"{n}_cache": torch.full((6, 5, 2, x.shape[2] // of_byte), 5, dtype=stored, device=device)
        for n, x in new.items()
    }
    scales = {f"{n}_scale_cache": torch.full((6, 5, 2), 3.0, device=device) for n in "kv"}
    reshape_and_cache(**new, **caches, slot_mapping=slots, kv_dtype=kind, **scales)
    for name, x in new.items():
        codes, factors = quantised(x, largest, F32)
        want, of_rows = torch.full_like(caches[f"{name}_cache"], 5), torch.full((6, 5, 2), 3.0)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                want[slot // 5, slot % 5] = codes[token]
                of_rows[slot // 5, slot % 5] = factors[token].cpu()
        assert torch.equal(unpacked(caches[f"{name}_cache"]), unpacked(want))
        torch.testing.assert_close(scales[f"{name}_scale_cache"].cpu(), of_rows)


# ---- operators, plans


@pytest.mark.eager
@pytest.mark.parametrize("problem", [MEDIUM, NARROW._replace(dense=True)], ids=str)
def test_the_operator_passes_opcheck(problem, device):
    case = make_case(problem, F32, device)
    clean = case.with_inputs(**{name: t.nan_to_num(0.0) for name, t in case.inputs.items()})
    arguments = list(test_operators.operator_arguments(clean))
    arguments[18] = torch.zeros(21, 4, problem.head_dim_v, device=device)
    opcheck(test_operators.ops.attention, tuple(arguments), test_utils=test_operators.UTILS)


@test_operators.traced_alike
@pytest.mark.eager
def test_the_output_of_a_traced_call_has_the_shape_of_the_real_one(device):
    case = make_case(MEDIUM, F32, device)
    given = {**case.inputs, **case.options}
    torch.compiler.reset()
    compiled = torch.compile(paged_attn_func, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(**given), paged_attn_func(**given))


def tensors_of(problem: Problem, dtype: torch.dtype) -> Tensors:
    case = make_case(problem, dtype, CPU)
    on_meta = {
        n: x.to("meta") if isinstance(x, Tensor) else x
        for n, x in {**case.inputs, **case.options}.items()
    }
    names = ("q", "k_cache", "v_cache", "k", "v", "block_table", "cu_seqlens_q", "seqlens_k")
    out = torch.empty(problem.tokens, problem.heads_q, problem.widths["v"], dtype=dtype)
    return Tensors.of(**{n: on_meta.get(n) for n in names}, out=out.to("meta"))


@pytest.mark.eager
@pytest.mark.parametrize(("d", "dv"), [(64, 128), (192, 128), (320, 64)])
def test_the_wider_of_keys_and_values_chooses_the_tile(d, dv):
    """On Hopper, too, where its own kernel has one width for both."""
    problem = Problem(((300, 900), (1, 500)), 8, 2, d, head_dim_v=dv)
    x = tensors_of(problem, BF16)
    with recording("nvidia:sm_90") as launches:
        plan = AttentionPlan(x, ORDINARY._replace(softmax_scale=0.1, window_right=0))
        plan.run(x, 300, 900)
    assert {launch.kernel for launch in launches} <= {"paged_kernel", "split_merge_kernel"}
    found = [launch.options for launch in launches if launch.kernel == "paged_kernel"]
    with absent_gpu("nvidia:sm_90"):
        platform = detect(x.q.device)
        tiles = [short_tile(platform, max(d, dv), 2, 4), long_tile(platform, max(d, dv), 2)]
    for options, tile in zip(found, tiles, strict=True):
        assert (options["BLOCK_M"], options["BLOCK_N"]) == (tile.block_m, tile.block_n)
        assert (options["HEAD_DIM"], options["HEAD_DIM_V"]) == (d, dv)
        assert (options["BLOCK_D"], options["BLOCK_DV"]) == (
            1 << (d - 1).bit_length(),
            1 << (dv - 1).bit_length(),
        )


@pytest.mark.eager
@pytest.mark.parametrize(("d", "dv"), [(64, 512), (512, 64)])
def test_parts_of_values_fit_their_memory(d, dv, monkeypatch, request):
    row = 4 * (dv + 1)  # and its log-sum-exp
    monkeypatch.setattr(paged_tiles, "_SCRATCH_BYTES", 5 * 16 * row)
    choose_splits.cache_clear()
    request.addfinalizer(choose_splits.cache_clear)
    x = tensors_of(Problem(((1, 4000),), 1, 1, d, page=16, head_dim_v=dv), BF16)
    with recording("nvidia:sm_90") as launches:
        AttentionPlan(x, ORDINARY._replace(softmax_scale=0.1, window_right=0)).run(x, 1, 4000)
    assert launches[0].kernel == "paged_kernel"
    assert math.prod(launches[0].grid) == 5 + 1  # splits, and a program that clears padding


# ---- errors


def given(**changes: Any) -> dict[str, Any]:
    case = make_case(MEDIUM._replace(dense=True), F16, CPU)
    return {**case.inputs, **case.options, **changes}


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=F16)


RANGE = "head_dim of v_cache must be a multiple of 8 from 8 to 512, got "
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "new values": (
        {"v": zeros(21, 2, 24)},
        "v must be [tokens, heads_k, head_dim_v], [21, 2, 40], got [21, 2, 24]",
    ),
    "new keys": (
        {"k": zeros(21, 2, 40)},
        "k must be [tokens, heads_k, head_dim], [21, 2, 24], got [21, 2, 40]",
    ),
    "36": ({"v_cache": zeros(6, 7, 2, 36)}, RANGE + "36"),
    "520": ({"v_cache": zeros(6, 7, 2, 520)}, RANGE + "520"),
    "0": ({"v_cache": zeros(6, 7, 2, 0)}, RANGE + "0"),
    "heads": (
        {"v_cache": zeros(6, 7, 1, 40)},
        "v_cache must be [num_blocks, block_size, heads_k, head_dim_v], [6, 7, 2, head_dim_v], "
        "got [6, 7, 1, 40]",
    ),
}


@pytest.mark.eager
@pytest.mark.parametrize("function", [paged_attn_func, validate_paged], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", WRONG)
def test_errors(name, function):
    changes, message = WRONG[name]
    caches = {"k_cache": zeros(6, 7, 2, 24), "v_cache": zeros(6, 7, 2, 40)}
    with pytest.raises(ValueError, match=re.escape(message)):
        function(**given(**{**caches, **changes}))


@pytest.mark.eager
@pytest.mark.parametrize("name", ["k", "v"])
def test_vectors_of_no_numbers_are_not_written(name):
    new = {n: zeros(9, 2, 0 if n == name else 24) for n in "kv"}
    caches = {f"{n}_cache": zeros(6, 7, 2, x.shape[2]) for n, x in new.items()}
    message = f"{name}_cache must have a head_dim of at least 1, got [6, 7, 2, 0]"
    with pytest.raises(ValueError, match=re.escape(message)):
        reshape_and_cache(**new, **caches, slot_mapping=torch.arange(9))


@pytest.mark.eager
def test_an_output_as_wide_as_the_queries_is_refused():
    message = "out must be [tokens, heads_q, head_dim_v], [21, 4, 40], got [21, 4, 24]"
    with pytest.raises(ValueError, match=re.escape(message)):
        paged_attn_func(**given(out=zeros(21, 4, 24)))


@pytest.mark.eager
def test_invariant_calls_are_refused_beyond_its_law():
    case = make_case(Problem(((3, 9),), 2, 1, 64, head_dim_v=264), F16, CPU)
    with pytest.raises(NotImplementedError, match="head_dim of v_cache must be at most 256 beside"):
        case(invariant=True)


@pytest.mark.eager
def test_a_known_form_does_not_hide_another_width_of_values(device):
    for width in (40, 16, 24, 40):
        case = make_case(MEDIUM._replace(head_dim_v=width), F32, device)
        assert run(case)["out"].shape[2] == width


# bytes of a row, which holds half as many numbers of int4, and twice as many of fp16
@pytest.mark.eager
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, F16], ids=str)
@pytest.mark.parametrize(("of_key", "of_value"), [(32, 16), (40, 16), (32, 24)])
def test_which_caches_are_read_in_narrow_words(of_key, of_value, dtype):
    q = torch.zeros(3, 4, of_key * (2 if dtype == torch.uint8 else 1), dtype=F16)
    caches = (torch.zeros(5, 7, 2, n, dtype=dtype) for n in (of_key, of_value))
    x = Tensors.of(q=q, **dict(zip(("k_cache", "v_cache"), caches, strict=True)))
    assert has_narrow_words(x) == (dtype != F16 and (of_key % 16 or of_value % 16) != 0)
