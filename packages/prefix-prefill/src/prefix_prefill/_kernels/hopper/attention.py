"""Prefill on Hopper: one warp gathers pages, two warpgroups multiply in turns.

Every warpgroup owns 64 rows of a tile, query heads of one head of keys times tokens, and walks
their keys from the last to the first, with the online softmax of FlashAttention-2 (Dao, 2023) and
the two overlaps of FlashAttention-3 (Shah et al., 2024): a warpgroup's softmax runs beside the
other's products, and beside its own product of the last tile's probabilities with the values.
"""

from ._linked.compat import copy_out, gl, gluon, hopper, mbarrier, tma
from ._linked.pipeline import (
    EMPTY,
    FIELDS,
    FIRST_ROW,
    HEAD,
    LEN_K,
    LEN_Q,
    LOG2E,
    NEG_INF,
    Q_START,
    SEQUENCE,
    SLOTS,
    TURN,
    barrier_arrive,
    barrier_arrive_after,
    barrier_sync,
    barriers,
    coordinates,
    field,
    key_tiles,
)
from ._linked.softmax import finish_softmax, logits_of, mask, row_sums, start_softmax
from .producer import PARTIES, produce


@gluon.jit
def _receive(fields_s, tile_full, tile_empty, count):
    """Wait for the producer to announce a tile of queries, or with head -1 that none is left."""
    layout: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    slot = count % SLOTS
    mbarrier.wait(tile_full.index(slot), count // SLOTS & 1)
    fields = fields_s.index(slot).load(layout)
    head, sequence = field(fields, HEAD), field(fields, SEQUENCE)
    first_row, q_start = field(fields, FIRST_ROW), field(fields, Q_START)
    len_q, len_k = field(fields, LEN_Q), field(fields, LEN_K)
    mbarrier.arrive(tile_empty.index(slot), count=1)
    return head, sequence, first_row, q_start, len_q, len_k


@gluon.jit
def _attend(
    turn, low, left, right, high, q, k_s, v_s, k_full, v_full, rows, len_k,
    scale, factor, softcap, slopes, window_left, window_right,
    W: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    HAS_ALIBI: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES_K: gl.constexpr, STAGES_V: gl.constexpr,
):  # fmt: skip
    """Fold a tile's keys into its softmax, but for the product with the last tile of values."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)

    # the first tile of keys: no other product of this warpgroup runs beside its softmax
    stage = turn % STAGES_K
    k = k_s.index(stage).reshape([BLOCK_N, HEAD_DIM])
    mbarrier.wait(k_full.index(stage), turn // STAGES_K & 1)
    barrier_sync(TURN + W, 256, 4)
    s = hopper.warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    barrier_arrive(TURN + (W + 1) % 2, 256, 4)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    barrier_arrive(EMPTY + stage, PARTIES, 4)
    cols = (high - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    s = logits_of(s, rows, cols, scale, softcap, slopes, HAS_SOFTCAP, HAS_ALIBI)
    s = mask(s, rows, cols, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT)
    m, l, e = start_softmax(s, factor)
    p = gl.convert_layout(e.to(q.dtype), P)
    o = gl.zeros([ROWS, HEAD_DIM], gl.float32, O)
    turn += 1

    for step in range(high - 1 - low):
        stage = turn % STAGES_K
        stage_v = (turn - 1) % STAGES_V
        k = k_s.index(stage).reshape([BLOCK_N, HEAD_DIM])
        v = v_s.index(stage_v).reshape([BLOCK_N, HEAD_DIM])
        mbarrier.wait(k_full.index(stage), turn // STAGES_K & 1)
        barrier_sync(TURN + W, 256, 4)
        s = hopper.warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(stage_v), (turn - 1) // STAGES_V & 1)
        o = hopper.warpgroup_mma(p, v, o, is_async=True)
        barrier_arrive(TURN + (W + 1) % 2, 256, 4)
        s = hopper.warpgroup_mma_wait(1, deps=(s,))
        tile = high - 2 - step
        cols = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
        s = logits_of(s, rows, cols, scale, softcap, slopes, HAS_SOFTCAP, HAS_ALIBI)
        if HAS_LEFT or HAS_RIGHT:  # noqa: SIM102  (a constant, then a number)
            if (tile >= right) | (tile < left):
                s = mask(s, rows, cols, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT)
        m_new = gl.maximum(m, gl.max(s, 1) * factor)
        pivot = m_new
        if HAS_LEFT or HAS_RIGHT:
            pivot = gl.where(m_new == NEG_INF, 0.0, m_new)
        e = gl.exp2(s * factor - pivot[:, None])
        alpha = gl.exp2(m - pivot)
        L: gl.constexpr = gl.SliceLayout(1, l.type.layout)
        sums = row_sums(e)
        # the exponentials run ahead of the wait for the other product
        barrier_arrive_after(sums, EMPTY + stage, PARTIES)
        l = l * gl.convert_layout(alpha, L)[:, None] + sums
        m = m_new
        o = hopper.warpgroup_mma_wait(0, deps=(o,))
        barrier_arrive(EMPTY + STAGES_K + stage_v, PARTIES, 4)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
        p = gl.convert_layout(e.to(q.dtype), P)
        turn += 1
    return o, m, l, p, turn


@gluon.jit
def _consume(
    W: gl.constexpr, out_desc, q_s, k_s, v_s, out_s, fields_s, q_full, q_empty, k_full, v_full,
    tile_full, tile_empty, lse_ptr, alibi_slopes_ptr, sinks_ptr,
    scale, softcap, window_left, window_right, tokens, stride_alibi_b,
    PACK: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES_K: gl.constexpr, STAGES_V: gl.constexpr, SHARE: gl.constexpr,
):  # fmt: skip
    """Work on the rows of warpgroup ``W`` of every tile of queries that the producer announces."""
    TOKENS: gl.constexpr = ROWS // PACK
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    HAS_ALIBI: gl.constexpr = alibi_slopes_ptr is not None
    # the scale goes into the exponential's multiply-add; it is positive, so max commutes
    factor = scale * LOG2E
    if HAS_SOFTCAP or HAS_ALIBI:
        factor = 1.0
    if W == 1:
        # the first turn
        barrier_arrive(TURN, 256, 4)
    turn = 0  # tiles of keys
    count = 0  # tiles of queries
    q = q_s.index(W).reshape([ROWS, HEAD_DIM])
    head, sequence, first_row, q_start, len_q, len_k = _receive(
        fields_s, tile_full, tile_empty, count
    )
    while head >= 0:
        low, left, right, high = key_tiles(
            first_row, len_q, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT,
            2 * TOKENS, BLOCK_N,
        )  # fmt: skip
        # heads, and within a head tokens
        index = gl.arange(0, ROWS, gl.SliceLayout(1, S))
        heads = head + index // TOKENS
        row = first_row + W * TOKENS
        slopes = 0.0
        if HAS_ALIBI:
            slopes = gl.load(alibi_slopes_ptr + sequence * stride_alibi_b + heads)[:, None]
        mbarrier.wait(q_full.index(W), count & 1)
        o, m, l, p, turn = _attend(
            turn, low, left, right, high, q, k_s, v_s, k_full, v_full,
            row + index % TOKENS + (len_k - len_q), len_k,
            scale, factor, softcap, slopes, window_left, window_right,
            W, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, ROWS, BLOCK_N, HEAD_DIM,
            STAGES_K, STAGES_V,
        )  # fmt: skip
        if not SHARE:
            mbarrier.arrive(q_empty.index(W), count=1)
        stage_v = (turn - 1) % STAGES_V
        v = v_s.index(stage_v).reshape([BLOCK_N, HEAD_DIM])
        mbarrier.wait(v_full.index(stage_v), (turn - 1) // STAGES_V & 1)
        o = hopper.warpgroup_mma(p, v, o, is_async=True)
        weight, empty, lse = finish_softmax(m, l, heads, heads < 0, sinks_ptr)
        o = hopper.warpgroup_mma_wait(0, deps=(o,))
        barrier_arrive(EMPTY + STAGES_K + stage_v, PARTIES, 4)
        if lse_ptr is not None:
            token = row + index % TOKENS
            at = heads.to(gl.int64) * tokens + (q_start + token)
            gl.store(lse_ptr + at, lse, mask=token < len_q)
        o = o * gl.convert_layout(weight, gl.SliceLayout(1, O))[:, None]
        # values that nobody sees may be NaN
        o = gl.where(gl.convert_layout(empty, gl.SliceLayout(1, O))[:, None], 0.0, o)
        tma.store_wait(0)
        out_s.index(W).reshape([ROWS, HEAD_DIM]).store(o.to(out_s.dtype))
        hopper.fence_async_shared()
        where = coordinates(sequence, head, q_start, len_q, row, True)
        copy_out(out_desc, where, out_s.index(W))
        if SHARE:
            # the output leaves through the memory of the queries
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(W), count=1)
        count += 1
        head, sequence, first_row, q_start, len_q, len_k = _receive(
            fields_s, tile_full, tile_empty, count
        )
    tma.store_wait(0)
    if W == 0:
        # the last turn that was passed on
        barrier_sync(TURN, 256, 4)


# the kernel takes numbers and pointers as they come; see ``runtime.py``
NUMBERS = (
    "window_left", "window_right", "batch", "packs", "tokens", "total", "page_rows_k",
    "page_rows_v", "stride_table_b", "stride_table_p", "stride_alibi_b",
)  # fmt: skip
POINTERS = (
    "lse_ptr", "ticket_ptr", "block_table_ptr", "cu_seqlens_q_ptr", "seqlens_k_ptr",
    "alibi_slopes_ptr", "sinks_ptr",
)  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def prefill_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, ticket_ptr, block_table_ptr, cu_seqlens_q_ptr,
    seqlens_k_ptr, alibi_slopes_ptr, sinks_ptr, scale, softcap, window_left, window_right,
    batch, packs, tokens, total, page_rows_k, page_rows_v, stride_table_b, stride_table_p,
    stride_alibi_b,
    GROUP: gl.constexpr,  # query heads per key head
    PACK: gl.constexpr,  # those of them that share a tile
    PAGE: gl.constexpr,
    PIECE: gl.constexpr,  # keys that are copied at once, of one page
    MIN_TOKENS: gl.constexpr,  # queries of the sequences served here
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    ROWS: gl.constexpr,  # of a warpgroup
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES_K: gl.constexpr,
    STAGES_V: gl.constexpr,
    SHARE: gl.constexpr,  # the output leaves through the memory of the queries
):  # fmt: skip
    """Share out the work of a persistent program: one producer, two consumers."""
    TOKENS: gl.constexpr = ROWS // PACK
    dtype: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [2, 1, 1, PACK, TOKENS, HEAD_DIM], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES_K, 1, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES_V, 1, 1, 1, BLOCK_N, HEAD_DIM], v_desc.layout)
    if SHARE:
        out_s = q_s
    else:
        out_s = gl.allocate_shared_memory(dtype, [2, 1, 1, PACK, TOKENS, HEAD_DIM], out_desc.layout)
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
                tile_full, tile_empty, lse_ptr, alibi_slopes_ptr, sinks_ptr,
                scale, softcap, window_left, window_right, tokens, stride_alibi_b,
                PACK, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, ROWS, BLOCK_N, HEAD_DIM,
                STAGES_K, STAGES_V, SHARE,
            )),
            (_consume, (
                1, out_desc, q_s, k_s, v_s, out_s, fields_s, q_full, q_empty, k_full, v_full,
                tile_full, tile_empty, lse_ptr, alibi_slopes_ptr, sinks_ptr,
                scale, softcap, window_left, window_right, tokens, stride_alibi_b,
                PACK, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, ROWS, BLOCK_N, HEAD_DIM,
                STAGES_K, STAGES_V, SHARE,
            )),
            (produce, (
                q_desc, k_desc, v_desc, q_s, k_s, v_s, fields_s, q_full, q_empty, k_full, v_full,
                tile_full, tile_empty, ticket_ptr, block_table_ptr, cu_seqlens_q_ptr,
                seqlens_k_ptr, window_left, window_right, batch, packs, total, page_rows_k,
                page_rows_v, stride_table_b, stride_table_p,
                GROUP, PACK, PAGE, PIECE, MIN_TOKENS, HAS_LEFT, HAS_RIGHT,
                ROWS, BLOCK_N, STAGES_K, STAGES_V,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
