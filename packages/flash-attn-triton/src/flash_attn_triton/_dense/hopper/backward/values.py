"""The gradient of values in a separate launch, if the registers cannot hold both dk and dv.

Between head dims 128 and 192 the registers hold dk of 128 keys, 64 per warpgroup, but not also dv.
A program with 64 keys would add to dq twice as often, and these additions bound the backward. So
one launch makes dk and dq; a second launch recomputes the probabilities and makes dv. That takes
six products instead of five.
"""

from ...._linked.hopper.compat import gl, gluon, hopper, mbarrier, tma
from ...._linked.hopper.gradients import ROWS
from ...._linked.hopper.pipeline import (
    EMPTY,
    TURN,
    await_full,
    barrier_arrive,
    barrier_sync,
    barriers,
)
from ..panels import (
    accumulator,
    allocate,
    multiply_rows,
    multiply_values,
    no_gradient,
    scale_panels,
    tile_of,
    wait_for_all,
)
from .blocks import count_turns
from .steps import PARTIES, head_of, probabilities, rounded
from .structures import ValuePipeline
from .sums.shares import hand_in


@gluon.jit
def make_value_pipeline(maps, TILE: gl.constexpr):
    """Allocate the buffers and mbarriers; see ``Pipeline``."""
    q_s = allocate(maps.q_descs, TILE.STAGES_Q)
    dout_s = allocate(maps.dout_descs, TILE.STAGES_O)
    k_s = allocate(maps.k_descs, TILE.BLOCK_N // ROWS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse2_s = gl.allocate_shared_memory(gl.float32, [TILE.STAGES_Q, TILE.BLOCK_M], PLAIN)
    # two arrivals: of the copy, and of the LSE, which the producer stores itself
    q_full = barriers(TILE.STAGES_Q, 2)
    dout_full = barriers(TILE.STAGES_O, 1)
    k_full = barriers(1, 1).index(0)
    hopper.fence_async_shared()
    return ValuePipeline(q_s, k_s, dout_s, lse2_s, q_full, k_full, dout_full)


@gluon.jit
def _walk_values(
    dv,
    s,
    turn,
    first_tile,
    end_tile,
    head,
    W: gl.constexpr,
    MASKED: gl.constexpr,
    program,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Accumulate dv for tiles of queries of one ``Head``; ``s`` are scores of the next tile."""
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    STAGES_Q: gl.constexpr = TILE.STAGES_Q
    STAGES_O: gl.constexpr = TILE.STAGES_O
    S: gl.constexpr = accumulator(BLOCK_M)
    pipeline, block = program.pipeline, program.block
    dtype: gl.constexpr = pipeline.q_s[0].dtype
    total = count_turns(program.walk, OPTIONS)
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S)  # [ROWS, BLOCK_M]
    for tile in range(first_tile, end_tile):
        # 0, which the compiler cannot know: else it hoists addresses out of the loop into registers
        none = turn >> 30
        k = tile_of(pipeline.k_s, W + none, ROWS)  # [ROWS, HEAD_DIM]
        stage = turn % STAGES_Q
        stage_o = turn % STAGES_O
        parity_o = turn // STAGES_O & 1
        lse2 = pipeline.lse2_s.index(stage).load(gl.SliceLayout(0, S))  # [BLOCK_M]
        turn += 1
        following = turn % STAGES_Q
        # after the last tile: scores of undefined data, which are not read
        await_full(pipeline.q_full, turn, pred=turn < total)
        q = tile_of(pipeline.q_s, following, BLOCK_M)  # [BLOCK_M, HEAD_DIM]
        more = multiply_rows(k, q, zeros, False)  # [ROWS, BLOCK_M]
        first_key = block.first_key + W * ROWS
        first_row = tile * BLOCK_M + block.diagonal
        p, _ = probabilities(
            s, lse2[None, :], first_key, first_row, head, MASKED, program, OPTIONS
        )  # [ROWS, BLOCK_M]
        barrier_arrive(EMPTY + stage, PARTIES, 4)
        p = rounded(p, program, dtype)
        p = gl.convert_layout(p, gl.DotOperandLayout(0, dv[0].type.layout, 2))
        dout = tile_of(pipeline.dout_s, stage_o, BLOCK_M)  # [BLOCK_M, HEAD_DIM_V]
        mbarrier.wait(pipeline.dout_full.index(stage_o), parity_o)
        dv = multiply_values(p, dout, dv)  # [ROWS, HEAD_DIM_V]
        # a product in flight over the loop's back edge would keep ptxas from overlapping any
        dv, s = wait_for_all(dv, more)
        barrier_arrive(EMPTY + STAGES_Q + stage_o, PARTIES, 4)
    return dv, s, turn


@gluon.jit
def consume_values(W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Compute warpgroup ``W``'s 64 rows of dv."""
    # queries before the block's keys see them
    ALIBI_AHEAD: gl.constexpr = (
        program.tensors.alibi_slopes_ptr is not None and not OPTIONS.HAS_RIGHT
    )
    pipeline, walk = program.pipeline, program.walk
    total = count_turns(walk, OPTIONS)
    dv = no_gradient(ROWS, TILE.HEAD_DIM_V, TILE.NARROW_V)  # [ROWS, HEAD_DIM_V]
    # [ROWS, BLOCK_M]
    s = gl.zeros([ROWS, TILE.BLOCK_M], gl.float32, accumulator(TILE.BLOCK_M))
    mbarrier.wait(pipeline.k_full, 0)
    mbarrier.wait(pipeline.q_full.index(0), 0, pred=total > 0)
    k = tile_of(pipeline.k_s, W, ROWS)
    q = tile_of(pipeline.q_s, 0, TILE.BLOCK_M)
    s = multiply_rows(k, q, s, False)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    turn = 0
    for member in range(OPTIONS.GROUP):
        head = head_of(member, 0, program, OPTIONS)
        # the parts of ``Walk``; the second and the fourth need a mask
        for i in gl.static_range(4):
            if (i > 0 or ALIBI_AHEAD) and (i < 3 or OPTIONS.HAS_LEFT):
                dv, s, turn = _walk_values(
                    dv, s, turn, walk[i], walk[i + 1], head, W, i % 2 == 1, program, OPTIONS, TILE
                )
    # the other warpgroup may still be multiplying the output gradients
    barrier_sync(TURN, 256, 4)
    if program.tensors.rng_state_ptr is not None:
        dv = scale_panels(dv, program.numbers.keep_scale)
    maps, tensors = program.maps, program.tensors
    hand_in(dv, maps.dv_descs, tensors.dv_sums_ptr, pipeline.dout_s, W, program, OPTIONS, TILE)
    tma.store_wait(0)
