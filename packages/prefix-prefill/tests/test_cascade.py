"""A prefix that sequences share: the same as the prefix ahead of each; and the merge by itself."""

from __future__ import annotations

import math

import pytest
import torch
from prefix_prefill import merge_attn_states, paged_attention_reference, shared_prefix_attn_func

from ._linked.budget import Maker, assert_no_worse_than_eager, assert_same
from ._numerics import MEDIUM, PACKED, Case, Problem, make_case, run_eager, run_oracle

OWN = ((5, 12), (1, 9), (17, 20), (1, 1))
FEATURES = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window_size": (14, 0)},
    "window_both": {"causal": False, "window_size": (14, 3)},
    "softcap": {"softcap": 1.5},
}


def shared(whole: Case, problem: Problem, shared_len: int) -> dict:
    """Arguments of the cascade for sequences whose first keys, in the first one's pages, agree."""
    table = whole.options["block_table"]
    pages = shared_len // problem.page
    assert pages * problem.page == shared_len
    return {
        **whole.inputs,
        **whole.options,
        "shared_pages": table[0, :pages].clone(),
        "shared_len": shared_len,
        "block_table": table[:, pages:],
        "seqlens_k": whole.options["seqlens_k"] - shared_len,
        "max_seqlen_k": whole.options["max_seqlen_k"] - shared_len,
    }


