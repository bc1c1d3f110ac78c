"""The producer of the walk on Hopper: one warp copies chunks of tokens into shared memory."""

from ..._linked.hopper.compat import copy_in, gl, gluon, mbarrier
from ..._linked.hopper.pipeline import EMPTY, barrier_sync
from .primitives import SIDE, chunk_of, panel


@gluon.jit
def produce(maps, pipeline, piece, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Copy chunks into shared memory, in the order of use."""
    PARTIES: gl.constexpr = 128 * TILE.WARPGROUPS + 32
    HAS_OUT: gl.constexpr = maps.read is not None
    PANELS: gl.constexpr = TILE.HALVES * (2 if HAS_OUT else 1) + TILE.WARPGROUPS
    for step in range(piece.chunks):
        chunk = chunk_of(step, piece.chunks, HAS_OUT, OPTIONS)
        stage = step % TILE.STAGES
        arrived = pipeline.full.index(stage)
        if step >= TILE.STAGES:
            barrier_sync(EMPTY + stage, PARTIES, 1)
        mbarrier.expect(arrived, PANELS * maps.key.block_type.nbytes)
        row = chunk * SIDE
        for h in gl.static_range(TILE.HALVES):
            where = panel(piece, row, h * SIDE, OPTIONS.RAGGED)
            copy_in(maps.key, where, arrived, pipeline.key.index(stage * TILE.HALVES + h))
            if HAS_OUT:
                copy_in(maps.read, where, arrived, pipeline.read.index(stage * TILE.HALVES + h))
        for w in gl.static_range(TILE.WARPGROUPS):
            where = panel(piece, row, piece.first_col + w * SIDE, OPTIONS.RAGGED)
            copy_in(maps.value, where, arrived, pipeline.value.index(stage * TILE.WARPGROUPS + w))
    # meet the consumers' last arrivals, so that no barrier stays incomplete
    for back in gl.static_range(TILE.STAGES):
        if piece.chunks > back:
            barrier_sync(EMPTY + (piece.chunks - 1 - back) % TILE.STAGES, PARTIES, 1)
