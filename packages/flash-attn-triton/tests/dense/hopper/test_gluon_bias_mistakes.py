"""Biases in the kernels for Hopper with mistakes planted in them: the interpreter shows each."""

from __future__ import annotations

import pytest
import torch
from flash_attn_triton._dense import ops

from ..._numerics import Shape, make_case
from ._gluon import caught, forward
from ._gluon_backward import backward
from ._gluon_bias import biased, gradients, hiding, in_order, with_bias

__all__ = ["backward", "biased", "forward", "gradients"]  # fixtures

pytestmark = pytest.mark.skipif(not ops.interpreted(), reason="about the interpreter")

WAIT = "await_full(ring.full, turn)"
FORWARD_MISTAKES = [
    ("add_bias", WAIT, "pass"),
    ("add_bias", "LOG2E / program.factor", "1.0"),
    ("add_bias", "stage * TILE.WARPGROUPS + W", "stage * TILE.WARPGROUPS"),
    ("add_bias", "barrier_arrive(FIRST + stage", "barrier_arrive(FIRST"),
    ("copy_bias", "await_readers(turn,", "await_readers(-1,"),
    ("copy_bias", "task.first_row + w * TILE.ROWS", "task.first_row"),
    ("copy_bias", "task.head if OPTIONS.BIAS_HEADS else 0", "0"),
    ("copy_bias", "task.sequence if OPTIONS.BIAS_BATCH else 0", "0"),
    ("produce", "drain(turn, EMPTY_V + STAGES_V", "drain(0, EMPTY_V + STAGES_V"),
]


@pytest.mark.mutation
@pytest.mark.parametrize(("function", "right", "wrong"), FORWARD_MISTAKES, ids=lambda x: x[:40])
def test_forward_with_a_mistake(function, right, wrong, biased):
    def serve(reverse):
        biased("stages", reverse).plant(function, right, wrong)

    case = make_case(Shape(2, 130, 160, 2, 1, 48), torch.bfloat16, "cpu", ("causal",))
    assert caught(serve, with_bias(case, 2, 2, 130, 160))


def test_hidden_rows_with_a_mistake(biased):
    def serve(reverse):
        kernel = biased("plain", reverse)
        kernel.plant("fold", "KIND == CUT or program.bias is not None", "KIND == CUT")

    assert caught(serve, hiding())


BACKWARD_MISTAKES = [
    ("less_bias", WAIT, "pass"),
    ("less_bias", "shift - bias", "shift + bias"),
    ("less_bias", "(TILE.BLOCK_N // ROWS) + W", "(TILE.BLOCK_N // ROWS)"),
    ("less_bias", "barrier_arrive(FIRST + stage", "barrier_arrive(FIRST"),
    ("copy_bias", "await_readers(turn,", "await_readers(-1,"),
    ("copy_bias", "block.ahead_q + row", "row"),
    ("copy_bias", "block.first_key + w * ROWS", "block.first_key"),
    ("copy_bias", "head if OPTIONS.BIAS_HEADS else 0", "0"),
    ("produce", "drain(turns, EMPTY + STAGES_Q + STAGES_O", "drain(0, EMPTY + STAGES_Q + STAGES_O"),
    ("keep_gradient", "turn % 2 * 2 + W", "W"),
    ("place_at", "head_at(turn, ", "head_at(0, "),
    ("place_at", "+ program.block.ahead_q", ""),
    ("place_in_planes", "W * ROWS", "0"),
    ("walk_tiles", "hopper.fence_async_shared()", "pass"),
]


def test_gradients_in_order_with_a_mistake(gradients):
    """The gradients of scores have left before their memory is written again."""

    def serve(reverse):
        gradients("columns", reverse).plant("_pass_on", "tma.store_wait(LEFT)", "pass")

    assert caught(serve, in_order(), grad=True)


# in memory: of all, of those in order, or of both
SEQUENCE_MISTAKES = [
    ("keep_gradient", "add_out(", "copy_out(", (True,)),
    ("keep_shared", "add_out(", "copy_out(", (False,)),
    ("place_in_planes", "// numbers.sequences_together", "", (False, True)),
    ("locate_keys", "sequence += numbers.first_sequence", "pass", (True,)),
    ("locate_keys", "gl.num_programs(0) // tiles", "batch * heads_k", (True,)),
]
HEAD_MISTAKES = [
    ("place_in_planes", "(head_k - head_k // numbers.heads_together)", "0", (False, True)),
    ("locate_keys", "head += numbers.first_head", "pass", (True,)),
    ("locate_keys", "heads_k = numbers.heads_here", "pass", (True,)),
]


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("function", "right", "wrong", "ordered"), SEQUENCE_MISTAKES, ids=lambda x: str(x)[:40]
)
def test_sums_over_sequences_with_a_mistake(function, right, wrong, ordered, gradients):
    def serve(reverse):
        gradients("columns", reverse).plant(function, right, wrong)

    case = make_case(Shape(2, 70, 136, 2, 1, 48), torch.bfloat16, "cpu", ("causal",))
    case = with_bias(case, 1, 2, 70, 136)
    for deterministic in ordered:
        assert caught(serve, case.with_options(deterministic=deterministic), grad=True)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("function", "right", "wrong", "ordered"), HEAD_MISTAKES, ids=lambda x: str(x)[:40]
)
def test_sums_over_heads_with_a_mistake(function, right, wrong, ordered, gradients):
    def serve(reverse):
        gradients("columns", reverse).plant(function, right, wrong)

    case = make_case(Shape(2, 70, 136, 2, 2, 48), torch.bfloat16, "cpu")
    case = with_bias(case, 2, 1, 70, 136)
    for deterministic in ordered:
        assert caught(serve, case.with_options(deterministic=deterministic), grad=True)


