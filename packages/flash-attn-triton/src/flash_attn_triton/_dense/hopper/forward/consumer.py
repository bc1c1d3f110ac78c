"""The consumer warpgroups: they walk over the keys of one block of queries after the other.

Every warpgroup owns 64 rows of a block of queries and walks its keys from the last to the first,
with the online softmax of FlashAttention-2 (Dao, 2023) and the two overlaps of FlashAttention-3
(Shah et al., 2024): a warpgroup's softmax overlaps with another warpgroup's wgmma, and with its own
product of the last tile's probabilities and values. With ``PIPELINE`` the walk does not stop
between blocks of queries: the first product of the next block is issued together with the last
product of this block.
"""

from ...._linked.hopper.compat import gl, gluon, hopper, mbarrier, tma
from ...._linked.hopper.pipeline import (
    EMPTY,
    FIRST_ROW,
    HEAD,
    LEN_K,
    LEN_Q,
    LOG2E,
    NEG_INF,
    Q_START,
    SEQUENCE,
    TURN,
    await_full,
    barrier_arrive,
    barrier_sync,
    coordinates,
    field,
    forget,
    hear,
    opaque,
)
from ...._linked.hopper.softmax import close_softmax, finish_softmax
from ..dropout import dropout_key
from ..panels import (
    accumulator,
    add_tile,
    copy_tile,
    copy_tile_out,
    finish,
    multiply_keys,
    multiply_values,
    no_output,
    store_tile,
    tile_of,
    wait_for_values,
)
from .alibi import sides
from .fp8 import UNIT, factors_of, scale_queries, sums_of, walk_fp8
from .structures import Block, Finished, Program, State, Walk
from .walk import attend, begin, factor_of, start, tiles_of


@gluon.jit
def _receive(program, count):
    """Wait for the producer's next announcement and return it as a ``Block``."""
    fields = hear(count, program.pipeline)  # [FIELDS]
    head, sequence = field(fields, HEAD), field(fields, SEQUENCE)
    first_row, q_start = field(fields, FIRST_ROW), field(fields, Q_START)
    len_q, len_k = field(fields, LEN_Q), field(fields, LEN_K)
    forget(count, program.pipeline)
    return Block(head, sequence, first_row, q_start, len_q, len_k)


