"""Backward pass over a tree on Hopper: the dense consumers with a producer that walks the tree.

A program owns a block of keys of one segment. Its producer copies the queries of that segment, then
the queries of all segments below, of all query heads of the group, and passes on where each tile's
sums of dq lie. So the consumers walk one list of tiles: first masked tiles, then whole ones.
"""

from ..._dense.hopper.backward.blocks import locate_keys, query_tiles
from ..._dense.hopper.backward.kernel import allocate_sums, make_pipeline
from ..._dense.hopper.backward.places import DQ_TILE, FIRST_ROW
from ..._dense.hopper.backward.producer import INF, await_consumers, copy_block
from ..._dense.hopper.backward.steps import MADE, PARTIES, adds_by_threads, consume
from ..._dense.hopper.backward.structures import (
    Block,
    Numbers,
    Options,
    Panels,
    Program,
    Tensors,
    Tile,
    Walk,
)
from ..._dense.hopper.backward.wide import GIVEN, consume_gradients, consume_scores
from ..._dense.hopper.panels import copy_tile, expect_tiles
from ..._linked.hopper.compat import gl, gluon, mbarrier
from ..._linked.hopper.gradients import ROWS
from ..._linked.hopper.pipeline import EMPTY, barrier_sync, coordinates
from .path import next_below, run_of
from .structures import Descent, Place, Run, TreeNumbers

# a row after every key
BEHIND = gl.constexpr(1 << 30)
POINTERS = ("cu_seqlens_ptr", "parents_ptr")


@gluon.constexpr_function
def _options(group, has_softcap):
    """Return the options of the dense consumers: causal, ragged, and nothing else."""
    return Options(
        GROUP=group,
        HAS_LEFT=False,
        HAS_RIGHT=True,
        HAS_SOFTCAP=has_softcap,
        RAGGED=True,
        APART_Q=False,
        APART_K=False,
        BIAS_BATCH=False,
        BIAS_HEADS=False,
        BIAS_ROWS=False,
        ORDERED=False,
        ADDS_DS=False,
        SHARES_DS=False,
        CLEARS_DS=False,
    )


@gluon.jit
def _find_block(tensors, numbers, below_ptr, GROUP: gl.constexpr, TILE: gl.constexpr):
    """Return ``(block, own, walk)``: a program's block of keys, and the queries that see it.

    ``own`` is the ``Walk`` over its own segment, of one head. ``walk`` counts tiles of all segments
    and of all heads of the group.
    """
    # causal within the own segment
    OPTIONS: gl.constexpr = _options(GROUP, False)
    found = locate_keys(gl.program_id(0), tensors, numbers, True, False, TILE.BLOCK_N)
    len_k = found.len_k
    # a slot without a block gets keys after the end, which are neither read nor written
    first_key = gl.where(found.block < 0, gl.cdiv(len_k, TILE.BLOCK_N), found.block) * TILE.BLOCK_N
    own = query_tiles(first_key, 0, found.len_q, len_k, numbers, False, OPTIONS, TILE)
    is_seen = own.end > own.begin
    below = gl.load(below_ptr + found.sequence, mask=is_seen, other=0)
    tiles = (own.end - own.begin + below) * GROUP
    masked = (own.whole - own.begin) * GROUP
    if first_key + TILE.BLOCK_N > len_k:
        masked = tiles
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
    if turn >= TILE.STAGES_Q:
        barrier_sync(EMPTY + stage, PARTIES, 1)
    copy_tile(maps.q_descs, where, pipeline.q_full.index(stage), pipeline.q_s, stage)
    pipeline.lse2_s.index(stage).store(lse2)
    zero = gl.arange(0, 1, gl.BlockedLayout([1], [32], [1], [0]))  # [1]
    program.places_s.index(2 * stage + FIRST_ROW).store(zero + place.first_row)
    program.places_s.index(2 * stage + DQ_TILE).store(zero + place.dq_tile)
    mbarrier.arrive(pipeline.q_full.index(stage), count=1)
    if turn == 0:
        copy_block(maps.v_descs, pipeline.v_s, pipeline.v_full, program, OPTIONS, TILE)
    stage = turn % TILE.STAGES_O
    if turn >= TILE.STAGES_O:
        barrier_sync(EMPTY + TILE.STAGES_Q + stage, PARTIES, 1)
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
            place = Place(head, row, first_row, head * descent.tiles_q + slot + tile)
            _copy_step(turn, run, place, program, OPTIONS, TILE)
            turn += 1
        first = gl.where(is_below, 0, end)
        end = gl.where(is_below, 0, own.end)
        if first == end:
            below = next_below(
                run.segment,
                block.sequence,
                descent.segments,
                descent.parents_ptr,
                descent.links_ptr,
            )
            run = run_of(below, descent.segments, descent.cu_seqlens_ptr)
            first = 0
            end = gl.cdiv(run.length, BLOCK_M)
    await_consumers(turn, EMPTY, TILE.STAGES_Q)
    await_consumers(turn, EMPTY + TILE.STAGES_Q, TILE.STAGES_O)


