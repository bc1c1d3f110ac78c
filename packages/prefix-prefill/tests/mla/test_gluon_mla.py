"""The kernel of multi-head latent attention for Hopper, run on a CPU by ``_linked.gluon``."""

from __future__ import annotations

import itertools

import pytest
import torch
from prefix_prefill._linked.host.forms import Memory
from prefix_prefill._mla import api
from prefix_prefill._paged import ops

from .._linked.budget import assert_same
from ._mla import NAN, Case, Problem, check, make_case

pytestmark = pytest.mark.skipif(not ops.interpreted(), reason="about the interpreter")

# more queries than keys, tails, no key, no query, one token
LENGTHS = ((3, 300), (1, 190), (0, 5), (9, 4), (2, 0), (1, 64))


@pytest.fixture(params=[True, False], ids=["copies_first", "copies_last"])
def reverse(request):
    """Which partition goes ahead of the others as far as the barriers let it."""
    return request.param


@pytest.fixture
def serve(monkeypatch):
    """Return a function that has one kernel serve calls."""
    from prefix_prefill._mla import launch as portable
    from prefix_prefill._mla.hopper import launch

    from .._linked.gluon import Kernel

    real = {name: getattr(launch, name) for name in ("mla_kernel", "mla_fp8_kernel")}
    monkeypatch.setattr(portable, "takes_hopper_mla", lambda *_: True)
    kernels = []

    def serve(reverse=True, name="mla_kernel"):
        monkeypatch.setattr(api, "_known", Memory())
        kernels.append(Kernel(real[name], reverse))
        monkeypatch.setattr(launch, name, kernels[-1])
        return kernels[-1]

    yield serve
    assert all(kernel.launches for kernel in kernels)


CASES = [
    (Problem(LENGTHS, 16, 16, padding=3), torch.bfloat16, True, 1),
    (Problem(LENGTHS, 24, 48), torch.float16, False, 3),
    (Problem(((1, 200), (1, 65), (1, 1)), 128, 64), torch.bfloat16, True, 1),
    (Problem(((1, 400), (1, 65), (1, 0)), 16, 64, padding=2), torch.float16, True, 4),
    (Problem(((70, 260), (5, 5)), 3, 128), torch.bfloat16, True, 2),
    (Problem((), 4, 64, padding=2), torch.bfloat16, True, 1),
]


@pytest.mark.parametrize(("problem", "dtype", "causal", "splits"), CASES, ids=str)
def test_attention(problem, dtype, causal, splits, serve, reverse):
    serve(reverse)
    check(make_case(problem, dtype, "cpu", causal=causal, num_splits=splits))


def fp8_of(case: Case, dtype: torch.dtype, descale: float) -> Case:
    cache = case.inputs["kv_cache"].to(dtype)
    descales = {"kv_descale": torch.full((1,), descale)}
    return case.with_inputs(kv_cache=cache).with_options(**descales)


FP8 = [
    (Problem(LENGTHS, 16, 16, padding=3), torch.bfloat16, torch.float8_e4m3fn, True, 1),
    (Problem(LENGTHS, 20, 7), torch.float16, torch.float8_e5m2, False, 3),
    (Problem(((1, 200), (1, 65), (1, 0)), 128, 64), torch.bfloat16, torch.float8_e4m3fn, True, 2),
]


@pytest.mark.parametrize(("problem", "dtype", "stored", "causal", "splits"), FP8, ids=str)
def test_fp8_cache(problem, dtype, stored, causal, splits, serve, reverse):
    serve(reverse, "mla_fp8_kernel")
    case = make_case(problem, dtype, "cpu", causal=causal, num_splits=splits)
    check(fp8_of(case, stored, 0.5))


@pytest.mark.parametrize("scale", [-0.1, 0.0])
def test_fp8_scales_of_any_sign(scale, serve):
    serve(name="mla_fp8_kernel")
    case = make_case(Problem(((2, 130), (1, 9)), 8, 48), torch.bfloat16, "cpu")
    case = fp8_of(case, torch.float8_e4m3fn, -0.25)
    check(case.with_options(softmax_scale=scale, num_splits=1))


def test_fp8_queries(serve):
    serve(name="mla_fp8_kernel")
    case = make_case(Problem(((2, 130), (1, 9)), 8, 64), torch.bfloat16, "cpu", num_splits=1)
    case = fp8_of(case, torch.float8_e4m3fn, 0.5)
    case = case.with_inputs(q=case.inputs["q"].to(torch.float8_e4m3fn))
    got = check(case.with_options(q_descale=torch.full((), 1.5)))
    assert got["out"].dtype == torch.bfloat16


def test_the_load_chooses_splits(serve):
    serve()
    check(make_case(Problem(((1, 2000),), 16, 64), torch.bfloat16, "cpu"))


def test_rows_with_gaps_and_another_output(serve):
    serve()
    case = make_case(Problem(LENGTHS, 16, 16), torch.float16, "cpu", num_splits=1)
    want = case()
    q, cache = case.inputs["q"], case.inputs["kv_cache"]
    wide_q = torch.full((len(q), 20, 640), NAN, dtype=q.dtype)[:, 2:18, :576]
    wide_cache = torch.full((len(cache), 32, 640), NAN, dtype=q.dtype)[:, :16, :576]
    wide_q.copy_(q)
    wide_cache.copy_(cache)
    out = torch.zeros(len(q), 2, 16, 520)[:, 1, :, :512]
    got = case.with_inputs(q=wide_q, kv_cache=wide_cache)(out=out)
    assert got["out"] is out
    assert torch.equal(out.half(), want["out"])
    assert torch.equal(got["lse"], want["lse"])


