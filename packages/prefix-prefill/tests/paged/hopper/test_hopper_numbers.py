"""The numbers of the kernel for Hopper, on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from attn_common import detect, fp8_dtype
from hypothesis import given
from hypothesis import strategies as st
from prefix_prefill import context_attention_fwd
from prefix_prefill._linked.hopper import tickets
from prefix_prefill._paged.hopper.launch import HopperPlan
from torch import Tensor

from ..._linked.budget import assert_same
from ..._linked.views import VIEWS
from ..._numerics import Case, Problem, check, make_case, run
from .._property import BATCHES, apart, bounded
from .._quantised import quantise

pytestmark = pytest.mark.device

HEAD_DIMS = [64, 128, 256]
LENGTHS = ((300, 900), (1, 2000), (0, 5), (17, 17), (130, 1300), (64, 0))
FEATURES = [
    (),
    ("full",),
    ("softcap",),
    ("alibi",),
    ("alibi_batch", "full"),
    ("sinks",),
    ("sinks", "alibi", "softcap"),
]


def hopper(case: Case, judge: Any = run) -> dict[str, Tensor]:
    """Run a case, or check it, and see that the kernel had a part in it."""
    served = []
    prefill = HopperPlan.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HopperPlan, "run", lambda *arguments: (served.append(1), prefill(*arguments)))
        got = judge(case.with_options(num_splits=1))
    assert served
    return got


def check_hopper(case: Case) -> dict[str, Tensor]:
    return hopper(case, functools.partial(check, portable=False))


@pytest.mark.parametrize(
    ("head_dim", "page"),
    [(128, page) for page in (16, 32, 48, 64, 128, 256, 544, 1056)]
    + [(d, page) for d in (64, 256) for page in (16, 544)],
)
def test_pages(head_dim, page, device):
    problem = Problem(LENGTHS, 8, 2, head_dim, page, padding=7)
    check_hopper(make_case(problem, torch.bfloat16, device))


@pytest.mark.parametrize("heads", [(1, 1), (6, 1), (7, 1), (12, 4), (16, 2), (128, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [40, 96, 192])
def test_groups(head_dim, heads, device):
    problem = Problem(((150, 500), (20, 40)), *heads, head_dim)
    check_hopper(make_case(problem, torch.float16, device, ["alibi"]))


@pytest.mark.parametrize("names", FEATURES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_features(head_dim, names, device):
    check_hopper(make_case(Problem(LENGTHS, 8, 2, head_dim, 48), torch.bfloat16, device, names))


@pytest.mark.parametrize("names", [(), ("full", "sinks", "alibi")], ids=str)
@pytest.mark.parametrize("window", [(14, -1), (100, -1), (500, 500), (126, 3)], ids=str)
@pytest.mark.parametrize(("head_dim", "page"), [(128, 256), (256, 48)])
def test_windows(head_dim, page, window, names, device):
    case = make_case(Problem(LENGTHS, 8, 2, head_dim, page), torch.bfloat16, device, names)
    check_hopper(case.with_options(window_size=window))


@pytest.mark.parametrize(
    "window", [(-1, 0), (-1, -1), (4, 0), (100, 0), (500, 3), (130, -1)], ids=str
)
@pytest.mark.parametrize(
    ("head_dim", "page", "dtype", "names"),
    [
        (64, 7, torch.bfloat16, ()),
        (128, 16, torch.float16, ("sinks", "alibi", "softcap")),
        (256, 64, torch.bfloat16, ("sinks",)),
    ],
    ids=str,
)
def test_fp8_caches(head_dim, page, dtype, names, window, device):
    """Blocks of queries that see other keys than the first, with left windows too."""
    platform = detect(device)
    if not platform.supports_fp8:
        pytest.skip(f"{platform} has no FP8")
    problem = Problem((*LENGTHS, (512, 4096)), 8, 2, head_dim, page, padding=7)
    stored = getattr(torch, fp8_dtype(platform))
    case = make_case(problem, dtype, device, names, cache_dtype=stored)
    scale = torch.tensor([0.75, -1.5], device=device)
    check_hopper(case.with_options(window_size=window, k_descale=scale, v_descale=scale))


NEW = ((300, 900), (1, 2000), (17, 17), (130, 1300), (512, 4096), (100, 120))
CHUNK_WINDOWS = [(-1, 0), (-1, -1), (14, 0), (100, 0), (500, 3), (130, -1)]


@pytest.mark.parametrize("window", CHUNK_WINDOWS, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "page", "dtype", "names"),
    [
        (64, 48, torch.float16, ("full",)),
        (128, 16, torch.bfloat16, ("sinks", "alibi", "softcap")),
        (256, 544, torch.bfloat16, ("full", "sinks")),
    ],
    ids=str,
)
def test_new_keys(head_dim, page, dtype, names, window, device):
    problem = Problem(NEW, 8, 2, head_dim, page, padding=7, dense=True)
    check_hopper(make_case(problem, dtype, device, names).with_options(window_size=window))


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("window", CHUNK_WINDOWS, ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(
    ("head_dim", "page", "dtype", "names"),
    [
        (64, 1, torch.float16, ("full",)),
        (128, 16, torch.bfloat16, ("sinks", "alibi", "softcap")),
        (128, 48, torch.float16, ()),
        (256, 544, torch.bfloat16, ("full", "sinks")),
    ],
    ids=str,
)
def test_caches_of_integers(head_dim, page, dtype, names, kind, window, dense, device):
    problem = Problem(NEW, 8, 2, head_dim, page, padding=7, dense=dense)
    case = quantise(make_case(problem, dtype, device, names), kind)
    check_hopper(case.with_options(window_size=window))


@pytest.mark.parametrize("window", CHUNK_WINDOWS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_new_keys_beside_an_fp8_cache(dtype, window, device):
    platform = detect(device)
    if not platform.supports_fp8:
        pytest.skip(f"{platform} has no FP8")
    problem = Problem(NEW, 8, 2, 128, 16, dense=True)
    stored = getattr(torch, fp8_dtype(platform))
    case = make_case(problem, dtype, device, cache_dtype=stored)
    scale = torch.tensor([0.75, -1.5], device=device)
    check_hopper(case.with_options(window_size=window, k_descale=scale, v_descale=scale))


@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_poison(head_dim, page, device):
    """NaN before the first window and past the end, pages that are gone, NaN around queries."""
    problem = Problem(((300, 900), (1, 2000), (700, 790)), 8, 2, head_dim, page, padding=50)
    case = make_case(problem, torch.bfloat16, device).with_options(window_size=(100, 0))
    want = check_hopper(case)
    bad = {name: t.clone() for name, t in case.inputs.items()}
    bad["q"][1001:] = float("nan")
    table = case.options["block_table"].clone()
    for b, (queries, keys) in enumerate(problem.lengths):
        unseen = max(0, keys - queries - 100)
        for name in ("k_cache", "v_cache"):
            for key in range(unseen):
                bad[name][table[b, key // page], key % page] = float("nan")
    for b, (queries, keys) in enumerate(problem.lengths):
        table[b, : max(0, keys - queries - 100) // page] = 2**30
        table[b, -(-keys // page) :] = -(2**30)
    assert_same(hopper(case.with_inputs(**bad).with_options(block_table=table)), want)
    inside = {name: VIEWS["inside"](t) for name, t in case.inputs.items() if name == "q"}
    assert_same(hopper(case.with_inputs(**inside)), want)


@pytest.mark.parametrize("view", sorted(VIEWS))
def test_views(view, device):
    """Queries and outputs that TMA refuses are copied; a cache never is."""
    case = make_case(Problem(LENGTHS, 8, 2, 128), torch.bfloat16, device)
    want = hopper(case)
    q = VIEWS[view](case.inputs["q"])
    assert_same(hopper(case.with_inputs(q=q)), want)
    out = torch.full_like(q, 7.0)
    hopper(case.with_options(out=out))
    assert torch.equal(out, want["out"])
    caches = {name: VIEWS["heads_first"](case.inputs[name]) for name in ("k_cache", "v_cache")}
    assert_same(hopper(case.with_inputs(**caches)), want)
    for axis in (0, 1):
        both = torch.stack([case.inputs["k_cache"], case.inputs["v_cache"]], axis)
        k_cache, v_cache = both.unbind(axis)
        assert_same(hopper(case.with_inputs(k_cache=k_cache, v_cache=v_cache)), want)


def test_many_sequences_and_tokens_around_them(device):
    """More sequences than are searched at once, some of no query, and NaN before the first."""
    lengths = tuple((b % 23, b % 23 + b) for b in range(300))
    case = make_case(Problem(lengths, 8, 2, 64, padding=5), torch.bfloat16, device)
    want = check_hopper(case)
    ahead = torch.full_like(case.inputs["q"][:40], float("nan"))
    moved = case.with_inputs(q=torch.cat([ahead, case.inputs["q"]]))
    got = hopper(moved.with_options(cu_seqlens_q=case.options["cu_seqlens_q"] + 40))
    assert not got["out"][:40].any()
    assert (got["lse"][:, :40] == -float("inf")).all()
    assert_same({"out": got["out"][40:], "lse": got["lse"][:, 40:]}, want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_tables(dtype, device):
    case = make_case(Problem(LENGTHS, 8, 2, 128), torch.bfloat16, device)
    table = case.options["block_table"].to(dtype)
    strided = torch.stack([table, table - 1], 2)[..., 0]
    assert_same(hopper(case.with_options(block_table=strided)), hopper(case))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_repeats_and_independence(head_dim, device):
    problem = Problem(((700, 1500),) * 7, 8, 2, head_dim)
    case = make_case(problem, torch.bfloat16, device)
    want = hopper(case)
    differing = torch.zeros((), dtype=torch.int64, device=device)
    unsplit = case.with_options(num_splits=1)
    for _ in range(300):
        got = unsplit()
        differing += sum((got[name] != want[name]).sum() for name in want)
    assert not differing
    options = {
        **case.options,
        "block_table": case.options["block_table"][2:3],
        "cu_seqlens_q": case.options["cu_seqlens_q"][:2],
        "seqlens_k": case.options["seqlens_k"][:1],
    }
    rows = slice(1400, 2100)
    alone = hopper(Case({**case.inputs, "q": case.inputs["q"][rows]}, options))
    assert torch.equal(alone["out"], want["out"][rows])
    assert torch.equal(alone["lse"], want["lse"][:, rows])


def test_rows_that_are_left_alone(device):
    """Those of padding and, if asked for, of decoding sequences."""
    problem = Problem(((1, 90), (50, 200), (1, 70)), 8, 2, 64, padding=9)
    case = make_case(problem, torch.float16, device)
    inputs, options = case.inputs, case.options
    out, one = torch.full_like(inputs["q"], 7.0), torch.ones(1, device=device)
    context_attention_fwd(
        inputs["q"],
        None,
        None,
        out,
        "auto",
        inputs["k_cache"],
        inputs["v_cache"],
        options["block_table"],
        options["cu_seqlens_q"],
        options["seqlens_k"],
        200,
        50,
        one,
        one,
        skip_decode=True,
    )
    assert (out[[0, *range(51, 61)]] == 7.0).all()
    assert torch.equal(out[1:51], hopper(case)["out"][1:51])


def test_graphs_do_not_share_a_counter(device):
    """Two graphs that were captured on one stream may run at once."""
    case = make_case(Problem(((900, 2000),) * 4, 8, 2, 128), torch.bfloat16, device)
    want = hopper(case)
    graphs, results = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results.append(hopper(case))
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for got in results:
        assert_same(got, want)
    assert all(int(t) == 0 for t in tickets._tickets.values())


LENGTH = st.tuples(st.integers(0, 300), st.sampled_from([0, 1, 15, 16, 100, 128, 333, 1000]))


@bounded
@given(
    batches=st.tuples(*[st.lists(LENGTH, min_size=1, max_size=5)] * BATCHES),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 2), (7, 1), (16, 2)]),
    head_dim=st.sampled_from([40, 64, 80, 128, 256]),
    page=st.sampled_from([16, 32, 48, 128, 272]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    names=st.sampled_from(FEATURES),
    window=st.tuples(*[st.one_of(st.just(-1), st.integers(0, 400))] * 2),
    padding=st.sampled_from([0, 1, 200]),
    seed=st.integers(0, 2**32),
)
def test_any_prefill(batches, heads, head_dim, page, dtype, names, window, padding, seed, device):
    """Both kernels, on what either may serve."""
    for drawn in batches:
        lengths = tuple((queries, queries + context) for queries, context in drawn)
        problem = Problem(lengths, *heads, head_dim, page, padding=padding)
        case = make_case(problem, dtype, device, names, seed)
        apart(check, case.with_options(window_size=window, num_splits=1))
