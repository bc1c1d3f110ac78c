"""What the two warpgroups of the Hopper backward do for heads wider than 128.

A program owns 64 keys, whose dk and dv fill the registers of a warpgroup each. The first makes the
probabilities and dv, the second their gradients and dk; each hands what it made to the other
through shared memory, and multiplies half of the columns of dq. So one of them computes while the
other's products (wgmma) run, and the factors of dk and dv never leave their registers.
"""

from ._linked.compat import gl, gluon, hopper, mbarrier, tma
from ._linked.gradients import ROWS, add_to_memory, write
from ._linked.pipeline import EMPTY, TURN, barrier_arrive, barrier_sync
from .backward_bias import less_bias
from .backward_steps import (
    PARTIES,
    accumulator,
    count_turns,
    gradient_coordinates,
    head_now,
    head_of,
    probabilities,
    rounded,
    scale_of,
    score_gradient,
)
from .ordered import begin_turn, say_added, tile_at
from .places import DQ_TILE, FIRST_ROW, place_of

# named barriers, one for either buffer: probabilities, and their gradients, are there
GIVEN = gl.constexpr(12)
READY = gl.constexpr(14)


@gluon.jit
def _inner(a, b, start, QUARTERS: gl.constexpr, use_acc: gl.constexpr):
    """Multiply rows of two tiles, but for a fourth quarter of padding: in 5 - QUARTERS products."""
    WIDTH: gl.constexpr = a.shape[1] // 4
    if QUARTERS > 3:
        return hopper.warpgroup_mma(a, b.permute((1, 0)), start, use_acc=use_acc, is_async=True)
    b_t = b.slice(0, 2 * WIDTH, 1).permute((1, 0))
    s = hopper.warpgroup_mma(a.slice(0, 2 * WIDTH, 1), b_t, start, use_acc=use_acc, is_async=True)
    b_t = b.slice(2 * WIDTH, WIDTH, 1).permute((1, 0))
    return hopper.warpgroup_mma(a.slice(2 * WIDTH, WIDTH, 1), b_t, s, is_async=True)


