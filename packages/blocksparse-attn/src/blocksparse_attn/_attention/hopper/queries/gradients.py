"""dq by tiles of queries: what the consumers do with a tile.

A tile walks the same list as in the forward, with three products per step instead of two: scores,
gradients of probabilities, and dq. Each program owns its part of dq and adds in the order of the
list, so the result does not depend on when programs run. ``hopper_backward_kernel`` then makes no
dq. Together the two launches take two products more than one launch for all gradients.

The alternative was to add to dq in a fixed order of programs, as the dense backward does. There all
walks end with the same queries, so that programs follow one another. Here each block of keys has
its own walk. By a model of the order in which programs begin and of the length of their steps,
programs would wait most of the time (local 8 and stride 16 at 8k tokens: 5 to 15 times as long as
without an order, however walks and programs are sorted).
"""

from ...._linked.hopper.compat import gl, gluon, hopper, mbarrier
from ...._linked.hopper.pipeline import EMPTY, barrier_arrive
from ..boxes import rows_for
from ..structures import RowGradients
from .producer import PARTIES
from .rows import entries_of, half_entries_of, hide, send
from .schedule import steps_of

INF = gl.constexpr(float("inf"))


@gluon.jit
def _numbers_of(place, layout: gl.constexpr, tensors, numbers, OPTIONS: gl.constexpr):
    """Load lse2 and delta of a warpgroup's rows; rows outside the sequence become fully masked."""
    row, head, sequence, q_start, len_q = place
    rows = row + gl.arange(0, OPTIONS.ROWS, layout)  # [ROWS]
    inside = (rows >= 0) & (rows < len_q)
    if tensors.cu_seqlens_q_ptr is not None:
        at = head.to(gl.int64) * numbers.tokens_q + q_start
    else:
        at = (sequence.to(gl.int64) * numbers.heads_q + head) * numbers.tokens_q
    lse2 = gl.load(tensors.lse2_ptr + at + rows, mask=inside, other=INF)
    return lse2, gl.load(tensors.delta_ptr + at + rows, mask=inside, other=0.0)


@gluon.jit
def _walk(
    gradients,
    low,
    high,
    task,
    W: gl.constexpr,
    MASKED: gl.constexpr,
    IS_HALF: gl.constexpr,
    tensors,
    pipeline,
    OPTIONS: gl.constexpr,
):
    """Add the contributions of the steps from ``high`` down to ``low``, or of half steps, to dq.

    The exponentials overlap with the product of dp. The other arithmetic overlaps with products of
    the other warpgroup: it takes less than a third of a step's time in the tensor cores.
    """
    KEYS: gl.constexpr = OPTIONS.BLOCK_N // 2 if IS_HALF else OPTIONS.BLOCK_N
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OPTIONS.HEAD_DIM, 16])
    walk, rows = task.walk, task.rows
    dq, lse2, delta, turn = gradients
    # half steps have another layout of rows, but the same threads hold them
    lse2 = gl.convert_layout(lse2, gl.SliceLayout(1, S))  # [ROWS]
    delta = gl.convert_layout(delta, gl.SliceLayout(1, S))
    q = pipeline.q_s.index(W).reshape([OPTIONS.ROWS, OPTIONS.HEAD_DIM])
    dout = pipeline.dout_s.index(W).reshape([OPTIONS.ROWS, OPTIONS.HEAD_DIM_V])
    zeros = gl.zeros([OPTIONS.ROWS, KEYS], gl.float32, S)  # [ROWS, KEYS]
    for back in range(high - low):
        stage, stage_v = turn % OPTIONS.STAGES_K, turn % OPTIONS.STAGES_V
        if IS_HALF:
            entries = half_entries_of(walk, back, W, tensors, OPTIONS)
        elif MASKED:
            entries = entries_of(walk, high - 1 - back, tensors, OPTIONS)
        mbarrier.wait(pipeline.k_full.index(stage), turn // OPTIONS.STAGES_K & 1)
        k = rows_for(pipeline.k_s.index(stage), W, KEYS)
        s = hopper.warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(pipeline.v_full.index(stage_v), turn // OPTIONS.STAGES_V & 1)
        v_t = rows_for(pipeline.v_s.index(stage_v), W, KEYS).permute((1, 0))
        if MASKED:
            # before dp begins: there are not enough registers for its accumulators and the mask
            s = hopper.warpgroup_mma_wait(0, deps=(s,))
            s = hide(s, entries, rows, OPTIONS)
        dp = hopper.warpgroup_mma(dout, v_t, zeros, use_acc=False, is_async=True)
        if not MASKED:
            s = hopper.warpgroup_mma_wait(1, deps=(s,))
        p = gl.exp2(s * rows.factor - lse2[:, None])  # [ROWS, KEYS]
        dp = hopper.warpgroup_mma_wait(0, deps=(dp,))
        barrier_arrive(EMPTY + OPTIONS.STAGES_K + stage_v, PARTIES, 4)
        ds = p * (dp - delta[:, None])  # [ROWS, KEYS]
        if MASKED:
            # a key that a query does not see may hold NaN
            ds = gl.where(p == 0.0, 0.0, ds)
        ds_q = gl.convert_layout(ds.to(pipeline.q_s.dtype), gl.DotOperandLayout(0, O, 2))
        dq = hopper.warpgroup_mma(ds_q, k, dq, is_async=True)  # [ROWS, HEAD_DIM]
        # a product in flight over the loop's back edge would keep ptxas from any overlap
        dq = hopper.warpgroup_mma_wait(0, deps=(dq,))
        barrier_arrive(EMPTY + stage, PARTIES, 4)
        turn += 1
    return RowGradients(dq, lse2, delta, turn)


@gluon.jit
def make_dq(
    task, turn, tile_count, W: gl.constexpr, tensors, numbers, pipeline, OPTIONS: gl.constexpr
):
    """Write dq of warpgroup ``W``'s rows of a tile; return the next turn."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OPTIONS.BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OPTIONS.HEAD_DIM, 16])
    walk, place = task.walk, task.place
    steps = steps_of(walk, OPTIONS)
    lse2, delta = _numbers_of(place, gl.SliceLayout(1, S), tensors, numbers, OPTIONS)
    dq = gl.zeros([OPTIONS.ROWS, OPTIONS.HEAD_DIM], gl.float32, O)  # [ROWS, HEAD_DIM]
    gradients = RowGradients(dq, lse2, delta, turn)
    mbarrier.wait(pipeline.q_full.index(W), tile_count & 1)
    given = tensors, pipeline
    if OPTIONS.HALVES:
        gradients = _walk(gradients, 0, walk.halves, task, W, True, True, *given, OPTIONS)
    gradients = _walk(gradients, walk.whole, steps, task, W, True, False, *given, OPTIONS)
    gradients = _walk(gradients, 0, walk.whole, task, W, False, False, *given, OPTIONS)
    dq, lse2, delta, turn = gradients
    mbarrier.arrive(pipeline.q_empty.index(W), count=1)
    # a fully masked row may hold NaN
    is_blind = gl.convert_layout(lse2 == INF, gl.SliceLayout(1, O))  # [ROWS]
    dq = gl.where(is_blind[:, None], 0.0, dq * numbers.scale)
    send(dq, place, W, tensors, numbers, pipeline)
    return turn
