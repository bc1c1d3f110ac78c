"""The additive bias of the Hopper backward: a ring of tiles that the producer copies by TMA.

A tile has the tensor's order in shared memory, [queries, keys], and is read transposed, in the
layout of the scores. Up to head dim 128 either warpgroup has a box of its 64 keys; above 128 the
warpgroup that makes the probabilities has the only box. A bias that is the same for all queries has
boxes of one row.
"""

from ...._linked.hopper.compat import add_out, copy_in, copy_out, gl, gluon, hopper, mbarrier
from ...._linked.hopper.gradients import ROWS
from ...._linked.hopper.pipeline import (
    EMPTY,
    LOG2E,
    await_full,
    await_readers,
    barrier_arrive,
    barriers,
)
from .order import head_at, tile_at
from .structures import BiasRing

INF = gl.constexpr(float("inf"))


@gluon.jit
def make_ring(desc, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Allocate the ring and initialise its mbarriers."""
    BOXES: gl.constexpr = TILE.STAGES_B * (TILE.BLOCK_N // ROWS)
    HEIGHT: gl.constexpr = TILE.BLOCK_M if OPTIONS.BIAS_ROWS else 1
    tiles = gl.allocate_shared_memory(desc.dtype, [BOXES, 1, 1, 1, HEIGHT, ROWS], desc.layout)
    full = barriers(TILE.STAGES_B, 1)
    hopper.fence_async_shared()
    return BiasRing(tiles, full)


@gluon.jit
def copy_bias(head, row, turn, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Copy the bias of a tile of queries once its stage is empty; the producer calls this."""
    PARTS: gl.constexpr = TILE.BLOCK_N // ROWS
    FIRST: gl.constexpr = EMPTY + TILE.STAGES_Q + TILE.STAGES_O
    PARTIES: gl.constexpr = 32 + 2 * TILE.BLOCK_N
    ring, desc, block = program.bias, program.maps.bias_desc, program.block
    stage = turn % TILE.STAGES_B
    await_readers(turn, FIRST, TILE.STAGES_B, PARTIES)
    mbarrier.expect(ring.full.index(stage), PARTS * desc.block_type.nbytes)
    sequence = block.sequence if OPTIONS.BIAS_BATCH else 0
    plane = head if OPTIONS.BIAS_HEADS else 0
    query = block.ahead_q + row if OPTIONS.BIAS_ROWS else 0
    for w in gl.static_range(PARTS):
        key = block.first_key + w * ROWS
        tile = ring.tiles.index(stage * PARTS + w)
        copy_in(desc, (0, sequence, plane, query, key), ring.full.index(stage), tile)


@gluon.jit
def less_bias(
    lse2, turn, W: gl.constexpr, program, S: gl.constexpr, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Return the LSE minus the bias in base 2, which is subtracted from scores of layout ``S``.

    The shape is ``[1, BLOCK_M]`` without a bias, else ``[ROWS, BLOCK_M]``.
    """
    FIRST: gl.constexpr = EMPTY + TILE.STAGES_Q + TILE.STAGES_O
    PARTIES: gl.constexpr = 32 + 2 * TILE.BLOCK_N
    shift = lse2[None, :]
    if program.bias is not None:
        ring = program.bias
        stage = turn % TILE.STAGES_B
        tile = ring.tiles.index(stage * (TILE.BLOCK_N // ROWS) + W)
        await_full(ring.full, turn)
        if OPTIONS.BIAS_ROWS:
            tile = tile.reshape([TILE.BLOCK_M, ROWS]).permute((1, 0))
            bias = tile.load(S)  # [ROWS, BLOCK_M]
        else:
            keys = tile.reshape([ROWS]).load(gl.SliceLayout(1, S))
            bias = keys[:, None]  # [ROWS, 1]
        barrier_arrive(FIRST + stage, PARTIES, 4)
        shift = shift - bias.to(gl.float32) * LOG2E
        if OPTIONS.RAGGED and OPTIONS.BIAS_ROWS:
            # rows after the sequence read the next sequence's bias, or undefined data
            shift = gl.where(lse2[None, :] == INF, INF, shift)
    return shift


@gluon.jit
def gradients_of(number, program, TILE: gl.constexpr):
    """Return buffer ``number`` of gradients of scores, ``[ROWS, BLOCK_M]``."""
    tile = program.pipeline.ds_s.index(number)
    if program.maps.ds_desc is not None:
        tile = tile.reshape([TILE.BLOCK_M, ROWS]).permute((1, 0))
    return tile


@gluon.jit
def place_in_planes(head, row, W: gl.constexpr, program, OPTIONS: gl.constexpr):
    """Return the coordinates of ``W``'s keys, from ``row`` on, in the map of gradients of scores.

    Sequences, or key heads, that are added up share a plane.
    """
    block, numbers = program.block, program.numbers
    head_k = block.head_k
    sequence = block.sequence // numbers.sequences_together
    plane = head - (head_k - head_k // numbers.heads_together) * OPTIONS.GROUP
    return 0, sequence, plane, row, block.first_key + W * ROWS


@gluon.jit
def place_at(turn, W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Return the coordinates of ``W``'s gradients of scores of a step in their map."""
    walk = program.walk
    head, step = head_at(turn, program.block.head_k, walk.end - walk.begin, OPTIONS)
    row = tile_at(step, walk.begin, walk.end, OPTIONS) * TILE.BLOCK_M + program.block.ahead_q
    return place_in_planes(head, row, W, program, OPTIONS)


@gluon.jit
def keep_gradient(turn, W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Start the TMA store of ``W``'s gradients of scores, for ``sum_bias_kernel``, or the addition.

    The TMA reads the buffers of the product of dq. They are written again two steps later, and
    each step but the first waits for the stores of earlier steps, so the TMA has read them by then.
    Shared gradients are left to ``keep_shared``.
    """
    if OPTIONS.SHARES_DS:
        mbarrier.arrive(program.order.full.index(turn % 2), count=1)
    elif program.maps.ds_desc is not None:
        where = place_at(turn, W, program, OPTIONS, TILE)
        ds = program.pipeline.ds_s.index(turn % 2 * 2 + W)
        if OPTIONS.ADDS_DS:
            add_out(program.maps.ds_desc, where, ds)
        else:
            copy_out(program.maps.ds_desc, where, ds)