# function, what is planted, how many programs run at once
SHARED_MISTAKES = [
    ("keep_shared", "_await_stored(stored, turn)", "pass", 64),
    ("keep_shared", "_say_stored(stored, PARTS)", "pass", 64),
    ("keep_shared", "_say_stored(stored, PARTS)", "_say_stored(stored, 2 * PARTS)", 64),
    ("keep_shared", "_say_stored(stored, 0)", "pass", 1),
    ("keep_shared", "_say_stored(stored, 0)", "_say_stored(stored, PARTS)", 64),
    ("keep_shared", "number == 0", "number == 1", 1),  # whoever is second may never begin
    ("keep_shared", "number == 0", "number >= 0", 1),
    ("keep_shared", "await_full(order.full, turn)", "pass", 1),
    ("keep_shared", "mbarrier.arrive(order.empty.index(turn % 2), count=1)", "pass", 1),
    ("keep_shared", "turn % 2 * PARTS + w", "turn % 2 * PARTS", 1),
    ("keep_shared", "tma.store_wait(0)", "pass", 1),
    ("await_buffer", "await_empty(program.order.empty, turn)", "pass", 1),
    ("_say_stored", "gl.where(lanes == 0, 1, 0)", "lanes * 0 + 1", 64),
    ("share_block", "2 * place", "0", 1),
    ("share_block", "block.head_k // heads", "0", 1),
    ("share_block", "// sequences", "", 1),
    ("clear_hidden", "range(own, tiles, together)", "range(own + 1, tiles, together)", 1),
    ("clear_hidden", "range(own, tiles, together)", "range(own, tiles - 1, together)", 1),
    ("clear_hidden", "rows // TILE.BLOCK_M", "walk.begin", 1),
    ("clear_hidden", "rows // TILE.BLOCK_M", "gl.cdiv(rows, TILE.BLOCK_M)", 1),
    ("clear_hidden", "+ block.ahead_q", "", 1),
    ("clear_hidden", "+ index % OPTIONS.GROUP", "", 1),
    ("clear_hidden", "await_buffer(steps + steps % 2, program, OPTIONS)", "pass", 1),
    ("clear_hidden", "hopper.fence_async_shared()", "pass", 1),
    ("_finish", "clear_hidden(W, program, OPTIONS, TILE)", "pass", 1),
]


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("function", "right", "wrong", "at_once"), SHARED_MISTAKES, ids=lambda x: str(x)[:40]
)
def test_shared_gradients_with_a_mistake(function, right, wrong, at_once, gradients):
    """Beside a causal mask: tiles that it hides, and queries that see no key."""

    def serve(reverse):
        kernel = gradients("columns", reverse)
        kernel.plant(function, right, wrong)
        kernel.at_once = at_once

    case = make_case(Shape(2, 330, 136, 4, 2, 48), torch.bfloat16, "cpu", ("causal",))
    assert caught(serve, with_bias(case, 1, 4, 330, 136), grad=True)


@pytest.mark.mutation
def test_counters_of_heads_with_a_mistake(gradients):
    """Groups of key heads have counters of their own."""

    def serve(reverse):
        gradients("columns", reverse).plant("share_block", "(numbers.heads_k // heads)", "1")

    case = make_case(Shape(2, 70, 72, 8, 8, 48), torch.bfloat16, "cpu")
    assert caught(serve, with_bias(case, 2, 1, 70, 72), grad=True)


def test_parts_in_order_with_a_mistake(gradients):
    """Programs of a later launch count from its first one."""

    def serve(reverse):
        kernel = gradients("columns", reverse)
        kernel.plant("find_block", "pid -= before * numbers.tiles", "pass")

    assert caught(serve, in_order(2, 200), grad=True)


@pytest.mark.mutation
@pytest.mark.parametrize(("function", "right", "wrong"), BACKWARD_MISTAKES, ids=lambda x: x[:40])
def test_backward_with_a_mistake(function, right, wrong, gradients):
    def serve(reverse):
        gradients("columns", reverse).plant(function, right, wrong)

    case = make_case(Shape(1, 260, 130, 2, 1, 48), torch.bfloat16, "cpu", ("causal",))
    assert caught(serve, with_bias(case, 1, 2, 260, 130), grad=True)
