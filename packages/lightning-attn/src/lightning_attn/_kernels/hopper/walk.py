"""The walk on Hopper: one warp copies, one or two warpgroups multiply; see :mod:`..walk`.

A warpgroup owns 64 columns of the state of one head, turned, in registers, and goes through the
chunks by itself: beside its arithmetic run the products of the other one. All tiles are panels of
64 tokens by 64 columns. Of a chunk, with everything turned ([columns, tokens])::

    scores   = k q^T, weighted, rounded and left in shared memory
    out      = state q^T  (the state rounded, from registers), weighted, + v^T scores
    state    = faded state + (faded v)^T k
"""

from ._linked.compat import copy_in, copy_out, gl, gluon, hopper, mbarrier, tma
from ._linked.pipeline import (
    EMPTY,
    LOG2E,
    SEARCH_CHUNK,
    barrier_arrive,
    barrier_sync,
    barriers,
    coordinates,
)
from .structures import (
    Found,
    Lengths,
    Maps,
    Numbers,
    Options,
    Piece,
    Pipeline,
    Recurrence,
    Tensors,
    Tile,
)

# tokens of a chunk, and columns of a panel
SIDE = gl.constexpr(64)
# as in ``primitives``
LARGEST_RATE = gl.constexpr(1.0e4)
# registers of a warpgroup: sums of products, and the left operands of products
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))


@gluon.jit
def _factor(rate, distance):
    """Return what is left after a number of tokens: at most 1."""
    return gl.exp2(-rate * distance.to(gl.float32))


