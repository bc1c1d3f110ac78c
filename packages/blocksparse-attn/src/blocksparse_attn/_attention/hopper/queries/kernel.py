"""The Hopper kernel whose programs own tiles of queries: one warp copies, two warpgroups multiply.

It makes the output in the forward, and dq in dq's own launch of the backward. A tile is 128 rows:
two heads of one row of blocks if heads share a pattern, else one head. Each of two warpgroups owns
64 rows. Both walk the tile's list from its end to its begin: first blocks that need a mask, then
whole blocks. A step is 128 keys, in as many blocks of the list as that takes.
"""

from __future__ import annotations

from ...._linked.hopper.compat import gl, gluon, hopper, tma
from ...._linked.hopper.pipeline import LOG2E, SLOTS, TURN, barrier_arrive, barrier_sync, barriers
from ...._linked.launch.entries import entry
from ..arguments import QueryNumbers, QueryOptions, QueryTensors
from ..boxes import boxes_of
from ..structures import QueryPipeline, Task
from .forward import make_output
from .gradients import make_dq
from .producer import produce
from .rows import place_of, receive, rows_of, understood
from .schedule import FIELDS, HEAD, pick


@gluon.jit
def _consume(W: gl.constexpr, tensors, numbers, pipeline, OPTIONS: gl.constexpr):
    """Work on the rows of warpgroup ``W`` of every tile of queries that the producer announces."""
    IS_FORWARD: gl.constexpr = tensors.dout_desc is None
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OPTIONS.BLOCK_N, 16])
    # fold the scale into the exponential's multiply-add; it is positive, so max commutes
    factor = numbers.scale * LOG2E
    if IS_FORWARD and W == 1:
        # ping-pong: warpgroup 0 issues first
        barrier_arrive(TURN, 256, 4)
    turn = 0  # tiles of keys
    tile_count = 0  # tiles of queries
    fields = receive(tile_count, pipeline)
    while pick(fields, HEAD) >= 0:
        tile = understood(fields)
        place = place_of(tile, W, OPTIONS)
        task = Task(tile.walk, rows_of(tile, place, factor, S, OPTIONS), place)
        if IS_FORWARD:
            turn = make_output(task, turn, tile_count, W, tensors, numbers, pipeline, OPTIONS)
        else:
            turn = make_dq(task, turn, tile_count, W, tensors, numbers, pipeline, OPTIONS)
        tile_count += 1
        fields = receive(tile_count, pipeline)
    tma.store_wait(0)
    if IS_FORWARD and W == 0:
        # meet the last arrival of the ping-pong
        barrier_sync(TURN, 256, 4)


@entry(gluon.jit)
def hopper_query_kernel(tensors: QueryTensors, numbers: QueryNumbers, OPTIONS: QueryOptions):
    """``out = softmax(scale * q k^T) v`` over the kept blocks, and ``lse`` of each row.

    With ``dout_desc``: ``dq = scale * (p * (dout v^T - delta)) k``. The kernel is persistent and
    warp-specialised: programs take tiles of queries from a counter; one warp produces, two
    warpgroups consume.
    """
    WIDTH: gl.constexpr = OPTIONS.HEAD_DIM_V if tensors.dout_desc is None else OPTIONS.HEAD_DIM
    dtype: gl.constexpr = tensors.q_desc.dtype
    K: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [OPTIONS.BLOCK_N, OPTIONS.HEAD_DIM], dtype
    )
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [OPTIONS.BLOCK_N, OPTIONS.HEAD_DIM_V], dtype
    )
    F: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = gl.allocate_shared_memory(
        dtype, [2, 1, 1, 1, OPTIONS.ROWS, OPTIONS.HEAD_DIM], tensors.q_desc.layout
    )
    dout_s = None
    if tensors.dout_desc is not None:
        dout_s = gl.allocate_shared_memory(
            dtype, [2, 1, 1, 1, OPTIONS.ROWS, OPTIONS.HEAD_DIM_V], tensors.dout_desc.layout
        )
    k_s = gl.allocate_shared_memory(dtype, [OPTIONS.STAGES_K, OPTIONS.BLOCK_N, OPTIONS.HEAD_DIM], K)
    v_s = gl.allocate_shared_memory(
        dtype, [OPTIONS.STAGES_V, OPTIONS.BLOCK_N, OPTIONS.HEAD_DIM_V], V
    )
    out_s = gl.allocate_shared_memory(
        dtype, [2, 1, 1, 1, OPTIONS.ROWS, WIDTH], tensors.out_desc.layout
    )
    fields_s = gl.allocate_shared_memory(gl.int32, [SLOTS, FIELDS], F)
    q_full = barriers(2, 1)
    q_empty = barriers(2, 1)
    k_full = barriers(OPTIONS.STAGES_K, 1)
    v_full = barriers(OPTIONS.STAGES_V, 1)
    tile_full = barriers(SLOTS, 1)
    tile_empty = barriers(SLOTS, 2)
    hopper.fence_async_shared()
    pipeline = QueryPipeline(
        q_s,
        dout_s,
        k_s,
        v_s,
        out_s,
        fields_s,
        q_full,
        q_empty,
        k_full,
        v_full,
        tile_full,
        tile_empty,
        boxes_of(k_s, tensors.k_desc, OPTIONS.BLOCK_K),
        boxes_of(v_s, tensors.v_desc, OPTIONS.BLOCK_K),
    )
    gl.warp_specialize(
        [
            (_consume, (0, tensors, numbers, pipeline, OPTIONS)),
            (_consume, (1, tensors, numbers, pipeline, OPTIONS)),
            (produce, (tensors, numbers, pipeline, OPTIONS)),
        ],
        [4, 1],
        [240, 32],
    )
