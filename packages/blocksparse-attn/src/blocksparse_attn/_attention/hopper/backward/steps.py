"""The steps of the Hopper backward: what a warpgroup does for one block of queries.

Products overlap with a warpgroup's arithmetic: dp with the exponentials, dv with the gradient of
the scores, and dk and the next step's scores with the addition to dq. First, both warpgroups take
the same block of queries, and each multiplies half of the columns of dq (``walk``). Then each takes
blocks of its own (``walk_apart``). In ``walk`` the product of dq runs one step late: by then the
other warpgroup has stored its gradients of scores, so the two need not keep step, and one computes
while the other multiplies.
"""

from ...._linked.hopper.compat import gl, gluon, hopper, mbarrier
from ...._linked.hopper.gradients import ROWS, add_to_memory
from ...._linked.hopper.pipeline import EMPTY, TURN, barrier_arrive, barrier_sync
from ..queries.schedule import pick
from ..structures import Gradients

# threads at the barrier of a stage: both warpgroups or one, and the copying warp
BOTH = gl.constexpr(288)
EITHER = gl.constexpr(160)
# named barriers: a warpgroup has stored its gradients of scores in one of two buffers; first two
# barriers of warpgroup 0, then two of warpgroup 1
MADE = gl.constexpr(12)
# fields that describe a block of queries: the tile of its sums of dq, and the last key that its
# first query sees, as a position in the first and in the second block of keys
STEP_FIELDS = gl.constexpr(4)
SUMS = gl.constexpr(0)
REACH = gl.constexpr(1)
# with pieces, REACH is a position in the sequence; BITS: which piece sees which
BITS = gl.constexpr(2)
# 1 if each query sees one key more than the query before it
SLOPE = gl.constexpr(3)