@gluon.jit
def _locate(cu_seqlens_ptr, piece, lengths, SEGMENTED: gl.constexpr):
    """Return where a piece of tokens lies, as ``primitives.locate``."""
    size = lengths.size
    if cu_seqlens_ptr is None:
        start = piece * 0
        end = lengths.tokens
        sequence = piece // gl.maximum(lengths.pieces, 1)
        index = piece % gl.maximum(lengths.pieces, 1)
        begin = index * size
        length = gl.minimum(size, lengths.tokens - begin)
    elif SEGMENTED:
        sequence = -1
        for first in range(0, lengths.batch + 1, SEARCH_CHUNK):
            slots = first + gl.arange(0, SEARCH_CHUNK, gl.BlockedLayout([1], [32], [4], [0]))
            start = gl.load(cu_seqlens_ptr + slots, mask=slots <= lengths.batch, other=0)
            mine = (start // size + slots < piece) & (slots <= lengths.batch)
            sequence += gl.sum(mine.to(gl.int32), 0)
        start = gl.load(cu_seqlens_ptr + sequence, mask=sequence >= 0, other=0)
        end = gl.load(
            cu_seqlens_ptr + sequence + 1, mask=sequence < lengths.batch, other=lengths.tokens
        )
        begin = start + (piece - (start // size + sequence + 1)) * size
        length = gl.minimum(size, end - begin)
        index = piece
    else:
        sequence = piece
        start = gl.load(cu_seqlens_ptr + gl.minimum(piece, lengths.batch))
        begin = start
        end = gl.load(cu_seqlens_ptr + piece + 1, mask=piece < lengths.batch, other=lengths.tokens)
        length = end - begin
        index = piece * 0
    return Found(sequence, start, end, begin, length, index)


@gluon.jit
def _clear_rows(out_ptr, begin, length, heads, head, first_col, E: gl.constexpr):
    """Store zeros to 64 columns of rows of a contiguous ``[tokens, heads, E]``."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    index = gl.arange(0, SIDE, gl.SliceLayout(1, layout))  # [SIDE]
    cols = first_col + gl.arange(0, SIDE, gl.SliceLayout(0, layout))  # [SIDE]
    zeros = gl.zeros([SIDE, SIDE], out_ptr.dtype.element_ty, layout)
    for done in range(0, length, SIDE):
        rows = (begin + done + index).to(gl.int64)
        pointers = out_ptr + ((rows * heads + head) * E)[:, None] + cols[None, :]
        gl.store(pointers, zeros, mask=(done + index < length)[:, None] & (cols < E)[None, :])


@gluon.jit
def _clear_padding(
    out_ptr,
    cu_seqlens_ptr,
    found,
    batch,
    heads,
    head,
    first_col,
    OPTIONS: gl.constexpr,
    WARPGROUPS: gl.constexpr,
):
    """Store zeros to the output of rows that belong to no sequence."""
    length = gl.maximum(found.length, 0)
    for w in gl.static_range(WARPGROUPS):
        col = first_col + w * SIDE
        _clear_rows(out_ptr, found.begin, length, heads, head, col, OPTIONS.E)
        if not OPTIONS.SEGMENTED:
            # who clears what lies behind all sequences clears what lies ahead, too
            ahead = gl.where(found.sequence == batch, gl.load(cu_seqlens_ptr), 0)
            _clear_rows(out_ptr, found.begin * 0, ahead, heads, head, col, OPTIONS.E)


@gluon.jit
def _memory(maps, TILE: gl.constexpr):
    """Allocate the shared memory of a program, and make its barriers."""
    dtype: gl.constexpr = maps.key.dtype
    HALF: gl.constexpr = [TILE.STAGES * TILE.HALVES, 1, 1, 1, 64, 64]
    k_s = gl.allocate_shared_memory(dtype, HALF, maps.key.layout)
    v_s = gl.allocate_shared_memory(
        dtype, [TILE.STAGES * TILE.WARPGROUPS, 1, 1, 1, 64, 64], maps.value.layout
    )
    q_s = k_s
    scores_s = k_s
    out_s = k_s
    if maps.out is not None:
        q_s = gl.allocate_shared_memory(dtype, HALF, maps.read.layout)
        scores_s = gl.allocate_shared_memory(
            dtype, [TILE.WARPGROUPS, 64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
        )
        out_s = gl.allocate_shared_memory(
            dtype, [TILE.WARPGROUPS, 1, 1, 1, 64, 64], maps.out.layout
        )
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    since_s = gl.allocate_shared_memory(gl.float32, [TILE.WARPGROUPS, 64], plain)
    until_s = gl.allocate_shared_memory(gl.float32, [TILE.WARPGROUPS, 64], plain)
    full = barriers(TILE.STAGES, 1)
    return Pipeline(k_s, v_s, q_s, scores_s, out_s, since_s, until_s, full)


@gluon.jit
def _chunk(step, chunks, HAS_OUT: gl.constexpr, OPTIONS: gl.constexpr):
    """Return the chunk of a step.

    Where nobody reads, the order is free: a segment is left at the end at which the walk with reads
    begins, whose rows the cache then still holds.
    """
    BACKWARDS: gl.constexpr = (OPTIONS.SEGMENTED and not HAS_OUT) != OPTIONS.REVERSE
    if BACKWARDS:
        return chunks - 1 - step
    return step


@gluon.jit
def _panel(piece, row, col, RAGGED: gl.constexpr):
    """Return where a panel lies in a tensor map."""
    where = coordinates(piece.sequence, piece.head, piece.begin, piece.length, row, RAGGED)
    return (where[0], where[1], where[2], where[3], col)


@gluon.jit
def _produce(maps, pipeline, piece, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Copy chunks into shared memory, in the order in which they are needed."""
    HALVES: gl.constexpr = TILE.HALVES
    WARPGROUPS: gl.constexpr = TILE.WARPGROUPS
    STAGES: gl.constexpr = TILE.STAGES
    PARTIES: gl.constexpr = 128 * WARPGROUPS + 32
    HAS_OUT: gl.constexpr = maps.read is not None
    PANELS: gl.constexpr = HALVES * (2 if HAS_OUT else 1) + WARPGROUPS
    for step in range(piece.chunks):
        chunk = _chunk(step, piece.chunks, HAS_OUT, OPTIONS)
        stage = step % STAGES
        arrived = pipeline.full.index(stage)
        if step >= STAGES:
            barrier_sync(EMPTY + stage, PARTIES, 1)
        mbarrier.expect(arrived, PANELS * maps.key.block_type.nbytes)
        row = chunk * SIDE
        for h in gl.static_range(HALVES):
            where = _panel(piece, row, h * SIDE, OPTIONS.RAGGED)
            copy_in(maps.key, where, arrived, pipeline.key.index(stage * HALVES + h))
            if HAS_OUT:
                copy_in(maps.read, where, arrived, pipeline.read.index(stage * HALVES + h))
        for w in gl.static_range(WARPGROUPS):
            where = _panel(piece, row, piece.first_col + w * SIDE, OPTIONS.RAGGED)
            copy_in(maps.value, where, arrived, pipeline.value.index(stage * WARPGROUPS + w))
    # nobody may be left at a barrier
    for back in gl.static_range(STAGES):
        if piece.chunks > back:
            barrier_sync(EMPTY + (piece.chunks - 1 - back) % STAGES, PARTIES, 1)


@gluon.jit
def _first_state(recurrence, cols_e, rows_d, OPTIONS: gl.constexpr, HALVES: gl.constexpr):
    """Return the halves of the state that arrives; a state has both, even if one is unused."""
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
    return low, high


@gluon.jit
def _keep_state(recurrence, low, high, cols_e, rows_d, OPTIONS: gl.constexpr, HALVES: gl.constexpr):
    """Store the halves of the state that leaves."""
    pointers = recurrence.last_ptr + cols_e.to(gl.int64) * recurrence.stride_last_e
    pointers = pointers + rows_d.to(gl.int64) * recurrence.stride_last_d
    limit = gl.where(recurrence.has_last, OPTIONS.D, 0)
    gl.store(pointers, low, mask=(cols_e < OPTIONS.E) & (rows_d < limit))
    if HALVES == 2:
        there = (cols_e < OPTIONS.E) & (rows_d + SIDE < limit)
        gl.store(pointers + SIDE * recurrence.stride_last_d, high, mask=there)


@gluon.jit
def _weights(W: gl.constexpr, pipeline, recurrence, REVERSE: gl.constexpr):
    """Return the factors of a chunk's scores; leave those of a whole chunk's ends in memory."""
    rate = recurrence.rate
    read_scale = recurrence.read_scale
    write_scale = recurrence.write_scale
    tokens = gl.arange(0, SIDE, gl.SliceLayout(0, ACC))
    # what is left over the tokens between each one and the ends of a whole chunk, with the scale
    # of what it is for
    since = _factor(rate, tokens + 1) * (write_scale if REVERSE else read_scale)  # [SIDE]
    pipeline.since.index(W).store(since)
    until = _factor(rate, SIDE - 1 - tokens) * (read_scale if REVERSE else write_scale)  # [SIDE]
    pipeline.until.index(W).store(until)
    # from the token of a row to that of a column; what lies the other way does not count
    apart = tokens[None, :] - gl.arange(0, SIDE, gl.SliceLayout(1, ACC))[:, None]  # [SIDE, SIDE]
    if REVERSE:
        apart = -apart
    weights = _factor(rate, gl.maximum(apart, 0)) * (read_scale * write_scale)
    return gl.where(apart >= 0, weights, 0.0)


@gluon.jit
def _fading(
    W: gl.constexpr,
    pipeline,
    recurrence,
    chunk,
    count,
    HAS_OUT: gl.constexpr,
    OPTIONS: gl.constexpr,
):
    """Return what is left of each token's write at the end of the chunk, and of the old state."""
    REVERSE: gl.constexpr = OPTIONS.REVERSE
    rate = recurrence.rate
    kept = _factor(rate, count)
    ends = pipeline.since if REVERSE else pipeline.until
    fading = ends.index(W).load(gl.SliceLayout(0, LEFT))  # [SIDE]
    if not REVERSE:  # noqa: SIM102  (a constant, then a number)
        if count < SIDE:
            to_end = count - 1 - gl.arange(0, SIDE, gl.SliceLayout(0, LEFT))
            fading = _factor(rate, gl.maximum(to_end, 0)) * recurrence.write_scale
    if OPTIONS.SEGMENTED and not HAS_OUT:
        # against the direction of time: to the end of the piece
        beyond = chunk * SIDE if REVERSE else recurrence.piece.length - count - chunk * SIDE
        fading *= _factor(rate, beyond)
        kept = 1.0
    return fading, kept


@gluon.jit
def _start_reads(low, high, k_low, k_high, q_low, q_high, HALVES: gl.constexpr):
    """Start the products of reads with keys, and with the rounded state: ``(scores, out)``."""
    dtype: gl.constexpr = k_low.dtype
    zeros = gl.zeros([SIDE, SIDE], gl.float32, ACC)
    scores = hopper.warpgroup_mma(k_low, q_low, zeros, use_acc=False, is_async=True)
    if HALVES == 2:
        scores = hopper.warpgroup_mma(k_high, q_high, scores, is_async=True)
    state = gl.convert_layout(low.to(dtype), LEFT)
    out = hopper.warpgroup_mma(state, q_low, zeros, use_acc=False, is_async=True)
    if HALVES == 2:
        state = gl.convert_layout(high.to(dtype), LEFT)
        out = hopper.warpgroup_mma(state, q_high, out, is_async=True)
    return scores, out


@gluon.jit
def _add_scores(
    W: gl.constexpr,
    pipeline,
    recurrence,
    scores,
    out,
    weights,
    v_t,
    count,
    HALVES: gl.constexpr,
    REVERSE: gl.constexpr,
):
    """Weight scores and out, and start the product of values and scores: ``out``."""
    scores = hopper.warpgroup_mma_wait(HALVES, deps=(scores,))
    pipeline.scores.index(W).store((scores * weights).to(v_t.dtype))
    hopper.fence_async_shared()
    ends = pipeline.until if REVERSE else pipeline.since
    arrival = ends.index(W).load(gl.SliceLayout(0, ACC))  # [SIDE]
    if REVERSE:  # noqa: SIM102
        if count < SIDE:
            tokens = gl.arange(0, SIDE, gl.SliceLayout(0, ACC))
            to_end = gl.maximum(count - 1 - tokens, 0)
            arrival = _factor(recurrence.rate, to_end) * recurrence.read_scale
    out = hopper.warpgroup_mma_wait(0, deps=(out,))
    out = out * arrival[None, :]
    return hopper.warpgroup_mma(v_t, pipeline.scores.index(W), out, is_async=True)


@gluon.jit
def _terms(v_t, fading, TERMS: gl.constexpr):
    """Return the faded values as one or two numbers of 16 bits each; a single one comes twice."""
    dtype: gl.constexpr = v_t.dtype
    faded = v_t.to(gl.float32) * fading[None, :]  # [SIDE of E, SIDE]
    if TERMS == 2:
        # the upper half of a number's bits is one of 16 bits
        upper = (faded.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
        rest = (faded - upper).to(dtype)
        return upper.to(dtype), rest
    upper = faded.to(dtype)
    return upper, upper


@gluon.jit
def _start_write(upper, rest, k, TERMS: gl.constexpr):
    """Start the products of faded values and keys.

    What is added to the state has an accumulator of its own: tensor cores cut sums off.
    """
    zeros = gl.zeros([SIDE, SIDE], gl.float32, ACC)
    written = hopper.warpgroup_mma(upper, k, zeros, use_acc=False, is_async=True)
    if TERMS == 2:
        written = hopper.warpgroup_mma(rest, k, written, is_async=True)
    return written


@gluon.jit
def _send(out_desc, staging, out, piece, row, col, RAGGED: gl.constexpr):
    """Send the output of a chunk on its way, through shared memory."""
    tma.store_wait(0)
    staging.reshape([SIDE, SIDE]).permute((1, 0)).store(out.to(staging.dtype))
    hopper.fence_async_shared()
    copy_out(out_desc, _panel(piece, row, col, RAGGED), staging)


@gluon.jit
def _consume(
    W: gl.constexpr, maps, pipeline, recurrence, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Walk with 64 columns of the state, those of warpgroup ``W``."""
    HALVES: gl.constexpr = TILE.HALVES
    STAGES: gl.constexpr = TILE.STAGES
    TERMS: gl.constexpr = OPTIONS.TERMS
    REVERSE: gl.constexpr = OPTIONS.REVERSE
    PARTIES: gl.constexpr = 128 * TILE.WARPGROUPS + 32
    HAS_OUT: gl.constexpr = maps.out is not None
    piece = recurrence.piece
    first_col = piece.first_col + W * SIDE
    cols_e = (first_col + gl.arange(0, SIDE, gl.SliceLayout(1, ACC)))[:, None]  # [SIDE, 1]
    rows_d = gl.arange(0, SIDE, gl.SliceLayout(0, ACC))[None, :]  # [1, SIDE]
    low, high = _first_state(recurrence, cols_e, rows_d, OPTIONS, HALVES)  # [SIDE, SIDE] each
    weights = _weights(W, pipeline, recurrence, REVERSE)  # [SIDE, SIDE]
    for step in range(piece.chunks):
        chunk = _chunk(step, piece.chunks, HAS_OUT, OPTIONS)
        stage = step % STAGES
        count = gl.minimum(SIDE, piece.length - chunk * SIDE)
        fading, kept = _fading(W, pipeline, recurrence, chunk, count, HAS_OUT, OPTIONS)
        k_low = pipeline.key.index(stage * HALVES).reshape([SIDE, SIDE])
        k_high = pipeline.key.index(stage * HALVES + HALVES - 1).reshape([SIDE, SIDE])
        v = pipeline.value.index(stage * TILE.WARPGROUPS + W).reshape([SIDE, SIDE])
        mbarrier.wait(pipeline.full.index(stage), step // STAGES & 1)
        if HAS_OUT:
            q_low = pipeline.read.index(stage * HALVES)
            q_low = q_low.reshape([SIDE, SIDE]).permute((1, 0))
            q_high = pipeline.read.index(stage * HALVES + HALVES - 1)
            q_high = q_high.reshape([SIDE, SIDE]).permute((1, 0))
            scores, out = _start_reads(low, high, k_low, k_high, q_low, q_high, HALVES)
        v_t = v.permute((1, 0)).load(LEFT)  # [SIDE of E, SIDE]
        upper, rest = _terms(v_t, fading, TERMS)
        if HAS_OUT:
            out = _add_scores(
                W, pipeline, recurrence, scores, out, weights, v_t, count, HALVES, REVERSE
            )
        written = _start_write(upper, rest, k_low, TERMS)
        if HAS_OUT:
            out = hopper.warpgroup_mma_wait(TERMS, deps=(out,))
        if HALVES == 2:
            written_high = _start_write(upper, rest, k_high, TERMS)
        if HAS_OUT:
            row = chunk * SIDE
            _send(maps.out, pipeline.out.index(W), out, piece, row, first_col, OPTIONS.RAGGED)
        if HALVES == 2:
            written = hopper.warpgroup_mma_wait(TERMS, deps=(written,))
            low = low * kept + written
            written_high = hopper.warpgroup_mma_wait(0, deps=(written_high,))
            high = high * kept + written_high
        else:
            written = hopper.warpgroup_mma_wait(0, deps=(written,))
            low = low * kept + written
        barrier_arrive(EMPTY + stage, PARTIES, 4)
    if recurrence.last_ptr is not None:
        _keep_state(recurrence, low, high, cols_e, rows_d, OPTIONS, HALVES)
    if HAS_OUT:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=Numbers._fields, do_not_specialize_on_alignment=Tensors._fields)
def hopper_walk_kernel(
    key_desc, value_desc, read_desc, out_desc, out_ptr, decay_ptr, first_ptr, last_ptr,
    cu_seqlens_ptr, slots_ptr, has_first_ptr,
    read_scale, write_scale,
    batch, heads, tokens, size, pieces,
    stride_first_b, stride_first_s, stride_first_h, stride_first_d, stride_first_e,
    stride_last_b, stride_last_s, stride_last_h, stride_last_d, stride_last_e,
    D: gl.constexpr, E: gl.constexpr, REVERSE: gl.constexpr, SEGMENTED: gl.constexpr,
    SKIP: gl.constexpr, RAGGED: gl.constexpr, TERMS: gl.constexpr,
    HALVES: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``out_i = read_i S_i``, where ``S_i = exp(-s) S_(i-1) + key_i^T value_i``.

    A program walks one piece of tokens for some columns of the state of one head: one warp copies,
    one or two warpgroups multiply.
    """
    OPTIONS: gl.constexpr = Options(D, E, REVERSE, SEGMENTED, SKIP, RAGGED, TERMS)
    TILE: gl.constexpr = Tile(HALVES, WARPGROUPS, STAGES)
    WIDTH: gl.constexpr = SIDE * WARPGROUPS
    SPLITS: gl.constexpr = (E + WIDTH - 1) // WIDTH
    pid = gl.program_id(0)
    first_col = pid % SPLITS * WIDTH
    head = pid // SPLITS % heads
    number = pid // SPLITS // heads
    found = _locate(cu_seqlens_ptr, number, Lengths(batch, tokens, size, pieces), SEGMENTED)
    sequence = found.sequence
    length = gl.maximum(found.length, 0)
    head_64 = head.to(gl.int64)
    is_real = (sequence >= 0) & (sequence < batch)
    slot = gl.where(is_real, sequence, -1).to(gl.int64)
    if slots_ptr is not None:
        slot = gl.load(slots_ptr + sequence, mask=is_real, other=-1).to(gl.int64)
    if RAGGED and out_desc is not None:  # noqa: SIM102  (constants, then a number)
        if slot < 0:
            _clear_padding(
                out_ptr,
                cu_seqlens_ptr,
                found,
                batch,
                heads,
                head_64,
                first_col,
                OPTIONS,
                WARPGROUPS,
            )
    if SKIP:
        # nobody asks for what the last segment writes
        if REVERSE:
            is_last = found.begin == found.start
        else:
            is_last = found.begin + length == found.end
        length = gl.where(is_last, 0, length)
    length = gl.where(slot < 0, 0, length)
    has_last = slot >= 0
    has_first = slot >= 0
    if SEGMENTED:
        has_last &= length > 0
        has_first &= length > 0
    if has_first_ptr is not None:
        has_first &= gl.load(has_first_ptr + sequence, mask=slot >= 0, other=0) != 0
    state_b = slot
    if SEGMENTED:
        state_b = sequence.to(gl.int64) if not RAGGED else slot * 0
    if first_ptr is not None:
        first_ptr += state_b * stride_first_b + found.index.to(gl.int64) * stride_first_s
        first_ptr += head_64 * stride_first_h
    if last_ptr is not None:
        last_ptr += state_b * stride_last_b + found.index.to(gl.int64) * stride_last_s
        last_ptr += head_64 * stride_last_h
    rate = gl.minimum(gl.load(decay_ptr + head), LARGEST_RATE) * LOG2E
    chunks = gl.cdiv(length, SIDE)

    maps = Maps(out_desc, key_desc, value_desc, read_desc)
    piece = Piece(sequence, head, found.begin, length, chunks, first_col)
    recurrence = Recurrence(
        rate,
        first_ptr,
        last_ptr,
        has_first,
        has_last,
        read_scale,
        write_scale,
        piece,
        stride_first_d,
        stride_first_e,
        stride_last_d,
        stride_last_e,
    )
    pipeline = _memory(maps, TILE)
    hopper.fence_async_shared()
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, maps, pipeline, recurrence, OPTIONS, TILE)),
                (_consume, (1, maps, pipeline, recurrence, OPTIONS, TILE)),
                (_produce, (maps, pipeline, piece, OPTIONS, TILE)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, maps, pipeline, recurrence, OPTIONS, TILE)),
                (_produce, (maps, pipeline, piece, OPTIONS, TILE)),
            ],
            [1],
            [24],
        )
