"""The consumer warpgroups of the forward over a tree.

They run the walk of the dense forward on each tile of keys. Of a path they know only the numbers of
tiles: first the tiles of their own segment that the diagonal cuts, then one tile for each segment
above that does not fill its last tile, then whole tiles.
"""

from ..._dense.hopper.forward.alibi import CUT, WHOLE
from ..._dense.hopper.forward.consumer import close, cross, finish_block, survey, write_block
from ..._dense.hopper.forward.structures import Block, Walk
from ..._dense.hopper.forward.walk import begin, fold, with_pairs
from ..._dense.hopper.panels import accumulator
from ..._linked.hopper.compat import gl, gluon, mbarrier, tma
from ..._linked.hopper.pipeline import (
    FIELDS,
    FIRST_ROW,
    HEAD,
    LEN_K,
    LEN_Q,
    LOG2E,
    Q_START,
    SEQUENCE,
    SLOTS,
    TURN,
    barrier_arrive,
    barrier_sync,
    field,
)
from .producer import TAILS, WHOLES
from .structures import Path

# a row after every key
BEHIND = gl.constexpr(1 << 30)


@gluon.jit
def _receive(pipeline, count, problem, W: gl.constexpr, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Wait for the producer's next announcement and return it as a ``Path``."""
    layout: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    slot = count % SLOTS
    mbarrier.wait(pipeline.tile_full.index(slot), count // SLOTS & 1)
    fields = pipeline.fields_s.index(slot).load(layout)  # [FIELDS]
    head, sequence = field(fields, HEAD), field(fields, SEQUENCE)
    first_row, q_start = field(fields, FIRST_ROW), field(fields, Q_START)
    len_q, len_k = field(fields, LEN_Q), field(fields, LEN_K)
    tails, wholes = field(fields, TAILS), field(fields, WHOLES)
    mbarrier.arrive(pipeline.tile_empty.index(slot), count=1)
    block = Block(head, sequence, first_row, q_start, len_q, len_k)
    own = survey(block, problem, W, accumulator(TILE.BLOCK_N), OPTIONS, TILE)
    return Path(own, tails, wholes)


@gluon.jit
def _attend(
    state,
    path,
    buffer,
    factor,
    pipeline,
    tails_s,
    problem,
    W: gl.constexpr,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Fold all tiles of keys but the first into the softmax; return the ``State``."""
    own = path.own
    if TILE.WARPGROUPS * TILE.ROWS > TILE.BLOCK_N:
        # the diagonal may cut more than the first tile
        state = fold(
            state,
            own.right,
            own.high - 1,
            own,
            buffer,
            factor,
            pipeline,
            problem,
            W,
            OPTIONS,
            TILE,
            CUT,
        )
        state = with_pairs(state)
    for _tail in range(path.tails):
        stage = state.turn % TILE.STAGES_K
        mbarrier.wait(pipeline.k_full.index(stage), state.turn // TILE.STAGES_K & 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        keys = gl.sum(tails_s.index(stage).load(layout), 0)
        block = Block(-1, -1, 0, 0, keys, keys)
        tail = Walk(block, 0, 0, 0, 1, own.rows * 0 + BEHIND, 0.0, 0, 0, 0)
        state = fold(state, 0, 1, tail, buffer, factor, pipeline, problem, W, OPTIONS, TILE, CUT)
    return fold(
        with_pairs(state),
        0,
        path.wholes,
        own,
        buffer,
        factor,
        pipeline,
        problem,
        W,
        OPTIONS,
        TILE,
        WHOLE,
    )


@gluon.jit
def consume(
    W: gl.constexpr,
    out_descs,
    pipeline,
    tails_s,
    problem,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Compute the rows of warpgroup ``W`` in each block of queries that the producer announces."""
    # the exponential's multiply-add applies the scale; it is positive, so the maximum commutes
    factor = problem.scale * LOG2E
    if OPTIONS.HAS_SOFTCAP:
        factor = 1.0
    if W == TILE.WARPGROUPS - 1:
        # the ping-pong begins with warpgroup 0
        barrier_arrive(TURN, 256, 4)
    if TILE.PIPELINE:
        _consume_pipelined(factor, out_descs, pipeline, tails_s, problem, W, OPTIONS, TILE)
    else:
        _consume_one_by_one(factor, out_descs, pipeline, tails_s, problem, W, OPTIONS, TILE)
    tma.store_wait(0)
    if W == 0:
        # wait for the last signal of the ping-pong, so that the barrier ends empty
        barrier_sync(TURN, 256, 4)


@gluon.jit
def _consume_one_by_one(
    factor,
    out_descs,
    pipeline,
    tails_s,
    problem,
    W: gl.constexpr,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Finish each block of queries before the next block begins."""
    turn = 0  # tiles of keys
    count = 0  # blocks of queries
    path = _receive(pipeline, count, problem, W, OPTIONS, TILE)
    while path.own.block.head >= 0:
        buffer = count % TILE.BUFFERS_Q * TILE.WARPGROUPS + W
        state = begin(turn, count, path.own, factor, pipeline, problem, W, OPTIONS, TILE)
        state = _attend(state, path, buffer, factor, pipeline, tails_s, problem, W, OPTIONS, TILE)
        block = path.own.block
        turn = close(state, count, block, buffer, out_descs, pipeline, problem, W, OPTIONS, TILE)
        count += 1
        path = _receive(pipeline, count, problem, W, OPTIONS, TILE)


@gluon.jit
def _consume_pipelined(
    factor,
    out_descs,
    pipeline,
    tails_s,
    problem,
    W: gl.constexpr,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Begin each block of queries while the last product of the block before it runs."""
    turn = 0  # tiles of keys
    count = 0  # blocks of queries
    path = _receive(pipeline, count, problem, W, OPTIONS, TILE)
    if path.own.block.head >= 0:
        state = begin(turn, count, path.own, factor, pipeline, problem, W, OPTIONS, TILE)
        while path.own.block.head >= 0:
            buffer = count % TILE.BUFFERS_Q * TILE.WARPGROUPS + W
            state = _attend(
                state, path, buffer, factor, pipeline, tails_s, problem, W, OPTIONS, TILE
            )
            mbarrier.arrive(pipeline.q_empty.index(buffer), count=1)
            last = path.own.block
            finished = finish_block(state.m, state.l, last, problem, W, OPTIONS, TILE)
            count += 1
            path = _receive(pipeline, count, problem, W, OPTIONS, TILE)
            o, state = cross(state, count, path.own, factor, pipeline, problem, W, OPTIONS, TILE)
            write_block(
                o, finished, count - 1, last, out_descs, pipeline, problem, W, OPTIONS, TILE
            )
