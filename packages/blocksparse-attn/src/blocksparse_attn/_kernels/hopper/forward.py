"""Forward pass on Hopper: one warp reads the lists and copies, two warpgroups multiply in turns.

A tile is 128 rows: two heads of one row of blocks where heads have one pattern, else one head. Each
warpgroup owns 64 of them, and both walk the list of the tile from its end to its begin: first what
needs a mask, then whole blocks. A step is 128 keys, in as many blocks of the list as make them,
from anywhere. Softmax and overlaps are those of FlashAttention-3 (Shah et al., 2024): a
warpgroup's softmax runs beside the other's products, and beside its own product of the last step's
probabilities with the values.
"""

from ._linked.compat import gl, gluon, hopper, mbarrier, tma
from ._linked.pipeline import (
    EMPTY,
    LOG2E,
    SLOTS,
    TURN,
    barrier_arrive,
    barrier_sync,
    barriers,
    opaque,
)
from ._linked.ptx import in_pairs
from ._linked.softmax import finish_softmax
from .boxes import boxes_of
from .forward_steps import attend, begin_tile
from .producer import PARTIES, produce
from .query_rows import (
    place_of,
    receive,
    rows_of,
    send,
    walk_of,
)
from .schedule import FIELDS, HEAD, pick, steps_of
from .structures import (
    ForwardNumbers,
    ForwardOptions,
    ForwardPipeline,
    ForwardTensors,
    ForwardTile,
    Softmax,
)


