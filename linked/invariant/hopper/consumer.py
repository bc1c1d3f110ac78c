"""The consumer warpgroups: sums of rows, segment by segment, as docs/numerics.md defines them.

Every warpgroup owns 64 rows (query heads of one head of keys, times tokens) of a tile of queries. A
segment is walked from its last tile to its first, with the online softmax of FlashAttention-2 (Dao,
2023) and the two overlaps of FlashAttention-3 (Shah et al., 2024): a warpgroup's softmax overlaps
with the other warpgroup's products, and with its own product of the previous tile's probabilities
and values. No rounding is left to the compiler (``enable_fp_fusion`` is off).
"""

from ...hopper.compat import copy_out, gl, gluon, hopper, mbarrier, tma
from ...hopper.pipeline import (
    EMPTY,
    FIELDS,
    FIRST_ROW,
    HEAD,
    LEN_K,
    LEN_Q,
    LN2,
    LOG2E,
    NEG_INF,
    Q_START,
    SEQUENCE,
    SLOTS,
    TURN,
    barrier_arrive,
    barrier_sync,
    coordinates,
    field,
)
from ...hopper.ptx import SLACK, hide_unless, in_pairs, shrink
from ...hopper.softmax import pivot_of, row_sums, tanh
from .keys import segments_of, tiles_of, within
from .structures import Queries, State, Work

# a further field of an announced tile, after those of ``pipeline``
PART = gl.constexpr(6)


@gluon.constexpr_function
def accumulator(columns):
    """Return the layout of a warpgroup's wgmma accumulator."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def parties(options, tile):
    """Return the number of threads at the barrier that frees a stage."""
    return 128 * tile.WARPGROUPS + (32 if options.PIECE > 0 else 128)


@gluon.jit
def _receive(pipeline, count):
    """Wait for the producer's next announcement: a tile of queries, or the end."""
    layout: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    slot = count % SLOTS
    mbarrier.wait(pipeline.tile_full.index(slot), count // SLOTS & 1)
    fields = pipeline.fields_s.index(slot).load(layout)  # [FIELDS]
    head, sequence = field(fields, HEAD), field(fields, SEQUENCE)
    first_row, q_start = field(fields, FIRST_ROW), field(fields, Q_START)
    len_q, len_k = field(fields, LEN_Q), field(fields, LEN_K)
    part = field(fields, PART)
    mbarrier.arrive(pipeline.tile_empty.index(slot), count=1)
    return Work(head, sequence, first_row, q_start, len_q, len_k, part)


@gluon.jit
def _take_turn(W: gl.constexpr, TILE: gl.constexpr):
    """Wait until the other warpgroup has issued its products."""
    if TILE.WARPGROUPS > 1:
        barrier_sync(TURN + W, 256, 4)


@gluon.jit
def _pass_turn(W: gl.constexpr, TILE: gl.constexpr):
    if TILE.WARPGROUPS > 1:
        barrier_arrive(TURN + (W + 1) % TILE.WARPGROUPS, 256, 4)


@gluon.jit
def _scores(s, first, queries, scores, MASKED: gl.constexpr, OPTIONS: gl.constexpr):
    """Turn products ``[ROWS, BLOCK_N]`` into scores; hidden keys get -inf."""
    if OPTIONS.HAS_SOFTCAP:
        s = tanh(s * (scores.scale / scores.softcap)) * (scores.softcap * LOG2E)
    elif not OPTIONS.FOLD:
        s = s * (scores.scale * LOG2E)
    if MASKED:
        rows = queries.rows
        cols = first + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))  # [BLOCK_N]
        limit = gl.full(rows.shape, queries.len_k - 1, gl.int32, rows.type.layout)  # [ROWS]
        if OPTIONS.HAS_RIGHT:
            limit = gl.minimum(rows + scores.window_right, limit)
        s = hide_unless(s, cols[None, :], limit[:, None])
        if OPTIONS.HAS_LEFT:
            s = hide_unless(s, (rows - scores.window_left)[:, None], cols[None, :])
    return s


