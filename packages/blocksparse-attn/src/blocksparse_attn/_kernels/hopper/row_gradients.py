"""dq by tiles of queries, for gradients that repeat: one warp copies, two warpgroups multiply.

A tile walks the list that it walks in the forward, with three products a step in place of two:
scores, the gradients of probabilities, and dq. What a program makes is its own, and it adds in the
order of the list. So nothing depends on when programs run. ``hopper_backward_kernel`` leaves dq out
then, which is two products more than where all gradients are made at once.

The alternative was to add to dq in a fixed order of programs, as the dense backward does. There all
walks end with the same queries, so that programs follow one another. Here each block of keys has
walks of its own: by a model of the order in which programs begin and of the length of their steps,
programs would wait for most of the time (local 8 and stride 16 at 8k tokens: 5 to 15 times as long
as without an order, however walks and programs are sorted).
"""

from ._linked.compat import gl, gluon, hopper, mbarrier, tma
from ._linked.pipeline import (
    EMPTY,
    LOG2E,
    SLOTS,
    barrier_arrive,
    barriers,
    coordinates,
)
from .boxes import boxes_of, rows_for
from .producer import (
    PARTIES,
    announce,
    copy_keys,
    copy_queries,
    copy_values,
    fetch,
    next_tile,
    say_the_end,
)
from .query_rows import (
    entries_of,
    half_entries_of,
    hide,
    place_of,
    receive,
    rows_of,
    send,
    walk_of,
)
from .schedule import FIELDS, HEAD, members_alive, pick, steps_of, survey
from .structures import (
    DqPipeline,
    DqTensors,
    ForwardNumbers,
    ForwardOptions,
    ForwardTile,
    RowGradients,
)

INF = gl.constexpr(float("inf"))


