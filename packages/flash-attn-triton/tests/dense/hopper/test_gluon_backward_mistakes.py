"""The backward for Hopper with mistakes planted in it: the interpreter for Gluon shows each."""

from __future__ import annotations

import pytest
import torch
from flash_attn_triton._dense import ops

from ..._numerics import Case, Packed, Shape, check, make_case, make_packed
from ._gluon import caught, forward, reverse
from ._gluon_backward import KINDS, USED, backward, kinds

__all__ = ["backward", "forward", "reverse"]  # fixtures

pytestmark = pytest.mark.skipif(not ops.interpreted(), reason="about the interpreter")


SYNC_O = "await_readers(turn, EMPTY + STAGES_Q, STAGES_O, PARTIES)"
WAIT_O = "await_full(pipeline.dout_full, turn)"
ARRIVE_Q_FULL = "mbarrier.arrive(pipeline.q_full.index(stage), count=1)"
ARRIVE_Q = "barrier_arrive(EMPTY + stage, PARTIES, 4)"
WAIT_DK = "dk, s = wait_for_all(dk, s)"
WAIT_Q_FULL = "mbarrier.wait(pipeline.q_full.index(0), 0, pred=total > 0)"
WAIT_MORE = "more = hopper.warpgroup_mma_wait(len(v), deps=(more,))"
HAS_TURNS = "if count_turns(program.walk, OPTIONS) > 0:"
MISTAKES = [
    ("columns", "produce", "await_readers(turn, EMPTY, STAGES_Q, PARTIES)", "pass"),
    ("columns", "produce", SYNC_O, "pass"),
    ("columns", "produce", ARRIVE_Q_FULL, "pass"),
    ("rows", "produce", "EARLY and turn < STAGES_O", "EARLY and turn < 1"),
    ("columns", "produce", "other=0.0", "other=INF"),
    ("columns", "_first_scores", "mbarrier.wait(pipeline.k_full, 0)", "pass"),
    ("columns", "_first_scores", "mbarrier.wait(pipeline.v_full, 0, pred=total > 0)", "pass"),
    ("columns", "_first_scores", WAIT_Q_FULL, "pass"),
    ("columns", "_finish", "barrier_sync(TURN, 256, 4)", "pass"),
    ("columns", "consume", "say_made(turn + 1, W)", "pass"),
    ("columns", "_finish", "await_made(carried.turn + 1, W)", "pass"),
    ("columns", "_finish", "dq = wait_for(dq, 0)", "pass"),
    ("columns", "_finish", HAS_TURNS, HAS_TURNS.replace(">", "<")),
    ("columns", "walk_tiles", WAIT_O, WAIT_O.replace("turn", "turn + STAGES_O")),
    ("columns", "walk_tiles", "pipeline.q_full, turn", "pipeline.q_full, turn % STAGES_Q"),
    ("columns", "walk_tiles", ", pred=turn < total", ""),
    ("columns", "walk_tiles", "hopper.fence_async_shared()", "pass"),
    ("columns", "walk_tiles", "await_made(turn + 1, W)", "pass"),
    ("columns", "walk_tiles", "await_made(turn + 1, W)", "await_made(turn, W)"),
    ("columns", "walk_tiles", "gradients_of(turn % 2 * 2 + W", "gradients_of(W"),
    ("columns", "walk_tiles", "if turn > 1:", "if turn > 2:"),
    ("columns", "await_made", "1 - W", "W"),
    ("columns", "walk_tiles", "dp = hopper.warpgroup_mma_wait(PANELS_V, deps=(dp,))", "pass"),
    ("columns", "walk_tiles", "dq = wait_for(dq, 2 * PANELS)", "pass"),
    ("columns", "walk_tiles", WAIT_DK, ARRIVE_Q + "; " + WAIT_DK),
    ("columns", "multiply_dq", "turn % 2 * 2", "0"),
    ("columns", "_part_of_panel", "NUMBER * WIDTH", "0"),
    ("rows", "multiply_dq", "W * 64, 64, 1", "0, 64, 1"),
    ("columns", "write", "hopper.fence_async_shared()", "pass"),
    ("columns", "stage_panels", "hopper.fence_async_shared()", "pass"),
    ("columns", "send", "tma.store_wait(LEFT)", "pass"),
    ("columns", "in_rows", "(3, 0, 2, 4, 1, 5)", "(3, 0, 2, 1, 4, 5)"),
    (
        "rows",
        "send",
        "row, buffers, NUMBER",
        "row, buffers, 0",
    ),
    ("columns", "make_pipeline", "barriers(STAGES_Q, 2)", "barriers(STAGES_Q, 1)"),
    ("wide", "_walk_scores", "barrier_arrive(GIVEN + buffer, 256, 4)", "pass"),
    ("wide", "_walk_scores", "barrier_sync(READY + buffer, 256, 4)", "pass"),
    ("wide", "_walk_scores", "dq = hopper.warpgroup_mma_wait(1, deps=(dq,))", "pass"),
    ("wide", "_walk_gradients", "hopper.fence_async_shared()", "pass"),
    ("wide", "consume_scores", "barrier_sync(TURN, 256, 4)", "pass"),
    ("wide", "_walk_gradients", "barrier_sync(GIVEN + buffer, 256, 4)", "pass"),
    ("wide", "_walk_gradients", "dk = wait_for(dk, 1)", "pass"),
    ("wide", "_walk_gradients", "pipeline.dout_full, turn", "pipeline.dout_full, turn % STAGES_O"),
    ("wide", "_walk_gradients", WAIT_MORE, "pass"),
    ("wide", "_columns", "2 * W + SECOND", "2 * W"),
]


