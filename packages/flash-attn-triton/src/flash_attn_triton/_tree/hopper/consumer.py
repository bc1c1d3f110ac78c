"""The consumer warpgroups of the forward over a tree.

They run the walk of the dense forward on each tile of keys. Of a path they know only the numbers of
tiles: first the tiles of their own segment that the diagonal cuts, then one tile for each segment
above that does not fill its last tile, then whole tiles.
"""

from ..._dense.hopper.forward.alibi import CUT, WHOLE
from ..._dense.hopper.forward.consumer import close, cross, finish_block, survey, write_block
from ..._dense.hopper.forward.producer import TAILS, WHOLES
from ..._dense.hopper.forward.structures import Block, Program, Walk
from ..._dense.hopper.forward.walk import begin, factor_of, fold, with_pairs
from ..._dense.hopper.panels import accumulator
from ..._linked.hopper.compat import gl, gluon, mbarrier, tma
from ..._linked.hopper.pipeline import (
    FIRST_ROW,
    HEAD,
    LEN_K,
    LEN_Q,
    Q_START,
    SEQUENCE,
    TURN,
    await_full,
    barrier_arrive,
    barrier_sync,
    field,
    forget,
    hear,
)
from .structures import Path

# a row after every key
BEHIND = gl.constexpr(1 << 30)


@gluon.jit
def _receive(count, W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Wait for the producer's next announcement and return it as a ``Path``."""
    fields = hear(count, program.pipeline)  # [FIELDS]
    head, sequence = field(fields, HEAD), field(fields, SEQUENCE)
    first_row, q_start = field(fields, FIRST_ROW), field(fields, Q_START)
    len_q, len_k = field(fields, LEN_Q), field(fields, LEN_K)
    tails, wholes = field(fields, TAILS), field(fields, WHOLES)
    forget(count, program.pipeline)
    block = Block(head, sequence, first_row, q_start, len_q, len_k)
    own = survey(block, accumulator(TILE.BLOCK_N), W, program, OPTIONS, TILE)
    return Path(own, tails, wholes)


@gluon.jit
def _attend(
    state, path, buffer, W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Fold all tiles of keys but the first into the softmax; return the ``State``."""
    own, pipeline = path.own, program.pipeline
    if TILE.WARPGROUPS * TILE.ROWS > TILE.BLOCK_N:
        # the diagonal may cut more than the first tile
        state = fold(state, own.right, own.high - 1, own, buffer, CUT, W, program, OPTIONS, TILE)
        state = with_pairs(state)
    for _tail in range(path.tails):
        stage = state.turn % TILE.STAGES_K
        await_full(pipeline.k_full, state.turn)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        keys = gl.sum(program.tails_s.index(stage).load(layout), 0)
        block = Block(-1, -1, 0, 0, keys, keys)
        tail = Walk(block, 0, 0, 0, 1, own.rows * 0 + BEHIND, 0.0, 0, 0, 0)
        state = fold(state, 0, 1, tail, buffer, CUT, W, program, OPTIONS, TILE)
    return fold(with_pairs(state), 0, path.wholes, own, buffer, WHOLE, W, program, OPTIONS, TILE)


@gluon.jit
def consume(W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Compute the rows of warpgroup ``W`` in each block of queries that the producer announces."""
    program = Program(*program[:-1], factor_of(program.numbers.scale, program, OPTIONS))
    if W == TILE.WARPGROUPS - 1:
        # the ping-pong begins with warpgroup 0
        barrier_arrive(TURN, 256, 4)
    if TILE.PIPELINE:
        _consume_pipelined(W, program, OPTIONS, TILE)
    else:
        _consume_one_by_one(W, program, OPTIONS, TILE)
    tma.store_wait(0)
    if W == 0:
        # wait for the last signal of the ping-pong, so that the barrier ends empty
        barrier_sync(TURN, 256, 4)


@gluon.jit
def _consume_one_by_one(W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Finish each block of queries before the next block begins."""
    turn = 0  # tiles of keys
    count = 0  # blocks of queries
    path = _receive(count, W, program, OPTIONS, TILE)
    while path.own.block.head >= 0:
        buffer = count % TILE.BUFFERS_Q * TILE.WARPGROUPS + W
        state = begin(turn, count, path.own, W, program, OPTIONS, TILE)
        state = _attend(state, path, buffer, W, program, OPTIONS, TILE)
        block = path.own.block
        turn = close(state, count, block, buffer, W, program, OPTIONS, TILE)
        count += 1
        path = _receive(count, W, program, OPTIONS, TILE)


@gluon.jit
def _consume_pipelined(W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Begin each block of queries while the last product of the block before it runs."""
    turn = 0  # tiles of keys
    count = 0  # blocks of queries
    path = _receive(count, W, program, OPTIONS, TILE)
    if path.own.block.head >= 0:
        state = begin(turn, count, path.own, W, program, OPTIONS, TILE)
        while path.own.block.head >= 0:
            buffer = count % TILE.BUFFERS_Q * TILE.WARPGROUPS + W
            state = _attend(state, path, buffer, W, program, OPTIONS, TILE)
            mbarrier.arrive(program.pipeline.q_empty.index(buffer), count=1)
            last = path.own.block
            finished = finish_block(state.m, state.l, last, W, program, OPTIONS, TILE)
            count += 1
            path = _receive(count, W, program, OPTIONS, TILE)
            o, state = cross(state, count, path.own, W, program, OPTIONS, TILE)
            write_block(o, finished, count - 1, last, W, program, OPTIONS, TILE)
