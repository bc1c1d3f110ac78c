"""Backward pass on Hopper: one warp copies by TMA, two warpgroups multiply by wgmma.

A program owns a block of keys, 64 per warpgroup, and walks the queries that see it. Above head dim
128 it owns 64 keys, and ``wide.py`` divides the work between the warpgroups.
Scores are transposed ([keys, queries]), so that probabilities and gradients of scores go from the
accumulators into the products of dv and dk without a change of layout. The product of dq needs the
gradients of scores of all keys of the block; the warpgroups exchange them through shared memory.
The block's part of dq is added in fp32 to a buffer in memory, in the order of the accumulators'
registers: by TMA, or above head dim 128 by the threads. ``round_dq`` restores the order of dq.
"""

from ...._linked.hopper.compat import gl, gluon, hopper
from ...._linked.hopper.gradients import ROWS
from ...._linked.hopper.pipeline import EMPTY, barriers
from ..panels import allocate
from .bias import make_ring
from .blocks import find_block
from .order import add_in_order, pass_turns
from .producer import produce
from .shared_bias import keep_shared, share_block
from .steps import MADE, adds_by_threads, consume
from .structures import (
    Numbers,
    Options,
    Order,
    Panels,
    Pipeline,
    Program,
    Tensors,
    Tile,
)
from .values import consume_values, make_value_pipeline
from .wide import GIVEN, consume_gradients, consume_scores


@gluon.jit
def make_pipeline(maps, TILE: gl.constexpr):
    """Allocate the buffers and mbarriers of the pipeline."""
    dtype: gl.constexpr = maps.q_descs[0].dtype
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    STAGES_Q: gl.constexpr = TILE.STAGES_Q
    STAGES_O: gl.constexpr = TILE.STAGES_O
    PARTS: gl.constexpr = TILE.BLOCK_N // ROWS
    q_s = allocate(maps.q_descs, STAGES_Q)
    dout_s = allocate(maps.dout_descs, STAGES_O)
    k_s = allocate(maps.k_descs, PARTS)
    v_s = allocate(maps.v_descs, PARTS)
    if maps.ds_desc is None:
        TRANSPOSED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], dtype)
        ds_s = gl.allocate_shared_memory(dtype, [2 * PARTS, ROWS, BLOCK_M], TRANSPOSED)
    else:
        # [queries, keys] as in the bias: TMA stores them
        ds_s = allocate((maps.ds_desc,), 2 * PARTS)[0]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse2_s = gl.allocate_shared_memory(gl.float32, [STAGES_Q, BLOCK_M], PLAIN)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES_O, BLOCK_M], PLAIN)
    # two arrivals: of the copy, and of LSE or delta, which the producer stores itself
    q_full = barriers(STAGES_Q, 2)
    dout_full = barriers(STAGES_O, 2)
    k_full = barriers(1, 1).index(0)
    v_full = barriers(1, 1).index(0)
    hopper.fence_async_shared()
    return Pipeline(q_s, k_s, v_s, dout_s, ds_s, lse2_s, delta_s, q_full, k_full, v_full, dout_full)


@gluon.jit
def allocate_sums(maps, TILE: gl.constexpr):
    """Allocate the panels from which dq is added to memory: half of a tile for either warpgroup."""
    SIZE: gl.constexpr = TILE.BLOCK_M * TILE.HEAD_DIM // 64
    dq_s = (gl.allocate_shared_memory(gl.float32, [2, SIZE, 32], maps.sums[0].layout),)
    if TILE.NARROW > 0:
        LESS: gl.constexpr = TILE.BLOCK_M * TILE.NARROW // 64
        dq_s += (gl.allocate_shared_memory(gl.float32, [2, LESS, 32], maps.sums[1].layout),)
    return dq_s


