"""NaN and Inf where nothing may be read, pages that do not exist, and outputs that start as NaN.

Every case of these tests has NaN in the unused slots of its pages already; see ``make_case``.
"""

from __future__ import annotations

import pytest
import torch

from .._linked.budget import Maker, assert_same
from .._linked.fences import run_fenced
from .._linked.tiers import INTERPRETED
from .._linked.views import VIEWS
from .._numerics import MEDIUM, PACKED, Problem, check, make_case, run

POISON = [float("nan"), float("inf")]
poisons = pytest.mark.parametrize("poison", POISON, ids=str)
NOWHERE = 2**30


@pytest.mark.eager
def test_empty_tensors_start_as_nan():
    assert torch.empty(5).isnan().all()
    assert torch.empty(5, dtype=torch.bfloat16).isnan().all()


def before_window(case, problem, left):
    """Keys of the first sequence that no row of it sees, and the pages that hold such alone."""
    queries, keys = problem.lengths[0]
    unseen = max(0, keys - queries - left)
    pages = case.options["block_table"][0].tolist()
    return unseen, pages[: unseen // problem.page], pages


# windows that begin inside a tile and inside a page, and on the edge of either
@pytest.mark.eager
@poisons
@pytest.mark.parametrize("layout", ["nhd", PACKED])
@pytest.mark.parametrize(("left", "page"), [(2, 7), (7, 16), (8, 5)])
def test_keys_before_the_first_window(left, page, layout, poison, device):
    problem = Problem(((5, 60),), 2, 1, 16, page=page, layout=layout)
    case = make_case(problem, torch.float32, device).with_options(window_size=(left, 0))
    want = run(case)
    unseen, _, pages = before_window(case, problem, left)
    k, v = case.inputs["k_cache"].clone(), case.inputs["v_cache"].clone()
    for i in range(unseen):
        if layout == PACKED:
            k[pages[i // page], :, :, i % page] = poison
            v[pages[i // page], :, :, i % page] = poison
        else:
            k[pages[i // page], i % page] = poison
            v[pages[i // page], i % page] = poison
    assert_same(run(case.with_inputs(k_cache=k, v_cache=v)), want)


# an engine takes pages back that a window has left behind: their entries mean nothing
@pytest.mark.eager
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("queries", [1, 3, 40])
def test_pages_before_the_first_window_are_not_looked_for(queries, dense, device):
    problem = Problem(((queries, queries + 70),), 2, 1, 16, page=7, dense=dense)
    case = make_case(problem, torch.float32, device).with_options(window_size=(9, 0))
    want = run(case)
    _, gone, _ = before_window(case, problem, 9)
    assert len(gone) > 3
    for entry in (NOWHERE, -1):
        table = case.options["block_table"].clone()
        table[0, : len(gone)] = entry
        assert_same(run(case.with_options(block_table=table)), want)


@pytest.mark.eager
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_pages_behind_the_last_are_not_looked_for(dense, causal, device):
    problem = MEDIUM._replace(dense=dense)
    case = make_case(problem, torch.float32, device).with_options(causal=causal)
    want = run(case)
    table = case.options["block_table"].clone()
    for b in range(len(problem.lengths)):
        table[b, -(-problem.cached(b) // problem.page) :] = NOWHERE
    assert_same(run(case.with_options(block_table=table)), want)


# keys right of the last row's window, in pages of their own
@pytest.mark.eager
@poisons
def test_keys_beyond_a_window_to_the_right(poison, device):
    problem = Problem(((20, 20),), 2, 1, 16, page=4)
    case = make_case(problem, torch.float32, device)
    # of the keys of the whole, the first queries alone
    table, q = case.options["block_table"], case.inputs["q"][:3]
    options = {"causal": False, "window_size": (1, 2), "max_seqlen_q": 3}
    options["cu_seqlens_q"] = torch.tensor([0, 3], dtype=torch.int32, device=device)
    options["seqlens_k"] = torch.tensor([9], dtype=torch.int32, device=device)
    case = case.with_inputs(q=q).with_options(**options)
    want = run(case)
    k = case.inputs["k_cache"].clone()
    k[table[0, 3:5].long()] = poison
    k[table[0, 2].long(), 1:] = poison
    assert_same(run(case.with_inputs(k_cache=k)), want)
    check(case)


@pytest.mark.eager
@poisons
def test_padding_after_the_last_sequence(poison, device):
    problem = MEDIUM._replace(padding=5, dense=True)
    case = make_case(problem, torch.float32, device)
    want = run(case)
    inputs = {name: case.inputs[name].clone() for name in "qkv"}
    for t in inputs.values():
        t[21:] = poison
    got = run(case.with_inputs(**inputs))
    assert_same(got, want)
    assert not got["out"][21:].any()
    assert (got["lse"][:, 21:] == float("-inf")).all()


@pytest.mark.eager
def test_padding_before_the_first_sequence(device):
    case = make_case(MEDIUM._replace(padding=3), torch.float32, device)
    want = run(case)
    rolled = case.with_inputs(q=case.inputs["q"].roll(3, 0))
    starts = case.options["cu_seqlens_q"] + 3
    got = run(rolled.with_options(cu_seqlens_q=starts))
    assert torch.equal(got["out"], want["out"].roll(3, 0))
    assert torch.equal(got["lse"], want["lse"].roll(3, 1))


@poisons
@pytest.mark.parametrize("splits", [1, 2])
def test_other_sequences_of_the_batch(splits, poison, device):
    problem = MEDIUM._replace(dense=True)
    case = make_case(problem, torch.float32, device).with_options(num_splits=splits)
    want = run(case)
    k, v = case.inputs["k_cache"].clone(), case.inputs["v_cache"].clone()
    for page in case.options["block_table"][0].tolist():
        k[page], v[page] = poison, poison
    got = run(case.with_inputs(k_cache=k, v_cache=v))
    assert torch.equal(got["out"][17:], want["out"][17:])
    # and the poison is where it belongs
    assert got["out"][:17].isnan().any()


@pytest.mark.parametrize("layout", ["nhd", PACKED])
@pytest.mark.parametrize("head_dim", [24, 80])
def test_memory_around_the_inputs(head_dim, layout, device):
    """Every input is a window into NaN: past its rows, heads, pages and head dimension."""
    problem = Problem(((5, 20), (1, 9)), 4, 2, head_dim, page=5, layout=layout, dense=True)
    case = make_case(problem, torch.float32, device, ["alibi", "sinks"])
    inside = {name: VIEWS["inside"](t) for name, t in case.inputs.items()}
    assert_same(run(case.with_inputs(**inside)), run(case))


# a key that is NaN and seen by some rows must reach exactly those
@pytest.mark.eager
def test_nan_reaches_the_rows_that_see_it(device):
    problem = Problem(((33, 33),), 1, 1, 16, page=8)
    case = make_case(problem, torch.float32, device, ["window"])
    k = case.inputs["k_cache"].clone()
    k[case.options["block_table"][0, 2], 4] = float("nan")  # key 20
    got = run(case.with_inputs(k_cache=k))
    rows = torch.arange(33, device=device)
    sees = (rows >= 20) & (rows - 9 <= 20)
    assert torch.equal(got["out"][:, 0].isnan().all(-1), sees)
    assert torch.equal(got["lse"][0].isnan(), sees)


@pytest.mark.skipif(not INTERPRETED, reason="needs memory that faults on a CPU")
def test_no_read_beyond_a_tensor():
    """The table holds the pages of its last sequence and no entry more."""
    code = """
import torch
from prefix_prefill import paged_attn_func
for starts, lengths, page, window, d in (
    ((0, 5, 6, 26), (9, 30, 48), 8, (-1, -1), 16),
    ((0, 20, 21, 26), (30, 9, 36), 3, (7, 0), 24),
):
    blocks = lengths[-1] // page
    table = fenced(torch.randperm(3 * blocks, dtype=torch.int32).view(3, blocks))
    starts, used = (fenced(torch.tensor(x, dtype=torch.int32)) for x in (starts, lengths))
    cache = fenced(torch.randn(3 * blocks, page, 2, d))
    q = fenced(torch.randn(26, 4, d))
    sinks, slopes = (fenced(torch.rand(4)) for _ in range(2))
    places = table, starts, used, 20, max(lengths)
    for options in ({}, {"sinks": sinks}, {"alibi_slopes": slopes}, {"num_splits": 2}):
        options |= {"causal": True, "window_size": window}
        assert paged_attn_func(q, cache, cache, *places, **options).isfinite().all()
    assert paged_attn_func(q, cache, cache, *places, causal=False).isfinite().all()
    one = fenced(torch.tensor([0, 1, 2, 3], dtype=torch.int32))
    q = fenced(torch.randn(3, 4, d))
    places = table, one, used, 1, max(lengths)
    for splits in (1, 3):
        out = paged_attn_func(q, cache, cache, *places, causal=True, num_splits=splits)
        assert out.isfinite().all()
"""
    run_fenced(code, __file__)


@pytest.mark.skipif(not INTERPRETED, reason="needs memory that faults on a CPU")
def test_no_read_beyond_a_packed_cache():
    """Read as it lies by short tiles, with head dimensions that fill no tile."""
    code = """
import torch
from prefix_prefill import paged_attn_func
for d, d_v, page in ((24, 24, 16), (40, 72, 8)):
    table = fenced(torch.randperm(12, dtype=torch.int32).view(2, 6))
    starts, used = (fenced(torch.tensor(x, dtype=torch.int32)) for x in ([0, 1, 2], [6 * page] * 2))
    k_cache = fenced(torch.randn(12, 2, d // 8, page, 8).half())
    v_cache = fenced(torch.randn(12, 2, d_v, page).half())
    q = fenced(torch.randn(2, 4, d).half())
    out = paged_attn_func(q, k_cache, v_cache, table, starts, used, 1, 6 * page, causal=True)
    assert out.isfinite().all()
"""
    run_fenced(code, __file__)


@pytest.mark.skipif(not INTERPRETED, reason="needs memory that faults on a CPU")
def test_no_read_of_a_cache_without_pages():
    """Of new keys alone; the scales of a cache of integers are loaded a step ahead."""
    code = """
import torch
from prefix_prefill import paged_attn_func
starts, used = (fenced(torch.tensor(x, dtype=torch.int32)) for x in ([0, 5, 6], [5, 1]))
table = fenced(torch.zeros(2, 1, dtype=torch.int32))
q, new = fenced(torch.randn(6, 4, 16)), fenced(torch.randn(6, 2, 16))
for dtype in (torch.float32, torch.int8):
    cache, scales = torch.empty(0, 8, 2, 16, dtype=dtype), {}
    if dtype == torch.int8:
        one = torch.empty(0, 8, 2)
        scales = {"k_scale_cache": one, "v_scale_cache": one, "kv_dtype": "int8"}
    out = paged_attn_func(q, cache, cache, table, starts, used, 5, 5, k=new, v=new, **scales)
    assert out.isfinite().all()
"""
    run_fenced(code, __file__)


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["nhd", PACKED])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_poison_at_length(head_dim, layout, dtype, device):
    problem = Problem(
        ((300, 900), (1, 2000), (0, 5), (700, 800)), 8, 2, head_dim, layout=layout, padding=50
    )
    case = make_case(problem, dtype, device).with_options(window_size=(100, 0))
    want = check(case)
    m = Maker(device, dtype)
    for _ in POISON:
        table = case.options["block_table"].clone()
        table[0, : (900 - 300 - 100) // 16] = NOWHERE
        table[1, : (2000 - 1 - 100) // 16] = NOWHERE
        assert_same(run(case.with_options(block_table=table)), want)
    assert m.device == device