def make(device, layout="nhd", dense=False, shared_len=21, own=OWN, dtype=torch.float32, d=16):
    """The whole problem, where the first pages of all sequences are those of the first."""
    lengths = tuple((q, k + shared_len) for q, k in own)
    problem = Problem(lengths, 4, 2, d, page=7, layout=layout, dense=dense, padding=2)
    whole = make_case(problem, dtype, device)
    table = whole.options["block_table"]
    table[:, : shared_len // 7] = table[:1, : shared_len // 7]
    return problem, whole


@pytest.mark.eager
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dense", [False, True])
def test_is_the_attention_to_prefix_and_own(dense, feature, device):
    problem, whole = make(device, dense=dense)
    whole = whole.with_options(**FEATURES[feature])
    arguments = shared(whole, problem, 21)
    out, lse = shared_prefix_attn_func(**arguments, return_lse=True)
    oracle = run_oracle(whole)
    eager = run_eager(whole, oracle)
    assert_no_worse_than_eager("out", out, eager["out"], oracle["out"])
    assert_no_worse_than_eager("lse", lse, eager["lse"], oracle["lse"])


@pytest.mark.eager
@pytest.mark.parametrize("slopes", ["head", "batch"])
def test_slopes_and_sinks(slopes, device):
    problem, whole = make(device, layout=PACKED)
    m = Maker(device, torch.float32, seed=4)
    size = (4,) if slopes == "head" else (4, 4)
    inputs = {"alibi_slopes": m.uniform(*size, low=0.05, high=0.5), "sinks": m.randn(4)}
    whole = whole.with_inputs(**inputs)
    out, lse = shared_prefix_attn_func(**shared(whole, problem, 21), return_lse=True)
    oracle = run_oracle(whole)
    eager = run_eager(whole, oracle)
    assert_no_worse_than_eager("out", out, eager["out"], oracle["out"])
    assert_no_worse_than_eager("lse", lse, eager["lse"], oracle["lse"])


@pytest.mark.eager
def test_the_last_shared_page_need_not_be_full(device):
    problem, whole = make(device, shared_len=7)
    arguments = shared(whole, problem, 7)
    arguments["shared_len"] = 4
    out, lse = shared_prefix_attn_func(**arguments, return_lse=True)
    # by hand: own keys, and the first four of the shared page, merged in float64
    q = whole.inputs["q"].double()
    caches = [whole.inputs[name].double() for name in ("k_cache", "v_cache")]
    count = torch.tensor([0, 24], dtype=torch.int32, device=device)
    four = torch.tensor([4], dtype=torch.int32, device=device)
    first = paged_attention_reference(
        q,
        *caches,
        arguments["shared_pages"][None],
        count,
        four,
        24,
        4,
        causal=False,
        return_lse=True,
    )
    names = ("block_table", "cu_seqlens_q", "seqlens_k", "max_seqlen_q", "max_seqlen_k")
    rest = paged_attention_reference(
        q, *caches, *(arguments[name] for name in names), return_lse=True
    )
    want_lse = torch.logaddexp(first[1], rest[1])
    shares = [(x - want_lse).exp().nan_to_num(0.0).T[..., None] for x in (first[1], rest[1])]
    want = shares[0] * first[0] + shares[1] * rest[0]
    assert_no_worse_than_eager("out", out, want.float(), want, eps=2e-6)
    assert_no_worse_than_eager("lse", lse, want_lse.float(), want_lse, eps=2e-6)


@pytest.mark.eager
def test_padding_has_no_prefix(device):
    problem, whole = make(device)
    out, lse = shared_prefix_attn_func(**shared(whole, problem, 21), return_lse=True)
    assert not out[24:].any()
    assert (lse[:, 24:] == -math.inf).all()


@pytest.mark.eager
@pytest.mark.parametrize("length", [0, 7])
def test_nothing_shared_or_no_sequence(length, device):
    problem, whole = make(device, shared_len=7)
    arguments = shared(whole, problem, 7)
    arguments["shared_len"] = 0
    out = shared_prefix_attn_func(**arguments)
    names = [name for name in arguments if not name.startswith("shared")]
    want = paged_attention_reference(**{name: arguments[name] for name in names})
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    empty = make_case(MEDIUM._replace(lengths=(), padding=length), torch.float32, device)
    pages = torch.zeros(1, dtype=torch.int32, device=device)
    out = shared_prefix_attn_func(**empty.inputs, **empty.options, shared_pages=pages, shared_len=3)
    assert not out.any()


@pytest.mark.eager
@pytest.mark.parametrize("feature", ["causal", "window"])
def test_a_sequence_does_not_depend_on_its_batch(feature, device):
    problem, whole = make(device)
    whole = whole.with_options(**FEATURES[feature], num_splits=1)
    arguments = shared(whole, problem, 21)
    out, lse = shared_prefix_attn_func(**arguments, return_lse=True)
    at = 0
    for b, (queries, own) in enumerate(OWN):
        rows = slice(at, at + queries)
        one = {
            **arguments,
            "q": arguments["q"][rows],
            "block_table": arguments["block_table"][b : b + 1],
            "cu_seqlens_q": torch.tensor([0, queries], dtype=torch.int32, device=device),
            "seqlens_k": arguments["seqlens_k"][b : b + 1],
            "max_seqlen_q": queries,
            "max_seqlen_k": own,
        }
        want, want_lse = shared_prefix_attn_func(**one, return_lse=True)
        # alone, its rows stand elsewhere in a tile of the shared keys; the products of some CPUs
        # round a row by its place
        eps = 0.0 if device.type == "cuda" else 4 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(out[rows], want, rtol=0, atol=eps * out.abs().max().item())
        torch.testing.assert_close(
            lse[:, rows], want_lse, rtol=0, atol=eps * lse[:, :24].abs().max().item()
        )
        at += queries


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_at_length(feature, dtype, device):
    own = ((1, 50),) * 40 + ((300, 400), (4, 9))
    problem, whole = make(device, shared_len=2100, own=own, dtype=dtype, d=128)
    whole = whole.with_options(**FEATURES[feature])
    out, lse = shared_prefix_attn_func(**shared(whole, problem, 2100), return_lse=True)
    oracle = run_oracle(whole)
    eager = run_eager(whole, oracle)
    assert_no_worse_than_eager("out", out, eager["out"], oracle["out"])
    assert_no_worse_than_eager("lse", lse, eager["lse"], oracle["lse"])


# ---- the merge


def states(device, dtype=torch.float32):
    m = Maker(device, dtype)
    outs = [m.randn(9, 3, 24) for _ in range(2)]
    lses = [m.randn(3, 9, dtype=torch.float32) * 4 for _ in range(2)]
    return outs, lses


@pytest.mark.eager
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_merge_is_exact(dtype, device):
    outs, lses = states(device, dtype)
    out, lse = merge_attn_states(outs[0], lses[0], outs[1], lses[1])
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    want_lse = torch.logaddexp(*(x.double() for x in lses))
    shares = [(x.double() - want_lse).exp().T[..., None] for x in lses]
    want = sum(share * x.double() for share, x in zip(shares, outs, strict=True))
    assert_no_worse_than_eager("out", out, want.to(dtype), want)
    assert_no_worse_than_eager("lse", lse, want_lse.float(), want_lse, eps=1e-6)


@pytest.mark.eager
@pytest.mark.parametrize("mark", [math.inf, -math.inf])
def test_merge_does_not_read_what_saw_no_key(mark, device):
    outs, lses = states(device)
    lses[0][:, 2], outs[0][2] = mark, math.nan
    lses[1][:, 4], outs[1][4] = mark, math.nan
    lses[0][:, 6], lses[1][:, 6] = mark, mark
    outs[0][6], outs[1][6] = math.nan, math.nan
    out, lse = merge_attn_states(outs[0], lses[0], outs[1], lses[1])
    torch.testing.assert_close(out[2], outs[1][2])
    torch.testing.assert_close(out[4], outs[0][4])
    assert not out[6].any()
    assert (lse[:, 6] == -math.inf).all()
    assert out.isfinite().all()


@pytest.mark.eager
def test_merge_of_strided_states(device):
    outs, lses = states(device)
    want = merge_attn_states(outs[0], lses[0], outs[1], lses[1])
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (*outs, *lses)]
    got = merge_attn_states(turned[0], turned[2], turned[1], turned[3])
    names = ("out", "lse")
    assert_same(dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True)))
