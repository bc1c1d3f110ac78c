"""The walk on Hopper: one warp copies, one or two warpgroups multiply; see :mod:`.walk`.

A warpgroup owns 64 columns of the state of one head, turned, in registers, and goes through the
chunks by itself: beside its arithmetic run the products of the other one. All tiles are panels of
64 tokens by 64 columns. Of a chunk, with everything turned ([columns, tokens])::

    scores   = k q^T, weighted, rounded and left in shared memory
    out      = state q^T  (the state rounded, from registers), weighted, + v^T scores
    state    = faded state + (faded v)^T k
"""

from ..common import NUMBERS, POINTERS
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

# tokens of a chunk, and columns of a panel
SIDE = gl.constexpr(64)
# as in ``primitives``
LARGEST_RATE = gl.constexpr(1.0e4)


@gluon.jit
def _factor(rate, distance):
    """Return what is left after a number of tokens: at most 1."""
    return gl.exp2(-rate * distance.to(gl.float32))


@gluon.jit
def _locate(cu_seqlens_ptr, piece, batch, tokens, size, pieces, SEGMENTED: gl.constexpr):
    """Return ``(sequence, its bounds, first row, length, index)``, as ``primitives.locate``."""
    if cu_seqlens_ptr is None:
        start = piece * 0
        end = tokens
        sequence = piece // gl.maximum(pieces, 1)
        index = piece % gl.maximum(pieces, 1)
        begin = index * size
        length = gl.minimum(size, tokens - begin)
    elif SEGMENTED:
        sequence = -1
        for first in range(0, batch + 1, SEARCH_CHUNK):
            slots = first + gl.arange(0, SEARCH_CHUNK, gl.BlockedLayout([1], [32], [4], [0]))
            start = gl.load(cu_seqlens_ptr + slots, mask=slots <= batch, other=0)
            mine = (start // size + slots < piece) & (slots <= batch)
            sequence += gl.sum(mine.to(gl.int32), 0)
        start = gl.load(cu_seqlens_ptr + sequence, mask=sequence >= 0, other=0)
        end = gl.load(cu_seqlens_ptr + sequence + 1, mask=sequence < batch, other=tokens)
        begin = start + (piece - (start // size + sequence + 1)) * size
        length = gl.minimum(size, end - begin)
        index = piece
    else:
        sequence = piece
        start = gl.load(cu_seqlens_ptr + gl.minimum(piece, batch))
        begin = start
        end = gl.load(cu_seqlens_ptr + piece + 1, mask=piece < batch, other=tokens)
        length = end - begin
        index = piece * 0
    return sequence, start, end, begin, length, index


@gluon.jit
def _panel(sequence, head, start, size, row, col, RAGGED: gl.constexpr):
    """Where a panel lies in a tensor map."""
    where = coordinates(sequence, head, start, size, row, RAGGED)
    return (where[0], where[1], where[2], where[3], col)


@gluon.jit
def _clear_rows(out_ptr, begin, length, heads, head, first_col, E: gl.constexpr):
    """Store zeros to 64 columns of rows of a contiguous ``[tokens, heads, E]``."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    index = gl.arange(0, SIDE, gl.SliceLayout(1, layout))
    cols = first_col + gl.arange(0, SIDE, gl.SliceLayout(0, layout))
    zeros = gl.zeros([SIDE, SIDE], out_ptr.dtype.element_ty, layout)
    for done in range(0, length, SIDE):
        rows = (begin + done + index).to(gl.int64)
        pointers = out_ptr + ((rows * heads + head) * E)[:, None] + cols[None, :]
        gl.store(pointers, zeros, mask=(done + index < length)[:, None] & (cols < E)[None, :])


@gluon.jit
def _produce(
    key_desc, value_desc, read_desc, k_s, v_s, q_s, full,
    sequence, head, begin, length, chunks, first_col,
    HALVES: gl.constexpr, BACKWARDS: gl.constexpr, RAGGED: gl.constexpr, WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy chunks into shared memory, in the order in which they are needed."""
    PARTIES: gl.constexpr = 128 * WARPGROUPS + 32
    HAS_OUT: gl.constexpr = read_desc is not None
    PANELS: gl.constexpr = HALVES * (2 if HAS_OUT else 1) + WARPGROUPS
    for step in range(chunks):
        chunk = step
        if BACKWARDS:
            chunk = chunks - 1 - step
        stage = step % STAGES
        arrived = full.index(stage)
        if step >= STAGES:
            barrier_sync(EMPTY + stage, PARTIES, 1)
        mbarrier.expect(arrived, PANELS * key_desc.block_type.nbytes)
        row = chunk * SIDE
        for h in gl.static_range(HALVES):
            where = _panel(sequence, head, begin, length, row, h * SIDE, RAGGED)
            copy_in(key_desc, where, arrived, k_s.index(stage * HALVES + h))
            if HAS_OUT:
                copy_in(read_desc, where, arrived, q_s.index(stage * HALVES + h))
        for w in gl.static_range(WARPGROUPS):
            where = _panel(sequence, head, begin, length, row, first_col + w * SIDE, RAGGED)
            copy_in(value_desc, where, arrived, v_s.index(stage * WARPGROUPS + w))
    # nobody may be left at a barrier
    for back in gl.static_range(STAGES):
        if chunks > back:
            barrier_sync(EMPTY + (chunks - 1 - back) % STAGES, PARTIES, 1)


@gluon.jit
def _consume(
    W: gl.constexpr, out_desc, k_s, v_s, q_s, scores_s, out_s, since_s, until_s, full, rate,
    first_ptr, last_ptr, has_first, has_last, read_scale, write_scale,
    sequence, head, begin, length, chunks, first_col,
    stride_first_d, stride_first_e, stride_last_d, stride_last_e,
    D: gl.constexpr, E: gl.constexpr, HALVES: gl.constexpr, REVERSE: gl.constexpr,
    BACKWARDS: gl.constexpr, RAGGED: gl.constexpr, TERMS: gl.constexpr, WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Walk with 64 columns of the state, those of warpgroup ``W``."""
    PARTIES: gl.constexpr = 128 * WARPGROUPS + 32
    HAS_OUT: gl.constexpr = out_desc is not None
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    dtype: gl.constexpr = k_s.dtype
    zeros = gl.zeros([SIDE, SIDE], gl.float32, ACC)
    first_col += W * SIDE
    cols_e = (first_col + gl.arange(0, SIDE, gl.SliceLayout(1, ACC)))[:, None]
    rows_d = gl.arange(0, SIDE, gl.SliceLayout(0, ACC))[None, :]
    low = zeros
    high = zeros
    if first_ptr is not None:
        pointers = first_ptr + cols_e.to(gl.int64) * stride_first_e
        pointers = pointers + rows_d.to(gl.int64) * stride_first_d
        there = (cols_e < E) & (rows_d < gl.where(has_first, D, 0))
        low = gl.load(pointers, mask=there, other=0.0)
        if HALVES == 2:
            there = (cols_e < E) & (rows_d + SIDE < gl.where(has_first, D, 0))
            high = gl.load(pointers + SIDE * stride_first_d, mask=there, other=0.0)
    tokens = gl.arange(0, SIDE, gl.SliceLayout(0, ACC))
    # what is left over the tokens between each one and the ends of a whole chunk, with the scale
    # of what it is for
    since_s.index(W).store(_factor(rate, tokens + 1) * (write_scale if REVERSE else read_scale))
    left = _factor(rate, SIDE - 1 - tokens)
    until_s.index(W).store(left * (read_scale if REVERSE else write_scale))
    # from the token of a row to that of a column; what lies the other way does not count
    apart = tokens[None, :] - gl.arange(0, SIDE, gl.SliceLayout(1, ACC))[:, None]
    if REVERSE:
        apart = -apart
    weights = _factor(rate, gl.maximum(apart, 0)) * (read_scale * write_scale)
    weights = gl.where(apart >= 0, weights, 0.0)
    for step in range(chunks):
        chunk = step
        if BACKWARDS:
            chunk = chunks - 1 - step
        stage = step % STAGES
        count = gl.minimum(SIDE, length - chunk * SIDE)
        kept = _factor(rate, count)
        fading = (since_s if REVERSE else until_s).index(W).load(gl.SliceLayout(0, LEFT))
        if not REVERSE:  # noqa: SIM102  (a constant, then a number)
            if count < SIDE:
                to_end = count - 1 - gl.arange(0, SIDE, gl.SliceLayout(0, LEFT))
                fading = _factor(rate, gl.maximum(to_end, 0)) * write_scale
        if BACKWARDS != REVERSE:
            # to the end of the piece
            beyond = chunk * SIDE if REVERSE else length - count - chunk * SIDE
            fading *= _factor(rate, beyond)
            kept = 1.0
        k_low = k_s.index(stage * HALVES).reshape([SIDE, SIDE])
        k_high = k_s.index(stage * HALVES + HALVES - 1).reshape([SIDE, SIDE])
        v = v_s.index(stage * WARPGROUPS + W).reshape([SIDE, SIDE])
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        if HAS_OUT:
            q_low = q_s.index(stage * HALVES).reshape([SIDE, SIDE]).permute((1, 0))
            q_high = q_s.index(stage * HALVES + HALVES - 1).reshape([SIDE, SIDE]).permute((1, 0))
            scores = hopper.warpgroup_mma(k_low, q_low, zeros, use_acc=False, is_async=True)
            if HALVES == 2:
                scores = hopper.warpgroup_mma(k_high, q_high, scores, is_async=True)
            state = gl.convert_layout(low.to(dtype), LEFT)
            out = hopper.warpgroup_mma(state, q_low, zeros, use_acc=False, is_async=True)
            if HALVES == 2:
                state = gl.convert_layout(high.to(dtype), LEFT)
                out = hopper.warpgroup_mma(state, q_high, out, is_async=True)
        v_t = v.permute((1, 0)).load(LEFT)
        faded = v_t.to(gl.float32) * fading[None, :]
        if TERMS == 2:
            # the upper half of a number's bits is one of 16 bits
            upper = (faded.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
            rest = (faded - upper).to(dtype)
            upper = upper.to(dtype)
        else:
            upper = faded.to(dtype)
        if HAS_OUT:
            scores = hopper.warpgroup_mma_wait(HALVES, deps=(scores,))
            scores_s.index(W).store((scores * weights).to(dtype))
            hopper.fence_async_shared()
            arrival = (until_s if REVERSE else since_s).index(W).load(gl.SliceLayout(0, ACC))
            if REVERSE:  # noqa: SIM102
                if count < SIDE:
                    arrival = _factor(rate, gl.maximum(count - 1 - tokens, 0)) * read_scale
            out = hopper.warpgroup_mma_wait(0, deps=(out,))
            out = out * arrival[None, :]
            out = hopper.warpgroup_mma(v_t, scores_s.index(W), out, is_async=True)
        written = hopper.warpgroup_mma(upper, k_low, zeros, use_acc=False, is_async=True)
        if TERMS == 2:
            written = hopper.warpgroup_mma(rest, k_low, written, is_async=True)
        if HAS_OUT:
            out = hopper.warpgroup_mma_wait(TERMS, deps=(out,))
        if HALVES == 2:
            written_high = hopper.warpgroup_mma(upper, k_high, zeros, use_acc=False, is_async=True)
            if TERMS == 2:
                written_high = hopper.warpgroup_mma(rest, k_high, written_high, is_async=True)
        if HAS_OUT:
            tma.store_wait(0)
            out_s.index(W).reshape([SIDE, SIDE]).permute((1, 0)).store(out.to(dtype))
            hopper.fence_async_shared()
            where = _panel(sequence, head, begin, length, chunk * SIDE, first_col, RAGGED)
            copy_out(out_desc, where, out_s.index(W))
        # what is added to the state has an accumulator of its own: tensor cores cut sums off
        if HALVES == 2:
            written = hopper.warpgroup_mma_wait(TERMS, deps=(written,))
            low = low * kept + written
            written_high = hopper.warpgroup_mma_wait(0, deps=(written_high,))
            high = high * kept + written_high
        else:
            written = hopper.warpgroup_mma_wait(0, deps=(written,))
            low = low * kept + written
        barrier_arrive(EMPTY + stage, PARTIES, 4)
    if last_ptr is not None:
        pointers = last_ptr + cols_e.to(gl.int64) * stride_last_e
        pointers = pointers + rows_d.to(gl.int64) * stride_last_d
        limit = gl.where(has_last, D, 0)
        gl.store(pointers, low, mask=(cols_e < E) & (rows_d < limit))
        if HALVES == 2:
            there = (cols_e < E) & (rows_d + SIDE < limit)
            gl.store(pointers + SIDE * stride_last_d, high, mask=there)
    if HAS_OUT:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def hopper_walk_kernel(
    key_desc, value_desc, read_desc, out_desc, out_ptr, decay_ptr, first_ptr, last_ptr,
    cu_seqlens_ptr, slots_ptr, has_first_ptr,
    read_scale, write_scale,
    batch, heads, tokens, size, pieces,
    stride_first_b, stride_first_s, stride_first_h, stride_first_d, stride_first_e,
    stride_last_b, stride_last_s, stride_last_h, stride_last_d, stride_last_e,
    D: gl.constexpr,
    E: gl.constexpr,
    HALVES: gl.constexpr,  # panels that hold a row of keys
    REVERSE: gl.constexpr,  # from the last token to the first
    SEGMENTED: gl.constexpr,
    SKIP: gl.constexpr,  # the state behind the last segment is not asked for
    TERMS: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Share out the work of a program: one producer, one or two consumers."""
    dtype: gl.constexpr = key_desc.dtype
    RAGGED: gl.constexpr = cu_seqlens_ptr is not None
    HAS_OUT: gl.constexpr = out_desc is not None
    # Where nobody reads, the order is free: a segment is left at the end at which the walk with
    # reads begins, whose rows the cache then still holds.
    BACKWARDS: gl.constexpr = REVERSE if HAS_OUT or not SEGMENTED else not REVERSE
    WIDTH: gl.constexpr = SIDE * WARPGROUPS
    SPLITS: gl.constexpr = (E + WIDTH - 1) // WIDTH
    pid = gl.program_id(0)
    first_col = pid % SPLITS * WIDTH
    head = pid // SPLITS % heads
    piece = pid // SPLITS // heads
    sequence, start, end, begin, length, place = _locate(
        cu_seqlens_ptr, piece, batch, tokens, size, pieces, SEGMENTED
    )
    length = gl.maximum(length, 0)
    head_64 = head.to(gl.int64)
    is_real = (sequence >= 0) & (sequence < batch)
    slot = gl.where(is_real, sequence, -1).to(gl.int64)
    if slots_ptr is not None:
        slot = gl.load(slots_ptr + sequence, mask=is_real, other=-1).to(gl.int64)
    if RAGGED and HAS_OUT:  # noqa: SIM102  (constants, then a number)
        if slot < 0:
            for w in gl.static_range(WARPGROUPS):
                col = first_col + w * SIDE
                _clear_rows(out_ptr, begin, length, heads, head_64, col, E)
                if not SEGMENTED:
                    # who clears what lies behind all sequences clears what lies ahead, too
                    ahead = gl.where(sequence == batch, gl.load(cu_seqlens_ptr), 0)
                    _clear_rows(out_ptr, begin * 0, ahead, heads, head_64, col, E)
    if SKIP:
        # nobody asks for what the last segment writes
        if REVERSE:
            is_last = begin == start
        else:
            is_last = begin + length == end
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
        first_ptr += state_b * stride_first_b + place.to(gl.int64) * stride_first_s
        first_ptr += head_64 * stride_first_h
    if last_ptr is not None:
        last_ptr += state_b * stride_last_b + place.to(gl.int64) * stride_last_s
        last_ptr += head_64 * stride_last_h
    rate = gl.minimum(gl.load(decay_ptr + head), LARGEST_RATE) * LOG2E
    chunks = gl.cdiv(length, SIDE)

    k_s = gl.allocate_shared_memory(dtype, [STAGES * HALVES, 1, 1, 1, 64, 64], key_desc.layout)
    v_s = gl.allocate_shared_memory(
        dtype, [STAGES * WARPGROUPS, 1, 1, 1, 64, 64], value_desc.layout
    )
    q_s = k_s
    scores_s = k_s
    out_s = k_s
    if HAS_OUT:
        q_s = gl.allocate_shared_memory(dtype, [STAGES * HALVES, 1, 1, 1, 64, 64], read_desc.layout)
        scores_s = gl.allocate_shared_memory(
            dtype, [WARPGROUPS, 64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
        )
        out_s = gl.allocate_shared_memory(dtype, [WARPGROUPS, 1, 1, 1, 64, 64], out_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    since_s = gl.allocate_shared_memory(gl.float32, [WARPGROUPS, 64], plain)
    until_s = gl.allocate_shared_memory(gl.float32, [WARPGROUPS, 64], plain)
    full = barriers(STAGES, 1)
    hopper.fence_async_shared()
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    0, out_desc, k_s, v_s, q_s, scores_s, out_s, since_s, until_s, full, rate,
                    first_ptr, last_ptr, has_first, has_last, read_scale, write_scale,
                    sequence, head, begin, length, chunks, first_col,
                    stride_first_d, stride_first_e, stride_last_d, stride_last_e,
                    D, E, HALVES, REVERSE, BACKWARDS, RAGGED, TERMS, WARPGROUPS, STAGES,
                )),
                (_consume, (
                    1, out_desc, k_s, v_s, q_s, scores_s, out_s, since_s, until_s, full, rate,
                    first_ptr, last_ptr, has_first, has_last, read_scale, write_scale,
                    sequence, head, begin, length, chunks, first_col,
                    stride_first_d, stride_first_e, stride_last_d, stride_last_e,
                    D, E, HALVES, REVERSE, BACKWARDS, RAGGED, TERMS, WARPGROUPS, STAGES,
                )),
                (_produce, (
                    key_desc, value_desc, read_desc, k_s, v_s, q_s, full, sequence, head, begin,
                    length, chunks, first_col, HALVES, BACKWARDS, RAGGED, WARPGROUPS, STAGES,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    0, out_desc, k_s, v_s, q_s, scores_s, out_s, since_s, until_s, full, rate,
                    first_ptr, last_ptr, has_first, has_last, read_scale, write_scale,
                    sequence, head, begin, length, chunks, first_col,
                    stride_first_d, stride_first_e, stride_last_d, stride_last_e,
                    D, E, HALVES, REVERSE, BACKWARDS, RAGGED, TERMS, WARPGROUPS, STAGES,
                )),
                (_produce, (
                    key_desc, value_desc, read_desc, k_s, v_s, q_s, full, sequence, head, begin,
                    length, chunks, first_col, HALVES, BACKWARDS, RAGGED, WARPGROUPS, STAGES,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip
