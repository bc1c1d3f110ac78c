"""Which piece of tokens a program owns, as in ``portable/primitives.py``."""

from ..._linked.hopper.compat import gl, gluon
from ..._linked.hopper.pipeline import SEARCH_CHUNK
from ..portable.structures import Found
from .primitives import SIDE


@gluon.jit
def locate(cu_seqlens_ptr, piece, lengths, SEGMENTED: gl.constexpr):
    """Return the ``Found`` of a piece, as the portable ``locate``, and its sequence's bounds."""
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
    return Found(sequence, begin, length, index), start, end


@gluon.jit
def _clear_rows(out, begin, length, first_col, E: gl.constexpr):
    """Store zeros to 64 columns of rows of a contiguous ``[tokens, heads, E]``."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    index = gl.arange(0, SIDE, gl.SliceLayout(1, layout))  # [SIDE]
    cols = first_col + gl.arange(0, SIDE, gl.SliceLayout(0, layout))  # [SIDE]
    zeros = gl.zeros([SIDE, SIDE], out.ptr.dtype.element_ty, layout)
    for done in range(0, length, SIDE):
        rows = (begin + done + index).to(gl.int64)
        pointers = out.ptr + ((rows * out.heads + out.head) * E)[:, None] + cols[None, :]
        gl.store(pointers, zeros, mask=(done + index < length)[:, None] & (cols < E)[None, :])


@gluon.jit
def clear_padding(out, tensors, found, batch, first_col, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Store zeros to the output of rows that belong to no sequence."""
    length = gl.maximum(found.length, 0)
    for w in gl.static_range(TILE.WARPGROUPS):
        col = first_col + w * SIDE
        _clear_rows(out, found.begin, length, col, OPTIONS.E)
        if not OPTIONS.SEGMENTED:
            # the program of the padding after all sequences also clears the padding before them
            ahead = gl.where(found.sequence == batch, gl.load(tensors.cu_seqlens_ptr), 0)
            _clear_rows(out, found.begin * 0, ahead, col, OPTIONS.E)