def mistaken() -> Case:
    """A case that what is planted must break: more tiles than buffers."""
    return make_case(Shape(1, 260, 150, 1, 1, 48), torch.bfloat16, "cpu", ("causal",))


@kinds
def test_backward_without_a_mistake(tile, backward, reverse):
    backward(KINDS[tile], reverse)
    check(mistaken())


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("tile", "function", "right", "wrong"), MISTAKES, ids=lambda x: str(x)[:40]
)
def test_backward_with_a_mistake(tile, function, right, wrong, backward):
    def serve(reverse):
        backward(KINDS[tile], reverse).plant(function, right, wrong)

    assert caught(serve, mistaken(), grad=True)


MISTAKES_OF_VALUES = [
    ("_walk_values", "barrier_arrive(EMPTY + stage, PARTIES, 4)", "pass"),
    ("_walk_values", "barrier_arrive(EMPTY + STAGES_Q + stage_o, PARTIES, 4)", "pass"),
    ("_walk_values", "pipeline.q_full, turn", "pipeline.q_full, turn % STAGES_Q"),
    ("_walk_values", "turn // STAGES_O & 1", "0"),
    ("_walk_values", ", pred=turn < total", ""),
    ("_walk_values", "tile * BLOCK_M + block.diagonal", "tile * BLOCK_M"),
    ("_walk_values", "dv, s = wait_for_all(dv, more)", "s = more"),
    ("consume_values", "mbarrier.wait(pipeline.k_full, 0)", "pass"),
    ("consume_values", WAIT_Q_FULL, "pass"),
    ("hand_in", "first_key + number * ROWS", "first_key"),
    ("make_value_pipeline", "barriers(TILE.STAGES_Q, 2)", "barriers(TILE.STAGES_Q, 1)"),
]


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("function", "right", "wrong"), MISTAKES_OF_VALUES, ids=lambda x: str(x)[:40]
)
def test_values_with_a_mistake(function, right, wrong, backward):
    def serve(reverse):
        backward(KINDS["apart"], reverse).plant(function, right, wrong)

    # more tiles than stages, and keys ahead of what the first query faces
    case = make_case(Shape(1, 420, 450, 1, 1, 48), torch.bfloat16, "cpu", ("causal",))
    assert caught(serve, case, grad=True)


MISTAKES_OF_PANELS = [
    ("columns", "own_panels", "(panels[W],)", "(panels[0],)"),
    ("columns", "rows_before", "2 * tile.HEAD_DIM if is_each", "0 if is_each"),
    ("rows", "add_panels", "row + buffers[0].shape[1]", "row"),
    ("columns", "expect_tiles", "nbytes + MORE", "nbytes"),
    ("columns", "write_panels", "_behind(descs, where)", "where"),
    ("columns", "walk_tiles", "wait_for(dq, 2 * PANELS)", "wait_for(dq, 2 * PANELS + 1)"),
    ("columns", "walk_tiles", "wait_for(dv, 2 * len(dq))", "wait_for(dv, 2 * len(dq) + 1)"),
    ("columns", "walk_tiles", "wait(PANELS_V, deps=(dp,))", "wait(PANELS_V + 1, deps=(dp,))"),
    ("wide", "_columns", "W * WIDTH, WIDTH", "0, WIDTH"),
    ("wide", "_walk_scores", "wait(len(k), deps=(more,))", "wait(len(k) + 1, deps=(more,))"),
    ("wide", "_walk_scores", "part_ptr + FIRST", "part_ptr"),
    ("wide", "_walk_gradients", "wait(len(v), deps=(more,))", "wait(len(v) + 1, deps=(more,))"),
]


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("tile", "function", "right", "wrong"), MISTAKES_OF_PANELS, ids=lambda x: str(x)[:40]
)
def test_panels_with_a_mistake(tile, function, right, wrong, backward):
    def serve(reverse):
        backward(KINDS[tile], reverse).plant(function, right, wrong)

    case = make_case(Shape(1, 200, 150, 1, 1, 96), torch.bfloat16, "cpu", ("causal",))
    assert caught(serve, case, grad=True)


