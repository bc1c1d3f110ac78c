"""The walk over the tiles of keys that a tile of queries sees, on Hopper.

From the last tile to the first, with the online softmax of FlashAttention-2 (Dao, 2023): the first
tile, those that the diagonal cuts, those that every row sees whole, and those that the window's far
end cuts. Each kind has a loop of its own, so that most tiles meet no code for masks.
"""

from ._linked.compat import gl, gluon, hopper, mbarrier
from ._linked.pipeline import EMPTY, NEG_INF, TURN, barrier_arrive, barrier_sync, opaque
from ._linked.ptx import SLACK, hide_unless, in_pairs, shrink
from ._linked.softmax import logits_of, row_sums, start_softmax


@gluon.jit
def hide(
    s, rows, cols, len_k, window_left, window_right,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """Hide the keys that a row does not see; ``rows`` count from the one that faces key 0."""
    limit = gl.full(rows.shape, len_k - 1, gl.int32, rows.type.layout)
    if HAS_RIGHT:
        limit = gl.minimum(rows + window_right, limit)
    s = hide_unless(s, cols[None, :], limit[:, None])
    if HAS_LEFT:
        s = hide_unless(s, (rows - window_left)[:, None], cols[None, :])
    return s


@gluon.jit
def begin(
    turn, count, q_s, k_s, q_full, k_full, rows, tile, len_k,
    scale, factor, softcap, slope, window_left, window_right,
    W: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    HAS_ALIBI: gl.constexpr, WARPGROUPS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BUFFERS_Q: gl.constexpr,
    STAGES_K: gl.constexpr,
):  # fmt: skip
    """Work on the first tile of keys where no other product runs beside its softmax."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM_V, 16])
    stage = turn % STAGES_K
    buffer = count % BUFFERS_Q * WARPGROUPS + W
    q = q_s.index(buffer).reshape([ROWS, HEAD_DIM])
    k = k_s.index(stage).reshape([BLOCK_N, HEAD_DIM])
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    mbarrier.wait(q_full.index(buffer), count // BUFFERS_Q & 1)
    mbarrier.wait(k_full.index(stage), turn // STAGES_K & 1)
    barrier_sync(TURN + W, 256, 4)
    s = hopper.warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    barrier_arrive(TURN + (W + 1) % WARPGROUPS, 256, 4)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    barrier_arrive(EMPTY + stage, 128 * WARPGROUPS + 32, 4)
    cols = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    s = logits_of(s, rows, cols, scale, softcap, slope, HAS_SOFTCAP, HAS_ALIBI)
    s = hide(s, rows, cols, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT)
    m, l, e = start_softmax(s, factor)
    return m, l, gl.convert_layout(e.to(q.dtype), gl.DotOperandLayout(0, O, 2)), turn + 1


@gluon.jit
def attend(
    o, m, l, p, turn, low, left, right, high, buffer, q_s, k_s, v_s, k_full, v_full, rows, len_k,
    scale, factor, softcap, slope, window_left, window_right,
    W: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_ALIBI: gl.constexpr, WARPGROUPS: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    BUFFERS_Q: gl.constexpr, STAGES_K: gl.constexpr, STAGES_V: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    """Fold all tiles of keys but the first into the softmax.

    First those that the diagonal cuts, then in a loop without code for masks those that every row
    sees whole, then those that the window's far end cuts. Beside softcap and slopes a mask costs
    little: there one loop has them all.
    """
    IS_MASKED: gl.constexpr = HAS_LEFT or HAS_RIGHT
    IS_HEAVY: gl.constexpr = IS_MASKED and (HAS_SOFTCAP or HAS_ALIBI)
    if HAS_RIGHT and not IS_HEAVY:
        o, m, l, p, turn = _fold(
            o, m, l, p, turn, right, high - 1, buffer, q_s, k_s, v_s, k_full, v_full, rows, len_k,
            scale, factor, softcap, slope, window_left, window_right,
            W, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, WARPGROUPS, ROWS, BLOCK_N,
            HEAD_DIM, HEAD_DIM_V, BUFFERS_Q, STAGES_K, STAGES_V, LAG, True,
        )  # fmt: skip
        p = in_pairs(p)
    if not IS_HEAVY:
        o, m, l, p, turn = _fold(
            o, m, l, p, turn, left, right, buffer, q_s, k_s, v_s, k_full, v_full, rows, len_k,
            scale, factor, softcap, slope, window_left, window_right,
            W, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, WARPGROUPS, ROWS, BLOCK_N,
            HEAD_DIM, HEAD_DIM_V, BUFFERS_Q, STAGES_K, STAGES_V, LAG, False,
        )  # fmt: skip
    if HAS_LEFT or IS_HEAVY:
        stop = high - 1 if IS_HEAVY else left
        o, m, l, p, turn = _fold(
            o, m, l, in_pairs(p), turn, low, stop, buffer, q_s, k_s, v_s, k_full, v_full, rows,
            len_k, scale, factor, softcap, slope, window_left, window_right,
            W, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, WARPGROUPS, ROWS, BLOCK_N,
            HEAD_DIM, HEAD_DIM_V, BUFFERS_Q, STAGES_K, STAGES_V, LAG, True,
        )  # fmt: skip
    return o, m, l, p, turn


@gluon.jit
def _fold(
    o, m, l, p, turn, start, stop, buffer, q_s, k_s, v_s, k_full, v_full, rows, len_k,
    scale, factor, softcap, slope, window_left, window_right,
    W: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_ALIBI: gl.constexpr, WARPGROUPS: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    BUFFERS_Q: gl.constexpr, STAGES_K: gl.constexpr, STAGES_V: gl.constexpr, LAG: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Fold the tiles of keys from ``start`` up to ``stop`` into the softmax, the last one first."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM_V, 16])
    PARTIES: gl.constexpr = 128 * WARPGROUPS + 32
    if BUFFERS_Q > 1:
        q = q_s.index(opaque(buffer)).reshape([ROWS, HEAD_DIM])
    else:
        q = q_s.index(W).reshape([ROWS, HEAD_DIM])
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    for step in range(stop - start):
        stage = turn % STAGES_K
        stage_v = (turn - 1) % STAGES_V
        k = k_s.index(stage).reshape([BLOCK_N, HEAD_DIM])
        v = v_s.index(stage_v).reshape([BLOCK_N, HEAD_DIM_V])
        mbarrier.wait(k_full.index(stage), turn // STAGES_K & 1)
        barrier_sync(TURN + W, 256, 4)
        s = hopper.warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(stage_v), (turn - 1) // STAGES_V & 1)
        o = hopper.warpgroup_mma(p, v, o, is_async=True)
        barrier_arrive(TURN + (W + 1) % WARPGROUPS, 256, 4)
        s = hopper.warpgroup_mma_wait(1, deps=(s,))
        barrier_arrive(EMPTY + stage, PARTIES, 4)
        cols = (stop - 1 - step) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
        s = logits_of(s, rows, cols, scale, softcap, slope, HAS_SOFTCAP, HAS_ALIBI)
        if MASKED:
            s = hide(s, rows, cols, len_k, window_left, window_right, HAS_LEFT, HAS_RIGHT)
        top = gl.max(s, 1) * factor
        m_new = gl.where(top - m > SLACK, top, m) if LAG else gl.maximum(m, top)
        pivot = m_new
        if MASKED:
            pivot = gl.where(m_new == NEG_INF, 0.0, m_new)
        e = gl.exp2(s * factor - pivot[:, None])
        alpha = gl.exp2(m - pivot)
        L: gl.constexpr = gl.SliceLayout(1, l.type.layout)
        l = l * gl.convert_layout(alpha, L)[:, None] + row_sums(e)
        m = m_new
        o = hopper.warpgroup_mma_wait(0, deps=(o,))
        barrier_arrive(EMPTY + STAGES_K + stage_v, PARTIES, 4)
        factors = gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
        o = shrink(o, factors) if LAG else o * factors
        p = gl.convert_layout(e.to(q_s.dtype), gl.DotOperandLayout(0, O, 2))
        turn += 1
    return o, m, l, p, turn
