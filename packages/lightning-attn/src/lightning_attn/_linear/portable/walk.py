"""The walk: the recurrence over chunks of tokens, with the state in registers.

Every token adds ``key^T value`` to a decaying state, and then reads ``read . state``. One program
owns some columns of the state of one head, and walks the chunks of one piece of tokens. For a chunk
of C tokens, counted from 0, with the state S before the chunk::

    out_i = sum_{j <= i} exp(-s (i - j)) (read_i . key_j) value_j  +  exp(-s (i + 1)) read_i S
    S     = exp(-s C) S  +  sum_j exp(-s (C - 1 - j)) key_j^T value_j

No exponent is positive, so every factor is at most 1 and none can overflow.

With (read, key, value) = (q, k, v) this is the forward pass, with (dout, v, k) it is dq. From the
last token to the first it is dv with (k, q, dout), and dk with (v, dout, q): the state is then the
gradient of the state, and decays after a token reads, not before it writes. A state is transposed
by swapping its strides.

The state is kept transposed, [E, D], in registers, so that the products that write it and the
products that read it need no change of layout.

The sequential schedule gives a whole sequence to a program. The parallel schedule cuts sequences
into segments: a walk without reads computes each segment's contribution, :mod:`.combine` turns
these into the state before each segment, and a second walk computes all segments at once.
"""

import triton
import triton.language as tl

from ..._linked.portable.primitives import dot, settle
from .primitives import (
    clear_rows,
    dot_add,
    dot_apart,
    factor,
    load_rows,
    locate,
    rate_of,
    slot_of,
    state_pointers,
)
from .structures import (
    Lengths,
    Output,
    Products,
    StateMemory,
    WalkNumbers,
    WalkOptions,
    WalkTensors,
    WalkTile,
)


