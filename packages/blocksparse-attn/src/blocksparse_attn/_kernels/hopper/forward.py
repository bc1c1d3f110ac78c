"""Forward pass on Hopper: one warp reads the lists and copies, two warpgroups multiply in turns.

A tile is 128 rows: two heads of one row of blocks where heads have one pattern, else one head. Each
warpgroup owns 64 of them, and both walk the list of the tile from its end to its begin: first what
needs a mask, then whole blocks. A step is 128 keys, in as many blocks of the list as make them,
from anywhere. Softmax and overlaps are those of FlashAttention-3 (Shah et al., 2024): a
warpgroup's softmax runs beside the other's products, and beside its own product of the last step's
probabilities with the values.
"""

from ._linked.compat import copy_out, gl, gluon, hopper, mbarrier, tma
from ._linked.pipeline import (
    EMPTY,
    LOG2E,
    NEG_INF,
    SLOTS,
    TURN,
    barrier_arrive,
    barrier_sync,
    barriers,
    coordinates,
)
from ._linked.ptx import SLACK, hide_unless, in_pairs, shrink
from ._linked.softmax import finish_softmax, row_sums, start_softmax
from .boxes import boxes_of
from .producer import produce
from .schedule import (
    COUNT,
    CUT,
    FIELDS,
    FIRST,
    FIRST_ROW,
    HEAD,
    LEN_K,
    LEN_Q,
    NO_BLOCK,
    Q_START,
    SEEN,
    SEQUENCE,
    WHOLE,
    pick,
    places,
)


