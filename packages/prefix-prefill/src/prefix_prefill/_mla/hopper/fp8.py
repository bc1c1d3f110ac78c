"""Multi-head latent attention over an FP8 cache on Hopper; keys are widened to 16 bits.

The kernel of ``kernel.py``, with a third warpgroup in place of the copying warp. It reads tiles of
keys into registers, one tile ahead, widens them to 16 bits, which is exact, and stores them in
shared memory. Pages may have any size.
"""

from ..._linked.hopper.compat import gl, gluon, hopper, mbarrier
from ..._linked.hopper.pipeline import EMPTY, barrier_sync
from .kernel import REST, clear, follow, lead, pipeline_of
from .producer import HALF, leave, work_of
from .structures import Cache, Counts, Results, Rows, Tile, WideArguments, WideStrides


@gluon.jit
def _keys_of(tile, last, cache, COLUMN: gl.constexpr, COLUMNS: gl.constexpr, TILE: gl.constexpr):
    """Read columns of a tile of keys, ``[BLOCK_N, COLUMNS]``; keys from ``last`` on are zeros."""
    LANES: gl.constexpr = COLUMNS // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    first = tile * TILE.BLOCK_N
    key = first + gl.arange(0, TILE.BLOCK_N, gl.SliceLayout(1, layout))  # [BLOCK_N]
    cols = COLUMN + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))  # [COLUMNS]
    if TILE.PAGE % TILE.BLOCK_N == 0:
        entry = cache.entries + (first // TILE.PAGE).to(gl.int64) * cache.stride_page
        page = gl.load(entry, mask=first < last, other=0).to(gl.int32)
    else:
        entry = cache.entries + (key // TILE.PAGE).to(gl.int64) * cache.stride_page
        page = gl.load(entry, mask=key < last, other=0).to(gl.int32)
    row = page * cache.page_rows + key % TILE.PAGE
    at = gl.multiple_of(cache.ptr + (row.to(gl.int64) * cache.stride)[:, None], [16, 16])
    return gl.load(at + cols[None, :], mask=(key < last)[:, None], other=0.0)


@gluon.jit
def _widen(work, cache, pipeline, TILE: gl.constexpr):
    """Bring tiles of keys into shared memory in 16 bits, from the last to the first."""
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    STAGES: gl.constexpr = TILE.STAGES
    dtype: gl.constexpr = pipeline.k_s.dtype
    last = work.last
    steps = work.end - work.begin
    for step in range(steps):
        tile = work.end - 1 - step
        # read before the stage is free
        low = _keys_of(tile, last, cache, 0, HALF, TILE)
        high = _keys_of(tile, last, cache, HALF, HALF, TILE)
        rest = _keys_of(tile, last, cache, 2 * HALF, REST, TILE)
        stage = step % STAGES
        if step >= STAGES:
            barrier_sync(EMPTY + 2 * stage, TILE.PARTIES, 4)
        pipeline.k_s.index(2 * stage).reshape([BLOCK_N, HALF]).store(low.to(dtype))
        hopper.fence_async_shared()
        mbarrier.arrive(pipeline.low_full.index(stage), count=1)
        if step >= STAGES:
            barrier_sync(EMPTY + 2 * stage + 1, TILE.PARTIES, 4)
        pipeline.k_s.index(2 * stage + 1).reshape([BLOCK_N, HALF]).store(high.to(dtype))
        pipeline.k_rest_s.index(stage).reshape([BLOCK_N, REST]).store(rest.to(dtype))
        hopper.fence_async_shared()
        mbarrier.arrive(pipeline.high_full.index(stage), count=1)
    leave(steps, 4, TILE)


# no specialisation on values or alignment: see ``runtime.py``
NUMBERS = Counts._fields + WideStrides._fields
POINTERS = tuple(name for name in WideArguments._fields if not name.startswith("part_"))


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def mla_fp8_kernel(
    q_ptr,
    kv_cache_ptr,
    block_table_ptr,
    cu_seqlens_q_ptr,
    seqlens_k_ptr,
    q_descale_ptr,
    kv_descale_ptr,
    out_ptr,
    lse_ptr,
    part_out_ptr,
    part_lse_ptr,
    scale,
    batch,
    tokens,
    splits,
    stride_qs,
    stride_qh,
    stride_os,
    stride_oh,
    page_rows,
    stride_kvs,
    stride_table_b,
    stride_table_p,
    CAUSAL: gl.constexpr,
    GROUP: gl.constexpr,
    TILES: gl.constexpr,
    PAGE: gl.constexpr,
    PIECE: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    PARTIES: gl.constexpr,
    FOLD: gl.constexpr,
):
    """``out = softmax(mask(scale * q @ k.T)) @ k[:, :512]``, of rows or of a split of keys.

    ``k``, of 576 columns, is in the pages of an FP8 cache.
    """
    TILE: gl.constexpr = Tile(
        CAUSAL, GROUP, TILES, PAGE, PIECE, ROWS, BLOCK_N, STAGES, PARTIES, FOLD
    )
    Q: gl.constexpr = q_ptr.dtype.element_ty
    # bf16 holds all numbers of 8 bits
    dtype: gl.constexpr = Q if Q.primitive_bitwidth > 8 else gl.bfloat16
    value_scale = 1.0
    if kv_descale_ptr is not None:
        value_scale = gl.load(kv_descale_ptr)
        scale *= value_scale
    if q_descale_ptr is not None:
        scale *= gl.load(q_descale_ptr)
    out = Rows(out_ptr, stride_os, stride_oh)
    results = Results(out, lse_ptr, part_out_ptr, part_lse_ptr, tokens, value_scale)
    clear(cu_seqlens_q_ptr, batch, results, GROUP)
    counts = Counts(scale, batch, tokens, splits)
    work = work_of(gl.program_id(0), cu_seqlens_q_ptr, seqlens_k_ptr, counts, TILE)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HALF], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, REST], dtype)
    k_s = gl.allocate_shared_memory(dtype, [2 * STAGES, BLOCK_N, HALF], wide)
    k_rest_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, REST], narrow)
    pipeline = pipeline_of(k_s, k_rest_s, TILE)
    queries = Rows(q_ptr, stride_qs, stride_qh)
    entries = block_table_ptr + work.sequence.to(gl.int64) * stride_table_b
    cache = Cache(kv_cache_ptr, page_rows, stride_kvs, entries, stride_table_p)
    gl.warp_specialize(
        [
            (lead, (work, queries, scale, pipeline, results, TILE)),
            (follow, (work, pipeline, results, TILE)),
            (_widen, (work, cache, pipeline, TILE)),
        ],
        [4, 4],
        [160, 120],
    )
