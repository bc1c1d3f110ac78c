"""Backward pass over a tree on Hopper: the dense consumers with a producer that walks the tree.

A program owns a block of keys of one segment. Its producer copies the queries of that segment, then
the queries of all segments below, of all query heads of the group, and passes on where each tile's
sums of dq lie. So the consumers walk one list of tiles: first masked tiles, then whole ones.
"""

from __future__ import annotations

from ..._dense.hopper.backward.arguments import Maps, Numbers, Options, Tensors, Tile
from ..._dense.hopper.backward.blocks import (
    DQ_TILE,
    FIRST_ROW,
    locate_keys,
    place_in_sums,
    query_tiles,
)
from ..._dense.hopper.backward.kernel import allocate_sums, in_panels, make_pipeline
from ..._dense.hopper.backward.producer import INF, copy_block
from ..._dense.hopper.backward.steps import MADE, PARTIES, adds_by_threads, consume
from ..._dense.hopper.backward.structures import Block, Panels, Program, Walk
from ..._dense.hopper.backward.wide import GIVEN, consume_gradients, consume_scores
from ..._dense.hopper.panels import copy_tile, expect_tiles
from ..._linked.hopper.compat import gl, gluon, mbarrier
from ..._linked.hopper.gradients import ROWS
from ..._linked.hopper.pipeline import EMPTY, await_readers, coordinates, drain
from ..._linked.launch.entries import entry
from .arguments import BackwardNumbers, BackwardTensors
from .path import next_below, run_of
from .structures import Descent, Place, Run

# a row after every key
BEHIND = gl.constexpr(1 << 30)


@gluon.jit
def _find_block(tensors, numbers, below_ptr, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Return ``(block, own, walk)``: a program's block of keys, and the queries that see it.

    ``own`` is the ``Walk`` over its own segment, of one head. ``walk`` counts tiles of all segments
    and of all heads of the group.
    """
    found = locate_keys(gl.program_id(0), tensors, numbers, True, False, TILE.BLOCK_N)
    len_k = found.len_k
    # a slot without a block gets keys after the end, which are neither read nor written
    first_key = gl.where(found.block < 0, gl.cdiv(len_k, TILE.BLOCK_N), found.block) * TILE.BLOCK_N
    own = query_tiles(first_key, 0, found.len_q, len_k, numbers, False, OPTIONS, TILE)
    is_seen = own.end > own.begin
    below = gl.load(below_ptr + found.sequence, mask=is_seen, other=0)
    tiles = (own.end - own.begin + below) * OPTIONS.GROUP
    masked = (own.whole - own.begin) * OPTIONS.GROUP
    if first_key + TILE.BLOCK_N > len_k:
        masked = tiles
    sums_at = 0
    if OPTIONS.SHARES > 1:
        sums_at = place_in_sums(found, tensors, numbers, OPTIONS, TILE)
    block = Block(
        found.sequence,
        found.head_k,
        first_key,
        found.q_start,
        found.k_start,
        0,
        found.len_q,
        len_k,
        found.q_start,
        numbers.tokens_q,
        0,
        0,
        0,
        sums_at,
    )
    return block, own, Walk(tiles * 0, tiles * 0, masked, tiles, tiles)


@gluon.jit
def _copy_step(turn, run, place, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Copy a tile of queries of one head, and its output gradient, LSE, delta and place."""
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    maps, pipeline, tensors = program.maps, program.pipeline, program.tensors
    index = gl.arange(0, BLOCK_M, gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0]))  # [BLOCK_M]
    head, row = place.head, place.row
    inside = row + index < run.length
    rows_at = head.to(gl.int64) * program.block.row_pitch + run.start + row
    # inf makes the exponentials 0: after the last row, and in fully masked rows
    lse2 = gl.load(tensors.lse2_ptr + rows_at + index, mask=inside, other=INF)  # [BLOCK_M]
    delta = gl.load(tensors.delta_ptr + rows_at + index, mask=inside, other=0.0)  # [BLOCK_M]
    where = coordinates(0, head, run.start, run.length, row, True)
    stage = turn % TILE.STAGES_Q
    await_readers(turn, EMPTY, TILE.STAGES_Q, PARTIES)
    copy_tile(maps.q_descs, where, pipeline.q_full.index(stage), pipeline.q_s, stage)
    pipeline.lse2_s.index(stage).store(lse2)
    zero = gl.arange(0, 1, gl.BlockedLayout([1], [32], [1], [0]))  # [1]
    program.places_s.index(2 * stage + FIRST_ROW).store(zero + place.first_row)
    program.places_s.index(2 * stage + DQ_TILE).store(zero + place.dq_tile)
    mbarrier.arrive(pipeline.q_full.index(stage), count=1)
    if turn == 0:
        copy_block(maps.v_descs, pipeline.v_s, pipeline.v_full, program, OPTIONS, TILE)
    stage = turn % TILE.STAGES_O
    await_readers(turn, EMPTY + TILE.STAGES_Q, TILE.STAGES_O, PARTIES)
    copy_tile(maps.dout_descs, where, pipeline.dout_full.index(stage), pipeline.dout_s, stage)
    pipeline.delta_s.index(stage).store(-delta)
    mbarrier.arrive(pipeline.dout_full.index(stage), count=1)


