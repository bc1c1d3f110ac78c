"""The consumers of the walk on Hopper: each warpgroup owns 64 columns of the state of one head.

The state is transposed, in registers. The warpgroups walk the chunks independently: the arithmetic
of one overlaps with the products of the other. For a chunk, with all tiles transposed
([columns, tokens])::

    scores   = k q^T, weighted, rounded and stored in shared memory
    out      = state q^T  (the state rounded, from registers), weighted, + v^T scores
    state    = decayed state + (decayed v)^T k
"""

from ..._linked.hopper.compat import copy_out, gl, gluon, hopper, mbarrier, tma
from ..._linked.hopper.pipeline import EMPTY, barrier_arrive
from .primitives import SIDE, chunk_of, factor, panel
from .structures import Chunk, Halves, Reads

# layouts of a warpgroup's registers: accumulators, and left operands of products
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))


@gluon.jit
def _first_state(recurrence, cols_e, rows_d, OPTIONS: gl.constexpr, HALVES: gl.constexpr):
    """Return the halves of the initial state; the second may be unused."""
    low = gl.zeros([SIDE, SIDE], gl.float32, ACC)  # [SIDE of E, SIDE of D]
    high = low
    if recurrence.first_ptr is not None:
        pointers = recurrence.first_ptr + cols_e.to(gl.int64) * recurrence.stride_first_e
        pointers = pointers + rows_d.to(gl.int64) * recurrence.stride_first_d
        there = (cols_e < OPTIONS.E) & (rows_d < gl.where(recurrence.has_first, OPTIONS.D, 0))
        low = gl.load(pointers, mask=there, other=0.0)
        if HALVES == 2:
            limit = gl.where(recurrence.has_first, OPTIONS.D, 0)
            there = (cols_e < OPTIONS.E) & (rows_d + SIDE < limit)
            high = gl.load(pointers + SIDE * recurrence.stride_first_d, mask=there, other=0.0)
    return Halves(low, high)


@gluon.jit
def _keep_state(recurrence, state, cols_e, rows_d, OPTIONS: gl.constexpr, HALVES: gl.constexpr):
    """Store the halves of the final state."""
    pointers = recurrence.last_ptr + cols_e.to(gl.int64) * recurrence.stride_last_e
    pointers = pointers + rows_d.to(gl.int64) * recurrence.stride_last_d
    limit = gl.where(recurrence.has_last, OPTIONS.D, 0)
    gl.store(pointers, state.low, mask=(cols_e < OPTIONS.E) & (rows_d < limit))
    if HALVES == 2:
        there = (cols_e < OPTIONS.E) & (rows_d + SIDE < limit)
        gl.store(pointers + SIDE * recurrence.stride_last_d, state.high, mask=there)


@gluon.jit
def _weights(W: gl.constexpr, pipeline, recurrence, REVERSE: gl.constexpr):
    """Return the factors of a chunk's scores; store those from and to a whole chunk's ends."""
    rate = recurrence.rate
    read_scale = recurrence.scales.read
    write_scale = recurrence.scales.write
    tokens = gl.arange(0, SIDE, gl.SliceLayout(0, ACC))  # [SIDE]
    # decay from the beginning of a whole chunk to each token, and from each token to its end, with
    # the scale of reads or of writes
    since = factor(rate, tokens + 1) * (write_scale if REVERSE else read_scale)  # [SIDE]
    pipeline.since.index(W).store(since)
    until = factor(rate, SIDE - 1 - tokens) * (read_scale if REVERSE else write_scale)  # [SIDE]
    pipeline.until.index(W).store(until)
    # distance from the token of a row to the token of a column; negative distances are masked
    apart = tokens[None, :] - gl.arange(0, SIDE, gl.SliceLayout(1, ACC))[:, None]  # [SIDE, SIDE]
    if REVERSE:
        apart = -apart
    weights = factor(rate, gl.maximum(apart, 0)) * (read_scale * write_scale)
    return gl.where(apart >= 0, weights, 0.0)


