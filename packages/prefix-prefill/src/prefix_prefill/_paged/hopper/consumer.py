"""The MMA warpgroups: scores, online softmax, product with the values, results.

Every warpgroup owns 64 rows of a tile of queries and visits the tiles of keys that they see.
"""

from ..._linked.hopper.compat import copy_out, gl, gluon, hopper, mbarrier, tma
from ..._linked.hopper.pipeline import (
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
    coordinates,
    field,
    opaque,
)
from ..._linked.hopper.ptx import in_pairs
from ..._linked.hopper.softmax import finish_softmax, hide, logits_of, row_sums, start_softmax
from .structures import Announced, Factors, Queries, Softmax
from .tiles import keys_of, tile_of, tiles_of

# the smallest normal number of fp32
TINY = gl.constexpr(2.0**-126)
# largest weight in fp16: it fits, and is far from denormals
LARGEST = gl.constexpr(32768.0)
# least unit of weights, relative to the largest so far: see _weighted
FALL = gl.constexpr(2.0**-60)


@gluon.jit
def receive(pipeline, count):
    """Wait for the producer's announcement: a tile of queries, or that none is left."""
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
def _tile_of(buffer, pipeline, TILE: gl.constexpr):
    """Return a warpgroup's tile of queries, ``[ROWS, HEAD_DIM]``."""
    if TILE.BUFFERS_Q > 1:
        # computed again for each loop: see docs/hopper-traps.md
        buffer = opaque(buffer)
    return pipeline.q_s.index(buffer).reshape([TILE.ROWS, TILE.HEAD_DIM])


