"""The steps of the Hopper forward: what a warpgroup does with one tile of keys.

A step's softmax runs while the product of the previous step's probabilities with the values runs.
In a half step each warpgroup multiplies 64 keys of its own, in blocks that the other does not see.
"""

from ...._linked.hopper.compat import gl, gluon, hopper, mbarrier
from ...._linked.hopper.pipeline import EMPTY, NEG_INF, TURN, barrier_arrive, barrier_sync
from ...._linked.hopper.ptx import SLACK, shrink
from ...._linked.hopper.softmax import row_sums, start_softmax
from ..boxes import rows_for
from ..structures import Entries, Softmax
from .producer import PARTIES
from .rows import entries_of, half_entries_of, hide
from .schedule import steps_of


@gluon.jit
def _begin(entries, rows, turn, tile_count, W: gl.constexpr, pipeline, OPTIONS: gl.constexpr):
    """Return the softmax of the first step, during which no other product runs."""
    KEYS: gl.constexpr = entries.items.shape[0] * OPTIONS.BLOCK_K
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OPTIONS.HEAD_DIM_V, 16])
    zeros = gl.zeros([OPTIONS.ROWS, KEYS], gl.float32, S)  # [ROWS, KEYS]
    stage = turn % OPTIONS.STAGES_K
    q = pipeline.q_s.index(W).reshape([OPTIONS.ROWS, OPTIONS.HEAD_DIM])
    mbarrier.wait(pipeline.q_full.index(W), tile_count & 1)
    mbarrier.wait(pipeline.k_full.index(stage), turn // OPTIONS.STAGES_K & 1)
    barrier_sync(TURN + W, 256, 4)
    k_t = rows_for(pipeline.k_s.index(stage), W, KEYS).permute((1, 0))
    s = hopper.warpgroup_mma(q, k_t, zeros, use_acc=False, is_async=True)  # [ROWS, KEYS]
    barrier_arrive(TURN + (W + 1) % 2, 256, 4)
    s = hopper.warpgroup_mma_wait(0, deps=(s,))
    barrier_arrive(EMPTY + stage, PARTIES, 4)
    s = hide(s, entries, rows, OPTIONS)
    m, l, e = start_softmax(s, rows.factor, NEG_INF)
    p = gl.convert_layout(e.to(pipeline.q_s.dtype), gl.DotOperandLayout(0, O, 2))
    o = gl.zeros([OPTIONS.ROWS, OPTIONS.HEAD_DIM_V], gl.float32, O)  # [ROWS, HEAD_DIM_V]
    return Softmax(o, m, l, p, turn + 1)


@gluon.jit
def _fold(
    softmax, entries, rows, W: gl.constexpr, MASKED: gl.constexpr, pipeline, OPTIONS: gl.constexpr
):
    """Fold a step or a half step into the softmax while the previous step's product runs.

    Without a mask the step is a whole one, and ``entries`` is not used.
    """
    KEYS: gl.constexpr = entries.items.shape[0] * OPTIONS.BLOCK_K if MASKED else OPTIONS.BLOCK_N
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OPTIONS.HEAD_DIM_V, 16])
    o, m, l, p, turn = softmax
    # the layout of rows depends on the step's width, but the same threads hold them
    m = gl.convert_layout(m, gl.SliceLayout(1, S))  # [ROWS]
    q = pipeline.q_s.index(W).reshape([OPTIONS.ROWS, OPTIONS.HEAD_DIM])
    zeros = gl.zeros([OPTIONS.ROWS, KEYS], gl.float32, S)  # [ROWS, KEYS]
    stage = turn % OPTIONS.STAGES_K
    stage_v = (turn - 1) % OPTIONS.STAGES_V
    mbarrier.wait(pipeline.k_full.index(stage), turn // OPTIONS.STAGES_K & 1)
    barrier_sync(TURN + W, 256, 4)
    k_t = rows_for(pipeline.k_s.index(stage), W, KEYS).permute((1, 0))
    s = hopper.warpgroup_mma(q, k_t, zeros, use_acc=False, is_async=True)  # [ROWS, KEYS]
    mbarrier.wait(pipeline.v_full.index(stage_v), (turn - 1) // OPTIONS.STAGES_V & 1)
    v = rows_for(pipeline.v_s.index(stage_v), W, p.shape[1])
    o = hopper.warpgroup_mma(p, v, o, is_async=True)  # [ROWS, HEAD_DIM_V]
    barrier_arrive(TURN + (W + 1) % 2, 256, 4)
    s = hopper.warpgroup_mma_wait(1, deps=(s,))
    barrier_arrive(EMPTY + stage, PARTIES, 4)
    if MASKED:
        s = hide(s, entries, rows, OPTIONS)
    top = gl.max(s, 1) * rows.factor  # [ROWS]
    m_new = gl.where(top - m > SLACK, top, m)
    pivot = m_new
    if MASKED:
        # a row that has not seen a key yet needs a finite pivot: -inf - -inf is NaN
        pivot = gl.where(m_new == NEG_INF, 0.0, m_new)
    e = gl.exp2(s * rows.factor - pivot[:, None])  # [ROWS, KEYS]
    alpha = gl.exp2(m - pivot)
    sums = row_sums(e)  # [ROWS, 4]
    L: gl.constexpr = sums.type.layout
    alpha_l = gl.convert_layout(alpha, gl.SliceLayout(1, L))
    l = gl.convert_layout(l, L) * alpha_l[:, None] + sums
    m = m_new
    o = hopper.warpgroup_mma_wait(0, deps=(o,))
    barrier_arrive(EMPTY + OPTIONS.STAGES_K + stage_v, PARTIES, 4)
    o = shrink(o, gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None])
    p = gl.convert_layout(e.to(pipeline.q_s.dtype), gl.DotOperandLayout(0, O, 2))
    return Softmax(o, m, l, p, turn + 1)


@gluon.jit
def attend(
    softmax,
    low,
    high,
    task,
    W: gl.constexpr,
    MASKED: gl.constexpr,
    tensors,
    pipeline,
    OPTIONS: gl.constexpr,
):
    """Fold the steps from ``high`` down to ``low`` into the softmax."""
    for back in range(high - low):
        entries = Entries(softmax.turn, softmax.turn)
        if MASKED:
            entries = entries_of(task.walk, high - 1 - back, tensors, OPTIONS)
        softmax = _fold(softmax, entries, task.rows, W, MASKED, pipeline, OPTIONS)
    return softmax


@gluon.jit
def _begin_in_halves(
    task, turn, tile_count, W: gl.constexpr, tensors, pipeline, OPTIONS: gl.constexpr
):
    """Return the softmax of all half steps and of the whole step after them."""
    walk, rows = task.walk, task.rows
    entries = half_entries_of(walk, 0, W, tensors, OPTIONS)
    softmax = _begin(entries, rows, turn, tile_count, W, pipeline, OPTIONS)
    for step in range(1, walk.halves):
        entries = half_entries_of(walk, step, W, tensors, OPTIONS)
        softmax = _fold(softmax, entries, rows, W, True, pipeline, OPTIONS)
    entries = entries_of(walk, steps_of(walk, OPTIONS) - 1, tensors, OPTIONS)
    return _fold(softmax, entries, rows, W, True, pipeline, OPTIONS)


@gluon.jit
def _begin_whole(task, turn, tile_count, W: gl.constexpr, tensors, pipeline, OPTIONS: gl.constexpr):
    """Return the softmax of the first step of a walk without half steps."""
    entries = entries_of(task.walk, steps_of(task.walk, OPTIONS) - 1, tensors, OPTIONS)
    return _begin(entries, task.rows, turn, tile_count, W, pipeline, OPTIONS)


@gluon.jit
def begin_tile(task, turn, tile_count, W: gl.constexpr, tensors, pipeline, OPTIONS: gl.constexpr):
    """Return the softmax of the half steps and of the list's last step, which is taken first."""
    if OPTIONS.HALVES:
        if task.walk.halves > 0:
            softmax = _begin_in_halves(task, turn, tile_count, W, tensors, pipeline, OPTIONS)
        else:
            softmax = _begin_whole(task, turn, tile_count, W, tensors, pipeline, OPTIONS)
    else:
        softmax = _begin_whole(task, turn, tile_count, W, tensors, pipeline, OPTIONS)
    return softmax
