"""Multi-head latent attention on Hopper: one read of the latent vectors brings keys and values.

A program owns 64 rows (query heads of tokens), which share all their keys. One warp copies tiles of
keys by TMA. The output has 512 columns, too many for the registers of one warpgroup, so each of two
warpgroups accumulates 256. The first also computes scores and softmax, and passes probabilities and
factors to the second through shared memory. The values are the first 512 columns of the keys.
"""

from __future__ import annotations

from ..._linked.hopper.compat import gl, gluon, hopper, mbarrier
from ..._linked.hopper.pipeline import (
    EMPTY,
    LN2,
    LOG2E,
    NEG_INF,
    TURN,
    barrier_arrive,
    barrier_sync,
    barriers,
)
from ..._linked.hopper.ptx import hide_unless
from ..._linked.hopper.softmax import row_sums
from ..._linked.launch.entries import entry
from ..portable.arguments import Tensors
from . import arguments
from .arguments import Maps, Numbers, Tile
from .producer import HALF, produce, work_of
from .structures import Inputs, Pipeline, Results, Rows, Softmax

REST = gl.constexpr(arguments.REST)
# named barriers between the two warpgroups: probabilities are stored, probabilities were read
FULL = gl.constexpr(TURN.value)
USED = gl.constexpr(TURN.value + 1)


@gluon.jit
def clear(tensors, numbers, TILE: gl.constexpr):
    """Write out 0 and lse -inf for tokens outside every sequence; programs share them."""
    begin = gl.load(tensors.cu_seqlens_q_ptr)
    end = gl.load(tensors.cu_seqlens_q_ptr + numbers.batch)
    tokens, out = numbers.tokens, numbers.out
    padding = begin + tokens - end
    cols = gl.arange(0, 2 * HALF, gl.BlockedLayout([4], [32], [4], [0]))  # [2 * HALF]
    for i in range(gl.program_id(0), padding, gl.num_programs(0)):
        token = gl.where(i < begin, i, end + i - begin).to(gl.int64)
        for head in range(TILE.GROUP):
            at = tensors.out_ptr + token * out.token + head * out.head
            gl.store(at + cols, (cols * 0).to(tensors.out_ptr.dtype.element_ty))
            if tensors.lse_ptr is not None:
                gl.store(tensors.lse_ptr + head * tokens + token, NEG_INF)


