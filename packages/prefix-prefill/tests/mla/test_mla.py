"""Multi-head latent attention: numbers, pages, FP8, what goes where, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from prefix_prefill import (
    mla_attention_reference,
    mla_attn_func,
    mla_cache_write,
    paged_attention_reference,
)
from prefix_prefill._linked.host.forms import Memory
from prefix_prefill._mla import api
from prefix_prefill._mla import ops as mla_ops
from prefix_prefill._paged import ops as paged_ops
from torch import Tensor
from torch.library import opcheck

from .._linked.budget import assert_same
from .._linked.views import VIEWS
from ._mla import NAN, Case, Problem, check, make_case, reference

pytestmark = pytest.mark.eager

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
CAUSAL = [(torch.float16, True), (torch.bfloat16, False), (torch.float32, True)]
STORED = [("e4m3", torch.float16), ("uint8", torch.bfloat16), ("e5m2", torch.float32)]
# tails, one token, no query, no key, more queries than keys
LENGTHS = ((3, 37), (1, 20), (0, 5), (2, 0), (5, 3), (1, 64))
SMALL = Problem(((2, 21), (1, 9)), 4, 5, 72, 64)
PROBLEMS = [
    Problem(LENGTHS, 16, 16, padding=2),
    Problem(((1, 70), (2, 17)), 128, 64),
    Problem(LENGTHS, 3, 1, 40, 24),
    Problem(((1, 50), (7, 7)), 5, 48, 64, 64),
    Problem((), 4, 16, padding=2),
    Problem(((0, 3),), 4, 16),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_matches_reference(problem, device):
    check(make_case(problem, torch.bfloat16, device))


@pytest.mark.parametrize(
    ("dtype", "causal"), list(zip(DTYPES, [True, False, True], strict=True)), ids=str
)
def test_dtypes_splits_and_masks(dtype, causal, device):
    case = make_case(Problem(((4, 90), (1, 30), (2, 1)), 8, 16), dtype, device, causal=causal)
    check(case, num_splits=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_definition_is_that_of_paged_attention(dtype):
    """One head of keys, whose first columns are the values."""
    case = make_case(Problem(LENGTHS, 6, 7, 40, 24, padding=3), dtype, "cpu")
    table = {n: x for n, x in case.options.items() if n != "head_dim_v"}
    cache = case.inputs["kv_cache"][:, :, None]
    want, lse = paged_attention_reference(case.inputs["q"], cache, cache, **table, return_lse=True)
    got = reference(case)
    torch.testing.assert_close(got["out"], want[..., :24])
    torch.testing.assert_close(got["lse"], lse)


def test_the_scale_is_that_of_whole_keys(device):
    case = make_case(SMALL, torch.float32, device)
    want = case(softmax_scale=72**-0.5)
    assert_same(case(softmax_scale=None), want)
    assert_same(check(case.with_options(softmax_scale=0.0)), case(softmax_scale=0.0))
    check(case.with_options(softmax_scale=-0.1))


def test_results_go_where_they_are_wanted(device):
    case = make_case(SMALL._replace(padding=2), torch.float16, device)
    want = case()
    assert want["lse"].dtype == torch.float32
    assert not want["out"][3:].any()
    assert (want["lse"][:, 3:] == -torch.inf).all()
    assert_same({"out": mla_attn_func(**case.inputs, **case.options)}, {"out": want["out"]})
    for view in sorted(VIEWS):
        out = VIEWS[view](torch.full_like(want["out"], 7.0))
        assert case(out=out)["out"] is out
        assert torch.equal(out, want["out"]), view
    wide = torch.empty(want["out"].shape, device=device)
    torch.testing.assert_close(case(out=wide)["out"].half(), want["out"], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("view", sorted(VIEWS))
def test_strides_change_no_bit(view, device):
    case = make_case(SMALL, torch.float32, device)
    want = case()
    for name, x in case.inputs.items():
        assert_same(case.with_inputs(**{name: VIEWS[view](x)})(), want, name)


def test_integers_of_64_bits(device):
    case = make_case(SMALL, torch.float32, device)
    wide = {n: case.options[n].long() for n in ("block_table", "cu_seqlens_q", "seqlens_k")}
    assert_same(case.with_options(**wide)(), case())


def test_a_sequence_alone_has_the_same_bits(device):
    case = make_case(Problem(((3, 37), (1, 20), (2, 60)), 4, 16, 72, 64), torch.float32, device)
    want = case(num_splits=1)
    alone = case.with_inputs(q=case.inputs["q"][3:4]).with_options(
        block_table=case.options["block_table"][1:2],
        cu_seqlens_q=case.options["cu_seqlens_q"][:2] // 3,
        seqlens_k=case.options["seqlens_k"][1:2],
    )
    got = alone(num_splits=1)
    assert torch.equal(got["out"], want["out"][3:4])
    assert torch.equal(got["lse"], want["lse"][:, 3:4])


def fp8_of(case: Case, dtype: torch.dtype, names: tuple[str, ...]) -> Case:
    return case.with_inputs(**{n: case.inputs[n].to(dtype) for n in names})


@pytest.mark.parametrize(
    ("stored", "dtype"), list(zip(["e4m3", "uint8", "e5m2"], DTYPES, strict=True)), ids=str
)
def test_fp8_cache(stored, dtype, device):
    case = make_case(Problem(((3, 37), (1, 20)), 8, 16), dtype, device)
    kind = torch.float8_e5m2 if stored == "e5m2" else torch.float8_e4m3fn
    case = fp8_of(case, kind, ("kv_cache",)).with_options(
        kv_descale=torch.full((1,), 0.5, device=device)
    )
    got = check(case)
    if stored == "uint8":
        view = case.inputs["kv_cache"].view(torch.uint8)
        assert_same(case.with_inputs(kv_cache=view)(), got)
    assert not torch.equal(case(kv_descale=None)["out"], got["out"])


@pytest.mark.parametrize("names", [("q",), ("q", "kv_cache")], ids=["cache16", "cache8"])
def test_fp8_queries(names, device):
    case = make_case(Problem(((3, 37), (1, 20)), 8, 16), torch.bfloat16, device)
    case = fp8_of(case, torch.float8_e4m3fn, names)
    case = case.with_options(q_descale=torch.full((), 1.5, device=device))
    got = check(case)
    assert got["out"].dtype == torch.bfloat16


# ---- writing


@pytest.mark.parametrize("page", [1, 16, 48, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_token_goes_to_its_slot(dtype, page, device):
    m = torch.Generator().manual_seed(0)
    kv_c, k_pe = (torch.randn(23, d, generator=m).to(device, dtype) for d in (512, 64))
    cache = torch.full((-(-30 // page), page, 576), 7.0, dtype=dtype, device=device)
    want = cache.clone().view(-1, 576)
    slots = torch.randperm(30, generator=m)[:21]
    slots[[3, 20]] = -1
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[slot] = torch.cat([kv_c[t], k_pe[t]])
    mla_cache_write(kv_c, k_pe, cache, slots.to(device))
    assert torch.equal(cache.view(-1, 576), want)
    strided = torch.full((2, *cache.shape), 7.0, dtype=dtype, device=device).permute(1, 2, 0, 3)
    wide = torch.cat([kv_c, k_pe], 1)
    pair = wide[:, :512], wide[:, 512:]
    mla_cache_write(*pair, strided[:, :, 1], slots.to(device, torch.int32))
    assert torch.equal(strided[:, :, 1].reshape(-1, 576), want)
    assert (strided[:, :, 0] == 7.0).all()


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8], ids=str)
def test_fp8_scales_and_saturates(stored, device):
    m = torch.Generator().manual_seed(0)
    # whole numbers that every format holds: the interpreter rounds to FP8 in its own way
    kv_c = torch.randint(-8, 9, (5, 64), generator=m).to(device) / 4
    kv_c[0, 0], kv_c[1, 1] = 1e6, -1e6
    k_pe = torch.randint(-8, 9, (5, 8), generator=m).to(device) / 4
    cache = torch.zeros(2, 4, 72, dtype=stored, device=device)
    scale = torch.full((1,), 0.25, device=device)
    mla_cache_write(kv_c, k_pe, cache, torch.arange(5, device=device), scale=scale)
    kind = torch.float8_e4m3fn if stored == torch.uint8 else stored
    limit = torch.finfo(kind).max
    want = (torch.cat([kv_c, k_pe], 1) / 0.25).clamp(-limit, limit).to(kind)
    got = cache.view(kind).view(-1, 72)
    assert torch.equal(got[:5].view(torch.uint8), want.view(torch.uint8))
    assert not got[5:].view(torch.uint8).any()


# ---- the operators


def operator_arguments(case: Case) -> tuple[Any, ...]:
    given = {**case.inputs, **case.options}
    q = given["q"]
    names = ("q", "kv_cache", "block_table", "cu_seqlens_q", "seqlens_k", "q_descale", "kv_descale")
    out = torch.zeros(*q.shape[:2], given["head_dim_v"], device=q.device)
    lse = torch.zeros(q.shape[1], q.shape[0], device=q.device)
    bounds = given["max_seqlen_q"], given["max_seqlen_k"]
    return (*(given.get(name) for name in names), out, lse, *bounds, 0.25, True, 0)


def test_operators_pass_opcheck(device):
    case = make_case(SMALL, torch.float32, device)
    # the schema test compares what was not to be written, and NaN differs from itself
    clean = case.with_inputs(kv_cache=case.inputs["kv_cache"].nan_to_num(0.0))
    utils = ("test_schema", "test_faketensor")
    opcheck(mla_ops.mla_attention, operator_arguments(clean), test_utils=utils)
    new = [torch.randn(4, d, device=device) for d in (64, 8)]
    slots = torch.tensor([3, -1, 0, 7], device=device)
    cache = clean.inputs["kv_cache"]
    opcheck(mla_ops.mla_cache_write, (*new, cache, slots, None), test_utils=utils)


@pytest.mark.skipif(paged_ops.interpreted(), reason="tracing sees the operators alone")
def test_a_step_of_an_engine_compiles_once_for_all_lengths(device):
    def step(kv_c, k_pe, slots, q, kv_cache, table, starts, lengths, max_q, max_k):
        mla_cache_write(kv_c, k_pe, kv_cache, slots)
        out, lse = mla_attn_func(
            q * 2, kv_cache, table, starts, lengths, max_q, max_k, head_dim_v=64, return_lse=True
        )
        return out + 1, lse

    torch.compiler.reset()
    fast = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    names = ("block_table", "cu_seqlens_q", "seqlens_k", "max_seqlen_q", "max_seqlen_k")
    # sizes that agree by chance would be taken as one
    first = ((5, 31), (1, 9))
    for lengths in (first, ((2, 8), (7, 7), (1, 41))):
        case = make_case(Problem(lengths, 10, 4, 80, 64), torch.float32, device)
        cache = case.inputs["kv_cache"].nan_to_num(0.0)
        new = [torch.randn(len(lengths) + 5, d, device=device) for d in (64, 16)]
        slots = torch.arange(len(lengths) + 5, device=device)
        rest = [case.options[name] for name in names]
        caches = [cache.clone() for _ in range(2)]
        with torch._dynamo.config.patch(error_on_recompile=lengths != first):
            got = fast(*new, slots, case.inputs["q"], caches[0], *rest)
        want = step(*new, slots, case.inputs["q"], caches[1], *rest)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)
        assert torch.equal(*caches)
    torch.compiler.reset()


def test_a_form_is_checked_once(device, monkeypatch):
    monkeypatch.setattr(api, "_known", Memory())
    seen = []
    monkeypatch.setattr(api, "check_mla", lambda *given: seen.append(given))
    case = make_case(SMALL, torch.float32, device)
    first = case()
    assert_same(case(), first)
    assert len(seen) == 1
    case(causal=False)
    assert len(seen) == 2


# ---- what is refused

ONE = torch.ones(1)


def wrong(**changes: Any) -> dict[str, Any]:
    return changes


ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (wrong(q=3), TypeError, "q must be a torch.Tensor, got int"),
    (wrong(kv_cache=None), TypeError, "kv_cache must be a torch.Tensor, got None"),
    (wrong(q=torch.zeros(3, 4, 72, dtype=torch.int32)), TypeError, "q must be torch.float16"),
    (wrong(q=torch.zeros(3, 4, 72).double()), TypeError, "mla_attention_reference takes"),
    (wrong(q=torch.zeros(3, 72)), ValueError, "q must be [tokens, heads, head_dim], got [3, 72]"),
    (wrong(q=torch.zeros(3, 4, 64)), ValueError, "must be that of q, 64, got 72"),
    (wrong(kv_cache=torch.zeros(9, 5, 1, 72)), ValueError, "kv_cache must be [num_blocks, "),
    (wrong(kv_cache=torch.zeros(9, 5, 72).half()), TypeError, "kv_cache must have the dtype of q"),
    (wrong(head_dim_v=73), ValueError, "head_dim_v must be from 1 to the head_dim of q, 72"),
    (wrong(head_dim_v=60), NotImplementedError, "head_dim_v must be a multiple of 8 up to 512"),
    (wrong(head_dim_v=64.0), TypeError, "head_dim_v must be an int, got float"),
    (wrong(head_dim_v=8, q=torch.zeros(3, 4, 80), kv_cache=torch.zeros(9, 5, 80)),
     NotImplementedError, "up to 64 more, got 80"),
    (wrong(block_table=torch.zeros(2, 3)), TypeError, "block_table must be torch.int32 or"),
    (wrong(seqlens_k=torch.zeros(3).int()), ValueError, "seqlens_k must be [2], got [3]"),
    (wrong(seqlens_k=torch.tensor([21, 60]).int()), ValueError, "seqlens_k[1] must be from 0 to"),
    (wrong(block_table=torch.full((2, 5), 99)), ValueError, "block_table[0, 0] must be from 0"),
    (wrong(cu_seqlens_q=torch.tensor([0, 2, 9]).int()), ValueError, "cu_seqlens_q[2] must be"),
    (wrong(max_seqlen_q=-1), ValueError, "max_seqlen_q must be at least 0, got -1"),
    (wrong(max_seqlen_k="9"), TypeError, "max_seqlen_k must be an int, got str"),
    (wrong(causal=1), TypeError, "causal must be a bool, got int"),
    (wrong(num_splits=2000), ValueError, "num_splits must be from 0 to 1024"),
    (wrong(softmax_scale=float("nan")), ValueError, "softmax_scale must be finite, got nan"),
    (wrong(q_descale=ONE), ValueError, "q_descale must be None unless q is FP8, which is"),
    (wrong(kv_descale=ONE), ValueError, "kv_descale must be None unless kv_cache is FP8"),
    (wrong(out=torch.zeros(3, 4, 72)), ValueError, "out must be [tokens, heads, head_dim_v], "),
    (wrong(out=torch.zeros(3, 4, 64).int()), TypeError, "out must be torch.float16"),
    (wrong(q=torch.zeros(3, 4, 72, requires_grad=True)), NotImplementedError, "has no gradient"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "message"), ERRORS, ids=lambda x: str(x)[:40])
def test_wrong_calls(changes, kind, message):
    case = make_case(SMALL, torch.float32, "cpu")
    with pytest.raises(kind, match=re.escape(message)):
        mla_attn_func(**{**case.inputs, **case.options, **changes})


def test_a_descale_has_one_element():
    case = fp8_of(make_case(SMALL, torch.float32, "cpu"), torch.float8_e4m3fn, ("kv_cache",))
    with pytest.raises(ValueError, match="kv_descale must have one element, got"):
        case(kv_descale=torch.ones(4))


WRITE_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (wrong(kv_c=None), TypeError, "kv_c must be a torch.Tensor, got None"),
    (wrong(k_pe=torch.zeros(5, 8).half()), TypeError, "k_pe must have the dtype of kv_c"),
    (wrong(k_pe=torch.zeros(5, 1, 8)), ValueError, "k_pe must be [tokens, columns]"),
    (wrong(k_pe=torch.zeros(4, 8)), ValueError, "k_pe must have the tokens of kv_c, 5, got"),
    (wrong(kv_cache=torch.zeros(2, 4, 80)), ValueError, "kv_c and k_pe, 64 + 8, got 80"),
    (wrong(kv_cache=torch.zeros(2, 4, 72).half()), TypeError, "must have the dtype of kv_c"),
    (wrong(slot_mapping=torch.zeros(5)), TypeError, "slot_mapping must be torch.int32 or"),
    (wrong(slot_mapping=torch.arange(6)), ValueError, "kv_c has tokens, 5, got 6"),
    (wrong(slot_mapping=torch.tensor([1, 1])), ValueError, "slot_mapping[1] must be a slot of its"),
    (wrong(slot_mapping=torch.tensor([8])), ValueError, "must be below the number of slots, 8"),
    (wrong(scale=ONE), ValueError, "scale must be None unless kv_cache is FP8"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), WRITE_ERRORS, ids=lambda x: str(x)[:40])
def test_wrong_writes(changes, kind, message):
    given: dict[str, Tensor] = {
        "kv_c": torch.zeros(5, 64),
        "k_pe": torch.zeros(5, 8),
        "kv_cache": torch.zeros(2, 4, 72),
        "slot_mapping": torch.arange(5),
    }
    with pytest.raises(kind, match=re.escape(message)):
        mla_cache_write(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (wrong(q=None), TypeError, "q must be a torch.Tensor, got None"),
        (wrong(q=torch.zeros(3, 4, 72).int()), TypeError, "q must be of a float dtype"),
        (wrong(head_dim_v=0), ValueError, "head_dim_v must be from 1 to"),
        (wrong(seqlens_k=torch.zeros(3).int()), ValueError, "seqlens_k must be [2]"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_wrong_calls_of_the_reference(changes, kind, message):
    case = make_case(SMALL, torch.float32, "cpu")
    with pytest.raises(kind, match=re.escape(message)):
        mla_attention_reference(**{**case.inputs, **case.options, **changes})


def test_nothing_that_nobody_sees_is_read(device):
    """NaN in rows of padding, and behind the keys (as every case has it); pages that are gone."""
    case = make_case(SMALL._replace(padding=2), torch.float16, device)
    bad = case.inputs["q"].clone()
    bad[3:] = NAN
    assert_same(case.with_inputs(q=bad)(), case())