@gluon.jit
def _part_at(dq_ptr, turn, tile, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Return where a step's part of dq belongs.

    ``dq_ptr`` says so itself, or if additions are ordered where the sums of the group begin.
    """
    if OPTIONS.ORDERED:
        member = turn % OPTIONS.GROUP
        dq_ptr += member * program.dq_pitch + tile.to(gl.int64) * (TILE.BLOCK_M * TILE.HEAD_DIM)
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
    """Accumulate dv for tiles of queries of one ``Head``, and add the left half of their dq.

    ``s`` holds the scores of the next tile.
    """
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    HEAD_DIM: gl.constexpr = TILE.HEAD_DIM
    STAGES_Q: gl.constexpr = TILE.STAGES_Q
    STAGES_O: gl.constexpr = TILE.STAGES_O
    WIDTH: gl.constexpr = HEAD_DIM // 4
    S: gl.constexpr = accumulator(BLOCK_M)
    pipeline, block = program.pipeline, program.block
    dtype: gl.constexpr = pipeline.q_s.dtype
    total = count_turns(program.walk, OPTIONS)
    tiles = end_tile - first_tile
    dq_ptr = head.dq_at
    if OPTIONS.ORDERED:
        tiles *= OPTIONS.GROUP
    else:
        dq_ptr += first_tile.to(gl.int64) * (BLOCK_M * HEAD_DIM)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S)  # [ROWS, BLOCK_M]
    zeros_q = gl.zeros([BLOCK_M, WIDTH], gl.float32, accumulator(WIDTH))  # [BLOCK_M, WIDTH]
    for step in range(tiles):
        # 0, but not for the compiler: what it can take out of the loop, it holds in registers
        none = turn >> 30
        k = pipeline.k_s.index(none).reshape([ROWS, HEAD_DIM])
        stage = turn % STAGES_Q
        stage_o = turn % STAGES_O
        buffer = turn % 2
        dout = pipeline.dout_s.index(stage_o).reshape([BLOCK_M, TILE.HEAD_DIM_V])
        lse2 = pipeline.lse2_s.index(stage).load(gl.SliceLayout(0, S))  # [BLOCK_M]
        tile = tile_at(step, first_tile, end_tile, OPTIONS)
        first_row = tile * BLOCK_M + block.diagonal
        if program.places_s is not None:
            first_row = place_of(program.places_s, stage, FIRST_ROW)
            place = place_of(program.places_s, stage, DQ_TILE)
            dq_ptr = head.dq_at + place.to(gl.int64) * (BLOCK_M * HEAD_DIM)
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
        p = gl.convert_layout(p, gl.DotOperandLayout(0, dv.type.layout, 2))
        mbarrier.wait(pipeline.dout_full.index(stage_o), turn // STAGES_O & 1)
        dv = hopper.warpgroup_mma(p, dout, dv, is_async=True)  # [ROWS, HEAD_DIM_V]
        barrier_sync(READY + buffer, 256, 4)
        ds_t = pipeline.ds_s.index(buffer).permute((1, 0))  # [BLOCK_M, ROWS]
        # [BLOCK_M, WIDTH]
        dq = hopper.warpgroup_mma(ds_t, k.slice(0, WIDTH, 1), zeros_q, use_acc=False, is_async=True)
        dv = hopper.warpgroup_mma_wait(1, deps=(dv,))
        barrier_arrive(EMPTY + STAGES_Q + stage_o, PARTIES, 4)
        # [BLOCK_M, WIDTH]
        more = hopper.warpgroup_mma(
            ds_t, k.slice(WIDTH, WIDTH, 1), zeros_q, use_acc=False, is_async=True
        )
        dq = hopper.warpgroup_mma_wait(1, deps=(dq,))
        begin_turn(turn, program, 0, OPTIONS)
        part_ptr = _part_at(dq_ptr, turn, tile, program, OPTIONS, TILE)
        add_to_memory(part_ptr, dq)
        turn += 1
        following = turn % STAGES_Q
        # behind the last tile: scores of whatever lies there, which nobody reads
        mbarrier.wait(pipeline.q_full.index(following), turn // STAGES_Q & 1, pred=turn < total)
        q = pipeline.q_s.index(following).reshape([BLOCK_M, HEAD_DIM])
        s = _inner(k, q, zeros, TILE.QUARTERS, False)  # [ROWS, BLOCK_M]
        more = hopper.warpgroup_mma_wait(5 - TILE.QUARTERS, deps=(more,))
        add_to_memory(part_ptr + BLOCK_M * WIDTH, more)
        say_added(program, 0, OPTIONS)
        if not OPTIONS.ORDERED:
            dq_ptr += BLOCK_M * HEAD_DIM
        # in flight over the loop's back edge, it would keep ptxas from overlapping anything
        s = hopper.warpgroup_mma_wait(0, deps=(s,))
    return dv, s, turn


@gluon.jit
def consume_scores(program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Compute the block's probabilities and dv, and the left half of what goes to dq."""
    pipeline, block, walk = program.pipeline, program.block, program.walk
    # queries ahead of the block's keys see them
    ALIBI_AHEAD: gl.constexpr = (
        program.tensors.alibi_slopes_ptr is not None and not OPTIONS.HAS_RIGHT
    )
    WALKS: gl.constexpr = 1 if OPTIONS.ORDERED else OPTIONS.GROUP
    FIRST: gl.constexpr = 3 if OPTIONS.ORDERED else 0
    LAST: gl.constexpr = -1 if OPTIONS.ORDERED else 4
    BY: gl.constexpr = -1 if OPTIONS.ORDERED else 1
    dq_ptr = program.dq_at
    total = count_turns(walk, OPTIONS)
    # [ROWS, HEAD_DIM_V]
    dv = gl.zeros([ROWS, TILE.HEAD_DIM_V], gl.float32, accumulator(TILE.HEAD_DIM_V))
    # [ROWS, BLOCK_M]
    s = gl.zeros([ROWS, TILE.BLOCK_M], gl.float32, accumulator(TILE.BLOCK_M))
    mbarrier.wait(pipeline.k_full, 0)
    mbarrier.wait(pipeline.q_full.index(0), 0, pred=total > 0)
    k = pipeline.k_s.index(0).reshape([ROWS, TILE.HEAD_DIM])
    q = pipeline.q_s.index(0).reshape([TILE.BLOCK_M, TILE.HEAD_DIM])
    s = _inner(k, q, s, TILE.QUARTERS, False)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    turn = 0
    first_head = block.head_k.to(gl.int64) * OPTIONS.GROUP
    dq_ptr += first_head * program.dq_pitch
    for member in range(WALKS):
        head = head_of(member, dq_ptr, program, OPTIONS)
        # the parts of ``Walk``, of which every second one needs a mask
        for i in gl.static_range(FIRST, LAST, BY):
            if (i > 0 or ALIBI_AHEAD) and (i < 3 or OPTIONS.HAS_LEFT):
                dv, s, turn = _walk_scores(
                    dv, s, turn, walk[i], walk[i + 1], head, i % 2 == 1, program, OPTIONS, TILE
                )
        dq_ptr += program.dq_pitch
    # the other warpgroup may still be multiplying the values
    barrier_sync(TURN, 256, 4)
    where = gradient_coordinates(block.first_key, program, OPTIONS)
    if program.tensors.rng_state_ptr is not None:
        dv = dv * program.numbers.keep_scale
    write(dv, program.maps.dv_desc, pipeline.v_s.index(0), where, TILE.HEAD_DIM_V)
    tma.store_wait(0)


@gluon.jit
def _walk_gradients(dk, dp, turn, dq_ptr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Accumulate dk for all tiles of queries of one head, and add the right half of their dq.

    ``dp`` holds dp - delta of the next tile, ``dq_ptr`` is where the head's sums of dq begin.
    """
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    HEAD_DIM: gl.constexpr = TILE.HEAD_DIM
    HEAD_DIM_V: gl.constexpr = TILE.HEAD_DIM_V
    STAGES_Q: gl.constexpr = TILE.STAGES_Q
    STAGES_O: gl.constexpr = TILE.STAGES_O
    WIDTH: gl.constexpr = HEAD_DIM // 4
    S: gl.constexpr = accumulator(BLOCK_M)
    pipeline, walk = program.pipeline, program.walk
    dtype: gl.constexpr = pipeline.q_s.dtype
    total = count_turns(walk, OPTIONS)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S)  # [ROWS, BLOCK_M]
    zeros_q = gl.zeros([BLOCK_M, WIDTH], gl.float32, accumulator(WIDTH))  # [BLOCK_M, WIDTH]
    first_ptr = dq_ptr
    steps = walk.end - walk.begin
    if OPTIONS.ORDERED:
        steps *= OPTIONS.GROUP
    else:
        dq_ptr += walk.begin.to(gl.int64) * (BLOCK_M * HEAD_DIM)
    for step in range(steps):
        none = turn >> 30
        k = pipeline.k_s.index(none).reshape([ROWS, HEAD_DIM])
        v = pipeline.v_s.index(none).reshape([ROWS, HEAD_DIM_V])
        stage = turn % STAGES_Q
        buffer = turn % 2
        q = pipeline.q_s.index(stage).reshape([BLOCK_M, HEAD_DIM])
        delta = 0.0
        if program.tensors.rng_state_ptr is not None:
            delta = pipeline.delta_s.index(turn % STAGES_O).load(gl.SliceLayout(0, S))  # [BLOCK_M]
        barrier_arrive(EMPTY + STAGES_Q + turn % STAGES_O, PARTIES, 4)
        barrier_sync(GIVEN + buffer, 256, 4)
        if program.places_s is not None:
            place = place_of(program.places_s, stage, DQ_TILE)
            dq_ptr = first_ptr + place.to(gl.int64) * (BLOCK_M * HEAD_DIM)
        tile = tile_at(step, walk.begin, walk.end, OPTIONS)
        part_ptr = _part_at(dq_ptr, turn, tile, program, OPTIONS, TILE)
        weight = program.p_s.index(buffer).load(S)  # [ROWS, BLOCK_M]
        # [ROWS, BLOCK_M]
        ds = score_gradient(weight.to(gl.float32), dp, delta, program).to(dtype)
        pipeline.ds_s.index(buffer).store(ds)
        hopper.fence_async_shared()
        barrier_arrive(READY + buffer, 256, 4)
        barrier_sync(TURN + 1, 128, 4)
        ds_k = gl.convert_layout(ds, gl.DotOperandLayout(0, dk.type.layout, 2))
        dk = hopper.warpgroup_mma(ds_k, q, dk, is_async=True)  # [ROWS, HEAD_DIM]
        ds_t = pipeline.ds_s.index(buffer).permute((1, 0))  # [BLOCK_M, ROWS]
        # [BLOCK_M, WIDTH]
        dq = hopper.warpgroup_mma(
            ds_t, k.slice(2 * WIDTH, WIDTH, 1), zeros_q, use_acc=False, is_async=True
        )
        dk = hopper.warpgroup_mma_wait(1, deps=(dk,))
        barrier_arrive(EMPTY + stage, PARTIES, 4)
        if TILE.QUARTERS > 3:
            # [BLOCK_M, WIDTH]
            more = hopper.warpgroup_mma(
                ds_t, k.slice(3 * WIDTH, WIDTH, 1), zeros_q, use_acc=False, is_async=True
            )
            dq = hopper.warpgroup_mma_wait(1, deps=(dq,))
            begin_turn(turn, program, 1, OPTIONS)
            add_to_memory(part_ptr, dq)
        turn += 1
        stage_o = turn % STAGES_O
        mbarrier.wait(pipeline.dout_full.index(stage_o), turn // STAGES_O & 1, pred=turn < total)
        dout = pipeline.dout_s.index(stage_o).reshape([BLOCK_M, HEAD_DIM_V])
        delta = pipeline.delta_s.index(stage_o).load(gl.SliceLayout(0, S))  # [BLOCK_M]
        dp = _inner(v, dout, delta[None, :] - zeros, TILE.QUARTERS_V, True)  # [ROWS, BLOCK_M]
        if TILE.QUARTERS > 3:
            more = hopper.warpgroup_mma_wait(5 - TILE.QUARTERS_V, deps=(more,))
            add_to_memory(part_ptr + BLOCK_M * WIDTH, more)
        else:
            dq = hopper.warpgroup_mma_wait(5 - TILE.QUARTERS_V, deps=(dq,))
            begin_turn(turn - 1, program, 1, OPTIONS)
            add_to_memory(part_ptr, dq)
        say_added(program, 1, OPTIONS)
        if not OPTIONS.ORDERED:
            dq_ptr += BLOCK_M * HEAD_DIM
        dp = hopper.warpgroup_mma_wait(0, deps=(dp,))
    return dk, dp, turn


@gluon.jit
def consume_gradients(program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Compute the gradients of the block's scores and dk, and the right half for dq."""
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    HEAD_DIM: gl.constexpr = TILE.HEAD_DIM
    S: gl.constexpr = accumulator(BLOCK_M)
    pipeline, block = program.pipeline, program.block
    dq_ptr = program.dq_at
    total = count_turns(program.walk, OPTIONS)
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, accumulator(HEAD_DIM))  # [ROWS, HEAD_DIM]
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S)  # [ROWS, BLOCK_M]
    mbarrier.wait(pipeline.k_full, 0)
    mbarrier.wait(pipeline.v_full, 0, pred=total > 0)
    mbarrier.wait(pipeline.dout_full.index(0), 0, pred=total > 0)
    v = pipeline.v_s.index(0).reshape([ROWS, TILE.HEAD_DIM_V])
    dout = pipeline.dout_s.index(0).reshape([BLOCK_M, TILE.HEAD_DIM_V])
    delta = pipeline.delta_s.index(0).load(gl.SliceLayout(0, S))  # [BLOCK_M]
    # [ROWS, BLOCK_M]: dp - delta, from a start at -delta
    dp = _inner(v, dout, delta[None, :] - zeros, TILE.QUARTERS_V, True)
    dp = hopper.warpgroup_mma_wait(0, deps=(dp,))
    turn = 0
    first_head = block.head_k.to(gl.int64) * OPTIONS.GROUP
    dq_ptr += first_head * program.dq_pitch + BLOCK_M * HEAD_DIM // 2
    WALKS: gl.constexpr = 1 if OPTIONS.ORDERED else OPTIONS.GROUP
    for _member in range(WALKS):
        dk, dp, turn = _walk_gradients(dk, dp, turn, dq_ptr, program, OPTIONS, TILE)
        dq_ptr += program.dq_pitch
    # the other warpgroup may still be multiplying the keys
    barrier_sync(TURN, 256, 4)
    where = gradient_coordinates(block.first_key, program, OPTIONS)
    dk = dk * scale_of(program.numbers.scale, program)
    write(dk, program.maps.dk_desc, pipeline.k_s.index(0), where, HEAD_DIM)
    tma.store_wait(0)
