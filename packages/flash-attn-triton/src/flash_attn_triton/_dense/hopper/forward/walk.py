"""The walk over the tiles of keys that a block of queries sees, on Hopper.

The walk goes from the last tile to the first, with the online softmax of FlashAttention-2 (Dao,
2023): the first tile, tiles that the diagonal cuts, tiles that every row sees whole, and tiles that
the left end of the window cuts. Each kind has its own loop, so most tiles run no code for masks.
"""

from ...._linked.hopper.compat import gl, gluon, hopper
from ...._linked.hopper.pipeline import (
    EMPTY,
    LOG2E,
    NEG_INF,
    TURN,
    await_full,
    barrier_arrive,
    barrier_arrive_after,
    barrier_sync,
    key_tiles,
    opaque,
)
from ...._linked.hopper.ptx import SLACK, hide_unless, in_pairs
from ...._linked.hopper.softmax import logits_of, row_sums, start_softmax
from ...portable.primitives import LEAST_LOGIT
from ..dropout import drop
from ..panels import (
    accumulator,
    multiply_keys,
    multiply_values,
    no_output,
    rescale,
    tile_of,
    wait_for_values,
)
from .alibi import AHEAD, CUT, WHOLE, largest, less_pivot, start_tilted, tilted
from .bias import add_bias
from .structures import State


