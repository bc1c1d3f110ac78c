"""Where tiles of queries lie, for the consumers of the backward, if only the producer knows."""

from ...._linked.hopper.compat import gl, gluon

# which row the first query of a tile is, and the tile in the sums of dq
FIRST_ROW = gl.constexpr(0)
DQ_TILE = gl.constexpr(1)


@gluon.jit
def place_of(places_s, stage, NUMBER: gl.constexpr):
    """Return what the producer says of a tile of queries, ``FIRST_ROW`` or ``DQ_TILE``."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.sum(places_s.index(2 * stage + NUMBER).load(layout), 0)
