"""The walk over keys in FP8 on Hopper: queries, keys, values and probabilities in e4m3.

FP8 products need operands that are contiguous along the dimension that is summed over. For the
values that is the dimension of keys, so values are read from a transposed copy (``values.py``). Its
keys are permuted: the exponentials that a thread holds after the first product are then the
probabilities that the second product expects from that thread.
"""

from ...._linked.hopper.compat import gl, gluon, hopper
from ...._linked.hopper.pipeline import EMPTY, NEG_INF, await_full, barrier_arrive
from ...._linked.hopper.softmax import row_sums
from .structures import Fp8State
from .walk import factor_of, hide, logits, tiles_of

# binary exponent that is added to probabilities, so that they use the range of e4m3, up to 448
SHIFT = gl.constexpr(8)
# factor that removes it from sums
UNIT = gl.constexpr(2.0**-8)
FP32_TINY = gl.constexpr(2.0**-126)


@gluon.constexpr_function
def sums_of(columns):
    """Return the layout of a warpgroup's wgmma accumulator of FP8 products."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])


@gluon.constexpr_function
def width_of(columns):
    """Return how many columns of a product fit into registers next to the sums of all columns."""
    return columns if columns <= 128 else 64


@gluon.jit
def walk_fp8(
    turn, q, scale, walk, W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Return the output of a block (in ``UNIT``), maxima, partial sums, and the key tiles so far.

    A warpgroup has one product in flight and waits for it, while other warpgroups compute their
    softmax. So scores and products share registers, which makes room for a third warpgroup. There
    is no ping-pong, so each warpgroup skips the tiles that none of its own rows sees.
    """
    S: gl.constexpr = sums_of(TILE.BLOCK_N)
    o = gl.zeros([TILE.ROWS, TILE.HEAD_DIM_V], gl.float32, sums_of(TILE.HEAD_DIM_V))
    m = gl.full([TILE.ROWS], NEG_INF, gl.float32, gl.SliceLayout(1, S))
    l = row_sums(gl.zeros([TILE.ROWS, TILE.BLOCK_N], gl.float32, S))  # [ROWS, 4]
    low, left, right, high = _own_tiles(walk, W, program, OPTIONS, TILE)
    turn = _pass_by(turn, walk.high - high, program, TILE)
    state = Fp8State(o, m, l, turn)
    # tiles that the diagonal or the last key cuts; tiles that every row sees whole; tiles that the
    # window's left end cuts
    state = _fold(state, right, high, q, scale, walk, True, program, OPTIONS, TILE)
    state = _fold(state, left, right, q, scale, walk, False, program, OPTIONS, TILE)
    if OPTIONS.HAS_LEFT:
        state = _fold(state, low, left, q, scale, walk, True, program, OPTIONS, TILE)
    o, m, l, turn = state
    turn = _pass_by(turn, low - walk.low, program, TILE)
    return o, m, l * UNIT, turn


