"""The forward kernel for Hopper, run on a CPU by ``_gluon``: numbers, and its barriers matter."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from attn_common import Platform
from blocksparse_attn import BlockSparseLayout
from blocksparse_attn._attention import tiles
from blocksparse_attn._attention.reference import visible_keys
from blocksparse_attn._attention.tiles import suits_hopper
from blocksparse_attn._layout import kept_lists
from blocksparse_attn._linked.host.forms import interpreted
from torch import Tensor

from ... import _numerics
from ..._linked.budget import assert_same
from ..._linked.numerics import compare, run_eager, run_oracle
from ..._numerics import Case, Packed, Shape, check, layout_of, make_case, make_packed, run
from ._gluon import reverse

__all__ = ["reverse"]  # fixtures

pytestmark = pytest.mark.skipif(not interpreted(), reason="about the interpreter")


@pytest.fixture
def serve(monkeypatch):
    """Return a function that has one kernel serve what it may of a call, in two programs."""
    from blocksparse_attn._attention.hopper.queries import launch

    from ..._linked.gluon import Kernel

    hopper = Platform.parse("nvidia:sm_90")
    real = launch.hopper_query_kernel
    ticket = torch.zeros(1, dtype=torch.int32)
    for module in (tiles, kept_lists):
        monkeypatch.setattr(module, "suits_hopper", lambda _, *form: suits_hopper(hopper, *form))
    # the portable kernel has its own tests, and is slow to interpret
    monkeypatch.setattr(_numerics, "takes_hopper", lambda _: False)
    monkeypatch.setattr(launch, "processors", lambda _: 2)
    for name in ("new_ticket", "kept_ticket"):
        monkeypatch.setattr(launch, name, lambda _: ticket)
    kernels = []

    def serve(reverse=True):
        kernels.append(Kernel(real, reverse))
        monkeypatch.setattr(launch, "hopper_query_kernel", kernels[-1])
        return kernels[-1]

    yield serve
    assert all(kernel.launches for kernel in kernels)
    assert not ticket.any() or any(kernel.faults for kernel in kernels)


CASES = [
    (Shape(1, 200, 300, 2, 1, 64), "random", (16, 16), False, True),
    (Shape(2, 150, 333, 2, 1, 64), "random", (32, 32), True, True),
    (Shape(1, 300, 300, 1, 1, 128), "local", (64, 64), False, True),
    (Shape(1, 200, 611, 2, 2, 128), "random", (128, 16), False, False),
    (Shape(1, 260, 200, 4, 2, 48, 80), "random", (64, 32), True, False),
    (Shape(1, 150, 400, 1, 1, 64), "all", (128, 128), False, False),
    (Shape(1, 150, 200, 2, 1, 64), "none", (64, 64), False, True),
]


@pytest.mark.parametrize(("shape", "pattern", "block", "shared", "causal"), CASES, ids=str)
def test_fixed_length(shape, pattern, block, shared, causal, serve, reverse):
    serve(reverse)
    case = make_case(
        shape, torch.bfloat16, "cpu", pattern, block, shared=shared, spare=1, causal=causal
    )
    check(case, grad=False)


@pytest.mark.parametrize("heads", [1, 2])
def test_a_layout_per_sequence(heads, serve):
    kernel = serve()
    lengths = (70, 3, 100)
    case = make_packed(Packed(lengths, (130, 40, 100), 2, 1, 64, padding=40), torch.bfloat16, "cpu")
    layouts = [
        layout_of(name, (32, 64), 160, heads, "cpu", alike=False)
        for name in ("local", "all", "random")
    ]
    check(case.with_options(layout=BlockSparseLayout.batched(layouts), causal=False), grad=False)
    assert kernel.launches


def test_rows_that_begin_with_the_queries(serve):
    """Rows behind the last query keep blocks that nobody sees, and that may be NaN."""
    kernel = serve()
    shape = Packed((100, 45), (30, 200), 2, 1, 64)
    options = {"causal": False, "align": "top-left"}
    case = make_packed(shape, torch.bfloat16, "cpu", "random", (32, 32), spare=1, **options)
    want = check(case, grad=False)
    dense = case.options["layout"].to_dense()
    seen = visible_keys(dense, (32, 32), 45, 200, False, True).flatten(0, 1).any(0)
    for name in "kv":
        case.inputs[name][30:][~seen] = math.nan
    assert_same(run(case, grad=False), want)
    # under a causal mask keys behind the last query may share its block: portable kernels
    count = kernel.launches
    check(case.with_options(causal=True), grad=False)
    assert kernel.launches == count


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("block", [(16, 16), (64, 32), (128, 128)], ids=str)
def test_packed(block, causal, serve, reverse):
    """Lengths end inside tiles and blocks; a tile may begin ahead of its sequence."""
    serve(reverse)
    lengths = (77, 0, 200, 5, 100), (77, 40, 333, 200, 90)
    shape = Packed(*lengths, 2, 1, 64, padding=70)
    check(make_packed(shape, torch.float16, "cpu", "random", block, causal=causal), grad=False)


@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("block", [(16, 16), (128, 16), (32, 32)], ids=str)
def test_blocks_that_nobody_sees(block, causal, shared, serve):
    """NaN between the blocks of a step, and in what only rows ahead of the chunk keep."""
    serve()
    rows, cols = (-(-500 // side) for side in block)
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand(1 if shared else 2, rows, cols, generator=generator) < 0.4
    kept[..., 1::3] = False
    first_row = 300 // block[0]
    kept[:, first_row - 1, 3] = True
    kept[:, first_row:, 3] = False
    layout = BlockSparseLayout.from_dense(kept, block)
    case = make_case(Shape(1, 200, 500, 2, 1, 64), torch.bfloat16, "cpu", causal=causal)
    case = case.with_options(layout=layout)
    seen = visible_keys(layout.to_dense(), block, 200, 500, causal).flatten(0, 1).any(0)
    want = run(case, grad=False)
    bad = {name: t.clone() for name, t in case.inputs.items()}
    for name in "kv":
        bad[name][:, ~seen] = math.nan
    assert_same(run(case.with_inputs(**bad), grad=False), want)


@pytest.mark.parametrize("block", [(64, 64), (128, 32)], ids=str)
def test_rows_that_keep_nothing_are_0_beside_values_that_are_nan(block, serve, reverse):
    serve(reverse)
    kept = torch.ones(2, -(-300 // block[0]), -(-300 // block[1]), dtype=torch.bool)
    kept[:, ::2] = False
    layout = BlockSparseLayout.from_dense(kept, block)
    case = make_case(Shape(1, 300, 300, 2, 1, 64), torch.bfloat16, "cpu", causal=False)
    case.inputs["v"][:] = math.nan
    got = run(case.with_options(layout=layout), grad=False)
    is_empty = torch.arange(300) // block[0] % 2 == 0
    assert not got["out"][0, is_empty].any()
    assert (got["lse"][0, :, is_empty] == -math.inf).all()
    assert got["out"][0, ~is_empty].isnan().all()


def test_other_sequences_are_not_read(serve):
    serve()
    shape = Packed((100, 150, 90), (120, 333, 100), 2, 1, 64, padding=70)
    case = make_packed(shape, torch.bfloat16, "cpu", "random", (32, 32))
    want = run(case, grad=False)
    bad = {name: t.clone() for name, t in case.inputs.items()}
    for name, begin, end in (("q", 100, 250), ("k", 120, 453), ("v", 120, 453)):
        bad[name][:begin] = math.nan
        bad[name][end:] = math.nan
    got = run(case.with_inputs(**bad), grad=False)
    assert torch.equal(got["out"][100:250], want["out"][100:250])
    assert torch.equal(got["lse"][:, 100:250], want["lse"][:, 100:250])


# function, what it says, what a mistake would be
ARRIVE_V = "barrier_arrive(EMPTY + OPTIONS.STAGES_K + stage_v, PARTIES, 4)"
WAIT_V = "mbarrier.wait(pipeline.v_full.index(stage_v), (turn - 1) // OPTIONS.STAGES_V & 1)"
WAIT_S = "s = hopper.warpgroup_mma_wait(1, deps=(s,))"
ARRIVE_K = "barrier_arrive(EMPTY + stage, PARTIES, 4)"
MISTAKES = [
    ("copy_blocks", "(PANELS * PER_STEP)", "PER_STEP"),
    ("copy_blocks", "panel * 64)", "0)"),
    ("copy_blocks", "barrier_sync(ROOM + stage, PARTIES, 1)", "pass"),
    ("copy_blocks", "= EMPTY + OPTIONS.STAGES_K if OF_V", "= EMPTY if OF_V"),
    ("produce", "before = items\n", "pass\n"),
    ("copy_queries", "mbarrier.wait(pipeline.q_empty.index(w), (count & 1) ^ 1)", "pass"),
    ("receive", "mbarrier.wait(pipeline.tile_full.index(slot), count // SLOTS & 1)", "pass"),
    ("receive", "mbarrier.arrive(pipeline.tile_empty.index(slot), count=1)", "pass"),
    ("hide", "!= 0, reach, -1", "!= 0, reach, reach"),
    ("_fold", "mbarrier.wait(pipeline.k_full.index(stage), turn // OPTIONS.STAGES_K & 1)", "pass"),
    ("_fold", "turn // OPTIONS.STAGES_K & 1", "(turn // OPTIONS.STAGES_K & 1) ^ 1"),
    ("_fold", WAIT_V, "pass"),
    ("_fold", WAIT_S, "pass"),
    ("_fold", WAIT_S, ARRIVE_K + "; " + WAIT_S),
    ("_fold", ARRIVE_K, "pass"),
    ("_fold", "o = hopper.warpgroup_mma_wait(0, deps=(o,))", "pass"),
    ("_fold", WAIT_V, WAIT_V + "; " + ARRIVE_V),
    ("_fold", "barrier_arrive(TURN + (W + 1) % 2, 256, 4)", "pass"),
    ("_fold", "top - m > SLACK, top, m", "top - m > 8000.0, top, m"),
    ("_fold", "o = shrink(", "shrink("),
    ("send", "hopper.fence_async_shared()", "pass"),
    ("send", "tma.store_wait(0)", "pass"),
    ("send", "if row >= 0", "if row >= -ROWS"),
    ("_begin", "mbarrier.wait(pipeline.q_full.index(W), tile_count & 1)", "pass"),
    ("rows_for", "W * ROWS", "0"),
    (
        "survey",
        "alone_0 = (counts // COUNTED // COUNTED)",
        "alone_0 = (counts // COUNTED % COUNTED)",
    ),
    ("half_places", "gl.where(half == 0, walk.alone_1, 0)", "0"),
    ("half_places", "behind < walk.odd", "behind < 0"),
    ("fetch", "lane // HALF", "lane * 0"),
    ("_begin_in_halves", "range(1, walk.halves)", "range(1, 1)"),
    ("_finish", "mbarrier.arrive(pipeline.q_empty.index(W), count=1)", "pass"),
    ("_consume", "barrier_sync(TURN, 256, 4)", "pass"),
    ("_consume", "barrier_arrive(TURN, 256, 4)", "barrier_arrive(TURN, 288, 4)"),
    ("hopper_query_kernel", "barriers(SLOTS, 2)", "barriers(SLOTS, 1)"),
]
# of these, blocks of 32 show nothing
OF_HALVES = ("rows_for", "survey", "half_places", "fetch", "_begin_in_halves")


def uneven() -> Case:
    """A case of walks with and without half steps, in which either half sees more alone."""
    generator = torch.Generator().manual_seed(5)
    kept = torch.rand(2, 7, 7, generator=generator) < 0.8
    case = make_case(Shape(1, 420, 420, 2, 1, 64), torch.bfloat16, "cpu")
    return case.with_options(layout=BlockSparseLayout.from_dense(kept, 64))


@pytest.mark.parametrize("halved", [tiles.HALVED, 0], ids=["halves", "whole"])
def test_what_one_half_of_a_tile_sees_alone(halved, serve, reverse, monkeypatch):
    """Also where a layout is too long for half steps."""
    monkeypatch.setattr(tiles, "HALVED", halved)
    serve(reverse)
    check(uneven(), grad=False)


def mistaken() -> Case:
    """A case that what is planted must break; its layout keeps the plan of a call."""
    shape = Packed((300, 100), (555, 333), 2, 2, 48, 80)
    case = make_packed(shape, torch.bfloat16, "cpu", "random", (32, 32))
    # walks end at the first keys: there the maxima rise further than pivots may lag behind
    k = case.inputs["k"].clone()
    k[:200] *= 200
    return case.with_inputs(k=k)


@functools.cache
def wanted(make: Callable[[], Case]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what the oracle gives of a case, and what eager code does."""
    oracle = run_oracle(make(), grad=False)
    return oracle, run_eager(make(), oracle, grad=False)


def test_without_a_mistake(serve, reverse):
    serve(reverse)
    check(mistaken(), grad=False)


@pytest.mark.mutation
@pytest.mark.parametrize(("function", "right", "wrong"), MISTAKES, ids=lambda x: str(x)[:40])
def test_a_mistake_is_seen(function, right, wrong, serve):
    """By one order of the partitions or the other."""
    make = uneven if function in OF_HALVES else mistaken
    results = wanted(make)
    for goes_ahead in (True, False):
        serve(goes_ahead).plant(function, right, wrong)
        try:
            case = make()
            compare(case, run(case, grad=False), *results)
        except (AssertionError, RuntimeError):
            return
    raise AssertionError("not seen")