@gluon.jit
def _produce(tensors, numbers, pipeline, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Copy tiles of queries, keys and values into shared memory, in the order of their use."""
    POSITIONS: gl.constexpr = 2 * TILE.ROWS // OPTIONS.HEADS
    RAGGED: gl.constexpr = tensors.cu_seqlens_q_ptr is not None
    units = numbers.heads_q // OPTIONS.HEADS
    index = gl.arange(0, FIELDS, gl.BlockedLayout([1], [32], [1], [0]))  # [FIELDS]
    count = 0  # tiles of queries
    turn = 0  # tiles of keys
    tile = next_tile(gl.program_id(0), units, tensors, numbers, OPTIONS, TILE)
    walk = survey(tile, tensors, numbers, OPTIONS, TILE)
    ticket = tile.ticket
    while ticket < numbers.total:
        head = tile.unit * OPTIONS.HEADS
        first_row = tile.index * POSITIONS - tile.diagonal
        announce(tile, walk, first_row, index, count, pipeline, OPTIONS)

        where = coordinates(
            tile.sequence, head // OPTIONS.GROUP, tile.k_start, tile.len_k, 0, RAGGED
        )
        alive = members_alive(tile, POSITIONS, OPTIONS)
        items = fetch(walk, 0, alive, tensors, OPTIONS, TILE)
        for step in range(walk.halves + steps_of(walk, OPTIONS, TILE)):
            # the entries of the next step come while this one's keys wait for room
            coming = fetch(walk, step + 1, alive, tensors, OPTIONS, TILE)
            copy_keys(items, where, turn, tensors, pipeline, OPTIONS, TILE)
            copy_values(items, where, turn, tensors, pipeline, OPTIONS, TILE)
            turn += 1
            if step == 0:
                # its answer comes while the rows do
                ticket = gl.num_programs(0) + gl.atomic_add(tensors.ticket_ptr, 1, sem="relaxed")
                copy_queries(tile, first_row, count, tensors, pipeline, True, OPTIONS, TILE)
            items = coming
        count += 1
        tile = next_tile(ticket, units, tensors, numbers, OPTIONS, TILE)
        walk = survey(tile, tensors, numbers, OPTIONS, TILE)
        ticket = tile.ticket
    say_the_end(index, count, turn, turn, pipeline, TILE)
    if ticket == numbers.total + gl.num_programs(0) - 1:
        # the last to ask: ready for the next launch
        gl.atomic_xchg(tensors.ticket_ptr, 0, sem="relaxed")


@gluon.jit
def _numbers_of(place, layout: gl.constexpr, tensors, numbers, TILE: gl.constexpr):
    """Load what is known of a warpgroup's rows; of rows that there are not, that they see none."""
    row, head, sequence, q_start, len_q = place
    rows = row + gl.arange(0, TILE.ROWS, layout)  # [ROWS]
    inside = (rows >= 0) & (rows < len_q)
    if tensors.cu_seqlens_q_ptr is not None:
        at = head.to(gl.int64) * numbers.tokens_q + q_start
    else:
        at = (sequence.to(gl.int64) * numbers.heads_q + head) * numbers.tokens_q
    lse2 = gl.load(tensors.lse2_ptr + at + rows, mask=inside, other=INF)
    return lse2, gl.load(tensors.delta_ptr + at + rows, mask=inside, other=0.0)


@gluon.jit
def _walk(
    gradients,
    low,
    high,
    walk,
    rows,
    W: gl.constexpr,
    MASKED: gl.constexpr,
    IS_HALF: gl.constexpr,
    tensors,
    pipeline,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Add what the steps from ``high`` down to ``low``, or half steps, contribute to dq.

    The exponentials run beside the product of dp. Beside the rest runs what the other warpgroup
    multiplies: of a step's time in the tensor cores, a warpgroup computes for less than a third.
    """
    STAGES_K: gl.constexpr = TILE.STAGES_K
    STAGES_V: gl.constexpr = TILE.STAGES_V
    KEYS: gl.constexpr = TILE.BLOCK_N // 2 if IS_HALF else TILE.BLOCK_N
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.HEAD_DIM, 16])
    dq, lse2, delta, turn = gradients
    # half steps have another layout of rows, which lie in the same threads
    lse2 = gl.convert_layout(lse2, gl.SliceLayout(1, S))  # [ROWS]
    delta = gl.convert_layout(delta, gl.SliceLayout(1, S))
    q = pipeline.q_s.index(W).reshape([TILE.ROWS, TILE.HEAD_DIM])
    dout = pipeline.dout_s.index(W).reshape([TILE.ROWS, TILE.HEAD_DIM_V])
    zeros = gl.zeros([TILE.ROWS, KEYS], gl.float32, S)  # [ROWS, KEYS]
    for back in range(high - low):
        stage, stage_v = turn % STAGES_K, turn % STAGES_V
        if IS_HALF:
            items, members = half_entries_of(walk, back, W, tensors, OPTIONS, TILE)
        elif MASKED:
            items, members = entries_of(walk, high - 1 - back, tensors, OPTIONS, TILE)
        mbarrier.wait(pipeline.k_full.index(stage), turn // STAGES_K & 1)
        k = rows_for(pipeline.k_s.index(stage), W, KEYS)
        s = hopper.warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(pipeline.v_full.index(stage_v), turn // STAGES_V & 1)
        v_t = rows_for(pipeline.v_s.index(stage_v), W, KEYS).permute((1, 0))
        if MASKED:
            # ahead of dp: there are no registers for its accumulators and for masks
            s = hopper.warpgroup_mma_wait(0, deps=(s,))
            s = hide(s, items, members, rows, OPTIONS)
        dp = hopper.warpgroup_mma(dout, v_t, zeros, use_acc=False, is_async=True)
        if not MASKED:
            s = hopper.warpgroup_mma_wait(1, deps=(s,))
        p = gl.exp2(s * rows.factor - lse2[:, None])  # [ROWS, KEYS]
        dp = hopper.warpgroup_mma_wait(0, deps=(dp,))
        barrier_arrive(EMPTY + STAGES_K + stage_v, PARTIES, 4)
        ds = p * (dp - delta[:, None])  # [ROWS, KEYS]
        if MASKED:
            # a key that a query does not see may hold NaN
            ds = gl.where(p == 0.0, 0.0, ds)
        ds_q = gl.convert_layout(ds.to(pipeline.q_s.dtype), gl.DotOperandLayout(0, O, 2))
        dq = hopper.warpgroup_mma(ds_q, k, dq, is_async=True)  # [ROWS, HEAD_DIM]
        # in flight over the loop's back edge, it would keep ptxas from overlapping anything
        dq = hopper.warpgroup_mma_wait(0, deps=(dq,))
        barrier_arrive(EMPTY + stage, PARTIES, 4)
        turn += 1
    return RowGradients(dq, lse2, delta, turn)


@gluon.jit
def _consume(
    W: gl.constexpr, tensors, numbers, pipeline, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Make dq of warpgroup ``W``'s rows of every tile of queries that the producer announces."""
    RAGGED: gl.constexpr = tensors.cu_seqlens_q_ptr is not None
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.HEAD_DIM, 16])
    factor = numbers.scale * LOG2E
    turn = 0  # tiles of keys
    tile_count = 0  # tiles of queries
    fields = receive(tile_count, pipeline)
    while pick(fields, HEAD) >= 0:
        walk = walk_of(fields, OPTIONS)
        steps = steps_of(walk, OPTIONS, TILE)
        place = place_of(fields, W, OPTIONS, TILE)
        rows = rows_of(fields, place, factor, S, OPTIONS, TILE)
        lse2, delta = _numbers_of(place, gl.SliceLayout(1, S), tensors, numbers, TILE)
        dq = gl.zeros([TILE.ROWS, TILE.HEAD_DIM], gl.float32, O)  # [ROWS, HEAD_DIM]
        gradients = RowGradients(dq, lse2, delta, turn)
        mbarrier.wait(pipeline.q_full.index(W), tile_count & 1)
        if OPTIONS.HALVES:
            gradients = _walk(
                gradients,
                0,
                walk.halves,
                walk,
                rows,
                W,
                True,
                True,
                tensors,
                pipeline,
                OPTIONS,
                TILE,
            )
        gradients = _walk(
            gradients,
            walk.whole,
            steps,
            walk,
            rows,
            W,
            True,
            False,
            tensors,
            pipeline,
            OPTIONS,
            TILE,
        )
        gradients = _walk(
            gradients, 0, walk.whole, walk, rows, W, False, False, tensors, pipeline, OPTIONS, TILE
        )
        dq, lse2, delta, turn = gradients
        mbarrier.arrive(pipeline.q_empty.index(W), count=1)
        # what a row holds that sees no key may be NaN
        is_blind = gl.convert_layout(lse2 == INF, gl.SliceLayout(1, O))  # [ROWS]
        dq = gl.where(is_blind[:, None], 0.0, dq * numbers.scale)
        dq_s = pipeline.dq_s.index(W)
        send(dq, place, dq_s, tensors.dq_desc, tensors.dq_ptr, numbers.width, numbers, RAGGED)
        tile_count += 1
        fields = receive(tile_count, pipeline)
    tma.store_wait(0)