@gluon.jit(do_not_specialize=TreeNumbers._fields, do_not_specialize_on_alignment=POINTERS)
def tree_backward_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    dk_desc,
    dv_desc,
    q_narrow_desc,
    k_narrow_desc,
    v_narrow_desc,
    dout_narrow_desc,
    dk_narrow_desc,
    dv_narrow_desc,
    bias_desc,
    ds_desc,
    sums,
    sums_narrow,
    lse2_ptr,
    delta_ptr,
    cu_seqlens_ptr,
    parents_ptr,
    links_ptr,
    below_ptr,
    scale,
    softcap,
    segments,
    heads_k,
    tokens,
    tiles_q,
    tiles_k,
    GROUP: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    NARROW: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    NARROW_V: gl.constexpr,
    STAGES_Q: gl.constexpr,
    STAGES_O: gl.constexpr,
    STAGES_B: gl.constexpr,
    MAKES_DK: gl.constexpr,
    MAKES_DV: gl.constexpr,
):
    """``dv = p^T dout``, ``dk = scale ds^T q`` and ``dq += ds k`` of one block of keys.

    ``p = exp2(s - lse2)`` and ``ds = p (dout v^T - delta)``, over the queries of the block's
    segment and of all segments below. The parameters are the fields of ``Maps``, ``TreeTensors``,
    ``TreeNumbers``, ``TreeOptions`` and ``Tile``.
    """
    dtype: gl.constexpr = q_desc.dtype
    OPTIONS: gl.constexpr = _options(GROUP, HAS_SOFTCAP)
    # the consumers' list contains the tiles of all heads, as if there were one head
    LISTED: gl.constexpr = _options(1, HAS_SOFTCAP)
    TILE: gl.constexpr = Tile(
        BLOCK_M,
        BLOCK_N,
        HEAD_DIM,
        NARROW,
        HEAD_DIM_V,
        NARROW_V,
        STAGES_Q,
        STAGES_O,
        STAGES_B,
        MAKES_DK,
        MAKES_DV,
    )
    maps = Panels(
        (q_desc, q_narrow_desc) if NARROW > 0 else (q_desc,),
        (k_desc, k_narrow_desc) if NARROW > 0 else (k_desc,),
        (v_desc, v_narrow_desc) if NARROW_V > 0 else (v_desc,),
        (dout_desc, dout_narrow_desc) if NARROW_V > 0 else (dout_desc,),
        (dk_desc, dk_narrow_desc) if NARROW > 0 else (dk_desc,),
        (dv_desc, dv_narrow_desc) if NARROW_V > 0 else (dv_desc,),
        bias_desc,
        ds_desc,
        sums if adds_by_threads(TILE) else (sums, sums_narrow) if NARROW > 0 else (sums,),
    )
    tensors = Tensors(lse2_ptr, delta_ptr, None, None, cu_seqlens_ptr, cu_seqlens_ptr, None, None)
    numbers = Numbers(
        scale,
        softcap,
        -1,
        0,
        segments,
        heads_k,
        tokens,
        tokens,
        tiles_k,
        tiles_q,
        0,
        1.0,
        0,
        0,
        0,
        0,
        heads_k,
        1,
        1,
    )
    block, own, walk = _find_block(tensors, numbers, below_ptr, GROUP, TILE)
    descent = Descent(cu_seqlens_ptr, parents_ptr, links_ptr, segments, tiles_q, own)
    pipeline = make_pipeline(maps, TILE)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    places_s = gl.allocate_shared_memory(gl.int32, [2 * STAGES_Q, 1], PLAIN)
    BARRIERS: gl.constexpr = EMPTY + STAGES_Q + STAGES_O
    if BLOCK_N == ROWS:
        gl.static_assert(BARRIERS <= GIVEN, "stages outnumber the barriers")
        TRANSPOSED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], dtype)
        p_s = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_M], TRANSPOSED)
        program = Program(
            maps, pipeline, None, p_s, None, sums, tensors, numbers, block, 0, walk, places_s, None
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
        dq_s = allocate_sums(maps, TILE)
        program = Program(
            maps, pipeline, dq_s, None, None, 0, tensors, numbers, block, 0, walk, places_s, None
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
