"""The two warpgroups of the Hopper backward for heads wider than 128.

A program owns 64 keys. Their dk fills the registers of one warpgroup, and their dv those of the
other. The first warpgroup makes the probabilities and dv, the second the gradients of scores and
dk. Each passes its result to the other through shared memory, and multiplies half of the columns of
dq. So one computes while the other's products (wgmma) run, and the factors of dk and dv stay in
registers.
"""

from ...._linked.hopper.compat import gl, gluon, hopper, mbarrier, tma
from ...._linked.hopper.gradients import ROWS, add_to_memory
from ...._linked.hopper.pipeline import EMPTY, TURN, await_full, barrier_arrive, barrier_sync
from ..panels import (
    accumulator,
    multiply_rows,
    multiply_values,
    no_gradient,
    scale_panels,
    tile_of,
    wait_for,
)
from .bias import less_bias
from .blocks import DQ_TILE, FIRST_ROW, count_turns, place_of
from .order import begin_turn, say_added, tile_at
from .steps import (
    PARTIES,
    head_now,
    head_of,
    probabilities,
    rounded,
    scale_of,
    score_gradient,
)
from .sums.shares import hand_in

# first of two named barriers, one per buffer: probabilities are there; gradients of scores are
GIVEN = gl.constexpr(12)
READY = gl.constexpr(14)


@gluon.constexpr_function
def first_part(wide, narrow):
    """Return how many columns of a warpgroup's half of dq its first product makes.

    The second product makes the columns of the narrow panel, or as many as the first.
    """
    return wide // 2 if narrow > 0 else wide // 4


@gluon.jit
def _columns(k, W: gl.constexpr, SECOND: gl.constexpr):
    """Return the key columns of a warpgroup's first or second product for dq."""
    if len(k) > 1:
        WIDTH: gl.constexpr = k[SECOND].shape[1] // 2
        part = k[SECOND].slice(W * WIDTH, WIDTH, 1)
    else:
        QUARTER: gl.constexpr = k[0].shape[1] // 4
        part = k[0].slice((2 * W + SECOND) * QUARTER, QUARTER, 1)
    return part


@gluon.jit
def _multiply_part(ds_t, k, W: gl.constexpr, SECOND: gl.constexpr):
    """Begin a warpgroup's first or second product for dq, ``[BLOCK_M, width]``."""
    part = _columns(k, W, SECOND)
    BLOCK_M: gl.constexpr = ds_t.shape[0]
    WIDTH: gl.constexpr = part.shape[1]
    zeros = gl.zeros([BLOCK_M, WIDTH], gl.float32, accumulator(WIDTH))
    return hopper.warpgroup_mma(ds_t, part, zeros, use_acc=False, is_async=True)