# numbers and pointers are never specialised; see ``runtime.py``
@gluon.jit(
    do_not_specialize=ForwardNumbers._fields[1:],
    do_not_specialize_on_alignment=DqTensors._fields[5:],
)
def hopper_dq_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    dq_desc,
    dq_ptr,
    lse2_ptr,
    delta_ptr,
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
    """``dq = scale * (p * (dout v^T - delta)) k`` over the kept blocks.

    A persistent kernel, warp-specialised: programs take tiles of queries from a counter; one warp
    produces, two warpgroups consume.
    """
    tensors = DqTensors(
        q_desc,
        k_desc,
        v_desc,
        dout_desc,
        dq_desc,
        dq_ptr,
        lse2_ptr,
        delta_ptr,
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
    dout_s = gl.allocate_shared_memory(dtype, [2, 1, 1, 1, ROWS, HEAD_DIM_V], dout_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES_K, BLOCK_N, HEAD_DIM], K)
    v_s = gl.allocate_shared_memory(dtype, [STAGES_V, BLOCK_N, HEAD_DIM_V], V)
    dq_s = gl.allocate_shared_memory(dtype, [2, 1, 1, 1, ROWS, HEAD_DIM], dq_desc.layout)
    fields_s = gl.allocate_shared_memory(gl.int32, [SLOTS, FIELDS], F)
    q_full = barriers(2, 1)
    q_empty = barriers(2, 1)
    k_full = barriers(STAGES_K, 1)
    v_full = barriers(STAGES_V, 1)
    tile_full = barriers(SLOTS, 1)
    tile_empty = barriers(SLOTS, 2)
    hopper.fence_async_shared()
    pipeline = DqPipeline(
        q_s,
        dout_s,
        k_s,
        v_s,
        dq_s,
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
            (_produce, (tensors, numbers, pipeline, OPTIONS, TILE)),
        ],
        [4, 1],
        [240, 32],
    )
