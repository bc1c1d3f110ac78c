"""The drop-ins: what their arguments mean, and the cases of an engine's test suite made strict.

The engine's own cases have values near 0, empty FP8 caches and no current token in the cache, so
that a wrong scale or page passes. Here values are of order one, tolerances are error budgets, FP8
caches are full, and every unused slot is NaN.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from prefix_prefill import chunked_prefill_paged_decode, context_attention_fwd

from ._dropin import BOTH, LENGTHS, judge, own_pages, run_dropin, with_newest_in_cache
from ._linked.budget import assert_no_worse_than_eager
from ._numerics import PACKED, Problem, make_case

PROBLEM = Problem(LENGTHS, 4, 2, 24, page=8, layout=PACKED, dense=True)


@BOTH
@pytest.mark.eager
def test_prefill_and_decode(function, device):
    judge(function, make_case(PROBLEM, torch.float16, device), PROBLEM)


@BOTH
@pytest.mark.eager
def test_everything_in_the_cache(function, device):
    problem = PROBLEM._replace(dense=False)
    judge(function, make_case(problem, torch.float16, device), problem)


@BOTH
@pytest.mark.parametrize("window", [None, 0, -1, 1, 5, 16, 2048])
def test_a_window_counts_the_query_s_own_token(function, window, device):
    case = make_case(PROBLEM, torch.float32, device)
    # W of the drop-ins is window_size[0] + 1
    left = window - 1 if window is not None and window > 0 else -1
    judge(function, case.with_options(window_size=(left, -1)), PROBLEM, sliding_window=window)


@BOTH
@pytest.mark.eager
@pytest.mark.parametrize("features", [("alibi",), ("sinks",), ("alibi", "sinks")], ids=str)
def test_slopes_and_sinks(function, features, device):
    judge(function, make_case(PROBLEM, torch.float32, device, features), PROBLEM)


@BOTH
def test_scale(function, device):
    case = make_case(PROBLEM, torch.float32, device).with_options(softmax_scale=0.7)
    judge(function, case, PROBLEM)
    judge(function, case.with_options(softmax_scale=0.0), PROBLEM)


@BOTH
@pytest.mark.eager
def test_without_a_causal_mask(function, device):
    case = make_case(PROBLEM, torch.float32, device).with_options(causal=False)
    judge(function, case, PROBLEM, causal=False)


@pytest.mark.eager
def test_slopes_keep_their_sign_without_a_causal_mask(device):
    """The bias is ``slope * (key - query)``: keys to the right gain."""
    problem = Problem(((5, 12),), 2, 1, 16, page=8, layout=PACKED, dense=True)
    case = make_case(problem, torch.float32, device, ["alibi"]).with_options(causal=False)
    got = run_dropin(context_attention_fwd, case, causal=False)
    # softmax does not see what is added to a whole row: slope * (key - query) is slope * key there
    q, slopes = case.inputs["q"].double(), case.inputs["alibi_slopes"].double()
    k = case.inputs["k_cache"].permute(0, 3, 1, 2, 4).flatten(3)
    v = case.inputs["v_cache"].permute(0, 3, 1, 2)
    page = case.options["block_table"][0, 0]
    k = torch.cat([k[page, :7], case.inputs["k"]]).double()[:, 0]
    v = torch.cat([v[page, :7], case.inputs["v"]]).double()[:, 0]
    scores = torch.einsum("ihd,jd->hij", q, k) * 16**-0.5
    scores = scores + slopes[:, None, None] * torch.arange(12, device=device)
    want = torch.einsum("hij,jd->ihd", scores.softmax(-1), v)
    assert_no_worse_than_eager("out", got, want.float(), want, eps=1e-6)


@pytest.mark.eager
def test_skipped_rows_stay_as_they_are(device):
    case = make_case(PROBLEM, torch.float32, device)
    got = run_dropin(context_attention_fwd, case, skip_decode=True)
    want = run_dropin(context_attention_fwd, case)
    single = torch.tensor([q == 1 for q, _ in LENGTHS for _ in range(q)], device=device)
    assert got[single].isnan().all()
    assert torch.equal(got[~single], want[~single])


@BOTH
@pytest.mark.eager
def test_rows_of_no_sequence_stay_as_they_are(function, device):
    problem = PROBLEM._replace(dense=False, lengths=((9, 20), (1, 5), (0, 4)))
    case = make_case(problem._replace(padding=4), torch.float32, device)
    got = run_dropin(function, case)
    assert got[10:].isnan().all()
    assert got[:10].isfinite().all()


@pytest.mark.eager
def test_the_newest_key_of_a_decoded_sequence_comes_from_the_cache(device):
    case = make_case(PROBLEM, torch.float32, device)
    case = with_newest_in_cache(own_pages(case, PROBLEM), PROBLEM)
    want = run_dropin(chunked_prefill_paged_decode, case)
    single = torch.tensor([q == 1 for q, _ in LENGTHS for _ in range(q)], device=device)
    new = {}
    for name in "kv":
        new[name] = case.inputs[name].clone()
        new[name][single] = float("nan")
    assert torch.equal(run_dropin(chunked_prefill_paged_decode, case.with_inputs(**new)), want)


# ---- the parameters of the engine's test suite

KINDS = ["auto", "fp8", "fp8_e5m2"]
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def suite_case(heads_q, ratio, head_dim, kind, device, *, small, layout=PACKED, page=32, seed=0):
    """Ten sequences, the last of one query; ``small``: lengths for the interpreter."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (1, 20) if small else (16, 1024)
    count = 3 if small else 10
    queries = torch.randint(low, high, (count,), generator=generator).tolist()
    queries[-1] = 1
    contexts = torch.randint(low, 2 * high, (count,), generator=generator).tolist()
    lengths = tuple((q, q + c) for q, c in zip(queries, contexts, strict=True))
    problem = Problem(lengths, heads_q, heads_q // ratio, head_dim, page, layout, dense=True)
    case = make_case(problem, torch.float16, device, cache_dtype=FP8.get(kind))
    if kind in FP8:
        names = ("k_cache", "v_cache")
        assert any(case.inputs[name].float().nan_to_num(0).any() for name in names)
    return case, problem


def suite(function, case, problem, kind, window):
    if window:
        case = case.with_options(window_size=(window - 1, -1))
    judge(function, case, problem, kv=kind, sliding_window=window)


@BOTH
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ratio", "head_dim"), [(1, 24), (8, 128)])
def test_engine_s_cases_in_small(ratio, head_dim, kind, function, device):
    case, problem = suite_case(8, ratio, head_dim, kind, device, small=True)
    suite(function, case, problem, kind, 16 if ratio > 1 else 0)


@BOTH
@pytest.mark.device
@pytest.mark.parametrize("window", [0, 16, 2048])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [24, 128])
@pytest.mark.parametrize("ratio", [1, 64])
def test_engine_s_cases(ratio, head_dim, kind, window, function, device):
    case, problem = suite_case(64, ratio, head_dim, kind, device, small=False)
    suite(function, case, problem, kind, window)


