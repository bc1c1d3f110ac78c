"""Device functions that the kernels share: tiles of rows, products, and pieces of tokens."""

import triton
import triton.language as tl

from ..._linked.portable.primitives import LOG2E
from .. import call
from .structures import Found

# decays are clamped to this, so that no product with a distance overflows
LARGEST_RATE = tl.constexpr(call.LARGEST_RATE)
# inner dimension of one instruction of the tensor cores
PRODUCT_DEPTH = tl.constexpr(16)
# sequences per step when a program searches its sequence in cu_seqlens
SEARCH_CHUNK = tl.constexpr(128)


@triton.jit
def load_rows(base, rows, stride, inside, cols, WIDTH: tl.constexpr, ROW_BYTES: tl.constexpr):
    """Load ``[rows, cols]`` of a matrix with unit column stride; rows not ``inside`` are 0.

    The launcher ensures that rows are aligned to ``ROW_BYTES``.
    """
    # int64: rows * stride may pass 2**31 elements
    begin = tl.multiple_of(base + rows.to(tl.int64)[:, None] * stride, [ROW_BYTES, ROW_BYTES])
    pointers = begin + cols[None, :]
    mask = inside[:, None] & (cols < WIDTH)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_rows_transposed(
    base, rows, stride, inside, cols, WIDTH: tl.constexpr, ROW_BYTES: tl.constexpr
):
    """Load the tile of ``load_rows`` as ``[cols, rows]``."""
    begin = tl.multiple_of(base + rows.to(tl.int64)[None, :] * stride, [ROW_BYTES, ROW_BYTES])
    pointers = begin + cols[:, None]
    mask = inside[None, :] & (cols < WIDTH)[:, None]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def dot_add(acc, a, b, dtype, TILE: tl.constexpr):
    """Return ``acc + a @ b``, where one operand is a computed value in fp32.

    ``TILE.NARROW`` rounds it to the inputs' ``dtype``; not for fp16, which would overflow.
    """
    if TILE.NARROW:
        return tl.dot(a.to(dtype), b.to(dtype), acc, input_precision=TILE.PRECISION)
    return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=TILE.PRECISION)


@triton.jit
def dot_apart(a, b, dtype, TILE: tl.constexpr):
    """Return ``a @ b`` as ``dot_add`` computes it, in a separate accumulator.

    Tensor cores truncate sums instead of rounding them, so a sum over a million tokens would drift.
    The bound on inexact sums keeps the compiler from folding the caller's addition into the
    accumulator.
    """
    if TILE.NARROW:
        a, b = a.to(dtype), b.to(dtype)
    else:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=TILE.PRECISION, max_num_imprecise_acc=PRODUCT_DEPTH)


@triton.jit
def rate_of(decay_ptr, head):
    """Return the decay of a head per token, in base 2."""
    return tl.minimum(tl.load(decay_ptr + head), LARGEST_RATE) * LOG2E


@triton.jit
def factor(rate, distance):
    """Return the decay over ``distance >= 0`` tokens, at most 1."""
    return tl.exp2(-rate * distance.to(tl.float32))


@triton.jit
def state_offsets(rows, cols, strides):
    """Return the offsets of a tile of a state, [D, E]."""
    return rows.to(tl.int64)[:, None] * strides.d + cols.to(tl.int64)[None, :] * strides.e


@triton.jit
def find_sequence(cu_seqlens_ptr, slot, batch, size):
    """Return the sequence that owns a slot; -1 and ``batch``: padding before and after all.

    Sequence ``b`` owns the slots from ``cu_seqlens[b] // size + b + 1`` on, at least as many as its
    segments. The grid, ``tokens // size + batch + 2`` slots, depends on no device data.
    """
    owned = tl.zeros([], tl.int32)
    for first in range(0, batch + 1, SEARCH_CHUNK):
        index = first + tl.arange(0, SEARCH_CHUNK)
        start = tl.load(cu_seqlens_ptr + index, mask=index <= batch, other=0)
        mine = (start // tl.maximum(size, 1) + index < slot) & (index <= batch)
        owned += tl.sum(mine.to(tl.int32), 0)
    return owned - 1


@triton.jit
def locate(cu_seqlens_ptr, piece, lengths, SEGMENTED: tl.constexpr):
    """Return the ``Found`` of a piece of tokens: a segment, or a whole sequence.

    A segment has at most ``lengths.size`` tokens; a fixed-length sequence has ``lengths.pieces``.
    Packed segments of the sequences -1 and ``batch`` are the padding before and after all
    sequences; if pieces are whole sequences, ``batch`` is all padding. ``index`` counts the
    segments of a fixed-length sequence, or the slots of all packed ones; a slot without tokens has
    a length of 0 or less.
    """
    batch = lengths.batch
    tokens = lengths.tokens
    size = lengths.size
    if cu_seqlens_ptr is None:
        sequence = piece // tl.maximum(lengths.pieces, 1)
        index = piece % tl.maximum(lengths.pieces, 1)
        begin = index * size
        length = tl.minimum(size, tokens - begin)
    elif SEGMENTED:
        sequence = find_sequence(cu_seqlens_ptr, piece, batch, size)
        start = tl.load(cu_seqlens_ptr + sequence, mask=sequence >= 0, other=0)
        end = tl.load(cu_seqlens_ptr + sequence + 1, mask=sequence < batch, other=tokens)
        begin = start + (piece - (start // tl.maximum(size, 1) + sequence + 1)) * size
        length = tl.minimum(size, end - begin)
        index = piece
    else:
        sequence = piece
        begin = tl.load(cu_seqlens_ptr + tl.minimum(piece, batch))
        end = tl.load(cu_seqlens_ptr + piece + 1, mask=piece < batch, other=tokens)
        length = end - begin
        index = 0
    return Found(sequence, begin, length, index)


@triton.jit
def slot_of(slots_ptr, sequence, batch):
    """Return the slot of a sequence's state; negative for padding."""
    is_real = (sequence >= 0) & (sequence < batch)
    slot = tl.where(is_real, sequence, -1).to(tl.int64)
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + sequence, mask=is_real, other=-1).to(tl.int64)
    return slot


@triton.jit
def clear_rows(out, begin, length, cols, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Store zeros to rows of one head of an output of ``WIDTH`` columns."""
    index = tl.arange(0, TILE.CHUNK)  # [C]
    for done in range(0, length, TILE.CHUNK):
        rows = (begin + done + index).to(tl.int64)
        pointers = out.ptr + ((rows * out.heads + out.head) * WIDTH)[:, None] + cols[None, :]
        mask = (done + index < length)[:, None] & (cols < WIDTH)[None, :]
        zeros = tl.zeros([TILE.CHUNK, TILE.BLOCK_E], out.ptr.dtype.element_ty)  # [C, E]
        tl.store(pointers, zeros, mask=mask)
