"""The steps of the Hopper backward: what a warpgroup does for one tile of queries.

Of the five products of a tile one is under way while a warpgroup computes: that of dp beside the
exponentials, that of dv beside the gradient of the scores, and those of dk and of the next tile's
scores beside the addition to dq. More in flight was slower: a warpgroup cannot go on before the
tensor cores have taken its product. The product of dq is one step behind: the gradients of scores
that it wants from the other warpgroup are there by then, so that the two need not keep step, and
one computes while the other multiplies.
"""

from ._linked.compat import gl, gluon, hopper, mbarrier
from ._linked.gradients import ROWS, send
from ._linked.pipeline import EMPTY, LOG2E, barrier_arrive, barrier_sync
from ._linked.softmax import tanh

PARTIES = gl.constexpr(288)
# hardware barriers: a warpgroup's gradients of scores are there, in either buffer; those of the
# second warpgroup come eight later
MADE = gl.constexpr(6)


@gluon.jit
def probabilities(
    s, lse2, first_key, first_row, len_k, scale, softcap, window_left, window_right,
    MASKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Return the probabilities of scores [keys, rows], and what dp is multiplied with.

    Rows count from the one that faces key 0.
    """
    S: gl.constexpr = s.type.layout
    if HAS_SOFTCAP:
        capped = tanh(s * (scale / softcap))
        p = gl.exp2(capped * (softcap * LOG2E) - lse2[None, :])
    else:
        p = gl.exp2(s * (scale * LOG2E) - lse2[None, :])
    if MASKED:
        keys = first_key + gl.arange(0, s.shape[0], gl.SliceLayout(1, S))
        rows = first_row + gl.arange(0, s.shape[1], gl.SliceLayout(0, S))
        visible = (keys < len_k)[:, None]
        if HAS_RIGHT:
            visible &= keys[:, None] <= (rows + window_right)[None, :]
        if HAS_LEFT:
            visible &= keys[:, None] >= (rows - window_left)[None, :]
        p = gl.where(visible, p, 0.0)
    weight = p
    if HAS_SOFTCAP:
        weight = p * (1.0 - capped * capped)
    return p, weight


@gluon.jit
def say_made(turn, W: gl.constexpr):
    """Say that ``W``'s gradients of a step are stored; ``turn`` is as even or odd as the step."""
    barrier_arrive(MADE + 8 * W + turn % 2, 256, 4)


@gluon.jit
def await_made(turn, W: gl.constexpr):
    """Wait until the other warpgroup than ``W`` has said so."""
    barrier_sync(MADE + 8 * (1 - W) + turn % 2, 256, 4)


@gluon.jit
def multiply_dq(
    ds_s, k_s, turn, none, W: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr
):  # fmt: skip
    """Begin ``W``'s half of the product of dq of step ``turn``: of its columns, or of its rows."""
    PARTS: gl.constexpr = BLOCK_M // 64
    WIDTH: gl.constexpr = HEAD_DIM * PARTS // 2
    Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    dq = gl.zeros([64, WIDTH], gl.float32, Q)
    for h in gl.static_range(2):
        ds_h = ds_s.index(turn % 2 * 2 + h)
        k_h = k_s.index(h + none).reshape([ROWS, HEAD_DIM])
        if PARTS == 2:
            ds_h = ds_h.slice(W * 64, 64, 1)
        else:
            k_h = k_h.slice(W * WIDTH, WIDTH, 1)
        dq = hopper.warpgroup_mma(ds_h.permute((1, 0)), k_h, dq, use_acc=h == 1, is_async=True)
    return dq


@gluon.jit
def walk(
    dk, dv, s, last, turn, total, first_tile, tiles, sums, dq_row, dq_s,
    q_s, k_s, v_s, dout_s, ds_s, lse2_s, delta_s, q_full, dout_full,
    first_key, diagonal, len_k, scale, softcap, window_left, window_right,
    W: gl.constexpr, MASKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr, STAGES_Q: gl.constexpr, STAGES_O: gl.constexpr,
):  # fmt: skip
    """Add what so many tiles of queries contribute, to dq what the tile before each does.

    ``s`` holds the scores of the next tile, ``last`` is where the last one's part of dq belongs.
    """
    S: gl.constexpr = s.type.layout
    K: gl.constexpr = dk.type.layout
    V: gl.constexpr = dv.type.layout
    dtype: gl.constexpr = q_s.dtype
    zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S)
    for step in range(tiles):
        # 0, but not for the compiler: what it can take out of the loop, it holds in registers
        none = turn >> 30
        k = k_s.index(W + none).reshape([ROWS, HEAD_DIM])
        v = v_s.index(W + none).reshape([ROWS, HEAD_DIM_V])
        stage = turn % STAGES_Q
        stage_o = turn % STAGES_O
        q = q_s.index(stage).reshape([BLOCK_M, HEAD_DIM])
        dout = dout_s.index(stage_o).reshape([BLOCK_M, HEAD_DIM_V])
        mbarrier.wait(dout_full.index(stage_o), turn // STAGES_O & 1)
        delta = delta_s.index(stage_o).load(gl.SliceLayout(0, S))
        # dp - delta, from a start at -delta
        dp = hopper.warpgroup_mma(v, dout.permute((1, 0)), delta[None, :] - zeros, is_async=True)
        lse2 = lse2_s.index(stage).load(gl.SliceLayout(0, S))
        p, weight = probabilities(
            s, lse2, first_key + W * ROWS, (first_tile + step) * BLOCK_M + diagonal, len_k,
            scale, softcap, window_left, window_right, MASKED, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
        )  # fmt: skip
        p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, V, 2))
        dv = hopper.warpgroup_mma(p, dout, dv, is_async=True)
        dp = hopper.warpgroup_mma_wait(1, deps=(dp,))
        ds = (weight * dp).to(dtype)
        await_made(turn + 1, W)
        ds_s.index(turn % 2 * 2 + W).store(ds)
        hopper.fence_async_shared()
        # of the step before; in the first one, of whatever lies there
        dq = multiply_dq(ds_s, k_s, turn + 1, none, W, BLOCK_M, HEAD_DIM)
        dv = hopper.warpgroup_mma_wait(2, deps=(dv,))
        barrier_arrive(EMPTY + STAGES_Q + stage_o, PARTIES, 4)
        dk = hopper.warpgroup_mma(
            gl.convert_layout(ds, gl.DotOperandLayout(0, K, 2)), q, dk, is_async=True
        )
        turn += 1
        following = turn % STAGES_Q
        # behind the last tile: scores of whatever lies there, which nobody reads
        mbarrier.wait(q_full.index(following), turn // STAGES_Q & 1, pred=turn < total)
        q_t = q_s.index(following).reshape([BLOCK_M, HEAD_DIM]).permute((1, 0))
        s = hopper.warpgroup_mma(k, q_t, zeros, use_acc=False, is_async=True)
        dq = hopper.warpgroup_mma_wait(2, deps=(dq,))
        if turn > 1:
            send(sums, last, dq_s.index(W), dq)
        last = dq_row
        dq_row += BLOCK_M * HEAD_DIM // 32
        # in flight over the loop's back edge, these would keep ptxas from overlapping anything
        dk, s = hopper.warpgroup_mma_wait(0, deps=(dk, s))
        barrier_arrive(EMPTY + stage, PARTIES, 4)
        say_made(turn + 1, W)
    return dk, dv, s, last, turn
