"""Prefill on Hopper: one warp gathers pages by TMA, two warpgroups multiply in turns (wgmma).

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
)
from ._linked.softmax import finish_softmax, logits_of, mask, row_sums, start_softmax
from .producer import produce, tiles_of
from .structures import (
    Announced,
    Arguments,
    CacheMap,
    Counts,
    Inputs,
    Options,
    Pipeline,
    Queries,
    Results,
    Rows,
    Scores,
    Sequences,
    Softmax,
    Strides,
    Table,
    Tickets,
    Tile,
)

# the least number of fp32 that is no denormal
TINY = gl.constexpr(2.0**-126)


@gluon.jit
def _receive(pipeline, count):
    """Wait for the producer to announce a tile of queries, or that none is left."""
    layout: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    slot = count % SLOTS
    mbarrier.wait(pipeline.tile_full.index(slot), count // SLOTS & 1)
    fields = pipeline.fields_s.index(slot).load(layout)  # [FIELDS]
    head, sequence = field(fields, HEAD), field(fields, SEQUENCE)
    first_row, q_start = field(fields, FIRST_ROW), field(fields, Q_START)
    len_q, len_k = field(fields, LEN_Q), field(fields, LEN_K)
    mbarrier.arrive(pipeline.tile_empty.index(slot), count=1)
    return Announced(head, sequence, first_row, q_start, len_q, len_k)


@gluon.jit
def _descale_of(ptr, work, heads_k, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Return the scale of a tile's keys, or values: one of all, of a head, or of a sequence too."""
    at = 0
    if OPTIONS.DESCALE_NDIM > 0:
        at = work.head // TILE.GROUP
    if OPTIONS.DESCALE_NDIM == 2:
        at += work.sequence * heads_k
    return gl.load(ptr + at)


@gluon.jit
def _flipped(s, queries):
    """Turn the products with keys whose scale is negative."""
    if queries.flips is not None:  # noqa: SIM102  (a constant, then a number)
        if queries.flips:
            s = -s
    return s


@gluon.jit
def _logits_of(s, first, queries, scores, OPTIONS: gl.constexpr):
    """Turn products into base-2 logits where a softcap or ALiBi is applied."""
    HAS_ALIBI: gl.constexpr = queries.slopes is not None
    rows, slopes = queries.rows, queries.slopes
    scale, softcap = scores.scale, scores.softcap
    return logits_of(s, rows, first, scale, softcap, slopes, OPTIONS.HAS_SOFTCAP, HAS_ALIBI)


@gluon.jit
def _masked(s, cols, queries, scores, OPTIONS: gl.constexpr):
    """Hide the keys that a row does not see."""
    rows, len_k = queries.rows, queries.len_k
    left, right = scores.window_left, scores.window_right
    return mask(s, rows, cols, len_k, left, right, OPTIONS.HAS_LEFT, OPTIONS.HAS_RIGHT)