@gluon.jit
def _weigh(s, m, factor, MASKED: gl.constexpr):
    """Return the new pivots, the factors of the sums so far, and the exponentials of scores.

    A pivot moves only if a maximum exceeds it by more than ``SLACK``. A tile without visible keys
    keeps a row's pivot, with the factor 1.
    """
    top = gl.max(s, 1) * factor  # [ROWS]
    m_new = gl.where(top - m > SLACK, top, m)
    pivot = pivot_of(m_new) if MASKED else m_new
    alpha = gl.exp2(m - pivot)
    factors = gl.full(s.shape, factor, gl.float32, s.type.layout)
    e = gl.exp2(gl.fma(s, factors, (-pivot)[:, None]))  # [ROWS, BLOCK_N]
    return m_new, alpha, e


@gluon.jit
def _begin(
    turn,
    tile,
    queries,
    pipeline,
    scores,
    W: gl.constexpr,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Return the ``State`` after a segment's last tile, which overlaps with no other product."""
    S: gl.constexpr = accumulator(TILE.BLOCK_N)
    O: gl.constexpr = accumulator(TILE.HEAD_DIM_V)
    stage = turn % TILE.STAGES_K
    k = pipeline.k_s.index(stage).reshape([TILE.BLOCK_N, TILE.HEAD_DIM])
    zeros = gl.full([TILE.ROWS, TILE.BLOCK_N], 0.0, gl.float32, S)
    mbarrier.wait(pipeline.k_full.index(stage), turn // TILE.STAGES_K & 1)
    _take_turn(W, TILE)
    # [ROWS, BLOCK_N]
    s = hopper.warpgroup_mma(queries.q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    _pass_turn(W, TILE)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    barrier_arrive(EMPTY + stage, parties(OPTIONS, TILE), 4)
    s = _scores(s, tile * TILE.BLOCK_N, queries, scores, True, OPTIONS)
    none = gl.full([TILE.ROWS], NEG_INF, gl.float32, gl.SliceLayout(1, S))
    m, _, e = _weigh(s, none, queries.factor, True)
    p = gl.convert_layout(e.to(queries.q.dtype), gl.DotOperandLayout(0, O, 2))  # [ROWS, BLOCK_N]
    o = gl.full([TILE.ROWS, TILE.HEAD_DIM_V], 0.0, gl.float32, O)
    return State(o, m, row_sums(e), p, turn + 1)


@gluon.jit
def _fold(
    state,
    start,
    stop,
    queries,
    pipeline,
    scores,
    W: gl.constexpr,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Fold the tiles of keys ``[start, stop)`` into the sums, the last tile first."""
    PARTIES: gl.constexpr = parties(OPTIONS, TILE)
    S: gl.constexpr = accumulator(TILE.BLOCK_N)
    O: gl.constexpr = accumulator(TILE.HEAD_DIM_V)
    zeros = gl.full([TILE.ROWS, TILE.BLOCK_N], 0.0, gl.float32, S)
    o, m, l, p, turn = state
    for step in range(stop - start):
        stage = turn % TILE.STAGES_K
        stage_v = (turn - 1) % TILE.STAGES_V
        k = pipeline.k_s.index(stage).reshape([TILE.BLOCK_N, TILE.HEAD_DIM])
        v = pipeline.v_s.index(stage_v).reshape([TILE.BLOCK_N, TILE.HEAD_DIM_V])
        mbarrier.wait(pipeline.k_full.index(stage), turn // TILE.STAGES_K & 1)
        _take_turn(W, TILE)
        # [ROWS, BLOCK_N]
        s = hopper.warpgroup_mma(queries.q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(pipeline.v_full.index(stage_v), (turn - 1) // TILE.STAGES_V & 1)
        o = hopper.warpgroup_mma(p, v, o, is_async=True)  # [ROWS, HEAD_DIM_V]
        _pass_turn(W, TILE)
        s = hopper.warpgroup_mma_wait(1, deps=(s,))
        barrier_arrive(EMPTY + stage, PARTIES, 4)
        s = _scores(s, (stop - 1 - step) * TILE.BLOCK_N, queries, scores, MASKED, OPTIONS)
        m, alpha, e = _weigh(s, m, queries.factor, MASKED)
        L: gl.constexpr = gl.SliceLayout(1, l.type.layout)
        sums = row_sums(e)  # [ROWS, 4]
        l = gl.fma(l, gl.convert_layout(alpha, L)[:, None], sums)
        o = hopper.warpgroup_mma_wait(0, deps=(o,))
        barrier_arrive(EMPTY + TILE.STAGES_K + stage_v, PARTIES, 4)
        # factors are mostly 1: a warp whose factors are all 1 skips the multiplications
        o = shrink(o, gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None])
        p = gl.convert_layout(e.to(queries.q.dtype), gl.DotOperandLayout(0, O, 2))
        turn += 1
    return State(o, m, l, p, turn)


@gluon.jit
def _with_pairs(state):
    """Return the state with its probabilities packed in pairs; see ``in_pairs``."""
    return State(state.o, state.m, state.l, in_pairs(state.p), state.turn)


@gluon.jit
def _walk_segment(
    turn,
    tiles,
    queries,
    pipeline,
    scores,
    W: gl.constexpr,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Return ``(o, m, l, turn)`` of a segment, ``l`` in the layout of ``m``.

    The first loop takes the tiles that the diagonal cuts; the second, without code for masks, the
    tiles that every row sees whole; the third the tiles that the window's left edge cuts. With a
    softcap a mask adds little time, so one loop takes all tiles.
    """
    IS_HEAVY: gl.constexpr = OPTIONS.HAS_SOFTCAP and (OPTIONS.HAS_LEFT or OPTIONS.HAS_RIGHT)
    last = tiles.high - 1
    state = _begin(turn, last, queries, pipeline, scores, W, OPTIONS, TILE)
    if OPTIONS.HAS_RIGHT and not IS_HEAVY:
        state = _fold(state, tiles.right, last, queries, pipeline, scores, W, OPTIONS, TILE, True)
        state = _with_pairs(state)
    if not IS_HEAVY:
        state = _fold(
            state, tiles.left, tiles.right, queries, pipeline, scores, W, OPTIONS, TILE, False
        )
    if OPTIONS.HAS_LEFT or IS_HEAVY:
        stop = last if IS_HEAVY else tiles.left
        state = _fold(
            _with_pairs(state), tiles.low, stop, queries, pipeline, scores, W, OPTIONS, TILE, True
        )
    o, m, l, p, turn = state
    stage_v = (turn - 1) % TILE.STAGES_V
    v = pipeline.v_s.index(stage_v).reshape([TILE.BLOCK_N, TILE.HEAD_DIM_V])
    mbarrier.wait(pipeline.v_full.index(stage_v), (turn - 1) // TILE.STAGES_V & 1)
    o = hopper.warpgroup_mma(p, v, o, is_async=True)  # [ROWS, HEAD_DIM_V]
    sums = gl.convert_layout(gl.sum(l, 1), m.type.layout)  # [ROWS]
    o = hopper.warpgroup_mma_wait(0, deps=(o,))
    barrier_arrive(EMPTY + TILE.STAGES_K + stage_v, parties(OPTIONS, TILE), 4)
    return o, m, sums, turn


@gluon.jit
def _as_rows(x, O: gl.constexpr):
    """Return numbers of rows as a column ``[ROWS, 1]`` in the layout of ``o``."""
    return gl.convert_layout(x, gl.SliceLayout(1, O))[:, None]


@gluon.jit
def _attend(
    turn,
    work,
    queries,
    heads,
    pipeline,
    results,
    W: gl.constexpr,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Return ``(o, m, l, turn)``: the sums of the visible segments, merged in order.

    Sums of earlier segments are parked in memory: every thread reads its own writes.
    """
    O: gl.constexpr = accumulator(TILE.HEAD_DIM_V)
    scores = results.scores
    tiles = tiles_of(work, scores, OPTIONS, TILE)
    first, last = segments_of(tiles, work.part, TILE)
    if results.parts.out_ptr is not None:
        tiles = within(tiles, first, TILE)
        o, m, l, turn = _walk_segment(turn, tiles, queries, pipeline, scores, W, OPTIONS, TILE)
    else:
        m = gl.full(heads.shape, NEG_INF, gl.float32, heads.type.layout)  # [ROWS]
        l = gl.full(heads.shape, 0.0, gl.float32, heads.type.layout)
        if results.sinks_ptr is not None:
            # the sink is a first key without a value; padding tokens have none
            is_real = (work.sequence >= 0) & (work.sequence < results.counts.batch)
            sink = gl.load(results.sinks_ptr + heads).to(gl.float32) * LOG2E
            m = gl.where(is_real, sink, NEG_INF)
            l = gl.where(m == NEG_INF, 0.0, 1.0)
        o = gl.full([TILE.ROWS, TILE.HEAD_DIM_V], 0.0, gl.float32, O)
        rows = gl.arange(0, TILE.ROWS, gl.SliceLayout(1, O))  # [ROWS]
        rows += (gl.program_id(0) * TILE.WARPGROUPS + W) * TILE.ROWS
        cols = gl.arange(0, TILE.HEAD_DIM_V, gl.SliceLayout(0, O))  # [HEAD_DIM_V]
        parked = results.parts.park_ptr + (rows * TILE.HEAD_DIM_V)[:, None] + cols[None, :]
        for segment in range(first, last):
            part = within(tiles, segment, TILE)
            o, m_new, l_new, turn = _walk_segment(
                turn, part, queries, pipeline, scores, W, OPTIONS, TILE
            )
            top = gl.maximum(m, m_new)
            pivot = pivot_of(top)
            a, b = gl.exp2(m - pivot), gl.exp2(m_new - pivot)
            l = gl.fma(l, a, l_new * b)
            m = top
            o = o * _as_rows(b, O)
            if segment > first:
                o = gl.fma(gl.load(parked), _as_rows(a, O), o)
            if segment < last - 1:
                gl.store(parked, o)
    return o, m, l, turn


@gluon.jit
def _store_part(o, m, l, work, tokens, heads, results, TILE: gl.constexpr):
    """Write the sums of a segment, for ``invariant_merge_kernel``."""
    O: gl.constexpr = accumulator(TILE.HEAD_DIM_V)
    counts, parts = results.counts, results.parts
    heads_q = (counts.packs * TILE.PACK).to(gl.int64)
    all_rows = counts.tokens_q * heads_q
    at = (work.q_start + tokens) * heads_q + heads
    if results.cu_seqlens_q_ptr is None:
        at += work.sequence * all_rows
        all_rows *= counts.batch
    at += work.part * all_rows
    inside = tokens < work.len_q
    gl.store(parts.max_ptr + at, m, mask=inside)
    gl.store(parts.sum_ptr + at, l, mask=inside)
    cols = gl.arange(0, TILE.HEAD_DIM_V, gl.SliceLayout(0, O))  # [HEAD_DIM_V]
    saw = gl.convert_layout(inside & (m != NEG_INF), gl.SliceLayout(1, O))[:, None]
    begins = _as_rows(at * TILE.WIDTH_V, O)
    gl.store(parts.out_ptr + begins + cols[None, :], o, mask=saw & (cols < TILE.WIDTH_V)[None, :])


@gluon.jit
def _store(
    o, m, l, work, tokens, heads, out_desc, pipeline, results, W: gl.constexpr, TILE: gl.constexpr
):
    """Write the output of a warpgroup, by TMA, and the log-sum-exps."""
    O: gl.constexpr = accumulator(TILE.HEAD_DIM_V)
    counts = results.counts
    # fully masked rows: output 0, lse -inf
    empty = l == 0.0
    safe = gl.where(empty, 1.0, l)
    if results.lse_ptr is not None:
        lse = gl.where(empty, NEG_INF, (m + gl.log2(safe)) * LN2)
        if results.cu_seqlens_q_ptr is None:
            plane = work.sequence.to(gl.int64) * (counts.packs * TILE.PACK)
            at = (plane + heads) * counts.tokens_q + tokens
        else:
            at = heads.to(gl.int64) * counts.tokens_q + (work.q_start + tokens)
        gl.store(results.lse_ptr + at, lse, mask=tokens < work.len_q)
    o = o * _as_rows(1.0 / safe, O)
    # hidden values may be NaN
    o = gl.where(_as_rows(empty, O), 0.0, o)
    tma.store_wait(0)
    out_s = pipeline.out_s
    out_s.index(W).reshape([TILE.ROWS, TILE.HEAD_DIM_V]).store(o.to(out_s.dtype))
    hopper.fence_async_shared()
    row = work.first_row + W * (TILE.ROWS // TILE.PACK)
    RAGGED: gl.constexpr = results.cu_seqlens_q_ptr is not None
    where = coordinates(work.sequence, work.head, work.q_start, work.len_q, row, RAGGED)
    copy_out(out_desc, where, out_s.index(W))


@gluon.jit
def consume(
    W: gl.constexpr, out_desc, pipeline, results, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Work on the rows of warpgroup ``W`` of every tile of queries that the producer announces."""
    TOKENS: gl.constexpr = TILE.ROWS // TILE.PACK
    S: gl.constexpr = accumulator(TILE.BLOCK_N)
    # the scale is part of the exponential's fma; it is positive, so it commutes with max
    factor = 1.0
    if OPTIONS.FOLD:
        factor = results.scores.scale * LOG2E
    if W == TILE.WARPGROUPS - 1:
        # gives warpgroup 0 the first turn
        _pass_turn(W, TILE)
    turn = 0  # number of tiles of keys so far
    count = 0  # number of tiles of queries so far
    q = pipeline.q_s.index(W).reshape([TILE.ROWS, TILE.HEAD_DIM])
    work = _receive(pipeline, count)
    while work.head >= 0:
        # rows count tokens within a head, then heads
        index = gl.arange(0, TILE.ROWS, gl.SliceLayout(1, S))  # [ROWS]
        heads = work.head + index // TOKENS
        tokens = work.first_row + W * TOKENS + index % TOKENS
        mbarrier.wait(pipeline.q_full.index(W), count & 1)
        queries = Queries(q, tokens + (work.len_k - work.len_q), work.len_k, factor)
        o, m, l, turn = _attend(turn, work, queries, heads, pipeline, results, W, OPTIONS, TILE)
        if not TILE.SHARE:
            mbarrier.arrive(pipeline.q_empty.index(W), count=1)
        if results.parts.out_ptr is not None:
            _store_part(o, m, l, work, tokens, heads, results, TILE)
        else:
            _store(o, m, l, work, tokens, heads, out_desc, pipeline, results, W, TILE)
        if TILE.SHARE:
            # the output is staged in the memory of the queries
            tma.store_wait(0)
            mbarrier.arrive(pipeline.q_empty.index(W), count=1)
        count += 1
        work = _receive(pipeline, count)
    tma.store_wait(0)
    if W == 0 and TILE.WARPGROUPS > 1:
        # takes the last turn, which the other warpgroup passed
        barrier_sync(TURN, 256, 4)
