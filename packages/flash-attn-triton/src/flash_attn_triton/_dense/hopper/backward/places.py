"""Places of tiles of queries, which the producer of the backward passes to the consumers."""

from ...._linked.hopper.compat import gl, gluon

# the row of a tile's first query, and the tile's index in the sums of dq
FIRST_ROW = gl.constexpr(0)
DQ_TILE = gl.constexpr(1)


@gluon.jit
def place_of(places_s, stage, NUMBER: gl.constexpr):
    """Return the producer's ``FIRST_ROW`` or ``DQ_TILE`` of a tile of queries."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.sum(places_s.index(2 * stage + NUMBER).load(layout), 0)