@gluon.jit
def _finish(softmax, head, W: gl.constexpr, pipeline, TILE: gl.constexpr):
    """Multiply the last step's values; return the output, what normalises it, and the LSE."""
    STAGES_V: gl.constexpr = TILE.STAGES_V
    o, m, l, p, turn = softmax
    mbarrier.arrive(pipeline.q_empty.index(W), count=1)
    stage_v = (turn - 1) % STAGES_V
    mbarrier.wait(pipeline.v_full.index(stage_v), (turn - 1) // STAGES_V & 1)
    v = pipeline.v_s.index(stage_v)
    o = hopper.warpgroup_mma(p, v, o, is_async=True)  # [ROWS, HEAD_DIM_V]
    weight, empty, lse = finish_softmax(m, l, head, False, None)
    o = hopper.warpgroup_mma_wait(0, deps=(o,))
    barrier_arrive(EMPTY + TILE.STAGES_K + stage_v, PARTIES, 4)
    return o, weight, empty, lse


@gluon.jit
def _write(
    o, weight, empty, lse, place, W: gl.constexpr, tensors, numbers, pipeline, TILE: gl.constexpr
):
    """Scale the output of a block of queries, and send it and the LSE on their way."""
    RAGGED: gl.constexpr = tensors.cu_seqlens_q_ptr is not None
    ROWS: gl.constexpr = TILE.ROWS
    O: gl.constexpr = o.type.layout
    row, head, sequence, q_start, len_q = place
    out_s = pipeline.out_s.index(W)
    rows = row + gl.arange(0, ROWS, lse.type.layout)  # [ROWS]
    if RAGGED:
        lse_at = head.to(gl.int64) * numbers.tokens_q + q_start
    else:
        # signs of numbers that are known from the start would be kept in registers
        row_of_heads = sequence.to(gl.int64) * opaque(numbers.heads_q) + head
        lse_at = row_of_heads * opaque(numbers.tokens_q)
    gl.store(tensors.lse_ptr + lse_at + rows, lse, mask=(rows >= 0) & (rows < len_q))
    o = o * gl.convert_layout(weight, gl.SliceLayout(1, O))[:, None]
    # values that nobody sees may be NaN
    o = gl.where(gl.convert_layout(empty, gl.SliceLayout(1, O))[:, None], 0.0, o)
    send(o, place, out_s, tensors.out_desc, tensors.out_ptr, numbers.width, numbers, RAGGED)


@gluon.jit
def _consume(
    W: gl.constexpr, tensors, numbers, pipeline, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Work on the rows of warpgroup ``W`` of every tile of queries that the producer announces."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.BLOCK_N, 16])
    # the scale goes into the exponential's multiply-add; it is positive, so max commutes
    factor = numbers.scale * LOG2E
    if W == 1:
        # the first turn
        barrier_arrive(TURN, 256, 4)
    turn = 0  # tiles of keys
    tile_count = 0  # tiles of queries
    fields = receive(tile_count, pipeline)
    while pick(fields, HEAD) >= 0:
        walk = walk_of(fields, OPTIONS)
        steps = steps_of(walk, OPTIONS, TILE)
        place = place_of(fields, W, OPTIONS, TILE)
        rows = rows_of(fields, place, factor, S, OPTIONS, TILE)

        softmax = begin_tile(walk, rows, turn, tile_count, W, tensors, pipeline, OPTIONS, TILE)
        softmax = attend(
            softmax, walk.whole, steps - 1, walk, rows, W, True, tensors, pipeline, OPTIONS, TILE
        )
        o, m, l, p, turn = softmax
        softmax = attend(
            Softmax(o, m, l, in_pairs(p), turn),
            0,
            walk.whole,
            walk,
            rows,
            W,
            False,
            tensors,
            pipeline,
            OPTIONS,
            TILE,
        )
        o, weight, empty, lse = _finish(softmax, place.head, W, pipeline, TILE)
        turn = softmax.turn
        _write(o, weight, empty, lse, place, W, tensors, numbers, pipeline, TILE)
        tile_count += 1
        fields = receive(tile_count, pipeline)
    tma.store_wait(0)
    if W == 0:
        # the last turn that was passed on
        barrier_sync(TURN, 256, 4)


# numbers and pointers are never specialised; see ``runtime.py``
@gluon.jit(
    do_not_specialize=ForwardNumbers._fields[1:],
    do_not_specialize_on_alignment=ForwardTensors._fields[4:],
)
def hopper_forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    out_ptr,
    lse_ptr,
    ticket_ptr,
    begin_ptr,
    whole_ptr,
    items_ptr,
    members_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    scale,
    batch,
    heads_q,
    tokens_q,
    tokens_k,
    width,
    tiles,
    span,
    last,
    total,
    list_rows,
    list_stride,
    extent_k,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    SPAN: gl.constexpr,
    ROW_MEMBERS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    PER_HEAD: gl.constexpr,
    SHORT: gl.constexpr,
    TOP_LEFT: gl.constexpr,
    HALVES: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    STAGES_K: gl.constexpr,
    STAGES_V: gl.constexpr,
):
    """``out = softmax(scale * q k^T) v`` over the kept blocks, and ``lse`` of each row.

    A persistent kernel, warp-specialised: programs take tiles of queries from a counter; one warp
    produces, two warpgroups consume.
    """
    tensors = ForwardTensors(
        q_desc,
        k_desc,
        v_desc,
        out_desc,
        out_ptr,
        lse_ptr,
        ticket_ptr,
        begin_ptr,
        whole_ptr,
        items_ptr,
        members_ptr,
        cu_seqlens_q_ptr,
        cu_seqlens_k_ptr,
    )
    numbers = ForwardNumbers(
        scale,
        batch,
        heads_q,
        tokens_q,
        tokens_k,
        width,
        tiles,
        span,
        last,
        total,
        list_rows,
        list_stride,
        extent_k,
    )
    OPTIONS: gl.constexpr = ForwardOptions(
        GROUP,
        HEADS,
        SPAN,
        ROW_MEMBERS,
        BLOCK_Q,
        BLOCK_K,
        IS_CAUSAL,
        PER_HEAD,
        SHORT,
        TOP_LEFT,
        HALVES,
    )
    TILE: gl.constexpr = ForwardTile(ROWS, BLOCK_N, HEAD_DIM, HEAD_DIM_V, STAGES_K, STAGES_V)
    dtype: gl.constexpr = q_desc.dtype
    K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM_V], dtype)
    F: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = gl.allocate_shared_memory(dtype, [2, 1, 1, 1, ROWS, HEAD_DIM], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES_K, BLOCK_N, HEAD_DIM], K)
    v_s = gl.allocate_shared_memory(dtype, [STAGES_V, BLOCK_N, HEAD_DIM_V], V)
    out_s = gl.allocate_shared_memory(dtype, [2, 1, 1, 1, ROWS, HEAD_DIM_V], out_desc.layout)
    fields_s = gl.allocate_shared_memory(gl.int32, [SLOTS, FIELDS], F)
    q_full = barriers(2, 1)
    q_empty = barriers(2, 1)
    k_full = barriers(STAGES_K, 1)
    v_full = barriers(STAGES_V, 1)
    tile_full = barriers(SLOTS, 1)
    tile_empty = barriers(SLOTS, 2)
    hopper.fence_async_shared()
    pipeline = ForwardPipeline(
        q_s,
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
        boxes_of(k_s, k_desc, BLOCK_K),
        boxes_of(v_s, v_desc, BLOCK_K),
    )
    gl.warp_specialize(
        [
            (_consume, (0, tensors, numbers, pipeline, OPTIONS, TILE)),
            (_consume, (1, tensors, numbers, pipeline, OPTIONS, TILE)),
            (produce, (tensors, numbers, pipeline, OPTIONS, TILE)),
        ],
        [4, 1],
        [240, 32],
    )
