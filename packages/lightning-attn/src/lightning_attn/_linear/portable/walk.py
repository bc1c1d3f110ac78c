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

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import entry
from ..._linked.portable.primitives import dot, pointer_to, settle
from .arguments import Numbers, Options, Rows, RowStrides, Tensors, WalkTile
from .primitives import clear_rows, dot_add, dot_apart, factor, load_rows, locate, rate_of, slot_of
from .structures import Output


@triton.jit
def _clear_padding(
    out, tensors, found, begin, batch, cols, OPTIONS: tl.constexpr, TILE: tl.constexpr
):
    """Store zeros to the output of rows that belong to no sequence."""
    clear_rows(out, begin, found.length, cols, OPTIONS.E, TILE)
    if tensors.cu_seqlens_ptr is not None and not OPTIONS.SEGMENTED:
        # the program of the padding after all sequences also clears the padding before them
        ahead = tl.where(found.sequence == batch, tl.load(tensors.cu_seqlens_ptr), 0)
        clear_rows(out, 0, ahead, cols, OPTIONS.E, TILE)


@triton.jit
def _state_pointers(ptr, strides, owner, index, head, rows_d, cols):
    """Return the pointers of a tile of the state of a piece, [E, D]."""
    base = ptr + owner * strides.batch + index.to(tl.int64) * strides.token + head * strides.head
    offsets = cols.to(tl.int64)[:, None] * strides.e + rows_d.to(tl.int64)[None, :] * strides.d
    return base + offsets