@gluon.jit
def _receive(fields_s, tile_full, tile_empty, count):
    """Wait for the numbers of a tile of queries; the head is -1 if none is left."""
    layout: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    slot = count % SLOTS
    mbarrier.wait(tile_full.index(slot), count // SLOTS & 1)
    fields = fields_s.index(slot).load(layout)
    mbarrier.arrive(tile_empty.index(slot), count=1)
    return fields


@gluon.jit
def _mask(
    s, items, members, last_seen, bits, BLOCK_K: gl.constexpr, PER_STEP: gl.constexpr,
    ROW_MEMBERS: gl.constexpr,
):  # fmt: skip
    """Hide what a row does not see: behind its last key, or in blocks that it does not keep."""
    S: gl.constexpr = s.type.layout
    col = gl.arange(0, s.shape[1], gl.SliceLayout(0, S))
    # the last key of its block that a row sees
    limit = gl.full(s.shape, -1, gl.int32, S)
    for i in gl.static_range(PER_STEP):
        reach = last_seen - pick(items, i) * BLOCK_K
        if ROW_MEMBERS > 1:
            reach = gl.where(((pick(members, i) >> bits) & 1) != 0, reach, -1)
        limit = gl.where((col // BLOCK_K == i)[None, :], reach[:, None], limit)
    return hide_unless(s, (col % BLOCK_K)[None, :], limit)


@gluon.jit
def _entries(
    items_ptr, members_ptr, first, seen, cut, count, step,
    PER_STEP: gl.constexpr, ROW_MEMBERS: gl.constexpr,
):  # fmt: skip
    """Load the key blocks of a step, and which of the tile's rows of blocks keep each."""
    lane = gl.arange(0, PER_STEP, gl.BlockedLayout([PER_STEP], [32], [4], [0]))
    at, there = places(first, seen, cut, count, step, lane, PER_STEP)
    items = gl.load(items_ptr + at, mask=there, other=NO_BLOCK)
    members = items
    if ROW_MEMBERS > 1:
        members = gl.load(members_ptr + at, mask=there, other=0)
    return items, members


@gluon.jit
def _attend(
    o, m, l, p, turn, low, high, first, seen, cut, count, items_ptr, members_ptr,
    q_s, k_s, v_s, k_full, v_full, last_seen, bits, factor,
    W: gl.constexpr, MASKED: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, ROW_MEMBERS: gl.constexpr, HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr, STAGES_K: gl.constexpr, STAGES_V: gl.constexpr,
):  # fmt: skip
    """Fold the steps from ``high`` down to ``low`` into the softmax."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM_V, 16])
    PARTIES: gl.constexpr = 2 * 128 + 32
    PER_STEP: gl.constexpr = BLOCK_N // BLOCK_K
    q = q_s.index(W).reshape([ROWS, HEAD_DIM])
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    for back in range(high - low):
        stage = turn % STAGES_K
        stage_v = (turn - 1) % STAGES_V
        if MASKED:
            items, members = _entries(
                items_ptr, members_ptr, first, seen, cut, count, high - 1 - back,
                PER_STEP, ROW_MEMBERS,
            )  # fmt: skip
        mbarrier.wait(k_full.index(stage), turn // STAGES_K & 1)
        barrier_sync(TURN + W, 256, 4)
        s = hopper.warpgroup_mma(
            q, k_s.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(stage_v), (turn - 1) // STAGES_V & 1)
        o = hopper.warpgroup_mma(p, v_s.index(stage_v), o, is_async=True)
        barrier_arrive(TURN + (W + 1) % 2, 256, 4)
        s = hopper.warpgroup_mma_wait(1, deps=(s,))
        barrier_arrive(EMPTY + stage, PARTIES, 4)
        if MASKED:
            s = _mask(s, items, members, last_seen, bits, BLOCK_K, PER_STEP, ROW_MEMBERS)
        top = gl.max(s, 1) * factor
        m_new = gl.where(top - m > SLACK, top, m)
        pivot = m_new
        if MASKED:
            # a row that has seen no key yet keeps a finite pivot: -inf - -inf is NaN
            pivot = gl.where(m_new == NEG_INF, 0.0, m_new)
        e = gl.exp2(s * factor - pivot[:, None])
        alpha = gl.exp2(m - pivot)
        sums = row_sums(e)
        L: gl.constexpr = gl.SliceLayout(1, l.type.layout)
        l = l * gl.convert_layout(alpha, L)[:, None] + sums
        m = m_new
        o = hopper.warpgroup_mma_wait(0, deps=(o,))
        barrier_arrive(EMPTY + STAGES_K + stage_v, PARTIES, 4)
        o = shrink(o, gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None])
        p = gl.convert_layout(e.to(q_s.dtype), gl.DotOperandLayout(0, O, 2))
        turn += 1
    return o, m, l, p, turn


@gluon.jit
def _write(
    o, weight, empty, lse, out_desc, out_s, out_ptr, lse_ptr,
    row, head, sequence, q_start, len_q, batch, heads_q, tokens_q, head_dim_v,
    RAGGED: gl.constexpr, ROWS: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Scale the output of a block of queries, and send it and the LSE on their way."""
    O: gl.constexpr = o.type.layout
    rows = row + gl.arange(0, ROWS, lse.type.layout)
    if RAGGED:
        lse_at = head.to(gl.int64) * tokens_q + q_start
    else:
        lse_at = (sequence.to(gl.int64) * heads_q + head) * tokens_q
    gl.store(lse_ptr + lse_at + rows, lse, mask=(rows >= 0) & (rows < len_q))
    o = o * gl.convert_layout(weight, gl.SliceLayout(1, O))[:, None]
    # values that nobody sees may be NaN
    o = gl.where(gl.convert_layout(empty, gl.SliceLayout(1, O))[:, None], 0.0, o)
    tma.store_wait(0)
    tile_s = out_s.reshape([ROWS, HEAD_DIM_V])
    tile_s.store(o.to(out_s.dtype))
    if row >= 0:
        hopper.fence_async_shared()
        copy_out(out_desc, coordinates(sequence, head, q_start, len_q, row, RAGGED), out_s)
    else:
        # copies end where a sequence does, but begin nowhere but in it
        LANES: gl.constexpr = HEAD_DIM_V // 8
        B: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
        lines = row + gl.arange(0, ROWS, gl.SliceLayout(1, B))
        cols = gl.arange(0, HEAD_DIM_V, gl.SliceLayout(0, B))
        inside = ((lines >= 0) & (lines < len_q))[:, None] & (cols < head_dim_v)[None, :]
        if RAGGED:
            first = q_start
        else:
            first = sequence.to(gl.int64) * tokens_q
        # of the row, and not of what tiles have in common: that would be kept in registers
        at = ((first + lines).to(gl.int64) * heads_q + head) * head_dim_v
        gl.store(out_ptr + (at[:, None] + cols[None, :]), tile_s.load(B), mask=inside)


@gluon.jit
def _consume(
    W: gl.constexpr, out_desc, q_s, k_s, v_s, out_s, fields_s, q_full, q_empty, k_full, v_full,
    tile_full, tile_empty, out_ptr, lse_ptr, items_ptr, members_ptr, scale, batch, heads_q,
    tokens_q, head_dim_v, HEADS: gl.constexpr, SPAN: gl.constexpr, ROW_MEMBERS: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, IS_CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    STAGES_K: gl.constexpr, STAGES_V: gl.constexpr,
):  # fmt: skip
    """Work on the rows of warpgroup ``W`` of every tile of queries that the producer announces."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM_V, 16])
    PARTIES: gl.constexpr = 2 * 128 + 32
    PER_STEP: gl.constexpr = BLOCK_N // BLOCK_K
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    # the scale goes into the exponential's multiply-add; it is positive, so max commutes
    factor = scale * LOG2E
    if W == 1:
        # the first turn
        barrier_arrive(TURN, 256, 4)
    turn = 0  # tiles of keys
    tile_count = 0  # tiles of queries
    fields = _receive(fields_s, tile_full, tile_empty, tile_count)
    while pick(fields, HEAD) >= 0:
        first_row, q_start = pick(fields, FIRST_ROW), pick(fields, Q_START)
        len_q, len_k = pick(fields, LEN_Q), pick(fields, LEN_K)
        first, seen, cut = pick(fields, FIRST), pick(fields, SEEN), pick(fields, CUT)
        count, whole = pick(fields, COUNT), pick(fields, WHOLE)
        steps = gl.maximum(gl.cdiv(count, PER_STEP), 1)
        items, members = _entries(
            items_ptr, members_ptr, first, seen, cut, count, steps - 1, PER_STEP, ROW_MEMBERS
        )
        head = pick(fields, HEAD)
        row = first_row
        if HEADS == 1:
            row += W * ROWS
        else:
            head += W
        start = first_row + (len_k - len_q)  # a position, as of all tiles a multiple of theirs
        positions = row + (len_k - len_q) + gl.arange(0, ROWS, gl.SliceLayout(1, S))
        bits = gl.maximum(positions - start // SPAN * SPAN, 0) // BLOCK_Q
        last_seen = positions * 0 + len_k - 1
        if IS_CAUSAL:
            last_seen = gl.minimum(positions, last_seen)

        # the first step, beside whose softmax no other product runs
        stage = turn % STAGES_K
        q = q_s.index(W).reshape([ROWS, HEAD_DIM])
        mbarrier.wait(q_full.index(W), tile_count & 1)
        mbarrier.wait(k_full.index(stage), turn // STAGES_K & 1)
        barrier_sync(TURN + W, 256, 4)
        s = hopper.warpgroup_mma(
            q, k_s.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        barrier_arrive(TURN + (W + 1) % 2, 256, 4)
        s = hopper.warpgroup_mma_wait(0, deps=(s,))
        barrier_arrive(EMPTY + stage, PARTIES, 4)
        s = _mask(s, items, members, last_seen, bits, BLOCK_K, PER_STEP, ROW_MEMBERS)
        m, l, e = start_softmax(s, factor)
        p = gl.convert_layout(e.to(q_s.dtype), gl.DotOperandLayout(0, O, 2))
        turn += 1

        o = gl.zeros([ROWS, HEAD_DIM_V], gl.float32, O)
        o, m, l, p, turn = _attend(
            o, m, l, p, turn, whole, steps - 1, first, seen, cut, count, items_ptr, members_ptr,
            q_s, k_s, v_s, k_full, v_full, last_seen, bits, factor,
            W, True, ROWS, BLOCK_N, BLOCK_K, ROW_MEMBERS, HEAD_DIM, HEAD_DIM_V,
            STAGES_K, STAGES_V,
        )  # fmt: skip
        p = in_pairs(p)
        o, m, l, p, turn = _attend(
            o, m, l, p, turn, 0, whole, first, seen, cut, count, items_ptr, members_ptr,
            q_s, k_s, v_s, k_full, v_full, last_seen, bits, factor,
            W, False, ROWS, BLOCK_N, BLOCK_K, ROW_MEMBERS, HEAD_DIM, HEAD_DIM_V,
            STAGES_K, STAGES_V,
        )  # fmt: skip
        mbarrier.arrive(q_empty.index(W), count=1)
        stage_v = (turn - 1) % STAGES_V
        mbarrier.wait(v_full.index(stage_v), (turn - 1) // STAGES_V & 1)
        o = hopper.warpgroup_mma(p, v_s.index(stage_v), o, is_async=True)
        weight, empty, lse = finish_softmax(m, l, head, False, None)
        o = hopper.warpgroup_mma_wait(0, deps=(o,))
        barrier_arrive(EMPTY + STAGES_K + stage_v, PARTIES, 4)
        _write(
            o, weight, empty, lse, out_desc, out_s.index(W), out_ptr, lse_ptr,
            row, head, pick(fields, SEQUENCE), q_start, len_q, batch, heads_q, tokens_q,
            head_dim_v, RAGGED, ROWS, HEAD_DIM_V,
        )  # fmt: skip
        tile_count += 1
        fields = _receive(fields_s, tile_full, tile_empty, tile_count)
    tma.store_wait(0)
    if W == 0:
        # the last turn that was passed on
        barrier_sync(TURN, 256, 4)


# the kernel takes numbers and pointers as they come; see ``runtime.py``
NUMBERS = (
    "batch", "heads_q", "tokens_q", "tokens_k", "head_dim_v", "tiles", "span", "last", "total",
    "list_rows", "extent_k",
)  # fmt: skip
POINTERS = (
    "out_ptr", "lse_ptr", "ticket_ptr", "begin_ptr", "whole_ptr", "items_ptr", "members_ptr",
    "cu_seqlens_q_ptr", "cu_seqlens_k_ptr",
)  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, out_desc, out_ptr, lse_ptr, ticket_ptr,
    begin_ptr, whole_ptr, items_ptr, members_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    scale, batch, heads_q, tokens_q, tokens_k, head_dim_v, tiles, span, last, total, list_rows,
    extent_k,
    GROUP: gl.constexpr,  # query heads per key head
    HEADS: gl.constexpr,  # of a tile
    SPAN: gl.constexpr,  # positions of a list's owner
    ROW_MEMBERS: gl.constexpr,  # rows of blocks in it
    BLOCK_Q: gl.constexpr,  # of the layout
    BLOCK_K: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    PER_HEAD: gl.constexpr,  # lists of each unit, or one for all
    SHORT: gl.constexpr,  # queries of a sequence that another kernel serves
    ROWS: gl.constexpr,  # of a warpgroup
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    STAGES_K: gl.constexpr,
    STAGES_V: gl.constexpr,
):  # fmt: skip
    """Share out the work of a persistent program: one producer, two consumers."""
    dtype: gl.constexpr = q_desc.dtype
    RAGGED: gl.constexpr = cu_seqlens_q_ptr is not None
    K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM_V], dtype)
    q_s = gl.allocate_shared_memory(dtype, [2, 1, 1, 1, ROWS, HEAD_DIM], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES_K, BLOCK_N, HEAD_DIM], K)
    v_s = gl.allocate_shared_memory(dtype, [STAGES_V, BLOCK_N, HEAD_DIM_V], V)
    out_s = gl.allocate_shared_memory(dtype, [2, 1, 1, 1, ROWS, HEAD_DIM_V], out_desc.layout)
    fields_s = gl.allocate_shared_memory(
        gl.int32, [SLOTS, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_full = barriers(2, 1)
    q_empty = barriers(2, 1)
    k_full = barriers(STAGES_K, 1)
    v_full = barriers(STAGES_V, 1)
    tile_full = barriers(SLOTS, 1)
    tile_empty = barriers(SLOTS, 2)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                0, out_desc, q_s, k_s, v_s, out_s, fields_s, q_full, q_empty, k_full, v_full,
                tile_full, tile_empty, out_ptr, lse_ptr, items_ptr, members_ptr, scale, batch,
                heads_q, tokens_q, head_dim_v, HEADS, SPAN, ROW_MEMBERS, BLOCK_Q, BLOCK_K,
                IS_CAUSAL, RAGGED, ROWS, BLOCK_N, HEAD_DIM, HEAD_DIM_V, STAGES_K, STAGES_V,
            )),
            (_consume, (
                1, out_desc, q_s, k_s, v_s, out_s, fields_s, q_full, q_empty, k_full, v_full,
                tile_full, tile_empty, out_ptr, lse_ptr, items_ptr, members_ptr, scale, batch,
                heads_q, tokens_q, head_dim_v, HEADS, SPAN, ROW_MEMBERS, BLOCK_Q, BLOCK_K,
                IS_CAUSAL, RAGGED, ROWS, BLOCK_N, HEAD_DIM, HEAD_DIM_V, STAGES_K, STAGES_V,
            )),
            (produce, (
                q_desc, k_desc, v_desc, q_s, boxes_of(k_s, k_desc, BLOCK_K),
                boxes_of(v_s, v_desc, BLOCK_K), fields_s, q_full, q_empty, k_full,
                v_full, tile_full, tile_empty, ticket_ptr, begin_ptr, whole_ptr, items_ptr,
                members_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads_q, tokens_q,
                tokens_k, tiles, span, last, total, list_rows, extent_k, GROUP, HEADS, SPAN,
                ROW_MEMBERS, BLOCK_Q, BLOCK_K, IS_CAUSAL, PER_HEAD, SHORT, ROWS, BLOCK_N,
                HEAD_DIM, HEAD_DIM_V, STAGES_K, STAGES_V,
            )),
        ],
        [4, 1],
        [240, 32],
    )  # fmt: skip