@gluon.jit
def _own_tiles(walk, W: gl.constexpr, program, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Return ``(low, left, right, high)`` as ``key_tiles``, only for the rows of warpgroup ``W``.

    They stay within the block's tiles. A warpgroup after the last query has none, and without a
    mask the last tile counts as masked only if it is not full.
    """
    TOKENS: gl.constexpr = TILE.ROWS // OPTIONS.PACK
    block = walk.block
    first_row = block.first_row + W * TOKENS
    low, left, right, high = tiles_of(block, first_row, TOKENS, program, OPTIONS, TILE)
    high = gl.where(first_row < block.len_q, high, low)
    if not (OPTIONS.HAS_LEFT or OPTIONS.HAS_RIGHT):
        right = gl.maximum(block.len_k // TILE.BLOCK_N, low)
    right = gl.minimum(right, high)
    left = gl.minimum(left, right)
    return low, left, right, high


@gluon.jit
def _pass_by(turn, tiles, program, TILE: gl.constexpr):
    """Release so many tiles of keys and values unread as they arrive; return the next ``turn``."""
    PARTIES: gl.constexpr = 128 * TILE.WARPGROUPS + 32
    pipeline = program.pipeline
    for _tile in range(tiles):
        stage = turn % TILE.STAGES_K
        stage_v = turn % TILE.STAGES_V
        await_full(pipeline.k_full, turn)
        barrier_arrive(EMPTY + stage, PARTIES, 4)
        await_full(pipeline.v_full, turn)
        barrier_arrive(EMPTY + TILE.STAGES_K + stage_v, PARTIES, 4)
        turn += 1
    return turn


@gluon.jit
def _fold(
    state,
    start,
    stop,
    q,
    scale,
    walk,
    MASKED: gl.constexpr,
    program,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Fold the tiles of keys ``[start, stop)`` into the softmax, the last one first."""
    S: gl.constexpr = sums_of(TILE.BLOCK_N)
    PARTIES: gl.constexpr = 128 * TILE.WARPGROUPS + 32
    WIDTH: gl.constexpr = width_of(TILE.HEAD_DIM_V)
    pipeline = program.pipeline
    factor = factor_of(scale, program, OPTIONS)
    zeros = gl.zeros([TILE.ROWS, TILE.BLOCK_N], gl.float32, S)
    o, m, l, turn = state
    for step in range(stop - start):
        stage = turn % TILE.STAGES_K
        stage_v = turn % TILE.STAGES_V
        k = pipeline.k_s[0].index(stage).reshape([TILE.BLOCK_N, TILE.HEAD_DIM])
        v = pipeline.v_s[0].index(stage_v).reshape([TILE.HEAD_DIM_V, TILE.BLOCK_N])
        await_full(pipeline.k_full, turn)
        s = hopper.warpgroup_mma(
            q, k.permute((1, 0)), zeros, use_acc=False, is_async=True
        )  # [ROWS, BLOCK_N]
        s = hopper.warpgroup_mma_wait(0, deps=(s,))
        barrier_arrive(EMPTY + stage, PARTIES, 4)
        first = (stop - 1 - step) * TILE.BLOCK_N
        cols = first + gl.arange(0, TILE.BLOCK_N, gl.SliceLayout(0, S))
        s = logits(s, first, scale, walk, program, OPTIONS)
        if MASKED:
            s = hide(s, cols, walk, program, OPTIONS)
        m_new = gl.maximum(m, gl.max(s, 1) * factor)  # [ROWS]
        pivot = m_new
        if MASKED:
            # a row that has seen no key yet keeps a finite pivot: -inf - -inf is NaN
            pivot = gl.where(m_new == NEG_INF, 0.0, m_new)
        e = gl.exp2(s * factor - (pivot - SHIFT)[:, None])  # [ROWS, BLOCK_N]
        alpha = gl.exp2(m - pivot)  # [ROWS]
        L: gl.constexpr = gl.SliceLayout(1, l.type.layout)
        l = l * gl.convert_layout(alpha, L)[:, None] + row_sums(e)  # [ROWS, 4]
        m = m_new
        p = unpack(pack(e), WIDTH)  # [ROWS, BLOCK_N]
        await_full(pipeline.v_full, turn)
        o = add_product(o, alpha, p, v, 0, TILE.HEAD_DIM_V, WIDTH)  # [ROWS, HEAD_DIM_V]
        barrier_arrive(EMPTY + TILE.STAGES_K + stage_v, PARTIES, 4)
        turn += 1
    return Fp8State(o, m, l, turn)


@gluon.jit
def add_product(o, shrink, p, v, FIRST: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr):
    """Return ``o * shrink + p @ v`` of columns ``[FIRST, FIRST + COLUMNS)``, ``WIDTH`` at a time.

    ``v`` is transposed and has all columns. Hopper accumulates FP8 products in about 14 bits. So
    each product starts from zero; the multiply-add that rescales the earlier products adds it in
    fp32. The error of four instructions of 32 keys, less than 2**-11 of the sum, then does not grow
    with the number of keys.
    """
    ROWS: gl.constexpr = o.shape[0]
    LAYOUT: gl.constexpr = o.type.layout
    if COLUMNS > WIDTH:
        HALF: gl.constexpr = COLUMNS // 2
        low, high = gl.split(gl.permute(gl.reshape(o, [ROWS, 2, HALF]), [0, 2, 1]))
        low = add_product(low, shrink, p, v, FIRST, HALF, WIDTH)  # [ROWS, COLUMNS // 2]
        high = add_product(high, shrink, p, v, FIRST + HALF, HALF, WIDTH)
        o = gl.reshape(gl.permute(gl.join(low, high), [0, 2, 1]), [ROWS, COLUMNS])
        o = gl.convert_layout(o, LAYOUT, assert_trivial=True)
    else:
        zeros = gl.zeros([ROWS, COLUMNS], gl.float32, sums_of(COLUMNS))
        part = hopper.warpgroup_mma(
            p, v.slice(FIRST, COLUMNS).permute((1, 0)), zeros, use_acc=False, is_async=True
        )  # [ROWS, COLUMNS]
        part = hopper.warpgroup_mma_wait(0, deps=(part,))
        part = gl.convert_layout(part, LAYOUT, assert_trivial=True)
        o = o * gl.convert_layout(shrink, gl.SliceLayout(1, LAYOUT))[:, None] + part
    return o


@gluon.jit
def pack(e):
    """Round exponentials to e4m3, four to a word: ``[ROWS, KEYS]`` to ``[ROWS, KEYS // 16, 4]``.

    Of 16 columns a thread holds 2i, 2i + 1, 2i + 8 and 2i + 9; the next product expects 4i to
    4i + 3. Triton's own conversion would keep every byte in a separate register.
    """
    ROWS: gl.constexpr = e.shape[0]
    KEYS: gl.constexpr = e.shape[1]
    # [ROWS, KEYS // 16, 4, 2, 2]
    e = gl.permute(gl.reshape(e, [ROWS, KEYS // 16, 2, 4, 2]), [0, 1, 3, 2, 4])
    even, odd = gl.split(e)
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
        }
        """,
        "=r,f,f,f,f",
        [a, b, c, d],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def unpack(words, WIDTH: gl.constexpr):
    """Return packed probabilities as the left operand of a product with ``WIDTH`` columns."""
    P: gl.constexpr = gl.DotOperandLayout(0, sums_of(WIDTH), 4)
    ROWS: gl.constexpr = words.shape[0]
    KEYS: gl.constexpr = words.shape[1] * 16
    # repeat each word at the positions of its four bytes
    pairs = gl.join(words, words)
    words = gl.reshape(gl.join(pairs, pairs), [ROWS, KEYS])  # [ROWS, KEYS]
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;",
        "=r,r,r,r,r",
        [gl.convert_layout(words, P, assert_trivial=True)],
        dtype=gl.float8e4nv,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def factors_of(factors_ptr, head, owner, heads_q, GROUP: gl.constexpr):
    """Return the address of a head's factors of scores and values; see ``values.py``."""
    return factors_ptr + 2 * (owner * (heads_q // GROUP) + gl.maximum(head, 0) // GROUP)


@gluon.jit
def scale_queries(q, scale):
    """Multiply queries in shared memory by the sign of a scale; return its absolute value.

    The softmax needs a positive scale: only a positive scale commutes with the maximum, and -inf
    times 0 is NaN. A scale of NaN makes the queries NaN.
    """
    if (scale < 0) | (scale != scale):
        layout: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
        sign = gl.where(scale < 0, -1.0, scale)
        q.store((q.load(layout).to(gl.float32) * sign).to(q.dtype))
        hopper.fence_async_shared()
    # the maximum of a number and NaN is the number
    return gl.maximum(gl.abs(scale), FP32_TINY)