@gluon.jit
def _part_at(dq_ptr, turn, tile, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Return the address of a step's part of dq.

    That is ``dq_ptr``; with ordered additions ``dq_ptr`` is the begin of the group's sums.
    """
    if OPTIONS.ORDERED:
        member = turn % OPTIONS.GROUP
        SIZE: gl.constexpr = TILE.BLOCK_M * (TILE.HEAD_DIM + TILE.NARROW)
        dq_ptr += member * program.dq_pitch + tile.to(gl.int64) * SIZE
    return dq_ptr


@gluon.jit
def _walk_scores(
    dv,
    s,
    turn,
    first_tile,
    end_tile,
    head,
    MASKED: gl.constexpr,
    program,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Accumulate dv for tiles of queries of one ``Head``, and add the left half of dq.

    ``s`` holds the scores of the next tile.
    """
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    STAGES_Q: gl.constexpr = TILE.STAGES_Q
    STAGES_O: gl.constexpr = TILE.STAGES_O
    SIZE: gl.constexpr = BLOCK_M * (TILE.HEAD_DIM + TILE.NARROW)
    FIRST: gl.constexpr = BLOCK_M * first_part(TILE.HEAD_DIM, TILE.NARROW)
    S: gl.constexpr = accumulator(BLOCK_M)
    pipeline, block = program.pipeline, program.block
    dtype: gl.constexpr = pipeline.ds_s.dtype
    total = count_turns(program.walk, OPTIONS)
    tiles = end_tile - first_tile
    dq_ptr = head.dq_at
    if OPTIONS.ORDERED:
        tiles *= OPTIONS.GROUP
    else:
        dq_ptr += first_tile.to(gl.int64) * SIZE
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S)  # [ROWS, BLOCK_M]
    for step in range(tiles):
        # 0, which the compiler cannot know: else it hoists addresses out of the loop into registers
        none = turn >> 30
        k = tile_of(pipeline.k_s, none, ROWS)  # [ROWS, HEAD_DIM]
        stage = turn % STAGES_Q
        stage_o = turn % STAGES_O
        buffer = turn % 2
        dout = tile_of(pipeline.dout_s, stage_o, BLOCK_M)  # [BLOCK_M, HEAD_DIM_V]
        lse2 = pipeline.lse2_s.index(stage).load(gl.SliceLayout(0, S))  # [BLOCK_M]
        tile = tile_at(step, first_tile, end_tile, OPTIONS)
        first_row = tile * BLOCK_M + block.diagonal
        if program.places_s is not None:
            first_row = place_of(program.places_s, stage, FIRST_ROW)
            place = place_of(program.places_s, stage, DQ_TILE)
            dq_ptr = head.dq_at + place.to(gl.int64) * SIZE
        shift = less_bias(lse2, turn, 0, program, S, OPTIONS, TILE)
        now = head_now(step, head, program, OPTIONS)
        # [ROWS, BLOCK_M]
        p, weight = probabilities(
            s, shift, block.first_key, first_row, now, MASKED, program, OPTIONS
        )
        program.p_s.index(buffer).store(weight.to(dtype))
        hopper.fence_async_shared()
        barrier_arrive(GIVEN + buffer, 256, 4)
        barrier_arrive(EMPTY + stage, PARTIES, 4)
        p = rounded(p, program, dtype)
        p = gl.convert_layout(p, gl.DotOperandLayout(0, dv[0].type.layout, 2))
        await_full(pipeline.dout_full, turn)
        dv = multiply_values(p, dout, dv)  # [ROWS, HEAD_DIM_V]
        barrier_sync(READY + buffer, 256, 4)
        ds_t = pipeline.ds_s.index(buffer).permute((1, 0))  # [BLOCK_M, ROWS]
        dq = _multiply_part(ds_t, k, 0, 0)
        dv = wait_for(dv, 1)
        barrier_arrive(EMPTY + STAGES_Q + stage_o, PARTIES, 4)
        more = _multiply_part(ds_t, k, 0, 1)
        dq = hopper.warpgroup_mma_wait(1, deps=(dq,))
        begin_turn(turn, program, 0, OPTIONS)
        part_ptr = _part_at(dq_ptr, turn, tile, program, OPTIONS, TILE)
        add_to_memory(part_ptr, dq)
        turn += 1
        following = turn % STAGES_Q
        # after the last tile: scores of undefined data, which are not read
        await_full(pipeline.q_full, turn, pred=turn < total)
        q = tile_of(pipeline.q_s, following, BLOCK_M)  # [BLOCK_M, HEAD_DIM]
        s = multiply_rows(k, q, zeros, False)  # [ROWS, BLOCK_M]
        more = hopper.warpgroup_mma_wait(len(k), deps=(more,))
        add_to_memory(part_ptr + FIRST, more)
        say_added(program, 0, OPTIONS)
        if not OPTIONS.ORDERED:
            dq_ptr += SIZE
        # a product in flight over the loop's back edge would keep ptxas from overlapping any
        s = hopper.warpgroup_mma_wait(0, deps=(s,))
    return dv, s, turn