@BOTH
@pytest.mark.device
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [24, 128])
@pytest.mark.parametrize("ratio", [1, 64])
def test_engine_s_cases_with_slopes(ratio, head_dim, kind, function, device):
    case, problem = suite_case(64, ratio, head_dim, kind, device, small=False)
    powers = torch.arange(1, 65, device=device, dtype=torch.float32)
    case = case.with_inputs(alibi_slopes=2.0 ** (-8 * powers / 64))
    suite(function, case, problem, kind, 0)


@BOTH
@pytest.mark.device
@pytest.mark.parametrize(
    ("heads_q", "ratio", "head_dim", "page"),
    [(64, 1, 128, 544), (8, 4, 256, 1040), (8, 4, 256, 1056)],
)
def test_engine_s_cases_of_odd_pages(heads_q, ratio, head_dim, page, function, device):
    case, problem = suite_case(heads_q, ratio, head_dim, "auto", device, small=False, page=page)
    suite(function, case, problem, "auto", 0)


@BOTH
def test_engine_s_case_of_an_exact_table(function, device):
    """Page 32, 128 keys, 99 queries, all of them in the cache, and a table with no entry more."""
    problem = Problem(((99, 128),), 2, 1, 32, page=32, layout=PACKED)
    case = make_case(problem, torch.float16, device)
    table = case.options["block_table"][:, :4].contiguous()
    judge(function, case.with_options(block_table=table), problem)


# of vLLM 0.33, in which callers pass arguments by position too
ORDERS = {
    context_attention_fwd: "q k v o kv_cache_dtype k_cache v_cache b_loc b_start_loc b_seq_len "
    "max_seq_len max_input_len k_scale v_scale alibi_slopes sliding_window sm_scale skip_decode "
    "fp8_out_scale sinks is_block_table_ptr interleaved_v_pack_factor causal",
    chunked_prefill_paged_decode: "query key value output kv_cache_dtype key_cache value_cache "
    "block_table query_start_loc seq_lens max_seq_len max_query_len k_scale v_scale alibi_slopes "
    "sliding_window sm_scale output_scale sinks is_block_table_ptr use_interleaved_v_cache causal",
}


@BOTH
def test_arguments_stand_in_the_order_of_engines(function):
    found = inspect.signature(function).parameters.values()
    by_position = [x.name for x in found if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert by_position == ORDERS[function].split()
    assert [x.name for x in found if x.kind is x.KEYWORD_ONLY] == ["invariant"]