@gluon.jit
def tiles_of(
    block, first_row, TOKENS: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Return the ``key_tiles`` of ``TOKENS`` tokens of a block of queries."""
    return key_tiles(
        first_row,
        block.len_q,
        block.len_k,
        program.numbers.window_left,
        program.numbers.window_right,
        OPTIONS.HAS_LEFT,
        OPTIONS.HAS_RIGHT,
        TOKENS,
        TILE.BLOCK_N,
    )


@gluon.jit
def logits(s, first, scale, walk, program, OPTIONS: gl.constexpr):
    """Return the base-2 logits of products, ``[ROWS, BLOCK_N]``; see ``logits_of``."""
    HAS_ALIBI: gl.constexpr = program.tensors.alibi_slopes_ptr is not None
    softcap = program.numbers.softcap
    return logits_of(
        s, walk.rows, first, scale, softcap, walk.slope, OPTIONS.HAS_SOFTCAP, HAS_ALIBI
    )


@gluon.jit
def factor_of(scale, program, OPTIONS: gl.constexpr):
    """Return the factor that brings logits to base 2.

    The exponential's multiply-add applies the scale; it is positive, so the maximum commutes.
    """
    factor = scale * LOG2E
    if OPTIONS.HAS_SOFTCAP or program.tensors.alibi_slopes_ptr is not None:
        factor = 1.0
    return factor


@gluon.jit
def start(
    s, first, turn, walk, W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Begin a block's softmax with its first tile's products; return as ``start_softmax`` does."""
    HAS_ALIBI: gl.constexpr = program.tensors.alibi_slopes_ptr is not None
    FLOOR: gl.constexpr = LEAST_LOGIT if program.bias is not None else NEG_INF
    cols = first + gl.arange(0, TILE.BLOCK_N, gl.SliceLayout(0, s.type.layout))
    if HAS_ALIBI:
        s, level = tilted(s, first, program.numbers.scale, walk, program, CUT, OPTIONS)
    else:
        s = logits(s, first, program.numbers.scale, walk, program, OPTIONS)
    s = add_bias(s, turn, W, program, OPTIONS, TILE)
    s = hide(s, cols, walk, program, OPTIONS)
    if HAS_ALIBI:
        m, l, e = start_tilted(s, level, FLOOR)
    else:
        m, l, e = start_softmax(s, program.factor, FLOOR)  # [ROWS], [ROWS, 4], [ROWS, BLOCK_N]
    return m, l, drop_some(e, cols, walk, program)


@gluon.jit
def hide(s, cols, walk, program, OPTIONS: gl.constexpr):
    """Hide the keys that a row does not see."""
    rows = walk.rows
    limit = gl.full(rows.shape, walk.block.len_k - 1, gl.int32, rows.type.layout)  # [ROWS]
    if OPTIONS.HAS_RIGHT:
        limit = gl.minimum(rows + program.numbers.window_right, limit)
    s = hide_unless(s, cols[None, :], limit[:, None])  # [ROWS, BLOCK_N]
    if OPTIONS.HAS_LEFT:
        s = hide_unless(s, (rows - program.numbers.window_left)[:, None], cols[None, :])
    return s


@gluon.jit
def drop_some(e, cols, walk, program):
    """Return the exponentials with 0 where dropout drops; the softmax's sums count them all."""
    if program.tensors.rng_state_ptr is not None:
        # from the key that a row stands at back to its index in the sequence
        rows = walk.rows - (walk.block.len_k - walk.block.len_q)
        e = drop(e, rows, cols, walk.dropout, program.numbers.dropout_threshold)
    return e


@gluon.jit
def begin(turn, count, walk, W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Fold a block's first tile of keys into an empty softmax and return the ``State``.

    No other product of the warpgroup overlaps with this softmax.
    """
    S: gl.constexpr = accumulator(TILE.BLOCK_N)
    O: gl.constexpr = accumulator(TILE.HEAD_DIM_V)
    pipeline = program.pipeline
    stage = turn % TILE.STAGES_K
    buffer = count % TILE.BUFFERS_Q * TILE.WARPGROUPS + W
    q = tile_of(pipeline.q_s, buffer, TILE.ROWS)  # [ROWS, HEAD_DIM]
    k = tile_of(pipeline.k_s, stage, TILE.BLOCK_N)  # [BLOCK_N, HEAD_DIM]
    zeros = gl.zeros([TILE.ROWS, TILE.BLOCK_N], gl.float32, S)
    await_full(pipeline.q_full, count, OWNERS=TILE.WARPGROUPS, W=W)
    await_full(pipeline.k_full, turn)
    barrier_sync(TURN + W, 256, 4)
    s = multiply_keys(q, k, zeros)  # [ROWS, BLOCK_N]
    barrier_arrive(TURN + (W + 1) % TILE.WARPGROUPS, 256, 4)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    barrier_arrive(EMPTY + stage, 128 * TILE.WARPGROUPS + 32, 4)
    first = (walk.high - 1) * TILE.BLOCK_N
    m, l, e = start(s, first, turn, walk, W, program, OPTIONS, TILE)
    p = gl.convert_layout(e.to(q[0].dtype), gl.DotOperandLayout(0, O, 2))
    return State(no_output(TILE), m, l, p, turn + 1)


@gluon.jit
def attend(
    state, walk, buffer, W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Fold all tiles of keys but the first into the softmax; return the ``State``.

    The first loop takes the tiles that the diagonal cuts. The second takes the tiles that every row
    sees whole, and has no code for masks. The third takes the tiles that the window's left end
    cuts. With a softcap a mask costs little, so one loop takes all tiles. With ALiBi the loops take
    keys after the rows, keys on both sides, and keys before the rows.
    """
    HAS_ALIBI: gl.constexpr = program.tensors.alibi_slopes_ptr is not None
    IS_MASKED: gl.constexpr = OPTIONS.HAS_LEFT or OPTIONS.HAS_RIGHT
    IS_HEAVY: gl.constexpr = IS_MASKED and OPTIONS.HAS_SOFTCAP
    stop = walk.high - 1
    if HAS_ALIBI and not OPTIONS.HAS_RIGHT and not IS_HEAVY:
        state = fold(state, walk.ahead, stop, walk, buffer, AHEAD, W, program, OPTIONS, TILE)
        state = with_pairs(state)
        stop = walk.ahead
    if (OPTIONS.HAS_RIGHT or HAS_ALIBI) and not IS_HEAVY:
        state = fold(state, walk.behind, stop, walk, buffer, CUT, W, program, OPTIONS, TILE)
        state = with_pairs(state)
        stop = walk.behind
    if not IS_HEAVY:
        state = fold(state, walk.left, stop, walk, buffer, WHOLE, W, program, OPTIONS, TILE)
        stop = walk.left
    if OPTIONS.HAS_LEFT or IS_HEAVY:
        state = fold(
            with_pairs(state), walk.low, stop, walk, buffer, CUT, W, program, OPTIONS, TILE
        )
    return state


@gluon.jit
def with_pairs(state):
    """Return the state with its probabilities packed in pairs; see ``in_pairs``."""
    return State(state.o, state.m, state.l, in_pairs(state.p), state.turn)


@gluon.jit
def fold(
    state,
    start,
    stop,
    walk,
    buffer,
    KIND: gl.constexpr,
    W: gl.constexpr,
    program,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Fold the tiles of keys ``[start, stop)`` into the softmax, the last one first."""
    HAS_ALIBI: gl.constexpr = program.tensors.alibi_slopes_ptr is not None
    S: gl.constexpr = accumulator(TILE.BLOCK_N)
    O: gl.constexpr = accumulator(TILE.HEAD_DIM_V)
    PARTIES: gl.constexpr = 128 * TILE.WARPGROUPS + 32
    FLOOR: gl.constexpr = LEAST_LOGIT if program.bias is not None else NEG_INF
    pipeline = program.pipeline
    if TILE.BUFFERS_Q > 1:
        q = tile_of(pipeline.q_s, opaque(buffer), TILE.ROWS)  # [ROWS, HEAD_DIM]
    else:
        q = tile_of(pipeline.q_s, W, TILE.ROWS)
    zeros = gl.zeros([TILE.ROWS, TILE.BLOCK_N], gl.float32, S)
    o, m, l, p, turn = state
    for step in range(stop - start):
        stage = turn % TILE.STAGES_K
        stage_v = (turn - 1) % TILE.STAGES_V
        k = tile_of(pipeline.k_s, stage, TILE.BLOCK_N)  # [BLOCK_N, HEAD_DIM]
        v = tile_of(pipeline.v_s, stage_v, TILE.BLOCK_N)  # [BLOCK_N, HEAD_DIM_V]
        await_full(pipeline.k_full, turn)
        barrier_sync(TURN + W, 256, 4)
        s = multiply_keys(q, k, zeros)  # [ROWS, BLOCK_N]
        await_full(pipeline.v_full, turn - 1)
        o = multiply_values(p, v, o)  # [ROWS, HEAD_DIM_V]
        barrier_arrive(TURN + (W + 1) % TILE.WARPGROUPS, 256, 4)
        s = hopper.warpgroup_mma_wait(len(o), deps=(s,))
        if not TILE.ORDERED:
            barrier_arrive(EMPTY + stage, PARTIES, 4)
        first = (stop - 1 - step) * TILE.BLOCK_N
        cols = first + gl.arange(0, TILE.BLOCK_N, gl.SliceLayout(0, S))
        if HAS_ALIBI:
            s, level = tilted(s, first, program.numbers.scale, walk, program, KIND, OPTIONS)
        else:
            s = logits(s, first, program.numbers.scale, walk, program, OPTIONS)
        s = add_bias(s, turn, W, program, OPTIONS, TILE)
        if KIND == CUT:
            s = hide(s, cols, walk, program, OPTIONS)
        if HAS_ALIBI:
            top = largest(s, level)  # [ROWS]
        else:
            top = gl.max(s, 1) * program.factor
        m_new = gl.where(top - m > SLACK, top, m) if TILE.LAG else gl.maximum(m, top)
        pivot = m_new
        if KIND == CUT or program.bias is not None:
            pivot = gl.where(m_new <= FLOOR, 0.0, m_new)
        if HAS_ALIBI:
            e = gl.exp2(less_pivot(s, level, pivot))  # [ROWS, BLOCK_N]
        else:
            e = gl.exp2(s * program.factor - pivot[:, None])
        alpha = gl.exp2(m - pivot)  # [ROWS]
        L: gl.constexpr = gl.SliceLayout(1, l.type.layout)
        if TILE.ORDERED:
            sums = row_sums(e)  # [ROWS, 4]
            barrier_arrive_after(sums, EMPTY + stage, PARTIES)
            l = l * gl.convert_layout(alpha, L)[:, None] + sums
        else:
            l = l * gl.convert_layout(alpha, L)[:, None] + row_sums(e)
        e = drop_some(e, cols, walk, program)
        m = m_new
        o = wait_for_values(o)
        barrier_arrive(EMPTY + TILE.STAGES_K + stage_v, PARTIES, 4)
        o = rescale(o, alpha, TILE.LAG)
        p = gl.convert_layout(e.to(q[0].dtype), gl.DotOperandLayout(0, O, 2))  # [ROWS, BLOCK_N]
        turn += 1
    return State(o, m, l, p, turn)
