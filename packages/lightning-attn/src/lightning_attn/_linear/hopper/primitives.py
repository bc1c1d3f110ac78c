"""What producer and consumers of the walk on Hopper share: panels, chunks and factors."""

from ..._linked.hopper.compat import gl, gluon
from ..._linked.hopper.pipeline import coordinates
from .. import call

# tokens of a chunk, and columns of a panel
SIDE = gl.constexpr(64)
# as in ``primitives`` of the portable kernels
LARGEST_RATE = gl.constexpr(call.LARGEST_RATE)


@gluon.jit
def factor(rate, distance):
    """Return what is left after a number of tokens: at most 1."""
    return gl.exp2(-rate * distance.to(gl.float32))


@gluon.jit
def chunk_of(step, chunks, HAS_OUT: gl.constexpr, OPTIONS: gl.constexpr):
    """Return the chunk of a step.

    Where nobody reads, the order is free: a segment is left at the end at which the walk with reads
    begins, whose rows the cache then still holds.
    """
    BACKWARDS: gl.constexpr = (OPTIONS.SEGMENTED and not HAS_OUT) != OPTIONS.REVERSE
    if BACKWARDS:
        return chunks - 1 - step
    return step


@gluon.jit
def panel(piece, row, col, RAGGED: gl.constexpr):
    """Return where a panel lies in a tensor map."""
    where = coordinates(piece.sequence, piece.head, piece.begin, piece.length, row, RAGGED)
    return (where[0], where[1], where[2], where[3], col)