@gluon.jit
def produce(program, descent, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Copy the block's keys and values, then tiles of queries, output gradients, LSE and delta.

    The tiles of the own segment that the diagonal cuts come first, of all heads; then its other
    tiles; then the tiles of the segments below, in preorder.
    """
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    GROUP: gl.constexpr = OPTIONS.GROUP
    PARTS: gl.constexpr = TILE.BLOCK_N // ROWS
    maps, pipeline, block, own = program.maps, program.pipeline, program.block, descent.own
    expect_tiles(maps.k_descs, pipeline.k_full, PARTS)
    expect_tiles(maps.v_descs, pipeline.v_full, PARTS)
    copy_block(maps.k_descs, pipeline.k_s, pipeline.k_full, program, OPTIONS, TILE)
    turn = 0
    segment = gl.where(own.end > own.begin, block.sequence, -1)
    run = Run(segment, block.q_start, block.len_q)
    first = own.begin
    end = own.whole
    while run.segment >= 0:
        tiles = end - first
        slot = run.start // BLOCK_M + run.segment + 1
        is_below = run.segment != block.sequence
        for step in range(tiles * GROUP):
            head = block.head_k * GROUP + step // tiles
            tile = first + step % tiles
            row = tile * BLOCK_M
            first_row = gl.where(is_below, BEHIND, row)
            place = Place(head, row, first_row, head * descent.numbers.tiles_q + slot + tile)
            _copy_step(turn, run, place, program, OPTIONS, TILE)
            turn += 1
        first = gl.where(is_below, 0, end)
        end = gl.where(is_below, 0, own.end)
        if first == end:
            below = next_below(run.segment, block.sequence, descent)
            run = run_of(below, descent.numbers.segments, descent.tensors.cu_seqlens_ptr)
            first = 0
            end = gl.cdiv(run.length, BLOCK_M)
    drain(turn, EMPTY, TILE.STAGES_Q, PARTIES)
    drain(turn, EMPTY + TILE.STAGES_Q, TILE.STAGES_O, PARTIES)


@entry(gluon.jit)
def tree_backward_kernel(
    maps: Maps,
    tensors: BackwardTensors,
    numbers: BackwardNumbers,
    OPTIONS: Options,
    TILE: Tile,
):
    """``dv = p^T dout``, ``dk = scale ds^T q`` and ``dq += ds k`` of one block of keys.

    ``p = exp2(s - lse2)`` and ``ds = p (dout v^T - delta)``, over the queries of the block's
    segment and of all segments below.
    """
    # the consumers' list contains the tiles of all heads, as if there were one head
    LISTED: gl.constexpr = Options(
        GROUP=1,
        HAS_LEFT=OPTIONS.HAS_LEFT,
        HAS_RIGHT=OPTIONS.HAS_RIGHT,
        HAS_SOFTCAP=OPTIONS.HAS_SOFTCAP,
        RAGGED=OPTIONS.RAGGED,
        SHARES=OPTIONS.SHARES,
    )
    starts = tensors.cu_seqlens_ptr
    sums = maps.sums
    if not adds_by_threads(TILE):
        sums = (sums, maps.sums_narrow) if TILE.NARROW > 0 else (sums,)
    panels = Panels(*in_panels(maps, TILE), maps.bias, maps.ds, sums)
    dense = Tensors(
        lse2_ptr=tensors.lse2_ptr,
        delta_ptr=tensors.delta_ptr,
        cu_seqlens_q_ptr=starts,
        cu_seqlens_k_ptr=starts,
        dk_sums_ptr=tensors.dk_sums_ptr,
        dv_sums_ptr=tensors.dv_sums_ptr,
    )
    # causal within the own segment
    counts = Numbers(
        scale=numbers.scale,
        softcap=numbers.softcap,
        window_left=-1,
        window_right=0,
        batch=numbers.segments,
        heads_k=numbers.heads_k,
        tokens_q=numbers.tokens,
        tokens_k=numbers.tokens,
        tiles=numbers.tiles_k,
        tiles_q=numbers.tiles_q,
        span=0,
        keep_scale=1.0,
        dropout_threshold=0,
        stride_alibi_b=0,
        first_sequence=0,
        first_head=0,
        heads_here=numbers.heads_k,
        sequences_together=1,
        heads_together=1,
    )
    block, own, walk = _find_block(dense, counts, tensors.below_ptr, OPTIONS, TILE)
    descent = Descent(tensors, numbers, own)
    pipeline = make_pipeline(panels, TILE)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    places_s = gl.allocate_shared_memory(gl.int32, [2 * TILE.STAGES_Q, 1], PLAIN)
    BARRIERS: gl.constexpr = EMPTY + TILE.STAGES_Q + TILE.STAGES_O
    if TILE.BLOCK_N == ROWS:
        gl.static_assert(BARRIERS <= GIVEN, "stages outnumber the barriers")
        dtype: gl.constexpr = maps.wide.q.dtype
        TRANSPOSED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, TILE.BLOCK_M], dtype)
        p_s = gl.allocate_shared_memory(dtype, [2, ROWS, TILE.BLOCK_M], TRANSPOSED)
        program = Program(
            panels, pipeline, None, p_s, None, sums, dense, counts, block, 0, walk, places_s, None
        )
        gl.warp_specialize(
            [
                (consume_scores, (program, LISTED, TILE)),
                (consume_gradients, (program, LISTED, TILE)),
                (produce, (program, descent, OPTIONS, TILE)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.static_assert(BARRIERS <= MADE + 8, "stages outnumber the barriers")
        dq_s = allocate_sums(panels, TILE)
        program = Program(
            panels, pipeline, dq_s, None, None, 0, dense, counts, block, 0, walk, places_s, None
        )
        gl.warp_specialize(
            [
                (consume, (0, program, LISTED, TILE)),
                (consume, (1, program, LISTED, TILE)),
                (produce, (program, descent, OPTIONS, TILE)),
            ],
            [4, 1],
            [240, 24],
        )
