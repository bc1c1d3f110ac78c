"""The kernel for Hopper, run on a CPU by ``_linked.gluon``: numbers, pages, and its barriers.

Tiles are those that serve calls, but for the keys of a step: short sequences are to have many.
"""

from __future__ import annotations

import pytest
import torch
from prefix_prefill._paged import ops
from prefix_prefill._paged.hopper_tiles import hopper_tile

from ..._linked.budget import Maker, assert_same
from ..._numerics import MEDIUM, NAN, Case, Problem, check, make_case, run

pytestmark = pytest.mark.skipif(not ops.interpreted(), reason="about the interpreter")

# more queries than keys, tails, no key, no query, and one that another tile may serve
LENGTHS = ((130, 300), (1, 90), (0, 5), (140, 60), (33, 33), (20, 0))


CASES = [
    (Problem(LENGTHS, 4, 2, 64, page=16, padding=7), (), (-1, -1)),
    (Problem(LENGTHS, 3, 1, 48, page=48), ("alibi", "sinks"), (-1, 0)),
    (Problem(LENGTHS, 8, 1, 128, page=128), ("full", "softcap"), (-1, -1)),
    (Problem(LENGTHS, 2, 2, 80, page=16), (), (40, -1)),
    (Problem(LENGTHS, 4, 1, 256, page=48), ("full", "sinks"), (61, 3)),
    (Problem(LENGTHS, 2, 1, 64, page=128, padding=3), ("full", "alibi_batch"), (14, 14)),
]


@pytest.mark.parametrize(("problem", "features", "window"), CASES, ids=str)
def test_prefill(problem, features, window, serve, reverse):
    serve(reverse)
    case = make_case(problem, torch.bfloat16, "cpu", features)
    check(case.with_options(num_splits=1, window_size=window))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page", [16, 48, 256])
def test_tiles_that_serve_calls(head_dim, page, serve):
    serve(block_n=hopper_tile(head_dim).block_n)
    problem = Problem(((70, 400), (17, 17)), 2, 1, head_dim, page)
    case = make_case(problem, torch.float16, "cpu")
    check(case.with_options(num_splits=1, window_size=(150, 0)))


TALL = [
    (Problem(LENGTHS, 4, 2, 64, page=16, padding=7), ("sinks",), (-1, 0)),
    (Problem(LENGTHS, 8, 1, 48, page=48), ("full",), (-1, -1)),
    (Problem(((400, 500), (95, 96)), 3, 1, 64, page=128), (), (-1, 5)),
]


@pytest.mark.parametrize(("problem", "features", "window"), TALL, ids=str)
def test_three_warpgroups_return_what_two_return(problem, features, window, serve, reverse):
    case = make_case(problem, torch.bfloat16, "cpu", features)
    case = case.with_options(num_splits=1, window_size=window)
    serve(reverse)
    two = run(case)
    serve(reverse, is_tall=True)
    check(case)
    assert_same(run(case), two)


