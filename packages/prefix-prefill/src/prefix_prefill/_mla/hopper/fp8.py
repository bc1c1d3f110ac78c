"""Multi-head latent attention over an FP8 cache on Hopper; keys are widened to 16 bits.

The kernel of ``kernel.py``, with a third warpgroup in place of the copying warp. It reads tiles of
keys into registers, one tile ahead, widens them to 16 bits, which is exact, and stores them in
shared memory. Pages may have any size.
"""

from __future__ import annotations

from ..._linked.hopper.compat import gl, gluon, hopper, mbarrier
from ..._linked.hopper.pipeline import EMPTY, barrier_sync
from ..._linked.launch.entries import entry
from ..portable.arguments import Tensors
from .arguments import Numbers, Tile
from .kernel import REST, clear, follow, lead, pipeline_of
from .producer import HALF, leave, work_of
from .structures import Cache, Results, Rows


@gluon.jit
def _keys_of(tile, last, cache, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, TILE: gl.constexpr):
    """Read columns of a tile of keys, ``[BLOCK_N, COLUMNS]``; keys from ``last`` on are zeros."""
    LANES: gl.constexpr = COLUMNS // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    first = tile * TILE.BLOCK_N
    key = first + gl.arange(0, TILE.BLOCK_N, gl.SliceLayout(1, layout))  # [BLOCK_N]
    cols = COLUMN + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))  # [COLUMNS]
    if TILE.PAGE % TILE.BLOCK_N == 0:
        page_at = cache.entries + (first // TILE.PAGE).to(gl.int64) * cache.entry
        page = gl.load(page_at, mask=first < last, other=0).to(gl.int32)
    else:
        page_at = cache.entries + (key // TILE.PAGE).to(gl.int64) * cache.entry
        page = gl.load(page_at, mask=key < last, other=0).to(gl.int32)
    row = page * cache.page_rows + key % TILE.PAGE
    at = gl.multiple_of(cache.ptr + (row.to(gl.int64) * cache.row)[:, None], [16, 16])
    return gl.load(at + cols[None, :], mask=(key < last)[:, None], other=0.0)


@gluon.jit
def _widen(work, cache, pipeline, TILE: gl.constexpr):
    """Bring tiles of keys into shared memory in 16 bits, from the last to the first."""
    dtype: gl.constexpr = pipeline.k_s.dtype
    last = work.last
    steps = work.end - work.begin
    for step in range(steps):
        tile = work.end - 1 - step
        # read before the stage is free
        low = _keys_of(tile, last, cache, 0, HALF, TILE)
        high = _keys_of(tile, last, cache, HALF, HALF, TILE)
        rest = _keys_of(tile, last, cache, 2 * HALF, REST, TILE)
        stage = step % TILE.STAGES
        if step >= TILE.STAGES:
            barrier_sync(EMPTY + 2 * stage, TILE.PARTIES, 4)
        pipeline.k_s.index(2 * stage).reshape([TILE.BLOCK_N, HALF]).store(low.to(dtype))
        hopper.fence_async_shared()
        mbarrier.arrive(pipeline.low_full.index(stage), count=1)
        if step >= TILE.STAGES:
            barrier_sync(EMPTY + 2 * stage + 1, TILE.PARTIES, 4)
        pipeline.k_s.index(2 * stage + 1).reshape([TILE.BLOCK_N, HALF]).store(high.to(dtype))
        pipeline.k_rest_s.index(stage).reshape([TILE.BLOCK_N, REST]).store(rest.to(dtype))
        hopper.fence_async_shared()
        mbarrier.arrive(pipeline.high_full.index(stage), count=1)
    leave(steps, 4, TILE)


@entry(gluon.jit)
def mla_fp8_kernel(tensors: Tensors, numbers: Numbers, TILE: Tile):
    """``out = softmax(mask(scale * q @ k.T)) @ k[:, :512]``, of rows or of a split of keys.

    ``k``, of 576 columns, is in the pages of an FP8 cache.
    """
    Q: gl.constexpr = tensors.q_ptr.dtype.element_ty
    # bf16 holds all numbers of 8 bits
    dtype: gl.constexpr = Q if Q.primitive_bitwidth > 8 else gl.bfloat16
    scale, value_scale = numbers.scale, 1.0
    if tensors.kv_descale_ptr is not None:
        value_scale = gl.load(tensors.kv_descale_ptr)
        scale *= value_scale
    if tensors.q_descale_ptr is not None:
        scale *= gl.load(tensors.q_descale_ptr)
    clear(tensors, numbers, TILE)
    results = Results(
        Rows(tensors.out_ptr, numbers.out),
        tensors.lse_ptr,
        tensors.part_out_ptr,
        tensors.part_lse_ptr,
        numbers.tokens,
        value_scale,
    )
    work = work_of(gl.program_id(0), tensors, numbers, TILE)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE.BLOCK_N, HALF], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE.BLOCK_N, REST], dtype)
    k_s = gl.allocate_shared_memory(dtype, [2 * TILE.STAGES, TILE.BLOCK_N, HALF], wide)
    k_rest_s = gl.allocate_shared_memory(dtype, [TILE.STAGES, TILE.BLOCK_N, REST], narrow)
    pipeline = pipeline_of(k_s, k_rest_s, TILE)
    queries = Rows(tensors.q_ptr, numbers.q)
    table = numbers.table
    entries = tensors.block_table_ptr + work.sequence.to(gl.int64) * table.sequence
    cache = Cache(tensors.kv_cache_ptr, numbers.page_rows, numbers.row, entries, table.page)
    gl.warp_specialize(
        [
            (lead, (work, queries, scale, pipeline, results, TILE)),
            (follow, (work, pipeline, results, TILE)),
            (_widen, (work, cache, pipeline, TILE)),
        ],
        [4, 4],
        [160, 120],
    )