@gluon.jit
def _fading(
    W: gl.constexpr,
    pipeline,
    recurrence,
    chunk,
    HAS_OUT: gl.constexpr,
    OPTIONS: gl.constexpr,
):
    """Return the decay of each token's write, and of the old state, until the chunk's end."""
    rate = recurrence.rate
    count = chunk.count
    kept = factor(rate, count)
    ends = pipeline.since if OPTIONS.REVERSE else pipeline.until
    fading = ends.index(W).load(gl.SliceLayout(0, LEFT))  # [SIDE]
    if not OPTIONS.REVERSE:  # noqa: SIM102  (a constant, then a number)
        if count < SIDE:
            to_end = count - 1 - gl.arange(0, SIDE, gl.SliceLayout(0, LEFT))
            fading = factor(rate, gl.maximum(to_end, 0)) * recurrence.scales.write
    if OPTIONS.SEGMENTED and not HAS_OUT:
        # chunks come in the opposite order, so writes decay to the end of the piece at once
        beyond = chunk.row if OPTIONS.REVERSE else recurrence.piece.length - count - chunk.row
        fading *= factor(rate, beyond)
        kept = 1.0
    return fading, kept


@gluon.jit
def _halves(panels, stage, HALVES: gl.constexpr):
    """Return the panels of a chunk in shared memory; a single panel is returned twice."""
    low = panels.index(stage * HALVES).reshape([SIDE, SIDE])
    high = panels.index(stage * HALVES + HALVES - 1).reshape([SIDE, SIDE])
    return Halves(low, high)


@gluon.jit
def _start_reads(state, k, q, HALVES: gl.constexpr):
    """Start the products of reads with keys and with the rounded state: ``(scores, out)``."""
    dtype: gl.constexpr = k.low.dtype
    zeros = gl.zeros([SIDE, SIDE], gl.float32, ACC)
    scores = hopper.warpgroup_mma(k.low, q.low, zeros, use_acc=False, is_async=True)
    if HALVES == 2:
        scores = hopper.warpgroup_mma(k.high, q.high, scores, is_async=True)
    rounded = gl.convert_layout(state.low.to(dtype), LEFT)
    out = hopper.warpgroup_mma(rounded, q.low, zeros, use_acc=False, is_async=True)
    if HALVES == 2:
        rounded = gl.convert_layout(state.high.to(dtype), LEFT)
        out = hopper.warpgroup_mma(rounded, q.high, out, is_async=True)
    return Reads(scores, out)