def test_poison(serve):
    """NaN behind queries and keys, in the pages of others, in columns that others have."""
    serve()
    problem = Problem(((2, 300), (3, 200), (1, 100)), 32, 16, padding=5)
    case = make_case(problem, torch.bfloat16, "cpu", num_splits=2)
    want = case()
    bad = {name: t.clone() for name, t in case.inputs.items()}
    bad["q"][:2] = bad["q"][5:] = NAN
    table = case.options["block_table"].clone()
    bad["kv_cache"][table[0, :19].long()] = NAN
    table[2] = 2**24
    lengths = case.options["seqlens_k"].clone()
    lengths[2] = 0
    got = case.with_inputs(**bad).with_options(block_table=table, seqlens_k=lengths)()
    assert_same({"out": got["out"][2:5]}, {"out": want["out"][2:5]})
    assert torch.equal(got["lse"][:, 2:5], want["lse"][:, 2:5])
    assert not got["out"][5:].any()


# function, what it says, what a mistake would be
MISTAKES = [
    ("work_of", "last_row // TILE.GROUP + diagonal + 1", "last_row // TILE.GROUP + diagonal"),
    ("work_of", "whole = gl.minimum(len_k, row // TILE.GROUP + diagonal + 1)", "whole = len_k"),
    ("work_of", "gl.minimum(split * most, key_tiles)", "split * 0"),
    (
        "_copy_columns",
        "gl.minimum(last - (tile * TILE.BLOCK_N + i * TILE.PIECE), TILE.PIECE)",
        "TILE.PIECE",
    ),
    ("produce", "barrier_sync(EMPTY + 2 * stage, TILE.PARTIES, 1)", "pass"),
    ("produce", "barrier_sync(EMPTY + 2 * stage + 1, TILE.PARTIES, 1)", "pass"),
    ("produce", "(half.block_type.nbytes + rest.block_type.nbytes)", "half.block_type.nbytes"),
    ("_rows_of", "% TILE.PAGE", "* 0"),
    ("_load_queries", "hopper.fence_async_shared()", "pass"),
    ("queries_of", "row % TILE.GROUP", "row"),
    ("_scores", "mbarrier.wait(pipeline.low_full.index(stage), parity)", "pass"),
    ("_scores", "mbarrier.wait(pipeline.high_full.index(stage), parity)", "pass"),
    ("_hand_over", "hopper.fence_async_shared()", "pass"),
    ("lead", "barrier_sync(USED, 256, 4)", "pass"),
    ("lead", "o = hopper.warpgroup_mma_wait(0, deps=(o,))", "pass"),
    ("lead", "alpha = gl.exp2(m - pivot)", "alpha = gl.exp2(m - m)"),
    ("lead", "if first + TILE.BLOCK_N > work.whole:", "if False:"),
    ("follow", "barrier_sync(FULL, 256, 4)", "pass"),
    ("follow", "o * pipeline.factor_s.load(gl.SliceLayout(1, O))[:, None]", "o"),
    ("follow", "barrier_arrive(USED, 256, 4)", "pass"),
    ("follow", "o = hopper.warpgroup_mma_wait(0, deps=(o,))", "pass"),
    ("_finish", "lse2 * LN2", "lse2"),
    ("_store", "gl.program_id(0) * TILE.ROWS + index", "index"),
]


# of the warpgroup that widens
FP8_MISTAKES = [
    ("_widen", "barrier_sync(EMPTY + 2 * stage, TILE.PARTIES, 4)", "pass"),
    ("_widen", "barrier_sync(EMPTY + 2 * stage + 1, TILE.PARTIES, 4)", "pass"),
    ("_widen", "hopper.fence_async_shared()", "pass"),
    ("_keys_of", "mask=(key < last)[:, None]", "mask=(key < 2**20)[:, None]"),
    ("_keys_of", "key % TILE.PAGE", "key * 0"),
    ("leave", "barrier_sync(EMPTY + 2 * stage, TILE.PARTIES, WARPS)", "pass"),
    ("_finish", "results.value_scale / safe", "1.0 / safe"),
    ("lead", "s = s * (scale * LOG2E)", "pass"),
]


def mistaken() -> list[Case]:
    """Cases of which what is planted must break one: more tiles than stages, splits, tails."""
    problem = Problem(((2, 384), (1, 115)), 40, 48)
    return [
        make_case(problem, torch.bfloat16, "cpu", num_splits=1),
        make_case(problem, torch.bfloat16, "cpu", num_splits=4),
    ]


@pytest.mark.mutation
@pytest.mark.parametrize(("function", "right", "wrong"), MISTAKES, ids=lambda x: str(x)[:40])
def test_a_mistake_is_seen(function, right, wrong, serve):
    """By one order of the partitions or the other."""
    for reverse, case in itertools.product((True, False), mistaken()):
        serve(reverse).plant(function, right, wrong)
        try:
            check(case)
        except (AssertionError, RuntimeError):
            return
    pytest.fail("nobody sees it")


@pytest.mark.mutation
@pytest.mark.parametrize(("function", "right", "wrong"), FP8_MISTAKES, ids=lambda x: str(x)[:40])
def test_a_mistake_with_fp8_is_seen(function, right, wrong, serve):
    # an odd number of tiles, so that stages are not used equally often
    case = make_case(Problem(((2, 320), (1, 115)), 40, 64), torch.bfloat16, "cpu", num_splits=1)
    case = fp8_of(case, torch.float8_e4m3fn, 0.5)
    for reverse in (True, False):
        serve(reverse, "mla_fp8_kernel").plant(function, right, wrong)
        try:
            check(case)
        except (AssertionError, RuntimeError):
            return
    pytest.fail("nobody sees it")


def test_without_a_mistake(serve, reverse):
    serve(reverse)
    for case in mistaken():
        check(case)