MISTAKES_OF_DROPOUT = [
    ("columns", "produce", "delta / program.numbers.keep_scale", "delta"),
    ("columns", "scale_of", "factor *= program.numbers.keep_scale", "pass"),
    ("columns", "_finish", "dv = scale_panels(dv, program.numbers.keep_scale)", "pass"),
    ("columns", "rounded", "round_kept(p, dtype)", "p.to(dtype)"),
    ("columns", "score_gradient", "gradient_of_kept(weight, dp, delta[None, :])", "weight * dp"),
    ("columns", "probabilities", "block.ahead_q", "0"),
    ("columns", "probabilities", "block.ahead_k", "0"),
    ("columns", "head_of", "block.sequence *", "0 *"),
    ("columns", "_draws_of_rows", "next_high, next_low", "next_low, next_high"),
    ("columns", "negate_dropped", "16 - (col & 8) * 2", "16"),
    ("columns", "negate_dropped", "left, right, is_low, lower", "left, right, is_low, upper"),
    ("wide", "_walk_gradients", "delta_s.index(turn % STAGES_O)", "delta_s.index(0)"),
    ("wide", "consume_scores", "dv = scale_panels(dv, program.numbers.keep_scale)", "pass"),
]


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("tile", "function", "right", "wrong"), MISTAKES_OF_DROPOUT, ids=lambda x: str(x)[:40]
)
def test_dropout_with_a_mistake(tile, function, right, wrong, backward):
    """Windows on both sides: tiles of queries and of keys begin anywhere."""
    features = ("window", "dropout")

    def serve(reverse):
        backward(KINDS[tile], reverse, features).plant(function, right, wrong)

    shape = Packed((70, 0, 90), (40, 30, 175), 1, 1, 48)
    assert caught(serve, make_packed(shape, torch.float16, "cpu", features), grad=True)


def of_alibi() -> Case:
    return make_case(Shape(1, 330, 270, 1, 1, 48), torch.float16, "cpu", ("alibi",))


def of_used() -> Case:
    shape = Packed((70, 20, 150), (230, 40, 90), 1, 1, 48)
    case = make_packed(shape, torch.float16, "cpu", ("causal",))
    return case.with_options(seqused_k=USED[:3])


MISTAKES_OF_OTHERS = [
    (of_alibi, "produce", "row + block.diagonal", "row"),
    (of_alibi, "produce", "side_of(slope_of(head, program), first_row, block)", "0.0"),
    (of_alibi, "slope_of", "* LOG2E", "* 1"),
    (of_alibi, "side_of", "first_row < block.first_key, -slope", "first_row < 0, -slope"),
    (of_alibi, "_tilt", "- gl.abs(distance) * slope", "- distance * side"),
    (of_alibi, "_tilt", "(keys - block.first_key)", "(keys - first_key)"),
    (of_alibi, "query_tiles", "gl.maximum(first_key - diagonal + 1, 0)", "last_key + BLOCK_M"),
    (of_used, "find_block", "len_k = used", "pass"),
    (of_used, "find_block", "mask=is_real, other=0)", "mask=is_real, other=0) - 1"),
    (of_used, "gradient_coordinates", "size += block.unused", "pass"),
]


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("make", "function", "right", "wrong"),
    MISTAKES_OF_OTHERS,
    ids=lambda x: getattr(x, "__name__", str(x)[:40]),
)
def test_slopes_and_used_keys_with_a_mistake(make, function, right, wrong, backward):
    def serve(reverse):
        backward(KINDS["columns"], reverse).plant(function, right, wrong)

    assert caught(serve, make(), grad=True)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("parts[1], parts[2]", "parts[2], parts[1]"),
        ("c0, c1, word, threshold]", "c1, c0, word, threshold]"),
    ],
)
def test_shared_draws_with_a_mistake(right, wrong, backward):
    def serve(reverse):
        backward(KINDS["columns"], reverse).plant("_negate_four", right, wrong)

    case = make_case(Shape(1, 70, 130, 1, 1, 48), torch.float16, "cpu", ("dropout",))
    assert caught(serve, case, grad=True)


