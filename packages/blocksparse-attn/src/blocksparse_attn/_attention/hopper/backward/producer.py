"""The copying warp of the Hopper backward: keys and values, then blocks of queries."""

from ...._linked.hopper.compat import gl, gluon, mbarrier
from ...._linked.hopper.gradients import ROWS
from ...._linked.hopper.order import raise_counter
from ...._linked.hopper.pipeline import EMPTY, barrier_sync
from ..structures import Item
from .lists import count_turns, find_item
from .pieces import copy_keys, copy_queries
from .steps import BITS, BOTH, EITHER, REACH, SLOPE, STEP_FIELDS

INF = gl.constexpr(float("inf"))


@gluon.jit
def _numbers(item, first_head, program, origin, tensors):
    """Load lse2 and delta of a block of rows."""
    head = first_head + item.head
    row = item.block * ROWS - program.diagonal
    index = gl.arange(0, ROWS, gl.BlockedLayout([ROWS // 32], [32], [1], [0]))  # [ROWS]
    inside = (row + index >= 0) & (row + index < program.len_q)
    at = origin.row_at + head.to(gl.int64) * origin.row_pitch + row
    # rows outside the sequence get probability 0, like fully masked rows
    lse2 = gl.load(tensors.lse2_ptr + at + index, mask=inside, other=INF)
    delta = gl.load(tensors.delta_ptr + at + index, mask=inside, other=0.0)
    return lse2, delta


@gluon.jit
def _wait_for_room(number, is_both):
    """Wait until the warpgroups that use a stage, both or one, have read it."""
    if is_both:
        barrier_sync(number, BOTH, 1)
    else:
        barrier_sync(number, EITHER, 1)


@gluon.jit
def _describe(field, item, head, work, OPTIONS: gl.constexpr):
    """Return the numbers that describe a step to the warpgroups."""
    program, keys, origin = work.program, work.keys, work.origin
    block = item.block
    sums = origin.sums_at + head * origin.sums_pitch + block
    fields = gl.where(item.is_there, sums, -1)
    fields += field * 0
    if OPTIONS.PIECE < ROWS:
        last_key = block * ROWS if OPTIONS.IS_CAUSAL else program.len_k - 1
        fields = gl.where(field == REACH, last_key, fields)
        fields = gl.where(field == BITS, item.bits, fields)
    elif OPTIONS.IS_CAUSAL:
        fields = gl.where(field == REACH, gl.where(block == keys.seen_0, 0, ROWS), fields)
        fields = gl.where(field == REACH + 1, gl.where(block == keys.seen_1, 0, ROWS), fields)
    else:
        last_key = program.len_k - 1
        fields = gl.where(field == REACH, last_key - keys.seen_0 * ROWS, fields)
        fields = gl.where(field == REACH + 1, last_key - keys.seen_1 * ROWS, fields)
    return gl.where(field == SLOPE, 1 if OPTIONS.IS_CAUSAL else 0, fields)


@gluon.jit
def produce(tensors, numbers, work, pipeline, OPTIONS: gl.constexpr):
    """Copy the keys and values, then blocks of queries, dout and row numbers.

    At the end signal that all of the program's dq is added. The fence that this needs runs while
    the warpgroups write dk and dv.
    """
    RAGGED: gl.constexpr = tensors.cu_seqlens_ptr is not None
    PIECE: gl.constexpr = OPTIONS.PIECE
    program, keys = work.program, work.keys
    field = gl.arange(0, STEP_FIELDS, gl.BlockedLayout([1], [32], [1], [0]))  # [STEP_FIELDS]
    # computed again: with ``steps.alone`` ptxas spills more
    alone = gl.maximum(work.steps.alone_0, work.steps.alone_1)
    both, total = count_turns(work.steps, alone, OPTIONS)
    first_head = program.head_k * OPTIONS.GROUP
    if total > 0:
        copy_keys(tensors.k_desc, pipeline.k_s, pipeline.k_full, work, tensors, PIECE)
    item = find_item(0, total, work, tensors, OPTIONS)
    lse2, delta = _numbers(item, first_head, program, work.origin, tensors)
    for turn in range(total):
        # load the next step's item while this step waits for a free stage
        coming = find_item(turn + 1, total, work, tensors, OPTIONS)
        head = first_head + item.head
        fields = _describe(field, item, head, work, OPTIONS)
        # pieces of keys after the sequence's end do not count as seen
        item = Item(item.block, item.head, item.is_there, item.bits & keys.kept)
        stage = turn % OPTIONS.STAGES
        if turn >= OPTIONS.STAGES:
            _wait_for_room(EMPTY + stage, turn - OPTIONS.STAGES < both)
        full, q_s = pipeline.q_full.index(stage), pipeline.q_s
        copy_queries(tensors.q_desc, q_s, full, stage, item, head, program, RAGGED, PIECE)
        pipeline.lse2_s.index(stage).store(lse2)
        pipeline.fields_s.index(stage).store(fields)
        mbarrier.arrive(pipeline.q_full.index(stage), count=1)
        if turn == 0:
            copy_keys(tensors.v_desc, pipeline.v_s, pipeline.v_full, work, tensors, PIECE)
        full, dout_s = pipeline.dout_full.index(stage), pipeline.dout_s
        copy_queries(tensors.dout_desc, dout_s, full, stage, item, head, program, RAGGED, PIECE)
        pipeline.delta_s.index(stage).store(-delta)
        mbarrier.arrive(pipeline.dout_full.index(stage), count=1)
        item = coming
        lse2, delta = _numbers(item, first_head, program, work.origin, tensors)
    # no warpgroup may be left waiting at a barrier
    for back in gl.static_range(OPTIONS.STAGES):
        last = total - 1 - back
        if last >= 0:
            _wait_for_room(EMPTY + last % OPTIONS.STAGES, last < both)
    if OPTIONS.MAKES_DQ:
        mbarrier.wait(pipeline.dq_added, 0)
        head = program.sequence * numbers.heads_k + program.head_k
        raise_counter(tensors.counters_ptr + head, 1)
