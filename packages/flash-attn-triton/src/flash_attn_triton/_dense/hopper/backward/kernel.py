"""Backward pass on Hopper: one warp copies by TMA, two warpgroups multiply by wgmma.

A program owns a block of keys, 64 per warpgroup, and walks the queries that see it. Above head dim
128 it owns 64 keys, and ``wide.py`` divides the work between the warpgroups.
Scores are transposed ([keys, queries]), so that probabilities and gradients of scores go from the
accumulators into the products of dv and dk without a change of layout. The product of dq needs the
gradients of scores of all keys of the block; the warpgroups exchange them through shared memory.
The block's part of dq is added in fp32 to a buffer in memory, in the order of the accumulators'
registers: by TMA, or above head dim 128 by the threads. ``sums/kernel.py`` restores the order.
"""

from __future__ import annotations

from ...._linked.hopper.compat import gl, gluon, hopper
from ...._linked.hopper.gradients import ROWS
from ...._linked.hopper.pipeline import EMPTY, barriers
from ...._linked.launch.entries import entry
from ..panels import allocate, splits_by_panel
from .arguments import Maps, Numbers, Options, Tensors, Tile
from .bias import make_ring
from .blocks import find_block
from .order import add_in_order, pass_turns
from .producer import produce
from .shared_bias import keep_shared, share_block
from .steps import MADE, adds_by_threads, consume
from .structures import Order, Panels, Pipeline, Program
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
    """Allocate the panels from which dq is added to memory: a part of a tile for each warpgroup."""
    # warpgroups that share a panel
    PARTS: gl.constexpr = 1 if splits_by_panel(TILE) else 2
    SIZE: gl.constexpr = TILE.BLOCK_M * TILE.HEAD_DIM // 32 // PARTS
    dq_s = (gl.allocate_shared_memory(gl.float32, [PARTS, SIZE, 32], maps.sums[0].layout),)
    if TILE.NARROW > 0:
        LESS: gl.constexpr = TILE.BLOCK_M * TILE.NARROW // 32 // PARTS
        dq_s += (gl.allocate_shared_memory(gl.float32, [PARTS, LESS, 32], maps.sums[1].layout),)
    return dq_s


@gluon.jit
def in_panels(maps, TILE: gl.constexpr):
    """Return the first fields of ``Panels``, up to ``dv_descs``."""
    wide, narrow = maps.wide, maps.narrow
    HAS_NARROW: gl.constexpr = TILE.NARROW > 0
    HAS_NARROW_V: gl.constexpr = TILE.NARROW_V > 0
    return (
        (wide.q, narrow.q) if HAS_NARROW else (wide.q,),
        (wide.k, narrow.k) if HAS_NARROW else (wide.k,),
        (wide.v, narrow.v) if HAS_NARROW_V else (wide.v,),
        (wide.dout, narrow.dout) if HAS_NARROW_V else (wide.dout,),
        (wide.dk, narrow.dk) if HAS_NARROW else (wide.dk,),
        (wide.dv, narrow.dv) if HAS_NARROW_V else (wide.dv,),
    )


@entry(gluon.jit)
def backward_kernel(maps: Maps, tensors: Tensors, numbers: Numbers, OPTIONS: Options, TILE: Tile):
    """``dv = p^T dout``, ``dk = scale ds^T q`` and ``dq += ds k`` of one block of keys.

    ``p = exp2(s - lse2)`` are the probabilities of the scores s, and ``ds = p (dout v^T - delta)``
    the gradients of the scores (with a softcap, times its derivative). With dropout, where ``m`` is
    1 for kept probabilities and ``c = keep_scale``, ``dv = c (p m)^T dout`` and
    ``ds = c p (m dout v^T - delta / c)``. A program writes dk and dv of the block, of one key head,
    and adds its part to the sums of dq.
    """
    dtype: gl.constexpr = maps.wide.q.dtype
    sums = maps.sums
    if not adds_by_threads(TILE):
        sums = (sums, maps.sums_narrow) if TILE.NARROW > 0 else (sums,)
    panels = Panels(*in_panels(maps, TILE), maps.bias, maps.ds, sums)
    block, walk, dq_at = find_block(panels, tensors, numbers, OPTIONS, TILE)
    if TILE.MAKES_DK:
        pipeline = make_pipeline(panels, TILE)
    else:
        pipeline = make_value_pipeline(panels, TILE)
    bias = None
    if maps.bias is not None:
        bias = make_ring(maps.bias, OPTIONS, TILE)
    BARRIERS: gl.constexpr = EMPTY + TILE.STAGES_Q + TILE.STAGES_O + TILE.STAGES_B
    # elements of a tile of dq
    SIZE: gl.constexpr = TILE.BLOCK_M * (TILE.HEAD_DIM + TILE.NARROW)
    order = None
    if OPTIONS.ORDERED:
        order = Order(tensors.counters_ptr + (1 + 2 * dq_at), barriers(2, 1), barriers(2, 1))
    elif OPTIONS.SHARES_DS:
        gl.static_assert(
            TILE.MAKES_DK and TILE.BLOCK_N > ROWS and not OPTIONS.HAS_LEFT,
            "another way to sum dbias",
        )
        order = share_block(block, tensors, numbers, TILE)
    if not TILE.MAKES_DK:
        gl.static_assert(BARRIERS <= 16, "stages outnumber the barriers")
        program = Program(
            panels, pipeline, None, None, bias, 0, tensors, numbers, block, 0, walk, None, order
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
    elif TILE.BLOCK_N == ROWS:
        gl.static_assert(BARRIERS <= GIVEN, "stages outnumber the barriers")
        TRANSPOSED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, TILE.BLOCK_M], dtype)
        p_s = gl.allocate_shared_memory(dtype, [2, ROWS, TILE.BLOCK_M], TRANSPOSED)
        at = maps.sums + dq_at * SIZE
        pitch = numbers.tiles_q.to(gl.int64) * SIZE
        program = Program(
            panels, pipeline, None, p_s, bias, at, tensors, numbers, block, pitch, walk, None, order
        )
        if OPTIONS.ORDERED:
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
            dq_s = allocate_sums(panels, TILE)
        # in rows of the maps
        at = (dq_at * (SIZE // 32)).to(gl.int32)
        pitch = numbers.tiles_q * (SIZE // 32)
        program = Program(
            panels,
            pipeline,
            dq_s,
            None,
            bias,
            at,
            tensors,
            numbers,
            block,
            pitch,
            walk,
            None,
            order,
        )
        if OPTIONS.ORDERED:
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
        elif OPTIONS.SHARES_DS:
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