@gluon.jit
def _tokens(ROWS: gl.constexpr, PACK: gl.constexpr, layout: gl.constexpr):
    """Return every row's token, counted from the warpgroup's first; rows go by head, then token."""
    index = gl.arange(0, ROWS, layout)  # [ROWS]
    if PACK > 1:
        index = index % (ROWS // PACK)
    return index


@gluon.jit
def _heads(head, ROWS: gl.constexpr, PACK: gl.constexpr, layout: gl.constexpr):
    """Return the head of every row, or one number if all rows have the same head."""
    if PACK > 1:
        head = head + gl.arange(0, ROWS, layout) // (ROWS // PACK)  # [ROWS]
    return head


@gluon.jit
def _owner_of(sequence, batch):
    """Return a sequence's row in per-sequence tensors; padding takes its neighbour's row."""
    return gl.maximum(gl.minimum(sequence, batch - 1), 0)


@gluon.jit
def survey(
    block, S: gl.constexpr, W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Return the ``Walk`` of warpgroup ``W`` over a block of queries; scores have layout ``S``."""
    TOKENS: gl.constexpr = TILE.ROWS // OPTIONS.PACK
    tensors, numbers = program.tensors, program.numbers
    low, left, right, high = tiles_of(
        block, block.first_row, TILE.WARPGROUPS * TOKENS, program, OPTIONS, TILE
    )
    layout: gl.constexpr = gl.SliceLayout(1, S)
    first_row = block.first_row + (block.len_k - block.len_q) + W * TOKENS
    rows = first_row + _tokens(TILE.ROWS, OPTIONS.PACK, layout)  # [ROWS]
    slope = 0.0
    behind = right
    ahead = right
    if tensors.alibi_slopes_ptr is not None:
        behind, ahead = sides(first_row, left, right, TOKENS, TILE.BLOCK_N)
        heads = _heads(gl.maximum(block.head, 0), TILE.ROWS, OPTIONS.PACK, layout)
        owner = _owner_of(block.sequence, numbers.batch)
        slope = gl.load(tensors.alibi_slopes_ptr + owner * numbers.stride_alibi_b + heads)
        if OPTIONS.PACK > 1:
            slope = slope[:, None]  # [ROWS, 1]
    dropout = 0
    if tensors.rng_state_ptr is not None:
        plane = block.sequence * numbers.heads_q + block.head
        dropout = dropout_key(tensors.rng_state_ptr, plane)
    return Walk(block, low, left, right, high, rows, slope, behind, ahead, dropout)


@gluon.jit
def _lse_at(block, program, rows, heads):
    """Return the offsets of a block's rows in the LSE, in elements."""
    tensors, numbers = program.tensors, program.numbers
    owner = _owner_of(block.sequence, numbers.batch).to(gl.int64)
    if program.before is not None:
        if tensors.cu_seqlens_q_ptr is None:
            first = owner * numbers.stride_lse_b
        else:
            first = block.q_start
        lse_at = heads.to(gl.int64) * numbers.stride_lse_h + first
    elif tensors.cu_seqlens_q_ptr is None:
        lse_at = (owner * numbers.heads_q + heads) * numbers.tokens_q
    else:
        lse_at = heads.to(gl.int64) * numbers.tokens_q + block.q_start
    return lse_at + rows


@gluon.jit
def finish_block(m, l, block, W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Return ``Finished`` of a block; padding rows have no sink.

    The factor of the output includes ``keep_scale``.
    """
    PACK: gl.constexpr = OPTIONS.PACK
    tensors, numbers = program.tensors, program.numbers
    layout: gl.constexpr = m.type.layout
    heads = _heads(block.head, TILE.ROWS, PACK, layout)
    if program.before is not None:
        # the other keys count as one more key, whose logit is their LSE and whose value is their
        # output
        rows = block.first_row + W * (TILE.ROWS // PACK) + _tokens(TILE.ROWS, PACK, layout)
        lse_ptr = tensors.lse_ptr + _lse_at(block, program, rows, heads)
        before = gl.load(lse_ptr, mask=rows < block.len_q, other=NEG_INF) * LOG2E  # [ROWS]
        weight, empty, lse, kept = close_softmax(m, l, before)
        # rows that see none of this call's keys: values that no row sees may be NaN
        empty |= weight == 0.0
    else:
        is_padding = (block.sequence < 0) | (block.sequence >= numbers.batch)
        if PACK > 1:
            is_padding |= heads < 0  # [ROWS]
        weight, empty, lse = finish_softmax(m, l, heads, is_padding, tensors.sinks_ptr)
        kept = weight
    if tensors.rng_state_ptr is not None:
        weight *= numbers.keep_scale
    return Finished(weight, empty, lse, kept)


@gluon.jit
def write_block(
    o, finished, count, block, W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Scale the output of a block of queries, start its TMA store, and store the LSE.

    ``count``: the number of blocks before it.
    """
    PACK: gl.constexpr = OPTIONS.PACK
    ROWS: gl.constexpr = TILE.ROWS
    maps, pipeline = program.maps, program.pipeline
    row = block.first_row + W * (ROWS // PACK)
    lse = finished.lse
    layout: gl.constexpr = lse.type.layout
    rows = row + _tokens(ROWS, PACK, layout)  # [ROWS]
    heads = _heads(block.head, ROWS, PACK, layout)
    lse_ptr = program.tensors.lse_ptr + _lse_at(block, program, rows, heads)
    gl.store(lse_ptr, lse, mask=rows < block.len_q)
    o = finish(o, finished.weight, finished.empty)  # [ROWS, HEAD_DIM_V]
    where = coordinates(block.sequence, block.head, block.q_start, block.len_q, row, OPTIONS.RAGGED)
    tma.store_wait(0)
    if program.before is not None:
        full = program.before.index(W)
        copy_tile(maps.out_descs, where, full, pipeline.out_s, W)
        mbarrier.wait(full, count & 1)
        o = add_tile(o, finished.kept, pipeline.out_s, W, ROWS)
    store_tile(o, pipeline.out_s, W, ROWS)
    copy_tile_out(maps.out_descs, where, pipeline.out_s, W)


@gluon.jit
def consume(W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Compute the rows of warpgroup ``W`` in each block of queries that the producer announces."""
    program = Program(*program[:-1], factor_of(program.numbers.scale, program, OPTIONS))
    if W == TILE.WARPGROUPS - 1:
        # the ping-pong begins with warpgroup 0
        barrier_arrive(TURN, 256, 4)
    if TILE.PIPELINE:
        _consume_pipelined(W, program, OPTIONS, TILE)
    elif program.tensors.factors_ptr is None:
        _consume_one_by_one(W, program, OPTIONS, TILE)
    else:
        _consume_fp8(W, program, OPTIONS, TILE)
    tma.store_wait(0)
    if W == 0:
        # wait for the last signal of the ping-pong, so that the barrier ends empty
        barrier_sync(TURN, 256, 4)


@gluon.jit
def _consume_one_by_one(W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Finish each block of queries before the next block begins."""
    S: gl.constexpr = accumulator(TILE.BLOCK_N)
    turn = 0  # tiles of keys
    count = 0  # blocks of queries
    block = _receive(program, count)
    while block.head >= 0:
        walk = survey(block, S, W, program, OPTIONS, TILE)
        buffer = count % TILE.BUFFERS_Q * TILE.WARPGROUPS + W
        state = begin(turn, count, walk, W, program, OPTIONS, TILE)
        state = attend(state, walk, buffer, W, program, OPTIONS, TILE)
        turn = close(state, count, block, buffer, W, program, OPTIONS, TILE)
        count += 1
        block = _receive(program, count)


@gluon.jit
def close(
    state, count, block, buffer, W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Issue the last product of a block of queries and write the block; return ``turn``.

    ``count``: the number of blocks before it.
    """
    PARTIES: gl.constexpr = 128 * TILE.WARPGROUPS + 32
    pipeline = program.pipeline
    o, m, l, p, turn = state
    if not TILE.SHARE:
        mbarrier.arrive(pipeline.q_empty.index(buffer), count=1)
    stage_v = (turn - 1) % TILE.STAGES_V
    v = tile_of(pipeline.v_s, stage_v, TILE.BLOCK_N)  # [BLOCK_N, HEAD_DIM_V]
    await_full(pipeline.v_full, turn - 1)
    o = multiply_values(p, v, o)  # [ROWS, HEAD_DIM_V]
    finished = finish_block(m, l, block, W, program, OPTIONS, TILE)
    o = wait_for_values(o)
    barrier_arrive(EMPTY + TILE.STAGES_K + stage_v, PARTIES, 4)
    write_block(o, finished, count, block, W, program, OPTIONS, TILE)
    if TILE.SHARE:
        # the output is stored from the buffer of the queries
        tma.store_wait(0)
        mbarrier.arrive(pipeline.q_empty.index(W), count=1)
    return turn


@gluon.jit
def _consume_pipelined(W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Begin each block of queries while the last product of the block before it runs."""
    S: gl.constexpr = accumulator(TILE.BLOCK_N)
    pipeline = program.pipeline
    turn = 0  # tiles of keys
    count = 0  # blocks of queries
    block = _receive(program, count)
    if block.head >= 0:
        walk = survey(block, S, W, program, OPTIONS, TILE)
        state = begin(turn, count, walk, W, program, OPTIONS, TILE)
        while walk.block.head >= 0:
            buffer = count % TILE.BUFFERS_Q * TILE.WARPGROUPS + W
            state = attend(state, walk, buffer, W, program, OPTIONS, TILE)
            mbarrier.arrive(pipeline.q_empty.index(buffer), count=1)
            last = walk.block
            finished = finish_block(state.m, state.l, last, W, program, OPTIONS, TILE)
            count += 1
            walk = survey(_receive(program, count), S, W, program, OPTIONS, TILE)
            o, state = cross(state, count, walk, W, program, OPTIONS, TILE)
            write_block(o, finished, count - 1, last, W, program, OPTIONS, TILE)


@gluon.jit
def cross(state, count, walk, W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Issue the last product of a block of queries together with the first of the next block.

    ``walk`` and ``count`` belong to the next block. Return the output of the block that ends, and
    the ``State`` of the block that begins.
    """
    PARTIES: gl.constexpr = 128 * TILE.WARPGROUPS + 32
    S: gl.constexpr = accumulator(TILE.BLOCK_N)
    O: gl.constexpr = accumulator(TILE.HEAD_DIM_V)
    pipeline = program.pipeline
    o, _, _, p, turn = state
    stage_v = (turn - 1) % TILE.STAGES_V
    stage_k = turn % TILE.STAGES_K
    buffer = count % TILE.BUFFERS_Q * TILE.WARPGROUPS + W
    q = tile_of(pipeline.q_s, opaque(buffer), TILE.ROWS)  # [ROWS, HEAD_DIM]
    k = tile_of(pipeline.k_s, stage_k, TILE.BLOCK_N)  # [BLOCK_N, HEAD_DIM]
    v = tile_of(pipeline.v_s, stage_v, TILE.BLOCK_N)  # [BLOCK_N, HEAD_DIM_V]
    zeros = gl.zeros([TILE.ROWS, TILE.BLOCK_N], gl.float32, S)
    await_full(pipeline.q_full, count, OWNERS=TILE.WARPGROUPS, W=W)
    await_full(pipeline.k_full, turn)
    barrier_sync(TURN + W, 256, 4)
    s = multiply_keys(q, k, zeros)  # [ROWS, BLOCK_N]
    await_full(pipeline.v_full, turn - 1)
    o = multiply_values(p, v, o)  # [ROWS, HEAD_DIM_V]
    barrier_arrive(TURN + (W + 1) % TILE.WARPGROUPS, 256, 4)
    s = hopper.warpgroup_mma_wait(len(o), deps=(s,))
    barrier_arrive(EMPTY + stage_k, PARTIES, 4)
    first = (walk.high - 1) * TILE.BLOCK_N
    m, l, e = start(s, first, turn, walk, W, program, OPTIONS, TILE)
    o = wait_for_values(o)
    barrier_arrive(EMPTY + TILE.STAGES_K + stage_v, PARTIES, 4)
    p = gl.convert_layout(e.to(q[0].dtype), gl.DotOperandLayout(0, O, 2))
    return o, State(no_output(TILE), m, l, p, turn + 1)


@gluon.jit
def _consume_fp8(W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Finish each block of queries before the next block begins, in FP8.

    Descales reach the kernel as one factor of the scores and one factor of the values per head.
    """
    tensors, numbers = program.tensors, program.numbers
    pipeline = program.pipeline
    gl.static_assert(TILE.BUFFERS_Q == 1, "one buffer of queries in FP8")
    turn = 0  # tiles of keys
    count = 0  # blocks of queries
    block = _receive(program, count)
    while block.head >= 0:
        walk = survey(block, sums_of(TILE.BLOCK_N), W, program, OPTIONS, TILE)
        owner = _owner_of(block.sequence, numbers.batch)
        factors = factors_of(tensors.factors_ptr, block.head, owner, numbers.heads_q, OPTIONS.GROUP)
        # load before waiting for the queries, whose copy takes as long
        scale, unit = numbers.scale * gl.load(factors), gl.load(factors + 1) * UNIT
        q = pipeline.q_s[0].index(W).reshape([TILE.ROWS, TILE.HEAD_DIM])
        await_full(pipeline.q_full, count, OWNERS=TILE.WARPGROUPS, W=W)
        scale = scale_queries(q, scale)
        o, m, l, turn = walk_fp8(turn, q, scale, walk, W, program, OPTIONS, TILE)
        mbarrier.arrive(pipeline.q_empty.index(W), count=1)
        finished = finish_block(m, l, block, W, program, OPTIONS, TILE)
        finished = Finished(finished.weight * unit, finished.empty, finished.lse, finished.kept)
        write_block((o,), finished, count, block, W, program, OPTIONS, TILE)
        count += 1
        block = _receive(program, count)
