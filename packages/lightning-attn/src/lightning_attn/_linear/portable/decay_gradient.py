"""The gradient of the decays: minus the distances between writes and reads, weighted and summed.

``d(loss)/d(decay)`` is ``-sum (i - j) a_ij``, where a_ij is the derivative of the loss through the
path from token j, which writes, to token i, which reads. A path may cross chunks, and every chunk
counts only the steps within it, so that no large terms cancel: between two of its tokens; from the
state before the chunk to a token; from a token to the state after the chunk; and from state to
state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import Foreign, entry
from ..._linked.portable.primitives import dot, pointer_to
from .arguments import DecayGradientNumbers, Options, Rows, Tensors, WalkTile
from .primitives import (
    dot_add,
    factor,
    load_rows,
    load_rows_transposed,
    locate,
    rate_of,
    slot_of,
    state_offsets,
)


@triton.jit
def _within(q, k_t, v_t, dout, rate, index, scale, TILE: tl.constexpr):
    """Return the weighted sum of steps between two tokens of a chunk."""
    apart = tl.maximum(index[:, None] - index[None, :], 0)  # [C, C]
    # 0 above the diagonal
    steps = apart.to(tl.float32) * factor(rate, apart) * scale
    scores = dot(q, k_t, TILE.PRECISION, TILE.UPCAST)  # [C, C]
    return tl.sum(tl.sum(steps * scores * dot(dout, v_t, TILE.PRECISION, TILE.UPCAST), 1), 0)


@entry(triton.jit)
def decay_gradient_kernel(
    rows: Rows,
    dout_ptr: Foreign,
    tensors: Tensors,
    numbers: DecayGradientNumbers,
    OPTIONS: Options,
    TILE: WalkTile,
):
    """``out = sum of (i - j) exp(-s (i - j)) scale (q_i . k_j) (dout_i . v_j)`` over steps j to i.

    A program writes the sum of the steps within one chunk, for some columns of the state of one
    head.
    """
    SPLITS: tl.constexpr = (OPTIONS.E + TILE.BLOCK_E - 1) // TILE.BLOCK_E
    lengths, states = numbers.lengths, numbers.states
    key, value, read = numbers.rows.key, numbers.rows.value, numbers.rows.read
    pid = tl.program_id(0)
    cols = pid % SPLITS * TILE.BLOCK_E + tl.arange(0, TILE.BLOCK_E)
    head = pid // SPLITS % lengths.heads
    piece = pid // SPLITS // lengths.heads
    found = locate(tensors.cu_seqlens_ptr, piece, lengths, SEGMENTED=True)
    length = found.length
    if (length <= 0) | (slot_of(None, found.sequence, lengths.batch) < 0):
        return
    head_64 = head.to(tl.int64)
    sequence_64 = found.sequence.to(tl.int64)
    if tensors.cu_seqlens_ptr is not None:
        sequence_64 = tl.zeros([], tl.int64)
    origin = found.begin.to(tl.int64)
    q_base = pointer_to(rows.read_ptr, read, sequence_64, origin, head_64)
    k_base = pointer_to(rows.key_ptr, key, sequence_64, origin, head_64)
    v_base = pointer_to(rows.value_ptr, value, sequence_64, origin, head_64)
    dout_base = pointer_to(dout_ptr, numbers.dout, sequence_64, origin, head_64)
    index = tl.arange(0, TILE.CHUNK)  # [CHUNK]
    inside = index < length
    rows_d = tl.arange(0, TILE.BLOCK_D)  # [BLOCK_D]
    q = load_rows(q_base, index, read.token, inside, rows_d, OPTIONS.D, TILE.ROW_BYTES)  # [C, D]
    k_t = load_rows_transposed(
        k_base, index, key.token, inside, rows_d, OPTIONS.D, TILE.ROW_BYTES
    )  # [D, C]
    v_t = load_rows_transposed(
        v_base, index, value.token, inside, cols, OPTIONS.E, TILE.ROW_BYTES_V
    )  # [E, C]
    dout = load_rows(
        dout_base, index, numbers.dout.token, inside, cols, OPTIONS.E, TILE.ROW_BYTES_V
    )  # [C, E]

    rate = rate_of(tensors.decay_ptr, head)
    total = _within(q, k_t, v_t, dout, rate, index, numbers.scale, TILE)

    # the state before the chunk and the gradient of the state after it have the same strides
    base = sequence_64 * states.batch + found.index.to(tl.int64) * states.token
    base += head_64 * states.head
    offsets = state_offsets(rows_d, cols, states)
    inside_state = (rows_d < OPTIONS.D)[:, None] & (cols < OPTIONS.E)[None, :]
    state = tl.load(tensors.first_ptr + base + offsets, mask=inside_state, other=0.0)  # [D, E]
    zeros = tl.zeros([TILE.CHUNK, TILE.BLOCK_E], tl.float32)  # [C, E]
    reads = dot_add(zeros, q, state, q.dtype, TILE) * dout.to(tl.float32)
    # from the state before the chunk to each token, then from each token to the state after it
    steps = (index + 1).to(tl.float32) * factor(rate, index + 1) * numbers.scale
    total += tl.sum(steps * tl.sum(reads, 1), 0)

    gradient = tl.load(tensors.last_ptr + base + offsets, mask=inside_state, other=0.0)  # [D, E]
    k = load_rows(k_base, index, key.token, inside, rows_d, OPTIONS.D, TILE.ROW_BYTES)  # [C, D]
    v = load_rows(v_base, index, value.token, inside, cols, OPTIONS.E, TILE.ROW_BYTES_V)  # [C, E]
    left = tl.maximum(length - 1 - index, 0)
    writes = dot_add(zeros, k, gradient, k.dtype, TILE) * v.to(tl.float32)
    steps = left.to(tl.float32) * factor(rate, left)
    total += tl.sum(steps * tl.sum(writes, 1), 0)

    through = tl.sum(tl.sum(state * gradient, 1), 0)
    total += length.to(tl.float32) * factor(rate, length) * through
    # every program of the grid has its own element
    tl.store(rows.out_ptr + tl.program_id(0).to(tl.int64), total)