@triton.jit
def _clear_padding(
    out,
    cu_seqlens_ptr,
    found,
    begin,
    batch,
    cols,
    OPTIONS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store zeros to the output of rows that belong to no sequence."""
    clear_rows(out, begin, found.length, cols, OPTIONS.E, TILE)
    if cu_seqlens_ptr is not None and not OPTIONS.SEGMENTED:
        # the program of the padding after all sequences also clears the padding before them
        ahead = tl.where(found.sequence == batch, tl.load(cu_seqlens_ptr), 0)
        clear_rows(out, 0, ahead, cols, OPTIONS.E, TILE)


@triton.jit
def _first_state(first, has_first_ptr, found, owner, head, cols, rows_d, inside, D: tl.constexpr):
    """Return the state before a piece, [E, D]."""
    is_there = inside
    if has_first_ptr is not None:
        there = tl.where(tl.load(has_first_ptr + found.sequence) != 0, D, 0)
        is_there = inside & (rows_d < there)[None, :]
    pointers = state_pointers(first, owner, found.index, head, cols, rows_d)
    return tl.load(pointers, mask=is_there, other=0.0)


@triton.jit
def _weights(rate, index, read_scale, write_scale, REVERSE: tl.constexpr):
    """Return the factors of a chunk's scores, [C, C]."""
    # distance from the token of a row to the token of a column; negative distances are masked
    apart = index[None, :] - index[:, None]
    if REVERSE:
        apart = -apart
    weights = factor(rate, tl.maximum(apart, 0)) * (read_scale * write_scale)
    return tl.where(apart >= 0, weights, 0.0)


@triton.jit
def _read(state, k, v_t, q, arrival, weights, PRODUCTS: tl.constexpr):
    """Return the reads of a chunk's tokens, from the state and from each other, [E, C]."""
    q_t = tl.trans(q)  # [D, C]
    zeros = tl.zeros([state.shape[0], q.shape[0]], tl.float32)  # [E, C]
    out = dot_add(zeros, state, q_t, q_t.dtype, PRODUCTS) * arrival[None, :]
    scores = dot(k, q_t, PRODUCTS.PRECISION, PRODUCTS.UPCAST) * weights  # [C, C]
    return dot_add(out, v_t, scores, v_t.dtype, PRODUCTS)


@triton.jit
def _written(v_t, k, fading, PRODUCTS: tl.constexpr):
    """Return ``(fading * v_t) @ k``, [E, D], with values as one or two numbers of 16 bits."""
    faded = v_t.to(tl.float32) * fading[None, :]
    if PRODUCTS.NARROW and PRODUCTS.TERMS == 2:
        # the upper half of a number's bits is a 16-bit number
        upper = (faded.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        written = dot_apart(upper, k, v_t.dtype, PRODUCTS)
        return dot_add(written, faded - upper, k, v_t.dtype, PRODUCTS)
    return dot_apart(faded, k, v_t.dtype, PRODUCTS)


@triton.jit(
    do_not_specialize=WalkNumbers._fields, do_not_specialize_on_alignment=WalkTensors._fields
)
def walk_kernel(
    key_ptr,
    value_ptr,
    read_ptr,
    out_ptr,
    decay_ptr,
    first_ptr,
    last_ptr,
    cu_seqlens_ptr,
    slots_ptr,
    has_first_ptr,
    read_scale,
    write_scale,
    batch,
    heads,
    tokens,
    size,
    pieces,
    stride_rb,
    stride_rs,
    stride_rh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_first_b,
    stride_first_s,
    stride_first_h,
    stride_first_d,
    stride_first_e,
    stride_last_b,
    stride_last_s,
    stride_last_h,
    stride_last_d,
    stride_last_e,
    D: tl.constexpr,
    E: tl.constexpr,
    REVERSE: tl.constexpr,
    SEGMENTED: tl.constexpr,
    SETTLE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ROW_BYTES_V: tl.constexpr,
    TERMS: tl.constexpr,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``out_i = read_i S_i``, where ``S_i = exp(-s) S_(i-1) + key_i^T value_i``.

    A program walks the chunks of one piece of tokens, for some columns of the state of one head.
    """
    OPTIONS: tl.constexpr = WalkOptions(D, E, REVERSE, SEGMENTED, SETTLE)
    TILE: tl.constexpr = WalkTile(BLOCK_D, BLOCK_E, CHUNK, ROW_BYTES, ROW_BYTES_V)
    PRODUCTS: tl.constexpr = Products(TERMS, NARROW, PRECISION, UPCAST)
    # the state is kept transposed: its rows are columns of the values
    first = StateMemory(
        first_ptr, stride_first_b, stride_first_s, stride_first_h, stride_first_e, stride_first_d
    )
    last = StateMemory(
        last_ptr, stride_last_b, stride_last_s, stride_last_h, stride_last_e, stride_last_d
    )
    SPLITS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    pid = tl.program_id(0)
    first_col = pid % SPLITS * BLOCK_E
    head = pid // SPLITS % heads
    piece = pid // SPLITS // heads
    found = locate(cu_seqlens_ptr, piece, Lengths(batch, tokens, size, pieces), SEGMENTED)
    length = found.length
    if SEGMENTED and length <= 0:
        return
    index = tl.arange(0, CHUNK)  # [C]
    rows_d = tl.arange(0, BLOCK_D)  # [D]
    cols = first_col + tl.arange(0, BLOCK_E)  # [E]
    sequence_64 = found.sequence.to(tl.int64)
    head_64 = head.to(tl.int64)
    out_begin = found.begin.to(tl.int64)
    if cu_seqlens_ptr is None:
        out_begin += sequence_64 * tokens
    slot = slot_of(slots_ptr, found.sequence, batch)
    if slot < 0:
        if out_ptr is not None:
            whole = Output(out_ptr, heads, head_64)
            _clear_padding(whole, cu_seqlens_ptr, found, out_begin, batch, cols, OPTIONS, TILE)
        return
    if cu_seqlens_ptr is not None:
        sequence_64 = tl.zeros([], tl.int64)
    if SEGMENTED:
        owner = sequence_64
    else:
        owner = slot

    inside_state = (cols < E)[:, None] & (rows_d < D)[None, :]  # [E, D]
    state = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)  # [E, D]
    if first_ptr is not None:
        state = _first_state(
            first, has_first_ptr, found, owner, head_64, cols, rows_d, inside_state, D
        )

    origin = found.begin.to(tl.int64)
    k_base = key_ptr + sequence_64 * stride_kb + origin * stride_ks + head_64 * stride_kh
    v_base = value_ptr + sequence_64 * stride_vb + origin * stride_vs + head_64 * stride_vh
    if out_ptr is not None:
        q_base = read_ptr + sequence_64 * stride_rb + origin * stride_rs + head_64 * stride_rh
        # out is contiguous: [tokens, heads, E]
        out_base = out_ptr + (out_begin * heads + head) * E
        stride_out = heads * E

    rate = rate_of(decay_ptr, head)
    weights = _weights(rate, index, read_scale, write_scale, REVERSE)  # [C, C]
    last_chunk = tl.maximum(length - 1, 0) // CHUNK * CHUNK
    for walked in tl.range(0, length, CHUNK):
        done = walked
        if REVERSE:
            done = last_chunk - walked
        rows = done + index
        inside = rows < length
        count = tl.minimum(CHUNK, length - done)
        k = load_rows(k_base, rows, stride_ks, inside, rows_d, D, ROW_BYTES)  # [C, D]
        v = load_rows(v_base, rows, stride_vs, inside, cols, E, ROW_BYTES_V)  # [C, E]
        v_t = tl.trans(v)  # [E, C]
        # tokens from each token to the end of the chunk, and from its beginning
        until = tl.maximum(count - 1 - index, 0)  # [C]
        since = index + 1  # [C]
        if out_ptr is not None:
            q = load_rows(q_base, rows, stride_rs, inside, rows_d, D, ROW_BYTES)  # [C, D]
            arrival = factor(rate, until if REVERSE else since) * read_scale  # [C]
            out = _read(state, k, v_t, q, arrival, weights, PRODUCTS)  # [E, C]
            begins = out_base + rows.to(tl.int64)[None, :] * stride_out
            begins = tl.multiple_of(begins, [ROW_BYTES_V, ROW_BYTES_V])
            mask = inside[None, :] & (cols < E)[:, None]
            tl.store(begins + cols[:, None], out.to(out_ptr.dtype.element_ty), mask=mask)
        fading = factor(rate, since if REVERSE else until) * write_scale  # [C]
        written = _written(v_t, k, fading, PRODUCTS)  # [E, D]
        state = state * factor(rate, count) + settle(written, SETTLE)

    if last_ptr is not None:
        pointers = state_pointers(last, owner, found.index, head_64, cols, rows_d)
        tl.store(pointers, state, mask=inside_state)