@gluon.jit
def _descale_of(ptr, work, heads_k, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Return the descale of keys or values: one for all, per head, or per sequence and head."""
    at = 0
    if OPTIONS.DESCALE_NDIM > 0:
        at = work.head // TILE.GROUP
    if OPTIONS.DESCALE_NDIM == 2:
        at += work.sequence * heads_k
    return gl.load(ptr + at)


@gluon.jit
def _scores_of(s, tile, stage, tiles, queries, factors, scores, OPTIONS: gl.constexpr):
    """Return ``(s, factor)``: ``s * factor`` are the logits in base 2."""
    S: gl.constexpr = s.type.layout
    HAS_ALIBI: gl.constexpr = queries.slopes is not None
    scale, flips = factors.scale, factors.flips
    if factors.scales_s is not None:
        k_scale = factors.scales_s.index(2 * stage).load(gl.SliceLayout(0, S))  # [BLOCK_N]
        s = s * k_scale[None, :]
    if factors.flips is not None:
        if OPTIONS.HAS_NEW:
            # new keys have no scale
            scale = gl.where(tile < tiles.new, scale, scores.scale)
            flips = flips & (tile < tiles.new)
        if flips:
            s = -s
    first, _ = keys_of(tile, tiles, queries.len_k, OPTIONS, s.shape[1])
    rows, slopes, softcap = queries.rows, queries.slopes, scores.softcap
    s = logits_of(s, rows, first, scale, softcap, slopes, OPTIONS.HAS_SOFTCAP, HAS_ALIBI)
    # the scale goes into the multiply-add of exp2; it is positive, so max commutes with it
    factor = scale * LOG2E
    if OPTIONS.HAS_SOFTCAP or HAS_ALIBI:
        factor = 1.0
    return s, factor


@gluon.jit
def _masked(s, tile, tiles, queries, scores, OPTIONS: gl.constexpr):
    """Hide the keys that a row does not see."""
    first, last = keys_of(tile, tiles, queries.len_k, OPTIONS, s.shape[1])
    cols = first + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))  # [BLOCK_N]
    left, right = scores.window_left, scores.window_right
    return hide(s, queries.rows, cols, last, left, right, OPTIONS.HAS_LEFT, OPTIONS.HAS_RIGHT)


@gluon.jit
def _weighted(e, top, stage, factors, DTYPE: gl.constexpr):
    """Return weights (probabilities times the values' scales), their unit, the largest unit so far.

    bf16 holds weights of any size. fp16 weights are divided by a unit, so that they are at most
    ``LARGEST``. The unit follows the scales of a tile, but never falls below ``FALL`` times the
    largest so far, so that no sum overflows.
    """
    unit = top
    if factors.scales_s is not None:
        scale = factors.scales_s.index(2 * stage + 1).load(gl.SliceLayout(0, e.type.layout))
        if gl.float16 == DTYPE:
            most = gl.max(gl.abs(scale), 0) * (1.0 / LARGEST)
            top = gl.maximum(most, top)
            unit = gl.maximum(gl.maximum(most, top * FALL), TINY)
            scale = scale * (1.0 / unit)
        e = e * scale[None, :]
    return e, unit, top


@gluon.jit
def _attend_first(
    turn,
    tiles,
    queries,
    factors,
    pipeline,
    scores,
    W: gl.constexpr,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Return the ``Softmax`` of the first tile of keys, where no product with values overlaps."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.HEAD_DIM, 16])
    zeros = gl.zeros([TILE.ROWS, TILE.BLOCK_N], gl.float32, S)
    q = _tile_of(queries.buffer, pipeline, TILE)
    stage = turn % TILE.STAGES_K
    k = pipeline.k_s.index(stage).reshape([TILE.BLOCK_N, TILE.HEAD_DIM])
    mbarrier.wait(pipeline.k_full.index(stage), turn // TILE.STAGES_K & 1)
    barrier_sync(TURN + W, 256, 4)
    # [ROWS, BLOCK_N]
    s = hopper.warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    barrier_arrive(TURN + (W + 1) % TILE.WARPGROUPS, 256, 4)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    if factors.scales_s is None:
        barrier_arrive(EMPTY + stage, TILE.PARTIES, 4)
    tile = tile_of(0, tiles, OPTIONS)
    s, factor = _scores_of(s, tile, stage, tiles, queries, factors, scores, OPTIONS)
    s = _masked(s, tile, tiles, queries, scores, OPTIONS)
    m, l, e = start_softmax(s, factor, NEG_INF)
    e, unit, top = _weighted(e, 0.0, stage, factors, pipeline.q_s.dtype)
    if factors.scales_s is not None:
        barrier_arrive(EMPTY + stage, TILE.PARTIES, 4)
    p = gl.convert_layout(e.to(pipeline.q_s.dtype), gl.DotOperandLayout(0, O, 2))  # [ROWS, BLOCK_N]
    o = gl.zeros([TILE.ROWS, TILE.HEAD_DIM], gl.float32, O)
    return Softmax(o, m, l, p, unit, top)


@gluon.jit
def _attend(
    turn,
    tiles,
    queries,
    factors,
    pipeline,
    scores,
    W: gl.constexpr,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Fold all keys of a tile of queries into its softmax, except the last product with values."""
    HAS_MASK: gl.constexpr = OPTIONS.HAS_LEFT or OPTIONS.HAS_RIGHT or OPTIONS.HAS_NEW
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.HEAD_DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    softmax = _attend_first(turn, tiles, queries, factors, pipeline, scores, W, OPTIONS, TILE)
    m, l, p, o = softmax.m, softmax.l, softmax.p, softmax.o
    unit, top = softmax.unit, softmax.top
    zeros = gl.full([TILE.ROWS, TILE.BLOCK_N], 0.0, gl.float32, S)
    q = _tile_of(queries.buffer, pipeline, TILE)
    turn += 1

    for step in range(1, tiles.high - tiles.low):
        stage = turn % TILE.STAGES_K
        stage_v = (turn - 1) % TILE.STAGES_V
        k = pipeline.k_s.index(stage).reshape([TILE.BLOCK_N, TILE.HEAD_DIM])
        v = pipeline.v_s.index(stage_v).reshape([TILE.BLOCK_N, TILE.HEAD_DIM])
        mbarrier.wait(pipeline.k_full.index(stage), turn // TILE.STAGES_K & 1)
        barrier_sync(TURN + W, 256, 4)
        # [ROWS, BLOCK_N]
        s = hopper.warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(pipeline.v_full.index(stage_v), (turn - 1) // TILE.STAGES_V & 1)
        o = hopper.warpgroup_mma(p, v, o, is_async=True)  # [ROWS, HEAD_DIM]
        barrier_arrive(TURN + (W + 1) % TILE.WARPGROUPS, 256, 4)
        s = hopper.warpgroup_mma_wait(1, deps=(s,))
        tile = tile_of(step, tiles, OPTIONS)
        s, factor = _scores_of(s, tile, stage, tiles, queries, factors, scores, OPTIONS)
        if HAS_MASK:  # noqa: SIM102  (a constant, then a number)
            if (tile >= tiles.right) | (tile < tiles.left):
                s = _masked(s, tile, tiles, queries, scores, OPTIONS)
        m_new = gl.maximum(m, gl.max(s, 1) * factor)  # [ROWS]
        pivot = m_new
        if HAS_MASK:
            pivot = gl.where(m_new == NEG_INF, 0.0, m_new)
        e = gl.exp2(s * factor - pivot[:, None])  # [ROWS, BLOCK_N]
        alpha = gl.exp2(m - pivot)
        L: gl.constexpr = gl.SliceLayout(1, l.type.layout)
        sums = row_sums(e)  # [ROWS, 4]
        e, new_unit, new_top = _weighted(e, top, stage, factors, pipeline.q_s.dtype)
        # `sums` orders this arrival, and so the wait for `o` below, after the exponentials
        barrier_arrive_after(sums, EMPTY + stage, TILE.PARTIES)
        l = l * gl.convert_layout(alpha, L)[:, None] + sums
        m = m_new
        if factors.scales_s is not None and pipeline.q_s.dtype == gl.float16:
            alpha = alpha * (unit / new_unit)
            unit, top = new_unit, new_top
        if factors.v_descale is not None:
            # the sum over cached values is complete
            alpha = gl.where(step == tiles.cached, alpha * factors.v_descale, alpha)
        o = hopper.warpgroup_mma_wait(0, deps=(o,))
        barrier_arrive(EMPTY + TILE.STAGES_K + stage_v, TILE.PARTIES, 4)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
        p = gl.convert_layout(e.to(pipeline.q_s.dtype), P)
        if TILE.WARPGROUPS == 3:
            p = in_pairs(p)
        turn += 1
    return Softmax(o, m, l, p, unit, top), turn


@gluon.jit
def _finish(softmax, turn, work, row, index, heads, pipeline, results, TILE: gl.constexpr):
    """Multiply by the last tile of values, store the LSE, return the output in fp32."""
    TOKENS: gl.constexpr = TILE.ROWS // TILE.PACK
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.HEAD_DIM, 16])
    stage_v = (turn - 1) % TILE.STAGES_V
    v = pipeline.v_s.index(stage_v).reshape([TILE.BLOCK_N, TILE.HEAD_DIM])
    mbarrier.wait(pipeline.v_full.index(stage_v), (turn - 1) // TILE.STAGES_V & 1)
    o = hopper.warpgroup_mma(softmax.p, v, softmax.o, is_async=True)  # [ROWS, HEAD_DIM]
    # each [ROWS]
    weight, empty, lse = finish_softmax(softmax.m, softmax.l, heads, heads < 0, results.sinks_ptr)
    o = hopper.warpgroup_mma_wait(0, deps=(o,))
    barrier_arrive(EMPTY + TILE.STAGES_K + stage_v, TILE.PARTIES, 4)
    if results.lse_ptr is not None:
        token = row + index % TOKENS  # [ROWS]
        at = heads.to(gl.int64) * results.tokens + (work.q_start + token)
        gl.store(results.lse_ptr + at, lse, mask=token < work.len_q)
    if results.scales_s is not None and pipeline.q_s.dtype == gl.float16:
        weight = weight * softmax.unit
    o = o * gl.convert_layout(weight, gl.SliceLayout(1, O))[:, None]
    # a fully masked row gets 0, even if the values are NaN
    return gl.where(gl.convert_layout(empty, gl.SliceLayout(1, O))[:, None], 0.0, o)


@gluon.jit
def _store_rows(o, work, row, out, TILE: gl.constexpr):
    """Store the output of a warpgroup from registers, in fp32."""
    TOKENS: gl.constexpr = TILE.ROWS // TILE.PACK
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.HEAD_DIM, 16])
    index = gl.arange(0, TILE.ROWS, gl.SliceLayout(1, O))  # [ROWS]
    cols = gl.arange(0, TILE.HEAD_DIM, gl.SliceLayout(0, O))  # [HEAD_DIM]
    token = row + index % TOKENS
    begin = (work.q_start + token).to(gl.int64) * out.strides.token
    begin += (work.head + index // TOKENS).to(gl.int64) * out.strides.head
    at = gl.multiple_of(out.ptr + begin[:, None], [16, 16]) + cols[None, :]
    mask = (token < work.len_q)[:, None]
    if TILE.WIDTH < TILE.HEAD_DIM:
        mask = mask & (cols < TILE.WIDTH)[None, :]
    gl.store(at, o, mask=mask)


@gluon.jit
def _store(o, work, row, out_desc, pipeline, W: gl.constexpr, TILE: gl.constexpr):
    """Store the output of a warpgroup by TMA, which overlaps with the next tile."""
    tma.store_wait(0)
    out_s = pipeline.out_s
    out_s.index(W).reshape([TILE.ROWS, TILE.HEAD_DIM]).store(o.to(out_s.dtype))
    hopper.fence_async_shared()
    where = coordinates(work.sequence, work.head, work.q_start, work.len_q, row, True)
    copy_out(out_desc, where, out_s.index(W))
    if TILE.SHARE:
        # the output is in the queries' only buffer: wait until TMA has read it, then free it
        tma.store_wait(0)
        mbarrier.arrive(pipeline.q_empty.index(W), count=1)


@gluon.jit
def consume(
    W: gl.constexpr, out_desc, pipeline, results, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Compute the rows of warpgroup ``W`` of every tile of queries that the producer announces."""
    TOKENS: gl.constexpr = TILE.ROWS // TILE.PACK
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.BLOCK_N, 16])
    HAS_ALIBI: gl.constexpr = results.alibi_slopes_ptr is not None
    if W == TILE.WARPGROUPS - 1:
        # hand the first ping-pong turn to warpgroup 0
        barrier_arrive(TURN, 256, 4)
    turn = 0  # tiles of keys
    count = 0  # tiles of queries
    work = receive(pipeline, count)
    while work.head >= 0:
        scores, scale, flips, v_descale = results.scores, results.scores.scale, None, None
        if results.k_descale_ptr is not None:
            descale = _descale_of(results.k_descale_ptr, work, results.heads_k, OPTIONS, TILE)
            flips = descale < 0
            scale = scores.scale * gl.where(flips, -descale, descale)
            # positive, so that -inf times the scale stays -inf
            scale = gl.where(scale < TINY, TINY, scale)
        if results.v_descale_ptr is not None and OPTIONS.HAS_NEW:
            v_descale = _descale_of(results.v_descale_ptr, work, results.heads_k, OPTIONS, TILE)
        factors = Factors(scale, flips, v_descale if OPTIONS.HAS_NEW else None, results.scales_s)
        tiles = tiles_of(work.first_row, work.len_q, work.len_k, scores, OPTIONS, TILE)
        # rows: heads, and within a head tokens
        index = gl.arange(0, TILE.ROWS, gl.SliceLayout(1, S))  # [ROWS]
        heads = work.head + index // TOKENS
        row = work.first_row + W * TOKENS
        slopes = None
        if HAS_ALIBI:
            at = results.alibi_slopes_ptr + work.sequence * results.stride_alibi_b + heads
            slopes = gl.load(at)[:, None]  # [ROWS, 1]
        buffer = count % TILE.BUFFERS_Q * TILE.WARPGROUPS + W
        mbarrier.wait(pipeline.q_full.index(buffer), count // TILE.BUFFERS_Q & 1)
        rows = row + index % TOKENS + (work.len_k - work.len_q)
        queries = Queries(buffer, rows, slopes, work.len_k)
        softmax, turn = _attend(turn, tiles, queries, factors, pipeline, scores, W, OPTIONS, TILE)
        if not TILE.SHARE:
            mbarrier.arrive(pipeline.q_empty.index(buffer), count=1)
        o = _finish(softmax, turn, work, row, index, heads, pipeline, results, TILE)
        if results.v_descale_ptr is not None and not OPTIONS.HAS_NEW:
            o = o * _descale_of(results.v_descale_ptr, work, results.heads_k, OPTIONS, TILE)
        if out_desc is None:
            _store_rows(o, work, row, results.out, TILE)
        else:
            _store(o, work, row, out_desc, pipeline, W, TILE)
        count += 1
        work = receive(pipeline, count)
    tma.store_wait(0)
    if W == 0:
        # take the last ping-pong turn, so that no arrival is left at the barrier
        barrier_sync(TURN, 256, 4)
