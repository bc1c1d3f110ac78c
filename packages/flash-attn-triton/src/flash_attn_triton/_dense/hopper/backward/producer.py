"""The producer warp of the Hopper backward."""

from ...._linked.hopper.compat import gl, gluon, mbarrier
from ...._linked.hopper.gradients import ROWS
from ...._linked.hopper.pipeline import EMPTY, await_readers, coordinates, drain
from ..panels import copy_panels, copy_tile, expect_tiles
from .bias import copy_bias
from .blocks import count_turns, key_coordinates
from .order import head_at, tile_at
from .steps import PARTIES, side_of, slope_of

INF = gl.constexpr(float("inf"))


@gluon.jit
def copy_block(descs, buffers, full, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Copy the block's keys, or its values."""
    for w in gl.static_range(TILE.BLOCK_N // ROWS):
        where = key_coordinates(program.block, program.block.first_key + w * ROWS, OPTIONS)
        copy_panels(descs, where, full, buffers, w)


@gluon.jit
def produce(program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Copy the block's keys and values, then tiles of queries, output gradients, LSE and delta.

    Queries and LSE share one ring of stages, output gradients and delta another.
    """
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    STAGES_Q: gl.constexpr = TILE.STAGES_Q
    STAGES_O: gl.constexpr = TILE.STAGES_O
    GROUP: gl.constexpr = OPTIONS.GROUP
    PARTS: gl.constexpr = TILE.BLOCK_N // ROWS
    # with other tiles this warp lacks the registers
    EARLY: gl.constexpr = TILE.MAKES_DK and BLOCK_M == 128
    maps, pipeline = program.maps, program.pipeline
    tensors, block, walk = program.tensors, program.block, program.walk
    index = gl.arange(0, BLOCK_M, gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0]))  # [BLOCK_M]
    expect_tiles(maps.k_descs, pipeline.k_full, PARTS)
    if TILE.MAKES_DK:
        expect_tiles(maps.v_descs, pipeline.v_full, PARTS)
    copy_block(maps.k_descs, pipeline.k_s, pipeline.k_full, program, OPTIONS, TILE)
    steps = walk.end - walk.begin
    for turn in range(steps * GROUP):
        head, step = head_at(turn, block.head_k, steps, OPTIONS)
        row = tile_at(step, walk.begin, walk.end, OPTIONS) * BLOCK_M
        inside = row + index < block.len_q
        rows_at = block.row_at + head.to(gl.int64) * block.row_pitch + row
        # inf makes the exponentials 0: after the last row, and in fully masked rows
        lse2 = gl.load(tensors.lse2_ptr + rows_at + index, mask=inside, other=INF)  # [BLOCK_M]
        if TILE.MAKES_DK:
            delta = gl.load(
                tensors.delta_ptr + rows_at + index, mask=inside, other=0.0
            )  # [BLOCK_M]
        if TILE.MAKES_DK and tensors.rng_state_ptr is not None:
            # keep_scale is a factor of all three gradients
            delta = delta / program.numbers.keep_scale
        if tensors.alibi_slopes_ptr is not None:
            # the rows' part of the distances; the consumers add the keys' part
            first_row = row + block.diagonal
            side = side_of(slope_of(head, program), first_row, block)
            lse2 += (first_row - block.first_key + index).to(gl.float32) * side
        where = coordinates(block.sequence, head, block.q_start, block.len_q, row, OPTIONS.RAGGED)
        stage = turn % STAGES_Q
        await_readers(turn, EMPTY, STAGES_Q, PARTIES)
        copy_tile(maps.q_descs, where, pipeline.q_full.index(stage), pipeline.q_s, stage)
        if EARLY and turn < STAGES_O:
            # the stages are empty: begin to copy before LSE and delta have arrived
            if turn == 0:
                copy_block(maps.v_descs, pipeline.v_s, pipeline.v_full, program, OPTIONS, TILE)
            full = pipeline.dout_full.index(turn)
            copy_tile(maps.dout_descs, where, full, pipeline.dout_s, turn)
        pipeline.lse2_s.index(stage).store(lse2)
        mbarrier.arrive(pipeline.q_full.index(stage), count=1)
        if program.bias is not None:
            copy_bias(head, row, turn, program, OPTIONS, TILE)
        if TILE.MAKES_DK and not EARLY and turn == 0:
            copy_block(maps.v_descs, pipeline.v_s, pipeline.v_full, program, OPTIONS, TILE)
        stage = turn % STAGES_O
        await_readers(turn, EMPTY + STAGES_Q, STAGES_O, PARTIES)
        if not EARLY or turn >= STAGES_O:
            full = pipeline.dout_full.index(stage)
            copy_tile(maps.dout_descs, where, full, pipeline.dout_s, stage)
        if TILE.MAKES_DK:
            pipeline.delta_s.index(stage).store(-delta)
            mbarrier.arrive(pipeline.dout_full.index(stage), count=1)
    turns = count_turns(walk, OPTIONS)
    drain(turns, EMPTY, STAGES_Q, PARTIES)
    drain(turns, EMPTY + STAGES_Q, STAGES_O, PARTIES)
    if program.bias is not None:
        drain(turns, EMPTY + STAGES_Q + STAGES_O, TILE.STAGES_B, 32 + 2 * TILE.BLOCK_N)