MISTAKES_OF_SHARES = [
    ("key_coordinates", "head // OPTIONS.SHARES", "head * 0"),
    ("place_in_sums", "head // OPTIONS.SHARES", "head"),
    ("place_in_sums", "heads // OPTIONS.SHARES", "heads"),
    ("place_in_sums", "+ found.block", ""),
    ("place_in_sums", "found.k_start // TILE.BLOCK_N +", ""),
    ("hand_in", "(TILE.BLOCK_N // ROWS) + number", "(TILE.BLOCK_N // ROWS)"),
    ("_finish", "tensors.dv_sums_ptr", "tensors.dk_sums_ptr"),
    ("add_by_threads", "pointer + SIZE", "pointer"),
]


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("function", "right", "wrong"), MISTAKES_OF_SHARES, ids=lambda x: str(x)[:40]
)
def test_shares_with_a_mistake(function, right, wrong, backward):
    def serve(reverse):
        backward(KINDS["columns"], reverse, shares=2).plant(function, right, wrong)

    fixed = make_case(Shape(2, 140, 150, 4, 2, 96), torch.bfloat16, "cpu", ("causal",))
    packed = make_packed(Packed((70, 0, 90), (140, 30, 175), 4, 2, 48), torch.float16, "cpu")
    assert caught(serve, fixed, grad=True) or caught(serve, packed, grad=True)


WAIT_FULL = "mbarrier.wait(order.full.index(W), step & 1)"
WAIT_EMPTY = "mbarrier.wait(program.order.empty.index(W), (step & 1) ^ 1)"
BEGIN_TURN = "mbarrier.wait(program.order.empty.index(W), step & 1)"
PASS_TURN = "pass_turn(counter, count, following, turn)"
MISTAKES_IN_ORDER = [
    ("columns", "_await_first", "await_turn(counter, turn)", "await_turn(counter, turn + 1)"),
    ("columns", "_find_next", "gl.minimum(step + 1, steps - 1)", "step + 1"),
    ("columns", "add_in_order", WAIT_FULL, "pass"),
    ("columns", "add_in_order", "tma.store_wait(0)", "pass"),
    ("columns", "add_in_order", PASS_TURN, "pass"),
    ("columns", "pass_turn", "cp.async.bulk.wait_group 0;", ""),
    ("columns", "hand_over", WAIT_EMPTY, "pass"),
    ("columns", "walk_tiles", "_pass_on(dq, last, turn, ", "_pass_on(dq, last, turn + 1, "),
    ("columns", "turn_at", " - first_block", ""),
    ("columns", "tile_at", "end - 1 - step", "end - step"),
    ("columns", "_find_tile", "2 * place + W", "2 * place"),
    ("columns", "head_at", "turn % OPTIONS.GROUP", "0"),
    ("columns", "backward_kernel", "1 + 2 * dq_at", "2 * dq_at"),
    ("wide", "pass_turns", WAIT_FULL, "pass"),
    ("wide", "pass_turns", PASS_TURN.replace("count,", "ask(following),"), "pass"),
    ("wide", "begin_turn", BEGIN_TURN, "pass"),
    ("wide", "_part_at", "turn % OPTIONS.GROUP", "0"),
]


def mistaken_in_order() -> Case:
    """As ``mistaken``; blocks of keys come second where they begin, and are first for others."""
    case = make_case(Shape(1, 140, 300, 2, 1, 48), torch.bfloat16, "cpu", ("window",))
    return case.with_options(deterministic=True, window_size=(150, 20))


@pytest.mark.parametrize("tile", ["columns", "wide"])
def test_backward_in_order_without_a_mistake(tile, backward, reverse):
    backward(KINDS[tile], reverse)
    check(mistaken_in_order())


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("tile", "function", "right", "wrong"), MISTAKES_IN_ORDER, ids=lambda x: str(x)[:40]
)
def test_backward_in_order_with_a_mistake(tile, function, right, wrong, backward):
    def serve(reverse):
        backward(KINDS[tile], reverse).plant(function, right, wrong)

    assert caught(serve, mistaken_in_order(), grad=True)