@gluon.jit
def _attend_first(
    turn,
    tile,
    queries,
    factor,
    pipeline,
    scores,
    W: gl.constexpr,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Return the ``Softmax`` of the last tile of keys: no other product runs beside it."""
    ROWS: gl.constexpr = TILE.ROWS
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    HEAD_DIM: gl.constexpr = TILE.HEAD_DIM
    STAGES_K: gl.constexpr = TILE.STAGES_K
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    stage = turn % STAGES_K
    k = pipeline.k_s.index(stage).reshape([BLOCK_N, HEAD_DIM])
    mbarrier.wait(pipeline.k_full.index(stage), turn // STAGES_K & 1)
    barrier_sync(TURN + W, 256, 4)
    # [ROWS, BLOCK_N]
    s = hopper.warpgroup_mma(queries.q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    barrier_arrive(TURN + (W + 1) % 2, 256, 4)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    barrier_arrive(EMPTY + stage, TILE.PARTIES, 4)
    first = tile * BLOCK_N
    cols = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))  # [BLOCK_N]
    s = _flipped(s, queries)
    s = _logits_of(s, first, queries, scores, OPTIONS)
    s = _masked(s, cols, queries, scores, OPTIONS)
    m, l, e = start_softmax(s, factor, NEG_INF)
    p = gl.convert_layout(e.to(queries.q.dtype), gl.DotOperandLayout(0, O, 2))  # [ROWS, BLOCK_N]
    o = gl.zeros([ROWS, HEAD_DIM], gl.float32, O)
    return Softmax(o, m, l, p)


@gluon.jit
def _attend(
    turn,
    tiles,
    queries,
    factor,
    pipeline,
    scores,
    W: gl.constexpr,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Fold a tile's keys into its softmax, but for the product with the last tile of values."""
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    HEAD_DIM: gl.constexpr = TILE.HEAD_DIM
    STAGES_K: gl.constexpr = TILE.STAGES_K
    STAGES_V: gl.constexpr = TILE.STAGES_V
    HAS_WINDOW: gl.constexpr = OPTIONS.HAS_LEFT or OPTIONS.HAS_RIGHT
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    last = tiles.high - 1
    softmax = _attend_first(turn, last, queries, factor, pipeline, scores, W, OPTIONS, TILE)
    m, l, p, o = softmax.m, softmax.l, softmax.p, softmax.o
    zeros = gl.zeros([TILE.ROWS, BLOCK_N], gl.float32, S)
    turn += 1

    for step in range(tiles.high - 1 - tiles.low):
        stage = turn % STAGES_K
        stage_v = (turn - 1) % STAGES_V
        k = pipeline.k_s.index(stage).reshape([BLOCK_N, HEAD_DIM])
        v = pipeline.v_s.index(stage_v).reshape([BLOCK_N, HEAD_DIM])
        mbarrier.wait(pipeline.k_full.index(stage), turn // STAGES_K & 1)
        barrier_sync(TURN + W, 256, 4)
        # [ROWS, BLOCK_N]
        s = hopper.warpgroup_mma(queries.q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(pipeline.v_full.index(stage_v), (turn - 1) // STAGES_V & 1)
        o = hopper.warpgroup_mma(p, v, o, is_async=True)  # [ROWS, HEAD_DIM]
        barrier_arrive(TURN + (W + 1) % 2, 256, 4)
        s = hopper.warpgroup_mma_wait(1, deps=(s,))
        tile = tiles.high - 2 - step
        first = tile * BLOCK_N
        cols = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))  # [BLOCK_N]
        s = _flipped(s, queries)
        s = _logits_of(s, first, queries, scores, OPTIONS)
        if HAS_WINDOW:  # noqa: SIM102  (a constant, then a number)
            if (tile >= tiles.right) | (tile < tiles.left):
                s = _masked(s, cols, queries, scores, OPTIONS)
        m_new = gl.maximum(m, gl.max(s, 1) * factor)  # [ROWS]
        pivot = m_new
        if HAS_WINDOW:
            pivot = gl.where(m_new == NEG_INF, 0.0, m_new)
        e = gl.exp2(s * factor - pivot[:, None])  # [ROWS, BLOCK_N]
        alpha = gl.exp2(m - pivot)
        L: gl.constexpr = gl.SliceLayout(1, l.type.layout)
        sums = row_sums(e)  # [ROWS, 4]
        # the exponentials run ahead of the wait for the other product
        barrier_arrive_after(sums, EMPTY + stage, TILE.PARTIES)
        l = l * gl.convert_layout(alpha, L)[:, None] + sums
        m = m_new
        o = hopper.warpgroup_mma_wait(0, deps=(o,))
        barrier_arrive(EMPTY + STAGES_K + stage_v, TILE.PARTIES, 4)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
        p = gl.convert_layout(e.to(queries.q.dtype), P)
        turn += 1
    return Softmax(o, m, l, p), turn


@gluon.jit
def _finish(softmax, turn, work, row, index, heads, pipeline, results, TILE: gl.constexpr):
    """Multiply with the last tile of values; store the LSE, and return the output in fp32."""
    HEAD_DIM: gl.constexpr = TILE.HEAD_DIM
    STAGES_V: gl.constexpr = TILE.STAGES_V
    TOKENS: gl.constexpr = TILE.ROWS // TILE.PACK
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    stage_v = (turn - 1) % STAGES_V
    v = pipeline.v_s.index(stage_v).reshape([TILE.BLOCK_N, HEAD_DIM])
    mbarrier.wait(pipeline.v_full.index(stage_v), (turn - 1) // STAGES_V & 1)
    o = hopper.warpgroup_mma(softmax.p, v, softmax.o, is_async=True)  # [ROWS, HEAD_DIM]
    # each [ROWS]
    weight, empty, lse = finish_softmax(softmax.m, softmax.l, heads, heads < 0, results.sinks_ptr)
    o = hopper.warpgroup_mma_wait(0, deps=(o,))
    barrier_arrive(EMPTY + TILE.STAGES_K + stage_v, TILE.PARTIES, 4)
    if results.lse_ptr is not None:
        token = row + index % TOKENS  # [ROWS]
        at = heads.to(gl.int64) * results.tokens + (work.q_start + token)
        gl.store(results.lse_ptr + at, lse, mask=token < work.len_q)
    o = o * gl.convert_layout(weight, gl.SliceLayout(1, O))[:, None]
    # values that nobody sees may be NaN
    return gl.where(gl.convert_layout(empty, gl.SliceLayout(1, O))[:, None], 0.0, o)


@gluon.jit
def _store_rows(o, work, row, out, TILE: gl.constexpr):
    """Write the output of a warpgroup in fp32."""
    TOKENS: gl.constexpr = TILE.ROWS // TILE.PACK
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.HEAD_DIM, 16])
    index = gl.arange(0, TILE.ROWS, gl.SliceLayout(1, O))  # [ROWS]
    cols = gl.arange(0, TILE.HEAD_DIM, gl.SliceLayout(0, O))  # [HEAD_DIM]
    token = row + index % TOKENS
    begin = (work.q_start + token).to(gl.int64) * out.stride_token
    begin += (work.head + index // TOKENS).to(gl.int64) * out.stride_head
    at = gl.multiple_of(out.ptr + begin[:, None], [16, 16]) + cols[None, :]
    mask = (token < work.len_q)[:, None]
    if TILE.WIDTH < TILE.HEAD_DIM:
        mask = mask & (cols < TILE.WIDTH)[None, :]
    gl.store(at, o, mask=mask)


@gluon.jit
def _store(o, work, row, out_desc, pipeline, W: gl.constexpr, TILE: gl.constexpr):
    """Write the output of a warpgroup, which leaves by TMA while the next tile is worked on."""
    tma.store_wait(0)
    out_s = pipeline.out_s
    out_s.index(W).reshape([TILE.ROWS, TILE.HEAD_DIM]).store(o.to(out_s.dtype))
    hopper.fence_async_shared()
    where = coordinates(work.sequence, work.head, work.q_start, work.len_q, row, True)
    copy_out(out_desc, where, out_s.index(W))
    if TILE.SHARE:
        # the output leaves through the memory of the queries
        tma.store_wait(0)
        mbarrier.arrive(pipeline.q_empty.index(W), count=1)


@gluon.jit
def consume(
    W: gl.constexpr, out_desc, pipeline, results, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Work on the rows of warpgroup ``W`` of every tile of queries that the producer announces."""
    ROWS: gl.constexpr = TILE.ROWS
    TOKENS: gl.constexpr = ROWS // TILE.PACK
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.BLOCK_N, 16])
    HAS_ALIBI: gl.constexpr = results.alibi_slopes_ptr is not None
    if W == 1:
        # the first turn
        barrier_arrive(TURN, 256, 4)
    turn = 0  # tiles of keys
    count = 0  # tiles of queries
    q = pipeline.q_s.index(W).reshape([ROWS, TILE.HEAD_DIM])
    work = _receive(pipeline, count)
    while work.head >= 0:
        scores = results.scores
        flips = None
        if results.k_descale_ptr is not None:
            descale = _descale_of(results.k_descale_ptr, work, results.heads_k, OPTIONS, TILE)
            flips = descale < 0
            scale = scores.scale * gl.where(flips, -descale, descale)
            # positive: -inf times it is to stay that
            scale = gl.where(scale < TINY, TINY, scale)
            scores = Scores(scale, scores.softcap, scores.window_left, scores.window_right)
        # the scale goes into the exponential's multiply-add; it is positive, so max commutes
        factor = scores.scale * LOG2E
        if OPTIONS.HAS_SOFTCAP or HAS_ALIBI:
            factor = 1.0
        tiles = tiles_of(work.first_row, work.len_q, work.len_k, scores, OPTIONS, TILE)
        # heads, and within a head tokens
        index = gl.arange(0, ROWS, gl.SliceLayout(1, S))  # [ROWS]
        heads = work.head + index // TOKENS
        row = work.first_row + W * TOKENS
        slopes = None
        if HAS_ALIBI:
            at = results.alibi_slopes_ptr + work.sequence * results.stride_alibi_b + heads
            slopes = gl.load(at)[:, None]  # [ROWS, 1]
        mbarrier.wait(pipeline.q_full.index(W), count & 1)
        rows = row + index % TOKENS + (work.len_k - work.len_q)
        queries = Queries(q, rows, slopes, work.len_k, flips)
        softmax, turn = _attend(turn, tiles, queries, factor, pipeline, scores, W, OPTIONS, TILE)
        if not TILE.SHARE:
            mbarrier.arrive(pipeline.q_empty.index(W), count=1)
        o = _finish(softmax, turn, work, row, index, heads, pipeline, results, TILE)
        if results.v_descale_ptr is not None:
            o = o * _descale_of(results.v_descale_ptr, work, results.heads_k, OPTIONS, TILE)
        if out_desc is None:
            _store_rows(o, work, row, results.out, TILE)
        else:
            _store(o, work, row, out_desc, pipeline, W, TILE)
        count += 1
        work = _receive(pipeline, count)
    tma.store_wait(0)
    if W == 0:
        # the last turn that was passed on
        barrier_sync(TURN, 256, 4)


@gluon.jit
def pipeline_of(q_desc, k_s, v_s, out_desc, TILE: gl.constexpr):
    """Return the ``Pipeline`` with these tiles of keys and values; all warps call it."""
    dtype: gl.constexpr = q_desc.dtype
    shape: gl.constexpr = [2, 1, 1, TILE.PACK, TILE.ROWS // TILE.PACK, TILE.HEAD_DIM]
    q_s = gl.allocate_shared_memory(dtype, shape, q_desc.layout)
    if TILE.SHARE or out_desc is None:
        out_s = q_s
    else:
        out_s = gl.allocate_shared_memory(dtype, shape, out_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    fields_s = gl.allocate_shared_memory(gl.int32, [SLOTS, FIELDS], plain)
    q_full, q_empty = barriers(2, 1), barriers(2, 1)
    k_full, v_full = barriers(TILE.STAGES_K, 1), barriers(TILE.STAGES_V, 1)
    tile_full, tile_empty = barriers(SLOTS, 1), barriers(SLOTS, 2)
    hopper.fence_async_shared()
    return Pipeline(
        q_s, k_s, v_s, out_s, fields_s, q_full, q_empty, k_full, v_full, tile_full, tile_empty
    )


# integers and pointers are taken as they come; see ``runtime.py``
NUMBERS = Scores._fields + Counts._fields + Strides._fields
POINTERS = tuple(name for name in Arguments._fields if name.endswith("_ptr"))


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def prefill_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    out_ptr,
    lse_ptr,
    ticket_ptr,
    block_table_ptr,
    cu_seqlens_q_ptr,
    seqlens_k_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    scale,
    softcap,
    window_left,
    window_right,
    batch,
    packs,
    tokens,
    total,
    page_rows_k,
    page_rows_v,
    stride_os,
    stride_oh,
    stride_table_b,
    stride_table_p,
    stride_alibi_b,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    DESCALE_NDIM: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    PAGE: gl.constexpr,
    PIECE: gl.constexpr,
    MIN_TOKENS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES_K: gl.constexpr,
    STAGES_V: gl.constexpr,
    SHARE: gl.constexpr,
    WARPS: gl.constexpr,
    PARTIES: gl.constexpr,
):
    """``out = softmax(mask(scale * q @ k.T)) @ v``, with ``k`` and ``v`` in the pages of a cache.

    A persistent program: one warp produces, two warpgroups consume.
    """
    OPTIONS: gl.constexpr = Options(HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, DESCALE_NDIM)
    TILE: gl.constexpr = Tile(
        GROUP,
        PACK,
        PAGE,
        PIECE,
        MIN_TOKENS,
        ROWS,
        BLOCK_N,
        HEAD_DIM,
        WIDTH,
        STAGES_K,
        STAGES_V,
        SHARE,
        WARPS,
        PARTIES,
    )
    dtype: gl.constexpr = q_desc.dtype
    k_s = gl.allocate_shared_memory(dtype, [STAGES_K, 1, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES_V, 1, 1, 1, BLOCK_N, HEAD_DIM], v_desc.layout)
    pipeline = pipeline_of(q_desc, k_s, v_s, out_desc, TILE)
    scores = Scores(scale, softcap, window_left, window_right)
    out = Rows(out_ptr, stride_os, stride_oh)
    results = Results(
        out, lse_ptr, alibi_slopes_ptr, sinks_ptr, None, None, scores, tokens, stride_alibi_b
    )
    inputs = Inputs(
        q_desc,
        CacheMap(k_desc, page_rows_k),
        CacheMap(v_desc, page_rows_v),
        Table(block_table_ptr, stride_table_b, stride_table_p),
        Sequences(cu_seqlens_q_ptr, seqlens_k_ptr, batch),
        Tickets(ticket_ptr, packs, total),
        scores,
    )
    gl.warp_specialize(
        [
            (consume, (0, out_desc, pipeline, results, OPTIONS, TILE)),
            (consume, (1, out_desc, pipeline, results, OPTIONS, TILE)),
            (produce, (inputs, pipeline, OPTIONS, TILE)),
        ],
        [4, 1],
        [240, 24],
    )