@gluon.jit
def probabilities(
    s, lse2, fields, mine, W: gl.constexpr, MASKED: gl.constexpr, PIECE: gl.constexpr
):
    """Return the probabilities of the scores, [keys, queries]."""
    S: gl.constexpr = s.type.layout
    p = gl.exp2(s * mine.factor - lse2[None, :])
    if MASKED:
        row = gl.arange(0, ROWS, gl.SliceLayout(0, S))  # [ROWS]
        reach = row * pick(fields, SLOPE)
        if PIECE == ROWS:
            reach += pick(fields, REACH + W)
            visible = mine.positions[:, None] <= reach[None, :]
        else:
            reach += pick(fields, REACH)
            key = gl.arange(0, ROWS, gl.SliceLayout(1, S))  # [ROWS]
            SIDE: gl.constexpr = ROWS // PIECE
            bits = (pick(fields, BITS) >> (16 * W)) >> (key // PIECE * SIDE)
            is_kept = ((bits[:, None] >> (row // PIECE)[None, :]) & 1) != 0
            visible = is_kept & (mine.positions[:, None] <= reach[None, :])
        p = gl.where(visible, p, 0.0)
    return p


@gluon.jit
def say_made(turn, W: gl.constexpr):
    """Signal: warpgroup ``W`` has stored a step's dS. Only the parity of ``turn`` counts."""
    barrier_arrive(MADE + 2 * W + turn % 2, 256, 4)


@gluon.jit
def await_made(turn, W: gl.constexpr):
    """Wait for the other warpgroup's signal."""
    barrier_sync(MADE + 2 * (1 - W) + turn % 2, 256, 4)


@gluon.jit
def multiply_dq(ds_s, k_s, turn, none, W: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Begin the product of ``W``'s half of the columns of dq, for step ``turn``."""
    WIDTH: gl.constexpr = HEAD_DIM // 2
    Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    dq = gl.zeros([ROWS, WIDTH], gl.float32, Q)
    for h in gl.static_range(2):
        ds_h = ds_s.index(turn % 2 * 2 + h).permute((1, 0))
        k_h = k_s.index(h + none).reshape([ROWS, HEAD_DIM]).slice(W * WIDTH, WIDTH, 1)
        dq = hopper.warpgroup_mma(ds_h, k_h, dq, use_acc=h == 1, is_async=True)
    return dq


@gluon.jit
def add_dq(dq_ptr, sums, dq, W: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Add ``W``'s half of the columns to a tile of the sums; ``sums`` is negative for no tile."""
    if sums >= 0:
        address = dq_ptr + sums.to(gl.int64) * (ROWS * HEAD_DIM)
        add_to_memory(address + W * (ROWS * HEAD_DIM // 2), dq)


@gluon.jit
def _start_step(
    s, dv, v, turn, mine, W: gl.constexpr, MASKED: gl.constexpr, pipeline, OPTIONS: gl.constexpr
):
    """Begin a step's products of dp and dv, and compute its probabilities in between."""
    S: gl.constexpr = s.type.layout
    V: gl.constexpr = dv.type.layout
    stage = turn % OPTIONS.STAGES
    dout = pipeline.dout_s.index(stage).reshape([ROWS, OPTIONS.HEAD_DIM_V])
    mbarrier.wait(pipeline.dout_full.index(stage), turn // OPTIONS.STAGES & 1)
    delta = pipeline.delta_s.index(stage).load(gl.SliceLayout(0, S))  # [ROWS]
    zeros = gl.zeros([ROWS, ROWS], gl.float32, S)
    # start the accumulators at -delta, which gives dp - delta
    dp = delta[None, :] - zeros  # [ROWS, ROWS]: keys, queries
    dp = hopper.warpgroup_mma(v, dout.permute((1, 0)), dp, is_async=True)
    fields = pipeline.fields_s.index(stage).load(gl.BlockedLayout([STEP_FIELDS], [32], [4], [0]))
    lse2 = pipeline.lse2_s.index(stage).load(gl.SliceLayout(0, S))  # [ROWS]
    p = probabilities(s, lse2, fields, mine, W, MASKED, OPTIONS.PIECE)
    p_v = gl.convert_layout(p.to(pipeline.q_s.dtype), gl.DotOperandLayout(0, V, 2))
    dv = hopper.warpgroup_mma(p_v, dout, dv, is_async=True)  # [ROWS, HEAD_DIM_V]
    return p, dp, dv, fields


@gluon.jit
def walk(
    gradients, steps, mine, W: gl.constexpr, MASKED: gl.constexpr, pipeline, OPTIONS: gl.constexpr
):
    """Add the contributions of ``steps`` blocks of queries that both warpgroups multiply.

    Each step adds the previous step's contribution to dq. From turn ``both`` on, each warpgroup has
    blocks of its own. Without ``MAKES_DQ`` the warpgroups do not exchange anything.
    """
    STAGES: gl.constexpr = OPTIONS.STAGES
    dk, dv, s, last, turn = gradients
    S: gl.constexpr = s.type.layout
    K: gl.constexpr = dk.type.layout
    dtype: gl.constexpr = pipeline.q_s.dtype
    zeros = gl.zeros([ROWS, ROWS], gl.float32, S)  # [ROWS, ROWS]
    for _step in range(steps):
        # a 0 that the compiler does not know: loop-invariant addresses would occupy registers
        none = turn >> 30
        k = pipeline.k_s.index(W + none).reshape([ROWS, OPTIONS.HEAD_DIM])
        v = pipeline.v_s.index(W + none).reshape([ROWS, OPTIONS.HEAD_DIM_V])
        stage = turn % STAGES
        q = pipeline.q_s.index(stage).reshape([ROWS, OPTIONS.HEAD_DIM])
        p, dp, dv, fields = _start_step(s, dv, v, turn, mine, W, MASKED, pipeline, OPTIONS)
        dp = hopper.warpgroup_mma_wait(1, deps=(dp,))
        ds = p * dp  # [ROWS, ROWS]
        if MASKED:
            # a key that a query does not see may hold NaN
            ds = gl.where(p == 0.0, 0.0, ds)
        ds = ds.to(dtype)
        if OPTIONS.MAKES_DQ:
            await_made(turn + 1, W)
            pipeline.ds_s.index(turn % 2 * 2 + W).store(ds)
            hopper.fence_async_shared()
            # the product of the previous step; the first step's product is not used
            dq = multiply_dq(pipeline.ds_s, pipeline.k_s, turn + 1, none, W, OPTIONS.HEAD_DIM)
            dv = hopper.warpgroup_mma_wait(2, deps=(dv,))
        ds_k = gl.convert_layout(ds, gl.DotOperandLayout(0, K, 2))
        dk = hopper.warpgroup_mma(ds_k, q, dk, is_async=True)  # [ROWS, HEAD_DIM]
        if not OPTIONS.MAKES_DQ:
            dv = hopper.warpgroup_mma_wait(1, deps=(dv,))
        turn += 1
        following = turn
        if W == 1:
            following += gl.where(turn < mine.both, 0, 1)
        # after the last step, these are scores of stale memory, which are never read
        stage_n = following % STAGES
        mbarrier.wait(
            pipeline.q_full.index(stage_n), following // STAGES & 1, pred=following < mine.total
        )
        q_t = pipeline.q_s.index(stage_n).reshape([ROWS, OPTIONS.HEAD_DIM]).permute((1, 0))
        s = hopper.warpgroup_mma(k, q_t, zeros, use_acc=False, is_async=True)  # [ROWS, ROWS]
        if OPTIONS.MAKES_DQ:
            dq = hopper.warpgroup_mma_wait(2, deps=(dq,))
            add_dq(mine.dq_ptr, last, dq, W, OPTIONS.HEAD_DIM)
            last = pick(fields, SUMS)
        # products in flight over the loop's back edge would keep ptxas from any overlap
        dk, s = hopper.warpgroup_mma_wait(0, deps=(dk, s))
        barrier_arrive(EMPTY + stage, BOTH, 4)
        if OPTIONS.MAKES_DQ:
            say_made(turn + 1, W)
    return Gradients(dk, dv, s, last, turn)


@gluon.jit
def walk_apart(gradients, steps, mine, W: gl.constexpr, pipeline, OPTIONS: gl.constexpr):
    """Add the contributions of ``steps`` blocks of queries that only this warpgroup multiplies.

    The warpgroups' blocks alternate. The warpgroup makes all of dq, in two halves of the columns.
    """
    STAGES: gl.constexpr = OPTIONS.STAGES
    WIDTH: gl.constexpr = OPTIONS.HEAD_DIM // 2
    dk, dv, s, _, turn = gradients
    S: gl.constexpr = s.type.layout
    K: gl.constexpr = dk.type.layout
    Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    dtype: gl.constexpr = pipeline.q_s.dtype
    zeros = gl.zeros([ROWS, ROWS], gl.float32, S)  # [ROWS, ROWS]
    zeros_q = gl.zeros([ROWS, WIDTH], gl.float32, Q)  # [ROWS, WIDTH]
    turn += W
    if OPTIONS.MAKES_DQ:
        # wait until the other warpgroup has read the shared gradients of scores
        barrier_sync(TURN, 256, 4)
    for step in range(steps):
        none = turn >> 30
        k = pipeline.k_s.index(W + none).reshape([ROWS, OPTIONS.HEAD_DIM])
        v = pipeline.v_s.index(W + none).reshape([ROWS, OPTIONS.HEAD_DIM_V])
        stage = turn % STAGES
        q = pipeline.q_s.index(stage).reshape([ROWS, OPTIONS.HEAD_DIM])
        p, dp, dv, fields = _start_step(s, dv, v, turn, mine, W, True, pipeline, OPTIONS)
        dp = hopper.warpgroup_mma_wait(1, deps=(dp,))
        ds = gl.where(p == 0.0, 0.0, p * dp).to(dtype)  # [ROWS, ROWS]
        if OPTIONS.MAKES_DQ:
            buffer = step % 2 * 2 + W
            pipeline.ds_s.index(buffer).store(ds)
            hopper.fence_async_shared()
            barrier_sync(TURN + 1 + W, 128, 4)
            ds_t = pipeline.ds_s.index(buffer).permute((1, 0))
            k_0, k_1 = k.slice(0, WIDTH, 1), k.slice(WIDTH, WIDTH, 1)
            dq = hopper.warpgroup_mma(ds_t, k_0, zeros_q, use_acc=False, is_async=True)
        dv = hopper.warpgroup_mma_wait(1 if OPTIONS.MAKES_DQ else 0, deps=(dv,))
        ds_k = gl.convert_layout(ds, gl.DotOperandLayout(0, K, 2))
        dk = hopper.warpgroup_mma(ds_k, q, dk, is_async=True)  # [ROWS, HEAD_DIM]
        if OPTIONS.MAKES_DQ:
            number = pick(fields, SUMS)
            address = mine.dq_ptr + number.to(gl.int64) * (ROWS * OPTIONS.HEAD_DIM)
            dq = hopper.warpgroup_mma_wait(1, deps=(dq,))  # [ROWS, WIDTH]
            if number >= 0:
                add_to_memory(address, dq)
            more = hopper.warpgroup_mma(ds_t, k_1, zeros_q, use_acc=False, is_async=True)
            dk = hopper.warpgroup_mma_wait(1, deps=(dk,))
            barrier_arrive(EMPTY + stage, EITHER, 4)
        turn += 2
        # after the last step, these are scores of stale memory, which are never read
        stage_n = turn % STAGES
        mbarrier.wait(pipeline.q_full.index(stage_n), turn // STAGES & 1, pred=turn < mine.total)
        q_t = pipeline.q_s.index(stage_n).reshape([ROWS, OPTIONS.HEAD_DIM]).permute((1, 0))
        s = hopper.warpgroup_mma(k, q_t, zeros, use_acc=False, is_async=True)  # [ROWS, ROWS]
        if OPTIONS.MAKES_DQ:
            more = hopper.warpgroup_mma_wait(1, deps=(more,))
            if number >= 0:
                add_to_memory(address + ROWS * WIDTH, more)
        else:
            dk = hopper.warpgroup_mma_wait(1, deps=(dk,))
            barrier_arrive(EMPTY + stage, EITHER, 4)
        s = hopper.warpgroup_mma_wait(0, deps=(s,))
    return dk, dv
