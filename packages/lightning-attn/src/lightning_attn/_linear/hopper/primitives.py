"""Panels, chunks and factors, for the producer and the consumers of the walk on Hopper."""

from ..._linked.hopper.compat import gl, gluon
from ..._linked.hopper.pipeline import coordinates
from .. import call
from . import arguments

SIDE = gl.constexpr(arguments.SIDE)
# as in ``primitives`` of the portable kernels
LARGEST_RATE = gl.constexpr(call.LARGEST_RATE)


@gluon.jit
def factor(rate, distance):
    """Return the decay over ``distance >= 0`` tokens, at most 1."""
    return gl.exp2(-rate * distance.to(gl.float32))


@gluon.jit
def chunk_of(step, chunks, HAS_OUT: gl.constexpr, OPTIONS: gl.constexpr):
    """Return the chunk of a step.

    A walk without reads may take chunks in any order: it ends where the walk with reads begins, so
    that the cache still holds these rows.
    """
    BACKWARDS: gl.constexpr = (OPTIONS.SEGMENTED and not HAS_OUT) != OPTIONS.REVERSE
    if BACKWARDS:
        return chunks - 1 - step
    return step


@gluon.jit
def panel(piece, row, col, RAGGED: gl.constexpr):
    """Return the coordinates of a panel in a tensor map."""
    where = coordinates(piece.sequence, piece.head, piece.begin, piece.length, row, RAGGED)
    return (where[0], where[1], where[2], where[3], col)
