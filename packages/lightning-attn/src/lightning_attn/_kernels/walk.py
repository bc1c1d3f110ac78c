"""The walk: the recurrence over chunks of tokens, with the state in registers.

Every token writes a product ``key^T value`` to a state that decays, and reads ``read . state`` from
it, its own included. One program owns some columns of the state of one head, and walks the chunks
of one piece of tokens. Within a chunk of C tokens, counted from 0, with the state S that arrived::

    out_i = sum_{j <= i} exp(-s (i - j)) (read_i . key_j) value_j  +  exp(-s (i + 1)) read_i S
    S     = exp(-s C) S  +  sum_j exp(-s (C - 1 - j)) key_j^T value_j

Every exponent is a distance, at least 0, so every factor is at most 1 and none can overflow.

This is the forward pass with (q, k, v), and dq with (dout, v, k). Going from the last token to the
first it is dv with (k, q, dout), and dk with (v, dout, q): the state is then its own gradient, and
decays after a token has read, not before it writes. The transpose of a state has its strides
swapped.

The state is held turned, [E, D]: so products read it where others leave it, in registers.

The sequential schedule gives a whole sequence to a program. The parallel one cuts sequences into
segments: one walk without reads leaves each segment's own contribution, :mod:`.combine` turns those
into the state before each segment, and a second walk starts from there, all segments at once.
"""

import triton
import triton.language as tl

from ._linked.primitives import dot, settle
from .common import NUMBERS, POINTERS
from .primitives import (
    clear_rows,
    dot_add,
    dot_apart,
    factor,
    load_rows,
    locate,
    rate_of,
    slot_of,
    state_offsets,
)