@pytest.mark.parametrize("page", [16, 48, 128])
def test_poison(page, serve):
    """NaN before the first window, pages that are gone, NaN behind the queries."""
    serve()
    problem = Problem(((130, 400), (40, 300)), 4, 2, 64, page, padding=50)
    case = make_case(problem, torch.bfloat16, "cpu")
    case = case.with_options(num_splits=1, window_size=(50, 0))
    want = run(case)
    bad = {name: t.clone() for name, t in case.inputs.items()}
    bad["q"][170:] = NAN
    table = case.options["block_table"].clone()
    for b, (queries, keys) in enumerate(problem.lengths):
        unseen = keys - queries - 50
        for name in ("k_cache", "v_cache"):
            for key in range(unseen):
                bad[name][table[b, key // page], key % page] = NAN
        table[b, : unseen // page] = 2**30
        table[b, -(-keys // page) :] = -(2**30)
    assert_same(run(case.with_inputs(**bad).with_options(block_table=table)), want)


def test_the_pages_of_others_are_not_read(serve):
    serve()
    problem = Problem(((130, 300), (70, 200), (40, 100)), 2, 1, 64, 16)
    case = make_case(problem, torch.bfloat16, "cpu").with_options(num_splits=1)
    want = run(case)
    bad = {name: t.clone() for name, t in case.inputs.items()}
    bad["q"][:130] = bad["q"][200:] = NAN
    table = case.options["block_table"].clone()
    table[[0, 2]] = table.max()  # a page without a key
    got = run(case.with_inputs(**bad).with_options(block_table=table))
    assert torch.equal(got["out"][130:200], want["out"][130:200])
    assert torch.equal(got["lse"][:, 130:200], want["lse"][:, 130:200])


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FEW = ((70, 150), (1, 90), (0, 5), (40, 20))
FP8 = [
    (Problem(FEW, 4, 2, 64, page=16, padding=7), torch.bfloat16, E4M3, (), (-1, -1)),
    (Problem(FEW[:2], 3, 1, 80, page=5), torch.float16, E5M2, ("full", "sinks"), (40, 3)),
    (Problem(FEW, 2, 2, 128, page=48), torch.bfloat16, E5M2, ("alibi",), (-1, 0)),
    (Problem(FEW[1:], 4, 1, 256, page=64), torch.float16, E4M3, ("softcap",), (20, 0)),
]


@pytest.mark.parametrize(("problem", "dtype", "stored", "features", "window"), FP8, ids=str)
def test_fp8_cache(problem, dtype, stored, features, window, serve):
    """With scales of any sign, of one element, of heads, and of sequences and heads."""
    serve(problem.page < 48, name="prefill_wide_kernel")
    case = make_case(problem, dtype, "cpu", features, cache_dtype=stored)
    case = case.with_options(num_splits=1, window_size=window)
    heads, batch = problem.heads_k, len(problem.lengths)
    m = Maker("cpu", torch.float32, 7)
    scale = m.uniform(batch, heads, low=0.5, high=2.0)
    scale[0] = -0.5
    if batch == 2:
        scale = scale[0]
    elif batch == 3:
        scale = torch.full((1,), 0.75)
    check(case.with_options(k_descale=scale, v_descale=-scale))


def test_an_fp8_cache_without_scales_and_one_of_zero(serve):
    serve(name="prefill_wide_kernel")
    case = make_case(MEDIUM._replace(head_dim=48), torch.float16, "cpu", cache_dtype=E4M3)
    case = case.with_options(num_splits=1)
    check(case)
    check(case.with_options(k_descale=torch.zeros(1)))


def test_poison_of_an_fp8_cache(serve):
    """NaN in slots that nobody sees, and pages that are gone."""
    serve(name="prefill_wide_kernel")
    problem = Problem(((70, 200),), 2, 1, 64, 16)
    case = make_case(problem, torch.bfloat16, "cpu", cache_dtype=E4M3)
    case = case.with_options(num_splits=1, window_size=(50, 0))
    want = run(case)
    table = case.options["block_table"].clone()
    table[0, :5] = 2**24
    table[0, 13:] = -(2**24)
    assert_same(run(case.with_options(block_table=table)), want)


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [("prefill_kernel", 48), ("prefill_kernel", 256), ("prefill_wide_kernel", 80)],
)
def test_an_output_in_fp32(name, head_dim, serve):
    """Of the shape that a call asks for, in rows with gaps; nothing beside it is written."""
    serve(name=name)
    cache = E4M3 if name == "prefill_wide_kernel" else None
    problem = Problem(((40, 90), (17, 20)), 4, 2, head_dim, 16)
    case = make_case(problem, torch.bfloat16, "cpu", cache_dtype=cache).with_options(num_splits=1)
    frame = torch.full((len(case.inputs["q"]), 2, 4, head_dim + 4), 7.0)
    out = frame[:, 1, :, :head_dim]
    got = case(out=out)
    want = case()
    torch.testing.assert_close(out.bfloat16(), want["out"], rtol=0, atol=0)
    assert torch.equal(got["lse"], want["lse"])
    assert (frame[:, 0] == 7.0).all()
    assert (frame[..., head_dim:] == 7.0).all()


# function, what it says, what a mistake would be
ARRIVE_V = "barrier_arrive(EMPTY + TILE.STAGES_K + stage_v, TILE.PARTIES, 4)"
WAIT_K = "mbarrier.wait(pipeline.k_full.index(stage), turn // TILE.STAGES_K & 1)"
WAIT_V = "mbarrier.wait(pipeline.v_full.index(stage_v), (turn - 1) // TILE.STAGES_V & 1)"
WAIT_S = "s = hopper.warpgroup_mma_wait(1, deps=(s,))"
WAIT_Q = "mbarrier.wait(pipeline.q_empty.index(buffer), (count // TILE.BUFFERS_Q & 1) ^ 1)"
FULL_Q = "mbarrier.wait(pipeline.q_full.index(buffer), count // TILE.BUFFERS_Q & 1)"
MISTAKES = [
    ("look_up", "key + TILE.PIECE > seen.first", "key >= seen.first"),
    ("_copy_pages", "key % TILE.PAGE", "0"),
    ("_copy_pages", "mbarrier.expect(full, cache.desc.block_type.nbytes * PIECES)", "pass"),
    ("_copy_piece", "gl.minimum(seen.last - key, PIECE)", "PIECE"),
    ("_copy_half", "barrier_sync(FREE + stage, TILE.PARTIES, 1)", "pass"),
    ("_copy_half", "EMPTY + TILE.STAGES_K if IS_V else EMPTY", "EMPTY"),
    ("_copy_tile", "pages_v = pages", "pass"),
    ("copy_queries", WAIT_Q, "pass"),
    ("_copy_tile", "last = tile_of(steps - 1,", "last = tile_of(steps,"),
    ("_settle", "(work.first_row < 0)", "(work.first_row < -(2**30))"),
    ("receive", "mbarrier.wait(pipeline.tile_full.index(slot), count // SLOTS & 1)", "pass"),
    ("receive", "mbarrier.arrive(pipeline.tile_empty.index(slot), count=1)", "pass"),
    ("_attend_first", WAIT_K, "pass"),
    ("_attend", WAIT_K, "pass"),
    ("_attend", "turn // TILE.STAGES_K & 1", "(turn // TILE.STAGES_K & 1) ^ 1"),
    ("_attend", WAIT_V, "pass"),
    ("_attend", WAIT_S, "pass"),
    ("_attend", WAIT_S, "barrier_arrive(EMPTY + stage, TILE.PARTIES, 4); " + WAIT_S),
    ("_attend", "barrier_arrive_after(sums, EMPTY + stage, TILE.PARTIES)", "pass"),
    ("_attend", "o = hopper.warpgroup_mma_wait(0, deps=(o,))", "pass"),
    ("_attend", WAIT_V, WAIT_V + "; " + ARRIVE_V),
    ("_attend", "barrier_arrive(TURN + (W + 1) % TILE.WARPGROUPS, 256, 4)", "pass"),
    ("_finish", WAIT_V, "pass"),
    ("consume", FULL_Q, "pass"),
    ("consume", FULL_Q, FULL_Q.replace("count // TILE.BUFFERS_Q", "count")),
    ("consume", "count % TILE.BUFFERS_Q * TILE.WARPGROUPS + W", "W"),
    ("consume", "mbarrier.arrive(pipeline.q_empty.index(buffer), count=1)", "pass"),
    ("_store", "hopper.fence_async_shared()", "pass"),
    ("_store", "tma.store_wait(0)", "pass"),
    ("consume", "tma.store_wait(0)", "pass"),
    ("consume", "barrier_sync(TURN, 256, 4)", "pass"),
    (
        "pipeline_of",
        "barriers(SLOTS, 1), barriers(SLOTS, READERS)",
        "barriers(SLOTS, 1), barriers(SLOTS, 1)",
    ),
]


# where the output leaves through the memory of the queries
SHARED_MISTAKES = [
    ("_store", "if TILE.SHARE:", "if False:"),
    ("_store", "mbarrier.arrive(pipeline.q_empty.index(W), count=1)", "pass"),
]
# of three warpgroups
TALL_MISTAKES = [
    ("pipeline_of", "TILE.WARPGROUPS + (TILE.WIDENERS == 2)", "2"),
    ("consume", "if W == TILE.WARPGROUPS - 1:", "if W == TILE.WARPGROUPS:"),
    ("_attend", "(W + 1) % TILE.WARPGROUPS", "(W + 1) % 2"),
    ("copy_queries", "gl.static_range(TILE.WARPGROUPS)", "gl.static_range(2)"),
    ("_locate", "TILE.WARPGROUPS * (TILE.ROWS // TILE.PACK)", "2 * (TILE.ROWS // TILE.PACK)"),
    ("tiles_of", "TILE.WARPGROUPS * (TILE.ROWS // TILE.PACK)", "2 * (TILE.ROWS // TILE.PACK)"),
]


def mistaken(head_dim: int = 48, is_tall: bool = False) -> Case:
    """A case that what is planted must break: more tiles than buffers, and pages that are gone.

    Tiles of one step follow, of which the stages of keys and values hold several.
    """
    problem = Problem(((300, 350), (70, 115), *((20, 20),) * 6), 2, 1, head_dim, 48)
    if is_tall:
        problem = problem._replace(lengths=((600, 650), (160, 205)))
    case = make_case(problem, torch.bfloat16, "cpu")
    case.options["block_table"][:, 14 if is_tall else 8 :] = 2**24
    return case.with_options(num_splits=1, window_size=(-1 if is_tall else 90, 0))


@pytest.mark.parametrize(("head_dim", "is_tall"), [(48, False), (128, False), (64, True)])
def test_without_a_mistake(head_dim, is_tall, serve, reverse):
    serve(reverse, is_tall=is_tall)
    check(mistaken(head_dim, is_tall))


FP8_MISTAKES = [
    ("_read", "inside * PIECE", "inside * 0"),
    ("_read", "(key < seen.last)", "(key < 2**20)"),
    ("_look_up", "number.to(gl.int64)", "(number * 0).to(gl.int64)"),
    ("_page_of", "unit >> SHIFT", "unit"),
    ("_wait", "barrier_sync(half.empty + stage, TILE.PARTIES, 4)", "pass"),
    ("_bring", "unit = (last - step) * (N // PIECE)", "pass"),
    ("_bring", "_put(odd, memory", "_put(even, memory"),
    ("_bring", "tiles_of(work.first_row", "tiles_of(work.sequence"),
    ("_bring", "hopper.fence_async_shared()", "pass"),
    ("bring_first", "drain(turn, EMPTY, TILE.STAGES_K, TILE.PARTIES, 4)", "pass"),
    ("consume", "flips = descale < 0", "flips = descale < -9"),
    ("_descale_of", "at += work.sequence * heads_k", "pass"),
    ("_descale_of", "at = work.head // TILE.GROUP", "at = 0"),
]


@pytest.mark.mutation
@pytest.mark.parametrize("wideners", [1, 2])
@pytest.mark.parametrize(("function", "right", "wrong"), FP8_MISTAKES, ids=lambda x: str(x)[:40])
def test_a_mistake_of_the_wide_kernel_is_seen(function, right, wrong, wideners, serve):
    seen = False
    problem = Problem(((300, 350), (70, 115)), 4, 2, 48, 16)
    case = make_case(problem, torch.bfloat16, "cpu", cache_dtype=E4M3)
    case.options["block_table"][:, 23:] = 2**24
    scale = torch.tensor([[0.5, -2.0], [1.5, 0.25]])
    case = case.with_options(num_splits=1, k_descale=scale, v_descale=scale)
    for reverse in (True, False):
        kernel = serve(reverse, name="prefill_wide_kernel", wideners=wideners)
        kernel.plant(function, right, wrong)
        try:
            check(case)
        except (AssertionError, RuntimeError):
            seen = True
    assert seen


def is_seen(fault: tuple[str, str, str], serve, head_dim: int, is_tall: bool = False) -> bool:
    """Say whether a planted mistake is seen by one order of the partitions or the other."""
    seen = False
    for reverse in (True, False):
        serve(reverse, is_tall=is_tall).plant(*fault)
        try:
            check(mistaken(head_dim, is_tall))
        except (AssertionError, RuntimeError):
            seen = True
    return seen


@pytest.mark.mutation
@pytest.mark.parametrize("fault", MISTAKES, ids=lambda x: " ".join(x)[:60])
def test_a_mistake_is_seen(fault, serve):
    assert is_seen(fault, serve, 48)


@pytest.mark.mutation
@pytest.mark.parametrize("fault", SHARED_MISTAKES, ids=lambda x: " ".join(x)[:60])
def test_a_mistake_with_shared_memory_is_seen(fault, serve):
    assert is_seen(fault, serve, 256)


@pytest.mark.mutation
@pytest.mark.parametrize("fault", TALL_MISTAKES, ids=lambda x: " ".join(x)[:60])
def test_a_mistake_of_three_warpgroups_is_seen(fault, serve):
    assert is_seen(fault, serve, 64, is_tall=True)