@gluon.jit
def _add_scores(
    W: gl.constexpr,
    pipeline,
    recurrence,
    chunk,
    reads,
    weights,
    v_t,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Weight scores and out, and start the product of values and scores: ``out``."""
    count = chunk.count
    scores = hopper.warpgroup_mma_wait(TILE.HALVES, deps=(reads.scores,))
    pipeline.scores.index(W).store((scores * weights).to(v_t.dtype))
    hopper.fence_async_shared()
    ends = pipeline.until if OPTIONS.REVERSE else pipeline.since
    arrival = ends.index(W).load(gl.SliceLayout(0, ACC))  # [SIDE]
    if OPTIONS.REVERSE:  # noqa: SIM102
        if count < SIDE:
            tokens = gl.arange(0, SIDE, gl.SliceLayout(0, ACC))  # [SIDE]
            to_end = gl.maximum(count - 1 - tokens, 0)
            arrival = factor(recurrence.rate, to_end) * recurrence.scales.read
    out = hopper.warpgroup_mma_wait(0, deps=(reads.out,))
    out = out * arrival[None, :]
    return hopper.warpgroup_mma(v_t, pipeline.scores.index(W), out, is_async=True)


@gluon.jit
def _terms(v_t, fading, TERMS: gl.constexpr):
    """Return the decayed values as one or two numbers of 16 bits; one is returned twice."""
    dtype: gl.constexpr = v_t.dtype
    faded = v_t.to(gl.float32) * fading[None, :]  # [SIDE of E, SIDE]
    if TERMS == 2:
        # the upper half of a number's bits is a 16-bit number
        upper = (faded.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
        rest = (faded - upper).to(dtype)
        return upper.to(dtype), rest
    upper = faded.to(dtype)
    return upper, upper


@gluon.jit
def _start_write(upper, rest, k, TERMS: gl.constexpr):
    """Start the products of decayed values and keys.

    They have a separate accumulator, which is then added to the state: tensor cores truncate sums.
    """
    zeros = gl.zeros([SIDE, SIDE], gl.float32, ACC)
    written = hopper.warpgroup_mma(upper, k, zeros, use_acc=False, is_async=True)
    if TERMS == 2:
        written = hopper.warpgroup_mma(rest, k, written, is_async=True)
    return written


@gluon.jit
def _send(out_desc, staging, out, piece, row, col, RAGGED: gl.constexpr):
    """Start the TMA store of a chunk's output."""
    tma.store_wait(0)
    staging.reshape([SIDE, SIDE]).permute((1, 0)).store(out.to(staging.dtype))
    hopper.fence_async_shared()
    copy_out(out_desc, panel(piece, row, col, RAGGED), staging)


@gluon.jit
def consume(W: gl.constexpr, maps, pipeline, recurrence, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Walk with the 64 columns of the state of warpgroup ``W``."""
    PARTIES: gl.constexpr = 128 * TILE.WARPGROUPS + 32
    HAS_OUT: gl.constexpr = maps.out is not None
    piece = recurrence.piece
    first_col = piece.first_col + W * SIDE
    cols_e = (first_col + gl.arange(0, SIDE, gl.SliceLayout(1, ACC)))[:, None]  # [SIDE, 1]
    rows_d = gl.arange(0, SIDE, gl.SliceLayout(0, ACC))[None, :]  # [1, SIDE]
    state = _first_state(recurrence, cols_e, rows_d, OPTIONS, TILE.HALVES)  # [SIDE, SIDE] each
    weights = _weights(W, pipeline, recurrence, OPTIONS.REVERSE)  # [SIDE, SIDE]
    for step in range(piece.chunks):
        row = chunk_of(step, piece.chunks, HAS_OUT, OPTIONS) * SIDE
        stage = step % TILE.STAGES
        chunk = Chunk(row, gl.minimum(SIDE, piece.length - row))
        fading, kept = _fading(W, pipeline, recurrence, chunk, HAS_OUT, OPTIONS)
        k = _halves(pipeline.key, stage, TILE.HALVES)
        v = pipeline.value.index(stage * TILE.WARPGROUPS + W).reshape([SIDE, SIDE])
        mbarrier.wait(pipeline.full.index(stage), step // TILE.STAGES & 1)
        if HAS_OUT:
            q = _halves(pipeline.read, stage, TILE.HALVES)
            q = Halves(q.low.permute((1, 0)), q.high.permute((1, 0)))
            reads = _start_reads(state, k, q, TILE.HALVES)
        v_t = v.permute((1, 0)).load(LEFT)  # [SIDE of E, SIDE]
        upper, rest = _terms(v_t, fading, TILE.TERMS)
        if HAS_OUT:
            out = _add_scores(W, pipeline, recurrence, chunk, reads, weights, v_t, OPTIONS, TILE)
        written = _start_write(upper, rest, k.low, TILE.TERMS)
        if HAS_OUT:
            out = hopper.warpgroup_mma_wait(TILE.TERMS, deps=(out,))
        if TILE.HALVES == 2:
            written_high = _start_write(upper, rest, k.high, TILE.TERMS)
        if HAS_OUT:
            _send(maps.out, pipeline.out.index(W), out, piece, row, first_col, OPTIONS.RAGGED)
        if TILE.HALVES == 2:
            written = hopper.warpgroup_mma_wait(TILE.TERMS, deps=(written,))
            low = state.low * kept + written
            written_high = hopper.warpgroup_mma_wait(0, deps=(written_high,))
            state = Halves(low, state.high * kept + written_high)
        else:
            written = hopper.warpgroup_mma_wait(0, deps=(written,))
            state = Halves(state.low * kept + written, state.high)
        barrier_arrive(EMPTY + stage, PARTIES, 4)
    if recurrence.last_ptr is not None:
        _keep_state(recurrence, state, cols_e, rows_d, OPTIONS, TILE.HALVES)
    if HAS_OUT:
        tma.store_wait(0)
