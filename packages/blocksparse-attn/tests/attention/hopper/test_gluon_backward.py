"""The backward for Hopper, run on a CPU by ``_gluon``: numbers, and that its barriers matter."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from blocksparse_attn import BlockSparseLayout
from blocksparse_attn._attention import tiles
from blocksparse_attn._attention.reference import visible_keys
from blocksparse_attn._linked.host.forms import interpreted
from torch import Tensor

from ..._linked.budget import assert_same
from ..._linked.numerics import compare, run_eager, run_oracle
from ..._numerics import Case, Packed, Shape, check, make_case, make_packed, run
from ._gluon import reverse
from ._gluon_backward import both_ways, eager_forward, self_attention

__all__ = ["both_ways", "eager_forward", "reverse"]  # fixtures

pytestmark = pytest.mark.skipif(not interpreted(), reason="about the interpreter")


@pytest.fixture
def backward(both_ways, eager_forward):
    """Return the same, of calls whose forward is eager."""
    return both_ways


CASES = [
    (Shape(1, 330, 330, 4, 2, 64), "local", (64, 64), False, True),
    (Shape(2, 150, 300, 2, 1, 64), "random", (64, 64), False, True),  # a chunk of a sequence
    (Shape(1, 333, 333, 4, 1, 128), "local", (64, 64), True, True),
    (Shape(1, 200, 611, 2, 2, 48, 80), "random", (128, 64), True, False),
    (Shape(1, 260, 200, 2, 1, 128), "random", (64, 128), False, False),  # rows ahead of key 0
    (Shape(1, 300, 400, 2, 1, 64), "all", (128, 128), False, True),
    (Shape(1, 150, 200, 2, 1, 64), "none", (64, 64), False, True),
    # blocks put together of small ones
    (Shape(1, 330, 330, 4, 2, 64), "local", (32, 32), False, True),
    (Shape(1, 250, 250, 2, 1, 128), "local", (16, 16), False, True),
    (Shape(2, 100, 213, 4, 1, 64), "random", (16, 16), True, False),
    (Shape(1, 220, 160, 2, 2, 48, 80), "random", (64, 16), False, True),
    (Shape(1, 150, 250, 2, 1, 64), "random", (16, 128), True, True),
    (Shape(1, 130, 200, 2, 1, 64), "none", (32, 32), False, False),
]


@pytest.mark.parametrize(("shape", "pattern", "block", "shared", "causal"), CASES, ids=str)
def test_fixed_length(shape, pattern, block, shared, causal, backward, reverse):
    backward(reverse)
    check(
        make_case(
            shape, torch.bfloat16, "cpu", pattern, block, shared=shared, spare=1, causal=causal
        )
    )


@pytest.mark.parametrize(
    ("lengths", "block"), [((150, 260), (64, 64)), ((90, 170), (16, 32))], ids=str
)
def test_rows_that_begin_with_the_queries(lengths, block, backward):
    """Rows behind the last query keep blocks that nobody sees, and that may be NaN."""
    kernel = backward()
    case = make_case(
        Shape(1, *lengths, 2, 1, 64), torch.bfloat16, "cpu", "random", block, spare=1,
        causal=False, align="top-left",
    )  # fmt: skip
    dense = case.options["layout"].to_dense()
    dense[:, :, 2] = False
    dense[:, -1, 2] = True
    case = case.with_options(layout=BlockSparseLayout.from_dense(dense, block))
    want = check(case)
    seen = visible_keys(dense, block, *lengths, False, True).flatten(0, 1).any(0)
    for name in "kv":
        case.inputs[name][:, ~seen] = math.nan
    assert_same(run(case), want)
    assert kernel.launches


@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("block", [(64, 64), (16, 32)], ids=str)
def test_packed(block, causal, shared, backward, reverse):
    """Lengths end inside blocks; what no sequence has gets gradients of 0."""
    backward(reverse)
    lengths = 77, 0, 200, 5, 130
    case = self_attention(
        lengths, 2, 1, 64, torch.float16, "cpu", "random", block, shared=shared, causal=causal
    )
    got = check(case)
    for name in ("dq", "dk", "dv"):
        assert not got[name][sum(lengths) :].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_keys_behind_the_end_without_a_causal_mask(dtype, backward, reverse):
    """Of logits far below 0, exp(0 - lse) of what is not there would overflow."""
    backward(reverse)
    case = make_case(Shape(1, 100, 100, 1, 1, 64), dtype, "cpu", "all", (64, 64), causal=False)
    shift = 1.6 if dtype == torch.float16 else 4.0
    q, k = (0.1 * case.inputs[name] for name in "qk")
    check(case.with_inputs(q=(q + shift).to(dtype), k=(k - shift).to(dtype)))


def test_rows_that_keep_nothing_but_blocks_behind_the_end(backward):
    """Without a causal mask both blocks of a program may lie there; their rows may be NaN."""
    backward()
    kept = torch.zeros(1, 8, 8, dtype=torch.bool)
    kept[:, :5, 0] = True
    kept[:, 3] = False
    kept[:, 3, 6:] = True
    layout = BlockSparseLayout.from_dense(kept, 64)
    case = make_case(Shape(1, 320, 320, 1, 1, 64), torch.bfloat16, "cpu", causal=False)
    case = case.with_options(layout=layout)
    q = case.inputs["q"].clone()
    q[:, 192:256] = math.nan
    want = run(case)
    got = run(case.with_inputs(q=q))
    for gradient in ("dq", "dk", "dv"):
        assert torch.equal(got[gradient], want[gradient])


def test_results_that_repeat_are_asked_for_too_late(backward, monkeypatch):
    """A fixed call carries no lists for the portable kernels."""
    backward()
    case = make_case(Shape(1, 100, 100, 1, 1, 64), torch.bfloat16, "cpu", "all", (64, 64))
    case = case.with_inputs(**{n: t.requires_grad_() for n, t in case.inputs.items()})
    out, _ = case()
    out.sum().backward(retain_graph=True)
    monkeypatch.setattr(tiles, "repeats", lambda: True)
    with pytest.raises(NotImplementedError, match="ahead of it"):
        out.sum().backward()


def test_packed_calls_that_are_not_worth_it(backward):
    """Offsets of two kinds, or sequences much shorter than the layout: the portable kernels."""
    kernel = backward()
    short = Packed((70, 90), (70, 90), 2, 1, 64)
    check(make_packed(short, torch.bfloat16, "cpu", "local", (64, 64)))
    assert not kernel.launches
    long = self_attention((70, 90), 2, 1, 64, torch.bfloat16, "cpu", "local", (64, 64), spare=9)
    check(long)
    assert not kernel.launches
    check(self_attention((70, 90), 2, 1, 64, torch.bfloat16, "cpu", "local", (64, 64)))
    assert kernel.launches


@pytest.mark.parametrize("shared", [False, True], ids=["per_head", "shared"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("block", [(64, 64), (128, 64), (64, 128), (16, 16), (32, 64)], ids=str)
def test_blocks_that_nobody_sees(block, causal, shared, backward):
    """NaN in what no row keeps, and in what only rows ahead of the chunk keep."""
    backward()
    queries, keys = (200, 500) if min(block) > 32 else (150, 280)
    rows, cols = (-(-keys // side) for side in block)
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand(1 if shared else 2, rows, cols, generator=generator) < 0.5
    kept[..., 1::3] = False
    first_row = (keys - queries) // block[0]
    kept[:, first_row - 1, 2] = True
    kept[:, first_row:, 2] = False
    layout = BlockSparseLayout.from_dense(kept, block)
    case = make_case(Shape(1, queries, keys, 2, 1, 64), torch.bfloat16, "cpu", causal=causal)
    case = case.with_options(layout=layout)
    seen = visible_keys(layout.to_dense(), block, queries, keys, causal).flatten(0, 1).any(0)
    want = run(case)
    bad = {name: t.clone() for name, t in case.inputs.items()}
    for name in "kv":
        bad[name][:, ~seen] = math.nan
    assert_same(run(case.with_inputs(**bad)), want)


def test_queries_that_see_nothing_may_be_nan(backward):
    """They keep no block, or one behind the last key, of which others keep the neighbour."""
    backward()
    kept = torch.zeros(1, 6, 6, dtype=torch.bool)
    kept[:, 1:3, 0] = kept[:, 2, 4:] = kept[:, 3, 5] = kept[:, 4, 4] = True
    case = make_case(Shape(1, 320, 320, 2, 1, 64), torch.bfloat16, "cpu", causal=False)
    case = case.with_options(layout=BlockSparseLayout.from_dense(kept, 64))
    want = run(case)
    bad = case.inputs["q"].clone()
    bad[:, :64] = bad[:, 192:256] = math.nan
    assert_same(run(case.with_inputs(q=bad)), want)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_pieces_of_queries_that_see_nothing_may_be_nan(causal, backward):
    """Where others of their 64 queries see something; and what arrives there."""
    backward()
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand(2, 10, 10, generator=generator) < 0.5
    kept[:, 1::3] = False
    layout = BlockSparseLayout.from_dense(kept, 16)
    case = make_case(Shape(1, 160, 160, 2, 1, 64), torch.bfloat16, "cpu", causal=causal)
    case = case.with_options(layout=layout)
    blind = ~visible_keys(layout.to_dense(), (16, 16), 160, 160, causal).any(-1)
    bad = case.inputs["q"].clone()
    bad[0, blind.T] = math.nan
    assert blind.any()
    assert_same(run(case.with_inputs(q=bad)), run(case))


def test_pieces_of_queries_that_keep_what_lies_behind_the_end_may_be_nan(backward):
    """They keep that alone, and others of their 64 queries keep its neighbours."""
    backward()
    kept = torch.zeros(1, 10, 10, dtype=torch.bool)
    kept[:, 1:3, :6] = kept[:, 2:4, 7] = True
    case = make_case(Shape(1, 100, 100, 2, 1, 64), torch.bfloat16, "cpu", causal=False)
    case = case.with_options(layout=BlockSparseLayout.from_dense(kept, 16))
    bad = case.inputs["q"].clone()
    bad[:, :16] = bad[:, 48:] = math.nan
    assert_same(run(case.with_inputs(q=bad)), run(case))


@pytest.mark.parametrize("row", [0, 64])
def test_nan_that_arrives_at_an_lse_stays_with_what_its_row_sees(row, backward):
    """In a tile of keys that one warpgroup multiplies alone, and in one of both."""
    backward()
    case = make_case(Shape(1, 128, 128, 1, 1, 64), torch.bfloat16, "cpu", "all", (64, 64))
    leaves = [case.inputs[name].requires_grad_() for name in "qkv"]
    out, lse = case()
    dlse = torch.ones_like(lse)
    want = torch.autograd.grad((out, lse), leaves, (out, dlse), retain_graph=True)
    dlse[..., row] = math.nan
    dq, dk, dv = torch.autograd.grad((out, lse), leaves, (out, dlse))
    assert dq[:, row].isnan().all()
    for got, exact, seen in zip((dq, dk, dv), want, (row + 1, row + 1, 0), strict=True):
        assert torch.equal(got[:, seen:], exact[:, seen:])
    assert torch.equal(dq[:, :row], want[0][:, :row])


@pytest.mark.parametrize("block", [(64, 64), (16, 16)], ids=str)
def test_other_sequences_are_not_read(block, backward):
    backward()
    case = self_attention((100, 150, 90), 2, 1, 64, torch.bfloat16, "cpu", "local", block)
    want = run(case)
    bad = {name: t.clone() for name, t in case.inputs.items()}
    for t in bad.values():
        t[:100] = math.nan
        t[250:] = math.nan
    got = run(case.with_inputs(**bad))
    for name in ("dq", "dk", "dv"):
        assert torch.equal(got[name][100:250], want[name][100:250]), name


# function, what it says, what a mistake would be
ARRIVE = "barrier_arrive(EMPTY + stage, BOTH, 4)"
ARRIVE_OWN = "barrier_arrive(EMPTY + stage, EITHER, 4)"
WAIT_DK = "dk, s = hopper.warpgroup_mma_wait(0, deps=(dk, s))"
WAIT_OWN_DK = "dk = hopper.warpgroup_mma_wait(1, deps=(dk,))"
MISTAKES = [
    ("produce", "_wait_for_room(EMPTY + stage, turn - OPTIONS.STAGES < both)", "pass"),
    ("produce", "turn - OPTIONS.STAGES < both", "turn < both"),
    ("produce", "_wait_for_room(EMPTY + last % OPTIONS.STAGES, last < both)", "pass"),
    ("produce", "mbarrier.arrive(pipeline.q_full.index(stage), count=1)", "pass"),
    ("_numbers", "other=0.0", "other=INF"),
    ("_describe", "block == keys.seen_1, 0", "block == keys.seen_0, 0"),
    ("produce", "item = coming", "item = coming._replace(head=item.head)"),
    ("find_item", "(place < count)", "(place < 99)"),
    ("find_item", "place // 2)", "place)"),
    ("_begin", "mbarrier.wait(pipeline.k_full, 0, pred=is_walked)", "pass"),
    ("_begin", "mbarrier.wait(pipeline.v_full, 0, pred=is_walked)", "pass"),
    ("_begin", "mbarrier.wait(pipeline.q_full.index(turn), 0, pred=is_walked)", "pass"),
    ("_begin", "gl.where(both > 0, 0, W)", "W * 0"),
    ("_leave", "mine >= OTHERS", "mine > OTHERS"),
    ("_leave", "dk * numbers.scale", "dk"),
    ("_start_step", "turn // OPTIONS.STAGES & 1", "(turn // OPTIONS.STAGES & 1) ^ 1"),
    ("walk", "following // STAGES & 1", "0"),
    ("walk", ", pred=following < mine.total", ""),
    ("walk", "gl.where(turn < mine.both, 0, 1)", "0"),
    ("walk", "hopper.fence_async_shared()", "pass"),
    ("walk", "await_made(turn + 1, W)", "pass"),
    ("walk", "turn % 2 * 2 + W", "W"),
    ("walk", "last = pick(fields, SUMS)", "pass"),
    ("multiply_dq", "turn % 2 * 2", "0"),
    ("_consume", "await_made(turn + 1, W)", "pass"),
    ("_consume", "add_dq(tensors.dq_ptr, gradients.last, dq, W, OPTIONS.HEAD_DIM)", "pass"),
    ("_consume", "dq = hopper.warpgroup_mma_wait(0, deps=(dq,))", "pass"),
    ("walk", "dp = hopper.warpgroup_mma_wait(1, deps=(dp,))", "pass"),
    ("walk", "dq = hopper.warpgroup_mma_wait(2, deps=(dq,))", "pass"),
    ("walk", WAIT_DK, ARRIVE + "; " + WAIT_DK),
    ("walk_apart", "turn += W", "pass"),
    ("walk_apart", "barrier_sync(TURN, 256, 4)", "pass"),
    ("walk_apart", "hopper.fence_async_shared()", "pass"),
    ("walk_apart", "dp = hopper.warpgroup_mma_wait(1, deps=(dp,))", "pass"),
    ("walk_apart", "dq = hopper.warpgroup_mma_wait(1, deps=(dq,))", "pass"),
    ("walk_apart", "more = hopper.warpgroup_mma_wait(1, deps=(more,))", "pass"),
    ("walk_apart", WAIT_OWN_DK, ARRIVE_OWN + "; " + WAIT_OWN_DK),
    ("walk_apart", "if number >= 0", "if number >= -1"),
    ("find_items", "MOST - gl.max", "1 + MOST - gl.max"),
    ("find_item", "(block >= program.low)", "(block > program.low)"),
    ("walk_apart", ", pred=turn < mine.total", ""),
    ("probabilities", "pick(fields, REACH + W)", "64"),
    ("write", "hopper.fence_async_shared()", "pass"),
    ("hopper_backward_kernel", "pid < there", "pid + 1 < there"),
    ("_allocate", "barriers(OPTIONS.STAGES, 2)", "barriers(OPTIONS.STAGES, 1)"),
    ("_allocate", "dq_added = barriers(1, 2)", "dq_added = barriers(1, 1)"),
    ("produce", "mbarrier.wait(pipeline.dq_added, 0)", "pass"),
    ("produce", "raise_counter(tensors.counters_ptr + head, 1)", "pass"),
]


# of what blocks of 32 are put together by
MISTAKES_OF_PIECES = [
    ("_describe", "fields = gl.where(field == BITS, item.bits, fields)", "pass"),
    ("find_item", "bits_ptr + first + place", "bits_ptr + first"),
    ("probabilities", "16 * W", "0"),
    ("probabilities", "row // PIECE", "row * 0"),
    ("probabilities", "key // PIECE * SIDE", "key // PIECE"),
    ("key_positions", "key % PIECE", "key"),
    ("first_key", "* PIECE", "* 16"),
    ("first_query", "j * PIECE", "0"),
    ("copy_piece", "(ROWS // PIECE) + i", "(ROWS // PIECE)"),
    ("_add_pieces", "warp % WARPS", "warp"),
    ("_add_pieces", "warp // WARPS == i", "warp == i"),
    ("_consume", "work.owned_ptr + W * (ROWS // OPTIONS.PIECE)", "work.owned_ptr"),
    ("add_block", "work.owned_ptr + W * (ROWS // PIECE)", "work.owned_ptr"),
    ("_leave", "mine % OTHERS != 0", "(mine > 0) & (mine < OTHERS)"),
    ("find_block", "gl.load(parts_ptr + piece, mask=is_there", "gl.load(parts_ptr, mask=is_there"),
    ("write_block", "work.owned_ptr + W * SIDE", "work.owned_ptr"),
    ("write_block", "gl.load(owned_ptr + i)", "gl.load(owned_ptr)"),
    ("write_block", "hopper.fence_async_shared()", "pass"),
]


def mistaken(block: int) -> Case:
    """A case that what is planted must break: more steps of either kind than stages."""
    shape = Shape(1, 600, 700, 2, 1, 48) if block == 64 else Shape(1, 330, 400, 2, 1, 48)
    return make_case(shape, torch.bfloat16, "cpu", "local", (block, block), spare=1)


@functools.cache
def wanted(block: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what the oracle gives of that case, and what eager code does."""
    oracle = run_oracle(mistaken(block))
    return oracle, run_eager(mistaken(block), oracle)


@pytest.mark.parametrize("block", [64, 32])
def test_without_a_mistake(block, both_ways, reverse):
    """The forward kernel's results as well."""
    both_ways(reverse)
    check(mistaken(block))


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("function", "right", "wrong", "block"),
    [(*fault, 64) for fault in MISTAKES] + [(*fault, 32) for fault in MISTAKES_OF_PIECES],
    ids=lambda x: str(x)[:40],
)
def test_a_mistake_is_seen(function, right, wrong, block, backward):
    """By one order of the partitions or the other."""
    results = wanted(block)
    for copies_first in (True, False):
        backward(copies_first).plant(function, right, wrong)
        try:
            case = mistaken(block)
            compare(case, run(case), *results)
        except (AssertionError, RuntimeError):
            return
    raise AssertionError("not seen")