@gluon.jit
def queries_of(work, queries, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, TILE: gl.constexpr):
    """Read columns of a tile of queries, ``[ROWS, COLUMNS]``; rows after the last are zeros."""
    LANES: gl.constexpr = COLUMNS // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    row = work.row + gl.arange(0, TILE.ROWS, gl.SliceLayout(1, layout))  # [ROWS]
    cols = COLUMN + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))  # [COLUMNS]
    token = (work.q_start + row // TILE.GROUP).to(gl.int64)
    begin = token * queries.strides.token + (row % TILE.GROUP) * queries.strides.head
    at = gl.multiple_of(queries.ptr + begin[:, None], [16, 16]) + cols[None, :]
    return gl.load(at, mask=(row < work.len_q * TILE.GROUP)[:, None], other=0.0)


@gluon.jit
def _load_queries(work, queries, pipeline, TILE: gl.constexpr):
    """Bring a tile of queries into shared memory."""
    low = queries_of(work, queries, 0, HALF, TILE)
    high = queries_of(work, queries, HALF, HALF, TILE)
    rest = queries_of(work, queries, 2 * HALF, REST, TILE)
    dtype: gl.constexpr = pipeline.q_s.dtype
    pipeline.q_s.index(0).store(low.to(dtype))
    pipeline.q_s.index(1).store(high.to(dtype))
    pipeline.q_rest_s.store(rest.to(dtype))
    hopper.fence_async_shared()


@gluon.jit
def _scores(step, pipeline, TILE: gl.constexpr):
    """Return the products of queries and a tile of keys, ``[ROWS, BLOCK_N]``."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.BLOCK_N, 16])
    stage = step % TILE.STAGES
    parity = step // TILE.STAGES & 1
    s = gl.zeros([TILE.ROWS, TILE.BLOCK_N], gl.float32, S)
    k = pipeline.k_s.index(2 * stage).reshape([TILE.BLOCK_N, HALF])
    mbarrier.wait(pipeline.low_full.index(stage), parity)
    q = pipeline.q_s.index(0)
    s = hopper.warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
    k = pipeline.k_s.index(2 * stage + 1).reshape([TILE.BLOCK_N, HALF])
    mbarrier.wait(pipeline.high_full.index(stage), parity)
    s = hopper.warpgroup_mma(pipeline.q_s.index(1), k.permute((1, 0)), s, is_async=True)
    k = pipeline.k_rest_s.index(stage).reshape([TILE.BLOCK_N, REST])
    s = hopper.warpgroup_mma(pipeline.q_rest_s, k.permute((1, 0)), s, is_async=True)
    return hopper.warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def _hand_over(factors, pipeline):
    """Store factors ``[ROWS]``, and signal to the second warpgroup that its inputs are ready."""
    pipeline.factor_s.store(factors)
    hopper.fence_async_shared()
    barrier_arrive(FULL, 256, 4)


@gluon.jit
def _store(o, factors, work, results, COLUMN: gl.constexpr, TILE: gl.constexpr):
    """Store half of the columns of a result; ``factors`` are 0 for fully masked rows."""
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    # a fully masked row gets 0, even if the values are NaN
    o = gl.where(factors[:, None] == 0.0, 0.0, o * factors[:, None])  # [ROWS, HALF]
    index = gl.arange(0, TILE.ROWS, gl.SliceLayout(1, O))  # [ROWS]
    cols = COLUMN + gl.arange(0, HALF, gl.SliceLayout(0, O))  # [HALF]
    row = work.row + index
    inside = (row < work.len_q * TILE.GROUP)[:, None]
    if results.part_out_ptr is not None:
        at = (gl.program_id(0) * TILE.ROWS + index).to(gl.int64) * (2 * HALF)
        gl.store(results.part_out_ptr + at[:, None] + cols[None, :], o, mask=inside)
    else:
        out = results.out
        token = (work.q_start + row // TILE.GROUP).to(gl.int64)
        begin = token * out.strides.token + (row % TILE.GROUP) * out.strides.head
        at = gl.multiple_of(out.ptr + begin[:, None], [16, 16]) + cols[None, :]
        gl.store(at, o.to(out.ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _finish(softmax, work, pipeline, results, TILE: gl.constexpr):
    """Store the LSE, and return the factors of the output, ``[ROWS]``."""
    m = softmax.m
    l = gl.convert_layout(gl.sum(softmax.l, 1), m.type.layout)  # [ROWS]
    safe = gl.where(l == 0.0, 1.0, l)
    lse2 = gl.where(l == 0.0, NEG_INF, m + gl.log2(safe))
    index = gl.arange(0, TILE.ROWS, m.type.layout)  # [ROWS]
    row = work.row + index
    inside = row < work.len_q * TILE.GROUP
    if results.part_lse_ptr is not None:
        gl.store(results.part_lse_ptr + gl.program_id(0) * TILE.ROWS + index, lse2, mask=inside)
    elif results.lse_ptr is not None:
        head = (row % TILE.GROUP).to(gl.int64)
        at = head * results.tokens + (work.q_start + row // TILE.GROUP)
        gl.store(results.lse_ptr + at, lse2 * LN2, mask=inside)
    return gl.where(l == 0.0, 0.0, results.value_scale / safe)


@gluon.jit
def lead(work, queries, scale, pipeline, results, TILE: gl.constexpr):
    """Compute scores and softmax of all tiles of keys, and the first half of the output."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    _load_queries(work, queries, pipeline, TILE)
    # FOLD: the scale goes into the multiply-add of exp2; it is positive, so max commutes with it
    factor = scale * LOG2E if TILE.FOLD else 1.0
    o = gl.zeros([TILE.ROWS, HALF], gl.float32, O)
    m = gl.full([TILE.ROWS], NEG_INF, gl.float32, gl.SliceLayout(1, S))
    l = row_sums(gl.zeros([TILE.ROWS, TILE.BLOCK_N], gl.float32, S))  # [ROWS, 4]
    # the last key that each row sees
    bound = gl.full([TILE.ROWS], work.last - 1, gl.int32, gl.SliceLayout(1, S))
    if TILE.CAUSAL:
        row = work.row + gl.arange(0, TILE.ROWS, gl.SliceLayout(1, S))  # [ROWS]
        bound = gl.minimum(bound, row // TILE.GROUP + (work.len_k - work.len_q))
    for step in range(work.end - work.begin):
        stage = step % TILE.STAGES
        s = _scores(step, pipeline, TILE)
        if not TILE.FOLD:
            s = s * (scale * LOG2E)
        first = (work.end - 1 - step) * TILE.BLOCK_N
        if first + TILE.BLOCK_N > work.whole:
            cols = first + gl.arange(0, TILE.BLOCK_N, gl.SliceLayout(0, S))  # [BLOCK_N]
            s = hide_unless(s, cols[None, :], bound[:, None])
        m_new = gl.maximum(m, gl.max(s, 1) * factor)  # [ROWS]
        # a row without keys so far needs a finite pivot: -inf - -inf is NaN
        pivot = gl.where(m_new == NEG_INF, 0.0, m_new)
        e = gl.exp2(s * factor - pivot[:, None])  # [ROWS, BLOCK_N]
        alpha = gl.exp2(m - pivot)
        l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None] + row_sums(e)
        m = m_new
        p = e.to(pipeline.p_s.dtype)
        barrier_sync(USED, 256, 4)
        pipeline.p_s.store(p)
        _hand_over(alpha, pipeline)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
        p = gl.convert_layout(p, gl.DotOperandLayout(0, O, 2))
        v = pipeline.k_s.index(2 * stage).reshape([TILE.BLOCK_N, HALF])
        o = hopper.warpgroup_mma(p, v, o, is_async=True)
        o = hopper.warpgroup_mma_wait(0, deps=(o,))
        barrier_arrive(EMPTY + 2 * stage, TILE.PARTIES, 4)
    factors = _finish(Softmax(m, l), work, pipeline, results, TILE)
    barrier_sync(USED, 256, 4)
    _hand_over(factors, pipeline)
    _store(o, gl.convert_layout(factors, gl.SliceLayout(1, O)), work, results, 0, TILE)


@gluon.jit
def follow(work, pipeline, results, TILE: gl.constexpr):
    """Compute the second half of the output from the probabilities of the first warpgroup."""
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    o = gl.zeros([TILE.ROWS, HALF], gl.float32, O)
    barrier_arrive(USED, 256, 4)
    for step in range(work.end - work.begin):
        stage = step % TILE.STAGES
        barrier_sync(FULL, 256, 4)
        o = o * pipeline.factor_s.load(gl.SliceLayout(1, O))[:, None]
        v = pipeline.k_s.index(2 * stage + 1).reshape([TILE.BLOCK_N, HALF])
        mbarrier.wait(pipeline.high_full.index(stage), step // TILE.STAGES & 1)
        o = hopper.warpgroup_mma(pipeline.p_s, v, o, is_async=True)
        o = hopper.warpgroup_mma_wait(0, deps=(o,))
        barrier_arrive(USED, 256, 4)
        # the first warpgroup read these columns for the scores before it signalled FULL
        barrier_arrive(EMPTY + 2 * stage + 1, TILE.PARTIES, 4)
    barrier_sync(FULL, 256, 4)
    _store(o, pipeline.factor_s.load(gl.SliceLayout(1, O)), work, results, HALF, TILE)


@gluon.jit
def pipeline_of(k_s, k_rest_s, TILE: gl.constexpr):
    """Return the ``Pipeline`` with these stages of keys; all warps of a program call it."""
    dtype: gl.constexpr = k_s.dtype
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE.ROWS, HALF], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE.ROWS, REST], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = gl.allocate_shared_memory(dtype, [2, TILE.ROWS, HALF], wide)
    q_rest_s = gl.allocate_shared_memory(dtype, [TILE.ROWS, REST], narrow)
    p_s = gl.allocate_shared_memory(dtype, [TILE.ROWS, TILE.BLOCK_N], narrow)
    factor_s = gl.allocate_shared_memory(gl.float32, [TILE.ROWS], plain)
    low_full, high_full = barriers(TILE.STAGES, 1), barriers(TILE.STAGES, 1)
    hopper.fence_async_shared()
    return Pipeline(q_s, q_rest_s, k_s, k_rest_s, p_s, factor_s, low_full, high_full)