@gluon.jit
def consume_scores(program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Compute the block's probabilities and dv, and the left half of its part of dq."""
    pipeline, block, walk = program.pipeline, program.block, program.walk
    # queries before the block's keys see them
    ALIBI_AHEAD: gl.constexpr = (
        program.tensors.alibi_slopes_ptr is not None and not OPTIONS.HAS_RIGHT
    )
    WALKS: gl.constexpr = 1 if OPTIONS.ORDERED else OPTIONS.GROUP
    FIRST: gl.constexpr = 3 if OPTIONS.ORDERED else 0
    LAST: gl.constexpr = -1 if OPTIONS.ORDERED else 4
    BY: gl.constexpr = -1 if OPTIONS.ORDERED else 1
    dq_ptr = program.dq_at
    total = count_turns(walk, OPTIONS)
    dv = no_gradient(ROWS, TILE.HEAD_DIM_V, TILE.NARROW_V)  # [ROWS, HEAD_DIM_V]
    # [ROWS, BLOCK_M]
    s = gl.zeros([ROWS, TILE.BLOCK_M], gl.float32, accumulator(TILE.BLOCK_M))
    mbarrier.wait(pipeline.k_full, 0)
    mbarrier.wait(pipeline.q_full.index(0), 0, pred=total > 0)
    k = tile_of(pipeline.k_s, 0, ROWS)
    q = tile_of(pipeline.q_s, 0, TILE.BLOCK_M)
    s = multiply_rows(k, q, s, False)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    turn = 0
    first_head = block.head_k.to(gl.int64) * OPTIONS.GROUP
    dq_ptr += first_head * program.dq_pitch
    for member in range(WALKS):
        head = head_of(member, dq_ptr, program, OPTIONS)
        # the parts of ``Walk``; the second and the fourth need a mask
        for i in gl.static_range(FIRST, LAST, BY):
            if (i > 0 or ALIBI_AHEAD) and (i < 3 or OPTIONS.HAS_LEFT):
                dv, s, turn = _walk_scores(
                    dv, s, turn, walk[i], walk[i + 1], head, i % 2 == 1, program, OPTIONS, TILE
                )
        dq_ptr += program.dq_pitch
    # the other warpgroup may still be multiplying the values
    barrier_sync(TURN, 256, 4)
    maps, tensors = program.maps, program.tensors
    if tensors.rng_state_ptr is not None:
        dv = scale_panels(dv, program.numbers.keep_scale)
    hand_in(dv, maps.dv_descs, tensors.dv_sums_ptr, pipeline.v_s, 0, program, OPTIONS, TILE)
    tma.store_wait(0)


@gluon.jit
def _walk_gradients(dk, dp, turn, dq_ptr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Accumulate dk for all tiles of queries of one head, and add the right half of dq.

    ``dp`` holds dp - delta of the next tile; ``dq_ptr`` is the begin of the head's sums of dq.
    """
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    STAGES_Q: gl.constexpr = TILE.STAGES_Q
    STAGES_O: gl.constexpr = TILE.STAGES_O
    SIZE: gl.constexpr = BLOCK_M * (TILE.HEAD_DIM + TILE.NARROW)
    FIRST: gl.constexpr = BLOCK_M * first_part(TILE.HEAD_DIM, TILE.NARROW)
    S: gl.constexpr = accumulator(BLOCK_M)
    pipeline, walk = program.pipeline, program.walk
    dtype: gl.constexpr = pipeline.ds_s.dtype
    total = count_turns(walk, OPTIONS)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S)  # [ROWS, BLOCK_M]
    first_ptr = dq_ptr
    steps = walk.end - walk.begin
    if OPTIONS.ORDERED:
        steps *= OPTIONS.GROUP
    else:
        dq_ptr += walk.begin.to(gl.int64) * SIZE
    for step in range(steps):
        none = turn >> 30
        k = tile_of(pipeline.k_s, none, ROWS)  # [ROWS, HEAD_DIM]
        v = tile_of(pipeline.v_s, none, ROWS)  # [ROWS, HEAD_DIM_V]
        stage = turn % STAGES_Q
        buffer = turn % 2
        q = tile_of(pipeline.q_s, stage, BLOCK_M)  # [BLOCK_M, HEAD_DIM]
        delta = 0.0
        if program.tensors.rng_state_ptr is not None:
            delta = pipeline.delta_s.index(turn % STAGES_O).load(gl.SliceLayout(0, S))  # [BLOCK_M]
        barrier_arrive(EMPTY + STAGES_Q + turn % STAGES_O, PARTIES, 4)
        barrier_sync(GIVEN + buffer, 256, 4)
        if program.places_s is not None:
            place = place_of(program.places_s, stage, DQ_TILE)
            dq_ptr = first_ptr + place.to(gl.int64) * SIZE
        tile = tile_at(step, walk.begin, walk.end, OPTIONS)
        part_ptr = _part_at(dq_ptr, turn, tile, program, OPTIONS, TILE)
        weight = program.p_s.index(buffer).load(S)  # [ROWS, BLOCK_M]
        # [ROWS, BLOCK_M]
        ds = score_gradient(weight.to(gl.float32), dp, delta, program).to(dtype)
        pipeline.ds_s.index(buffer).store(ds)
        hopper.fence_async_shared()
        barrier_arrive(READY + buffer, 256, 4)
        barrier_sync(TURN + 1, 128, 4)
        ds_k = gl.convert_layout(ds, gl.DotOperandLayout(0, dk[0].type.layout, 2))
        dk = multiply_values(ds_k, q, dk)  # [ROWS, HEAD_DIM]
        ds_t = pipeline.ds_s.index(buffer).permute((1, 0))  # [BLOCK_M, ROWS]
        dq = _multiply_part(ds_t, k, 1, 0)
        dk = wait_for(dk, 1)
        barrier_arrive(EMPTY + stage, PARTIES, 4)
        more = _multiply_part(ds_t, k, 1, 1)
        dq = hopper.warpgroup_mma_wait(1, deps=(dq,))
        begin_turn(turn, program, 1, OPTIONS)
        add_to_memory(part_ptr, dq)
        turn += 1
        stage_o = turn % STAGES_O
        await_full(pipeline.dout_full, turn, pred=turn < total)
        dout = tile_of(pipeline.dout_s, stage_o, BLOCK_M)  # [BLOCK_M, HEAD_DIM_V]
        delta = pipeline.delta_s.index(stage_o).load(gl.SliceLayout(0, S))  # [BLOCK_M]
        dp = multiply_rows(v, dout, delta[None, :] - zeros, True)  # [ROWS, BLOCK_M]
        more = hopper.warpgroup_mma_wait(len(v), deps=(more,))
        add_to_memory(part_ptr + FIRST, more)
        say_added(program, 1, OPTIONS)
        if not OPTIONS.ORDERED:
            dq_ptr += SIZE
        dp = hopper.warpgroup_mma_wait(0, deps=(dp,))
    return dk, dp, turn


@gluon.jit
def consume_gradients(program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Compute the gradients of the block's scores, dk, and the right half of its part of dq."""
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    S: gl.constexpr = accumulator(BLOCK_M)
    pipeline, block = program.pipeline, program.block
    dq_ptr = program.dq_at
    total = count_turns(program.walk, OPTIONS)
    dk = no_gradient(ROWS, TILE.HEAD_DIM, TILE.NARROW)  # [ROWS, HEAD_DIM]
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S)  # [ROWS, BLOCK_M]
    mbarrier.wait(pipeline.k_full, 0)
    mbarrier.wait(pipeline.v_full, 0, pred=total > 0)
    mbarrier.wait(pipeline.dout_full.index(0), 0, pred=total > 0)
    v = tile_of(pipeline.v_s, 0, ROWS)
    dout = tile_of(pipeline.dout_s, 0, BLOCK_M)
    delta = pipeline.delta_s.index(0).load(gl.SliceLayout(0, S))  # [BLOCK_M]
    # [ROWS, BLOCK_M]: dp - delta, from a start at -delta
    dp = multiply_rows(v, dout, delta[None, :] - zeros, True)
    dp = hopper.warpgroup_mma_wait(0, deps=(dp,))
    turn = 0
    first_head = block.head_k.to(gl.int64) * OPTIONS.GROUP
    dq_ptr += first_head * program.dq_pitch + BLOCK_M * (TILE.HEAD_DIM + TILE.NARROW) // 2
    WALKS: gl.constexpr = 1 if OPTIONS.ORDERED else OPTIONS.GROUP
    for _member in range(WALKS):
        dk, dp, turn = _walk_gradients(dk, dp, turn, dq_ptr, program, OPTIONS, TILE)
        dq_ptr += program.dq_pitch
    # the other warpgroup may still be multiplying the keys
    barrier_sync(TURN, 256, 4)
    dk = scale_panels(dk, scale_of(program.numbers.scale, program))
    maps, tensors = program.maps, program.tensors
    hand_in(dk, maps.dk_descs, tensors.dk_sums_ptr, pipeline.k_s, 0, program, OPTIONS, TILE)
    tma.store_wait(0)