@gluon.jit(
    do_not_specialize=Numbers._fields,
    do_not_specialize_on_alignment=[
        "alibi_slopes_ptr",
        "rng_state_ptr",
        "cu_seqlens_q_ptr",
        "cu_seqlens_k_ptr",
        "seqused_k_ptr",
    ],
)
def backward_kernel(
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
    alibi_slopes_ptr,
    rng_state_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_k_ptr,
    counters_ptr,
    scale,
    softcap,
    window_left,
    window_right,
    batch,
    heads_k,
    tokens_q,
    tokens_k,
    tiles,
    tiles_q,
    span,
    keep_scale,
    dropout_threshold,
    stride_alibi_b,
    first_sequence,
    first_head,
    heads_here,
    sequences_together,
    heads_together,
    GROUP: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    RAGGED: gl.constexpr,
    APART_Q: gl.constexpr,
    APART_K: gl.constexpr,
    BIAS_BATCH: gl.constexpr,
    BIAS_HEADS: gl.constexpr,
    BIAS_ROWS: gl.constexpr,
    ORDERED: gl.constexpr,
    ADDS_DS: gl.constexpr,
    SHARES_DS: gl.constexpr,
    CLEARS_DS: gl.constexpr,
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

    ``p = exp2(s - lse2)`` are the probabilities of the scores s, and ``ds = p (dout v^T - delta)``
    the gradients of the scores (with a softcap, times its derivative). With dropout, where ``m`` is
    1 for kept probabilities and ``c = keep_scale``, ``dv = c (p m)^T dout`` and
    ``ds = c p (m dout v^T - delta / c)``. A program writes dk and dv of the block, of one key head,
    and adds its part to the sums of dq.
    """
    dtype: gl.constexpr = q_desc.dtype
    OPTIONS: gl.constexpr = Options(
        GROUP,
        HAS_LEFT,
        HAS_RIGHT,
        HAS_SOFTCAP,
        RAGGED,
        APART_Q,
        APART_K,
        BIAS_BATCH,
        BIAS_HEADS,
        BIAS_ROWS,
        ORDERED,
        ADDS_DS,
        SHARES_DS,
        CLEARS_DS,
    )
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
    tensors = Tensors(
        lse2_ptr,
        delta_ptr,
        alibi_slopes_ptr,
        rng_state_ptr,
        cu_seqlens_q_ptr,
        cu_seqlens_k_ptr,
        seqused_k_ptr,
        counters_ptr,
    )
    numbers = Numbers(
        scale,
        softcap,
        window_left,
        window_right,
        batch,
        heads_k,
        tokens_q,
        tokens_k,
        tiles,
        tiles_q,
        span,
        keep_scale,
        dropout_threshold,
        stride_alibi_b,
        first_sequence,
        first_head,
        heads_here,
        sequences_together,
        heads_together,
    )
    block, walk, dq_at = find_block(
        tensors, numbers, bias_desc is not None, ds_desc is not None, OPTIONS, TILE
    )
    if MAKES_DK:
        pipeline = make_pipeline(maps, TILE)
    else:
        pipeline = make_value_pipeline(maps, TILE)
    bias = None
    if bias_desc is not None:
        bias = make_ring(bias_desc, OPTIONS, TILE)
    BARRIERS: gl.constexpr = EMPTY + STAGES_Q + STAGES_O + STAGES_B
    # elements of a tile of dq
    SIZE: gl.constexpr = BLOCK_M * (HEAD_DIM + NARROW)
    order = None
    if ORDERED:
        order = Order(counters_ptr + (1 + 2 * dq_at), barriers(2, 1), barriers(2, 1))
    elif SHARES_DS:
        gl.static_assert(MAKES_DK and BLOCK_N > ROWS and not HAS_LEFT, "another way to sum dbias")
        order = share_block(block, tensors, numbers, TILE)
    if not MAKES_DK:
        gl.static_assert(BARRIERS <= 16, "stages outnumber the barriers")
        program = Program(
            maps, pipeline, None, None, bias, 0, tensors, numbers, block, 0, walk, None, order
        )
        gl.warp_specialize(
            [
                (consume_values, (0, program, OPTIONS, TILE)),
                (consume_values, (1, program, OPTIONS, TILE)),
                (produce, (program, OPTIONS, TILE)),
            ],
            [4, 1],
            [240, 24],
        )
    elif BLOCK_N == ROWS:
        gl.static_assert(BARRIERS <= GIVEN, "stages outnumber the barriers")
        TRANSPOSED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], dtype)
        p_s = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_M], TRANSPOSED)
        at = sums + dq_at * SIZE
        pitch = tiles_q.to(gl.int64) * SIZE
        program = Program(
            maps, pipeline, None, p_s, bias, at, tensors, numbers, block, pitch, walk, None, order
        )
        if ORDERED:
            gl.warp_specialize(
                [
                    (consume_scores, (program, OPTIONS, TILE)),
                    (consume_gradients, (program, OPTIONS, TILE)),
                    (produce, (program, OPTIONS, TILE)),
                    (pass_turns, (0, program, OPTIONS, TILE)),
                    (pass_turns, (1, program, OPTIONS, TILE)),
                ],
                [4, 1, 1, 1],
                [240, 24, 24, 24],
            )
        else:
            gl.warp_specialize(
                [
                    (consume_scores, (program, OPTIONS, TILE)),
                    (consume_gradients, (program, OPTIONS, TILE)),
                    (produce, (program, OPTIONS, TILE)),
                ],
                [4, 1],
                [240, 24],
            )
    else:
        gl.static_assert(BARRIERS <= MADE + 8, "stages outnumber the barriers")
        dq_s = None
        if not adds_by_threads(TILE):
            dq_s = allocate_sums(maps, TILE)
        # in rows of the maps
        at = (dq_at * (SIZE // 32)).to(gl.int32)
        pitch = tiles_q * (SIZE // 32)
        program = Program(
            maps, pipeline, dq_s, None, bias, at, tensors, numbers, block, pitch, walk, None, order
        )
        if ORDERED:
            gl.warp_specialize(
                [
                    (consume, (0, program, OPTIONS, TILE)),
                    (consume, (1, program, OPTIONS, TILE)),
                    (produce, (program, OPTIONS, TILE)),
                    (add_in_order, (0, program, OPTIONS, TILE)),
                    (add_in_order, (1, program, OPTIONS, TILE)),
                ],
                [4, 1, 1, 1],
                [240, 24, 24, 24],
            )
        elif SHARES_DS:
            gl.warp_specialize(
                [
                    (consume, (0, program, OPTIONS, TILE)),
                    (consume, (1, program, OPTIONS, TILE)),
                    (produce, (program, OPTIONS, TILE)),
                    (keep_shared, (program, OPTIONS, TILE)),
                ],
                [4, 1, 1],
                [240, 24, 24],
            )
        else:
            gl.warp_specialize(
                [
                    (consume, (0, program, OPTIONS, TILE)),
                    (consume, (1, program, OPTIONS, TILE)),
                    (produce, (program, OPTIONS, TILE)),
                ],
                [4, 1],
                [240, 24],
            )