@entry(gluon.jit)
def mla_kernel(maps: Maps, tensors: Tensors, numbers: Numbers, TILE: Tile):
    """``out = softmax(mask(scale * q @ k.T)) @ k[:, :512]``, of rows or of a split of keys.

    ``k``, of 576 columns, is in the pages of a cache.
    """
    dtype: gl.constexpr = maps.half_desc.dtype
    clear(tensors, numbers, TILE)
    results = Results(
        Rows(tensors.out_ptr, numbers.out),
        tensors.lse_ptr,
        tensors.part_out_ptr,
        tensors.part_lse_ptr,
        numbers.tokens,
        1.0,
    )
    work = work_of(gl.program_id(0), tensors, numbers, TILE)
    halves: gl.constexpr = [2 * TILE.STAGES, 1, 1, 1, TILE.BLOCK_N, HALF]
    rests: gl.constexpr = [TILE.STAGES, 1, 1, 1, TILE.BLOCK_N, REST]
    k_s = gl.allocate_shared_memory(dtype, halves, maps.half_desc.layout)
    k_rest_s = gl.allocate_shared_memory(dtype, rests, maps.rest_desc.layout)
    pipeline = pipeline_of(k_s, k_rest_s, TILE)
    queries = Rows(tensors.q_ptr, numbers.q)
    inputs = Inputs(maps, numbers.page_rows, tensors.block_table_ptr, numbers.table)
    gl.warp_specialize(
        [
            (lead, (work, queries, numbers.scale, pipeline, results, TILE)),
            (follow, (work, pipeline, results, TILE)),
            (produce, (work, inputs, pipeline, TILE)),
        ],
        [4, 1],
        [224, 56],
    )