@triton.jit
def _first_state(pointers, has_first_ptr, sequence, rows_d, inside, D: tl.constexpr):
    """Return the state before a piece, [E, D]."""
    if has_first_ptr is not None:
        there = tl.where(tl.load(has_first_ptr + sequence) != 0, D, 0)
        inside = inside & (rows_d < there)[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _weights(rate, index, scales, REVERSE: tl.constexpr):
    """Return the factors of a chunk's scores, [C, C]."""
    # distance from the token of a row to the token of a column; negative distances are masked
    apart = index[None, :] - index[:, None]
    if REVERSE:
        apart = -apart
    weights = factor(rate, tl.maximum(apart, 0)) * (scales.read * scales.write)
    return tl.where(apart >= 0, weights, 0.0)


@triton.jit
def _read(state, k, v_t, q, arrival, weights, TILE: tl.constexpr):
    """Return the reads of a chunk's tokens, from the state and from each other, [E, C]."""
    q_t = tl.trans(q)  # [D, C]
    zeros = tl.zeros([state.shape[0], q.shape[0]], tl.float32)  # [E, C]
    out = dot_add(zeros, state, q_t, q_t.dtype, TILE) * arrival[None, :]
    scores = dot(k, q_t, TILE.PRECISION, TILE.UPCAST) * weights  # [C, C]
    return dot_add(out, v_t, scores, v_t.dtype, TILE)


@triton.jit
def _written(v_t, k, fading, TILE: tl.constexpr):
    """Return ``(fading * v_t) @ k``, [E, D], with values as one or two numbers of 16 bits."""
    faded = v_t.to(tl.float32) * fading[None, :]
    if TILE.NARROW and TILE.TERMS == 2:
        # the upper half of a number's bits is a 16-bit number
        upper = (faded.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        written = dot_apart(upper, k, v_t.dtype, TILE)
        return dot_add(written, faded - upper, k, v_t.dtype, TILE)
    return dot_apart(faded, k, v_t.dtype, TILE)


@entry(triton.jit)
def walk_kernel(
    rows: Rows,
    tensors: Tensors,
    numbers: Numbers,
    strides: RowStrides,
    OPTIONS: Options,
    TILE: WalkTile,
):
    """``out_i = read_i S_i``, where ``S_i = exp(-s) S_(i-1) + key_i^T value_i``.

    A program walks the chunks of one piece of tokens, for some columns of the state of one head.
    """
    SPLITS: tl.constexpr = (OPTIONS.E + TILE.BLOCK_E - 1) // TILE.BLOCK_E
    lengths, scales = numbers.lengths, numbers.scales
    key, value, read = strides.key, strides.value, strides.read
    pid = tl.program_id(0)
    first_col = pid % SPLITS * TILE.BLOCK_E
    head = pid // SPLITS % lengths.heads
    piece = pid // SPLITS // lengths.heads
    found = locate(tensors.cu_seqlens_ptr, piece, lengths, OPTIONS.SEGMENTED)
    length = found.length
    if OPTIONS.SEGMENTED and length <= 0:
        return
    index = tl.arange(0, TILE.CHUNK)  # [C]
    rows_d = tl.arange(0, TILE.BLOCK_D)  # [D]
    cols = first_col + tl.arange(0, TILE.BLOCK_E)  # [E]
    sequence_64 = found.sequence.to(tl.int64)
    head_64 = head.to(tl.int64)
    out_begin = found.begin.to(tl.int64)
    if tensors.cu_seqlens_ptr is None:
        out_begin += sequence_64 * lengths.tokens
    slot = slot_of(tensors.slots_ptr, found.sequence, lengths.batch)
    if slot < 0:
        if rows.out_ptr is not None:
            whole = Output(rows.out_ptr, lengths.heads, head_64)
            _clear_padding(whole, tensors, found, out_begin, lengths.batch, cols, OPTIONS, TILE)
        return
    if tensors.cu_seqlens_ptr is not None:
        sequence_64 = tl.zeros([], tl.int64)
    if OPTIONS.SEGMENTED:
        owner = sequence_64
    else:
        owner = slot

    inside_state = (cols < OPTIONS.E)[:, None] & (rows_d < OPTIONS.D)[None, :]  # [E, D]
    state = tl.zeros([TILE.BLOCK_E, TILE.BLOCK_D], tl.float32)  # [E, D]
    if tensors.first_ptr is not None:
        first_ptrs = _state_pointers(
            tensors.first_ptr, numbers.first, owner, found.index, head_64, rows_d, cols
        )
        state = _first_state(
            first_ptrs, tensors.has_first_ptr, found.sequence, rows_d, inside_state, OPTIONS.D
        )

    origin = found.begin.to(tl.int64)
    k_base = pointer_to(rows.key_ptr, key, sequence_64, origin, head_64)
    v_base = pointer_to(rows.value_ptr, value, sequence_64, origin, head_64)
    if rows.out_ptr is not None:
        q_base = pointer_to(rows.read_ptr, read, sequence_64, origin, head_64)
        # out is contiguous: [tokens, heads, E]
        out_base = rows.out_ptr + (out_begin * lengths.heads + head) * OPTIONS.E
        stride_out = lengths.heads * OPTIONS.E

    rate = rate_of(tensors.decay_ptr, head)
    weights = _weights(rate, index, scales, OPTIONS.REVERSE)  # [C, C]
    last_chunk = tl.maximum(length - 1, 0) // TILE.CHUNK * TILE.CHUNK
    for walked in tl.range(0, length, TILE.CHUNK):
        done = walked
        if OPTIONS.REVERSE:
            done = last_chunk - walked
        tokens = done + index
        inside = tokens < length
        count = tl.minimum(TILE.CHUNK, length - done)
        k = load_rows(
            k_base, tokens, key.token, inside, rows_d, OPTIONS.D, TILE.ROW_BYTES
        )  # [C, D]
        v = load_rows(
            v_base, tokens, value.token, inside, cols, OPTIONS.E, TILE.ROW_BYTES_V
        )  # [C, E]
        v_t = tl.trans(v)  # [E, C]
        # tokens from each token to the end of the chunk, and from its beginning
        until = tl.maximum(count - 1 - index, 0)  # [C]
        since = index + 1  # [C]
        if rows.out_ptr is not None:
            q = load_rows(
                q_base, tokens, read.token, inside, rows_d, OPTIONS.D, TILE.ROW_BYTES
            )  # [C, D]
            arrival = factor(rate, until if OPTIONS.REVERSE else since) * scales.read  # [C]
            out = _read(state, k, v_t, q, arrival, weights, TILE)  # [E, C]
            begins = out_base + tokens.to(tl.int64)[None, :] * stride_out
            begins = tl.multiple_of(begins, [TILE.ROW_BYTES_V, TILE.ROW_BYTES_V])
            mask = inside[None, :] & (cols < OPTIONS.E)[:, None]
            tl.store(begins + cols[:, None], out.to(rows.out_ptr.dtype.element_ty), mask=mask)
        fading = factor(rate, since if OPTIONS.REVERSE else until) * scales.write  # [C]
        written = _written(v_t, k, fading, TILE)  # [E, D]
        state = state * factor(rate, count) + settle(written, TILE.SETTLE)

    if tensors.last_ptr is not None:
        last_ptrs = _state_pointers(
            tensors.last_ptr, numbers.last, owner, found.index, head_64, rows_d, cols
        )
        tl.store(last_ptrs, state, mask=inside_state)
