"""The walk over keys in FP8 on Hopper: queries, keys, values and probabilities in e4m3.

Operands of FP8 products lie along the dimension that is summed over. For the values that is the
keys, so they are read from a transposed copy (``hopper_values.py``), in whose columns the keys are
permuted in such a way that a thread's exponentials, where the first product has left them, are the
probabilities that the second one wants of it.
"""

from ._linked.compat import gl, gluon, hopper, mbarrier
from ._linked.pipeline import EMPTY, LOG2E, NEG_INF, barrier_arrive, barrier_arrive_after
from ._linked.softmax import logits_of, mask, row_sums

# binary exponent added to probabilities, so that e4m3 holds them well: it reaches 448
SHIFT = gl.constexpr(8)
# what takes it out of sums again
UNIT = gl.constexpr(2.0**-8)
FP32_TINY = gl.constexpr(2.0**-126)


@gluon.constexpr_function
def sums_of(columns):
    """Layout of a warpgroup's sums of FP8 products, so many columns wide."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])


@gluon.jit
def walk_fp8(
    turn, q, k_s, v_s, k_full, v_full, low, left, right, high, rows, len_k,
    scale, softcap, slope, window_left, window_right,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_ALIBI: gl.constexpr, WARPGROUPS: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    STAGES_K: gl.constexpr, STAGES_V: gl.constexpr,
):  # fmt: skip
    """Return output (in ``UNIT``), maxima and partial sums of a tile, and the key tiles so far.

    Hopper adds FP8 products to some 14 bits. So every tile's product of probabilities and values
    begins anew, and is added to the others in fp32, by the multiply-add that shrinks those: what
    four instructions of 32 keys lose, less than 2**-11 of the sum, does not grow with the length.

    The warpgroups take no turns: these products are too short for that to pay.
    """
    S: gl.constexpr = sums_of(BLOCK_N)
    O: gl.constexpr = sums_of(HEAD_DIM_V)
    PARTIES: gl.constexpr = 128 * WARPGROUPS + 32
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    o = gl.zeros([ROWS, HEAD_DIM_V], gl.float32, O)
    no_part = gl.zeros([ROWS, HEAD_DIM_V], gl.float32, O)
    # what the sums so far are still to be multiplied with
    shrink = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, S))
    factor = scale * LOG2E
    if HAS_SOFTCAP or HAS_ALIBI:
        factor = 1.0
    stage = turn % STAGES_K
    k = k_s.index(stage).reshape([BLOCK_N, HEAD_DIM])
    mbarrier.wait(k_full.index(stage), turn // STAGES_K & 1)
    s = hopper.warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    barrier_arrive(EMPTY + stage, PARTIES, 4)
    cols = (high - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    s = logits_of(s, rows, cols, scale, softcap, slope, HAS_SOFTCAP, HAS_ALIBI)
    s = mask(s, rows, cols, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT)
    m = gl.max(s, 1) * factor
    # a row that has seen no key yet keeps a finite pivot: -inf - -inf is NaN
    e = gl.exp2(s * factor - (gl.where(m == NEG_INF, 0.0, m) - SHIFT)[:, None])
    l = row_sums(e)
    words = pack(e)
    turn += 1
    # what the diagonal cuts, what every row sees whole, what the window's far end cuts
    if HAS_RIGHT:
        o, m, l, words, shrink, turn = _fold(
            o, m, l, words, shrink, turn, right, high - 1, q, k_s, v_s, k_full, v_full, rows, len_k,
            scale, factor, softcap, slope, window_left, window_right,
            HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, WARPGROUPS, ROWS, BLOCK_N,
            HEAD_DIM, HEAD_DIM_V, STAGES_K, STAGES_V, True,
        )  # fmt: skip
    o, m, l, words, shrink, turn = _fold(
        o, m, l, words, shrink, turn, left, right, q, k_s, v_s, k_full, v_full, rows, len_k,
        scale, factor, softcap, slope, window_left, window_right,
        HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, WARPGROUPS, ROWS, BLOCK_N,
        HEAD_DIM, HEAD_DIM_V, STAGES_K, STAGES_V, False,
    )  # fmt: skip
    if HAS_LEFT:
        o, m, l, words, shrink, turn = _fold(
            o, m, l, words, shrink, turn, low, left, q, k_s, v_s, k_full, v_full, rows, len_k,
            scale, factor, softcap, slope, window_left, window_right,
            HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, WARPGROUPS, ROWS, BLOCK_N,
            HEAD_DIM, HEAD_DIM_V, STAGES_K, STAGES_V, True,
        )  # fmt: skip
    stage_v = (turn - 1) % STAGES_V
    v = v_s.index(stage_v).reshape([HEAD_DIM_V, BLOCK_N])
    p = unpack(words, HEAD_DIM_V)
    mbarrier.wait(v_full.index(stage_v), (turn - 1) // STAGES_V & 1)
    part = hopper.warpgroup_mma(p, v.permute((1, 0)), no_part, use_acc=False, is_async=True)
    part = hopper.warpgroup_mma_wait(0, deps=(part,))
    barrier_arrive(EMPTY + STAGES_K + stage_v, PARTIES, 4)
    return add(o, shrink, part), m, l * UNIT, turn


@gluon.jit
def _fold(
    o, m, l, words, shrink, turn, begin, end, q, k_s, v_s, k_full, v_full, rows, len_k,
    scale, factor, softcap, slope, window_left, window_right,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_ALIBI: gl.constexpr, WARPGROUPS: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    STAGES_K: gl.constexpr, STAGES_V: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Fold the tiles of keys from ``end`` down to ``begin`` into the softmax."""
    S: gl.constexpr = sums_of(BLOCK_N)
    O: gl.constexpr = sums_of(HEAD_DIM_V)
    PARTIES: gl.constexpr = 128 * WARPGROUPS + 32
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    no_part = gl.zeros([ROWS, HEAD_DIM_V], gl.float32, O)
    for step in range(end - begin):
        gl.assume(turn > 0)  # its remainder is then a few bits of it
        stage = turn % STAGES_K
        stage_v = (turn - 1) % STAGES_V
        k = k_s.index(stage).reshape([BLOCK_N, HEAD_DIM])
        v = v_s.index(stage_v).reshape([HEAD_DIM_V, BLOCK_N])
        p = unpack(words, HEAD_DIM_V)
        mbarrier.wait(k_full.index(stage), turn // STAGES_K & 1)
        s = hopper.warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(stage_v), (turn - 1) // STAGES_V & 1)
        part = hopper.warpgroup_mma(p, v.permute((1, 0)), no_part, use_acc=False, is_async=True)
        s = hopper.warpgroup_mma_wait(1, deps=(s,))
        cols = (end - 1 - step) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
        s = logits_of(s, rows, cols, scale, softcap, slope, HAS_SOFTCAP, HAS_ALIBI)
        if MASKED:
            s = mask(s, rows, cols, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT)
        m_new = gl.maximum(m, gl.max(s, 1) * factor)
        pivot = m_new
        if MASKED:
            pivot = gl.where(m_new == NEG_INF, 0.0, m_new)
        e = gl.exp2(s * factor - (pivot - SHIFT)[:, None])
        alpha = gl.exp2(m - pivot)
        L: gl.constexpr = gl.SliceLayout(1, l.type.layout)
        sums = row_sums(e)
        barrier_arrive_after(sums, EMPTY + stage, PARTIES)
        l = l * gl.convert_layout(alpha, L)[:, None] + sums
        m = m_new
        part = hopper.warpgroup_mma_wait(0, deps=(part,))
        barrier_arrive(EMPTY + STAGES_K + stage_v, PARTIES, 4)
        o = add(o, shrink, part)
        shrink = alpha
        words = pack(e)
        turn += 1
    return o, m, l, words, shrink, turn


@gluon.jit
def pack(e):
    """Round exponentials to e4m3, four to a word, in the order in which the product wants them.

    Of 16 columns a thread holds 2i, 2i + 1, 2i + 8 and 2i + 9, and is to hold 4i to 4i + 3. Words,
    because bytes that a loop carries lie in a register each.
    """
    ROWS: gl.constexpr = e.shape[0]
    KEYS: gl.constexpr = e.shape[1]
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
        "=r,f,f,f,f", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def unpack(words, WIDTH: gl.constexpr):
    """Return packed probabilities as the left operand of a product with ``WIDTH`` columns."""
    P: gl.constexpr = gl.DotOperandLayout(0, sums_of(WIDTH), 4)
    ROWS: gl.constexpr = words.shape[0]
    KEYS: gl.constexpr = words.shape[1] * 16
    # a word four times, where its bytes are to be
    pairs = gl.join(words, words)
    words = gl.reshape(gl.join(pairs, pairs), [ROWS, KEYS])
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [gl.convert_layout(words, P, assert_trivial=True)],
        dtype=gl.float8e4nv, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def add(o, shrink, part):
    """Add a tile's product to the sums so far."""
    O: gl.constexpr = o.type.layout
    return o * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None] + part


@gluon.jit
def factors_of(factors_ptr, head, owner, heads_q, GROUP: gl.constexpr):
    """Return where a head's factors of scores and of values are; see ``hopper_values.py``."""
    return factors_ptr + 2 * (owner * (heads_q // GROUP) + gl.maximum(head, 0) // GROUP)


@gluon.jit
def scale_queries(q, scale):
    """Give the sign of a scale to a warpgroup's queries, where they lie; return its size.

    The softmax wants a positive one: with it the maximum commutes, and minus infinity times 0 is
    NaN. So it is the queries, too, that a scale of NaN makes NaN.
    """
    if (scale < 0) | (scale != scale):
        layout: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
        sign = gl.where(scale < 0, -1.0, scale)
        q.store((q.load(layout).to(gl.float32) * sign).to(q.dtype))
        hopper.fence_async_shared()
    # of a number and NaN the number
    return gl.maximum(gl.abs(scale), FP32_TINY)