@triton.jit
def _written(
    v_t, k, fading,
    TERMS: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return ``(fading * v_t) @ k``, the values as one or two numbers of 16 bits each."""
    faded = v_t.to(tl.float32) * fading[None, :]
    if NARROW and TERMS == 2:
        # the upper half of a number's bits is one of 16 bits
        upper = (faded.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        written = dot_apart(upper, k, v_t.dtype, NARROW, PRECISION)
        return dot_add(written, faded - upper, k, v_t.dtype, NARROW, PRECISION)
    return dot_apart(faded, k, v_t.dtype, NARROW, PRECISION)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def walk_kernel(
    key_ptr, value_ptr, read_ptr, out_ptr, decay_ptr, first_ptr, last_ptr,
    cu_seqlens_ptr, slots_ptr, has_first_ptr,
    read_scale, write_scale,
    batch, heads, tokens, size, pieces,
    stride_rb, stride_rs, stride_rh,
    stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh,
    stride_first_b, stride_first_s, stride_first_h, stride_first_d, stride_first_e,
    stride_last_b, stride_last_s, stride_last_h, stride_last_d, stride_last_e,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    ROW_BYTES: tl.constexpr,  # alignment of rows of reads and keys
    ROW_BYTES_V: tl.constexpr,
    REVERSE: tl.constexpr,  # from the last token to the first
    SEGMENTED: tl.constexpr,
    TERMS: tl.constexpr,
    NARROW: tl.constexpr,
    SETTLE: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter multiplies in fp32
):  # fmt: skip
    SPLITS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    pid = tl.program_id(0)
    first_col = pid % SPLITS * BLOCK_E
    head = pid // SPLITS % heads
    piece = pid // SPLITS // heads
    sequence, begin, length, place = locate(
        cu_seqlens_ptr, piece, batch, tokens, size, pieces, SEGMENTED
    )
    if SEGMENTED and length <= 0:
        return
    index = tl.arange(0, CHUNK)
    rows_d = tl.arange(0, BLOCK_D)
    cols = first_col + tl.arange(0, BLOCK_E)
    sequence_64 = sequence.to(tl.int64)
    head_64 = head.to(tl.int64)
    out_begin = begin.to(tl.int64)
    if cu_seqlens_ptr is None:
        out_begin += sequence_64 * tokens
    slot = slot_of(slots_ptr, sequence, batch)
    if slot < 0:
        if out_ptr is not None:
            clear_rows(out_ptr, out_begin, length, heads, head_64, cols, E, BLOCK_E, CHUNK)
            if cu_seqlens_ptr is not None and not SEGMENTED:
                # what lies ahead of the first sequence is the business of those who clear the rest
                ahead = tl.where(sequence == batch, tl.load(cu_seqlens_ptr), 0)
                clear_rows(out_ptr, 0, ahead, heads, head_64, cols, E, BLOCK_E, CHUNK)
        return
    if cu_seqlens_ptr is not None:
        sequence_64 = tl.zeros([], tl.int64)
    if SEGMENTED:
        state_b = sequence_64
    else:
        state_b = slot

    inside_state = (cols < E)[:, None] & (rows_d < D)[None, :]
    state = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    if first_ptr is not None:
        is_there = inside_state
        if has_first_ptr is not None:
            there = tl.where(tl.load(has_first_ptr + sequence) != 0, D, 0)
            is_there = inside_state & (rows_d < there)[None, :]
        first_base = first_ptr + state_b * stride_first_b + place.to(tl.int64) * stride_first_s
        first_base += head_64 * stride_first_h
        offsets = state_offsets(cols, rows_d, stride_first_e, stride_first_d)
        state = tl.load(first_base + offsets, mask=is_there, other=0.0)

    origin = begin.to(tl.int64)
    k_base = key_ptr + sequence_64 * stride_kb + origin * stride_ks + head_64 * stride_kh
    v_base = value_ptr + sequence_64 * stride_vb + origin * stride_vs + head_64 * stride_vh
    if out_ptr is not None:
        q_base = read_ptr + sequence_64 * stride_rb + origin * stride_rs + head_64 * stride_rh
        # out is contiguous: [tokens, heads, E]
        out_base = out_ptr + (out_begin * heads + head) * E
        stride_out = heads * E

    rate = rate_of(decay_ptr, head)
    # from the token of a row to that of a column; what lies the other way does not count
    apart = index[None, :] - index[:, None]
    if REVERSE:
        apart = -apart
    weights = factor(rate, tl.maximum(apart, 0)) * (read_scale * write_scale)
    weights = tl.where(apart >= 0, weights, 0.0)  # [C, C]
    last_chunk = tl.maximum(length - 1, 0) // CHUNK * CHUNK
    for walked in tl.range(0, length, CHUNK):
        done = walked
        if REVERSE:
            done = last_chunk - walked
        rows = done + index
        inside = rows < length
        count = tl.minimum(CHUNK, length - done)
        k = load_rows(k_base, rows, stride_ks, inside, rows_d, D, ROW_BYTES)  # [C, D]
        v = load_rows(v_base, rows, stride_vs, inside, cols, E, ROW_BYTES_V)
        v_t = tl.trans(v)  # [E, C]
        # tokens between each one and the ends of the chunk
        until = tl.maximum(count - 1 - index, 0)
        since = index + 1
        if out_ptr is not None:
            q = load_rows(q_base, rows, stride_rs, inside, rows_d, D, ROW_BYTES)
            q_t = tl.trans(q)  # [D, C]
            arrival = factor(rate, until if REVERSE else since) * read_scale
            zeros = tl.zeros([BLOCK_E, CHUNK], tl.float32)
            out = dot_add(zeros, state, q_t, q_t.dtype, NARROW, PRECISION) * arrival[None, :]
            scores = dot(k, q_t, PRECISION, UPCAST) * weights  # [C, C]
            out = dot_add(out, v_t, scores, v_t.dtype, NARROW, PRECISION)  # [E, C]
            begins = out_base + rows.to(tl.int64)[None, :] * stride_out
            begins = tl.multiple_of(begins, [ROW_BYTES_V, ROW_BYTES_V])
            mask = inside[None, :] & (cols < E)[:, None]
            tl.store(begins + cols[:, None], out.to(out_ptr.dtype.element_ty), mask=mask)
        fading = factor(rate, since if REVERSE else until) * write_scale
        written = _written(v_t, k, fading, TERMS, NARROW, PRECISION)
        state = state * factor(rate, count) + settle(written, SETTLE)

    if last_ptr is not None:
        last_base = last_ptr + state_b * stride_last_b + place.to(tl.int64) * stride_last_s
        last_base += head_64 * stride_last_h
        offsets = state_offsets(cols, rows_d, stride_last_e, stride_last_d)
        tl.store(last_base + offsets, state, mask=inside_state)
