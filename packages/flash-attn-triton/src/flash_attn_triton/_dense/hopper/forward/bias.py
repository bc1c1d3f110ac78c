"""The additive bias of the Hopper forward: a ring of tiles that the producer copies by TMA.

A tile has the tensor's order in shared memory, and is read in the accumulators' layout. A bias that
is the same for all queries has tiles of one row, which the warpgroups share.
"""

from ...._linked.hopper.compat import copy_in, gl, gluon, hopper, mbarrier
from ...._linked.hopper.pipeline import (
    EMPTY,
    LOG2E,
    await_full,
    await_readers,
    barrier_arrive,
    barriers,
)
from .structures import BiasRing


@gluon.jit
def make_ring(desc, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Allocate the ring and initialise its mbarriers."""
    TILES: gl.constexpr = TILE.STAGES_B * (TILE.WARPGROUPS if OPTIONS.BIAS_ROWS else 1)
    ROWS: gl.constexpr = TILE.ROWS if OPTIONS.BIAS_ROWS else 1
    FIRST: gl.constexpr = EMPTY + TILE.STAGES_K + TILE.STAGES_V
    gl.static_assert(FIRST + TILE.STAGES_B <= 16, "stages outnumber the barriers")
    tiles = gl.allocate_shared_memory(desc.dtype, [TILES, 1, 1, 1, ROWS, TILE.BLOCK_N], desc.layout)
    full = barriers(TILE.STAGES_B, 1)
    hopper.fence_async_shared()
    return BiasRing(desc, tiles, full)


@gluon.jit
def copy_bias(task, first_key, turn, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Copy a tile of the bias once its stage is empty; the producer calls this.

    The bias's named barriers come after those of the keys and the values.
    """
    FIRST: gl.constexpr = EMPTY + TILE.STAGES_K + TILE.STAGES_V
    PARTS: gl.constexpr = TILE.WARPGROUPS if OPTIONS.BIAS_ROWS else 1
    ring, desc = program.bias, program.bias.desc
    stage = turn % TILE.STAGES_B
    await_readers(turn, FIRST, TILE.STAGES_B, 128 * TILE.WARPGROUPS + 32)
    mbarrier.expect(ring.full.index(stage), PARTS * desc.block_type.nbytes)
    sequence = task.sequence if OPTIONS.BIAS_BATCH else 0
    head = task.head if OPTIONS.BIAS_HEADS else 0
    for w in gl.static_range(PARTS):
        row = task.first_row + w * TILE.ROWS if OPTIONS.BIAS_ROWS else 0
        tile = ring.tiles.index(stage * PARTS + w)
        copy_in(desc, (0, sequence, head, row, first_key), ring.full.index(stage), tile)


@gluon.jit
def add_bias(s, turn, W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Add the bias to logits ``[ROWS, BLOCK_N]``, which ``factor`` brings to base 2 later."""
    if program.bias is not None:
        S: gl.constexpr = s.type.layout
        FIRST: gl.constexpr = EMPTY + TILE.STAGES_K + TILE.STAGES_V
        ring = program.bias
        stage = turn % TILE.STAGES_B
        await_full(ring.full, turn)
        if OPTIONS.BIAS_ROWS:
            tile = ring.tiles.index(stage * TILE.WARPGROUPS + W)
            bias = tile.reshape([TILE.ROWS, TILE.BLOCK_N]).load(S)  # [ROWS, BLOCK_N]
        else:
            row = ring.tiles.index(stage).reshape([TILE.BLOCK_N]).load(gl.SliceLayout(0, S))
            bias = row[None, :]  # [1, BLOCK_N]
        s += bias.to(gl.float32) * (LOG2E / program.factor)
        barrier_arrive(FIRST + stage, 128 * TILE.WARPGROUPS + 32, 4)
    return s
