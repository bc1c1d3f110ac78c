"""Prefill over a cache of 8 or 4 bits on Hopper: keys and values are widened on their way.

The kernel of ``attention.py``, with a third warpgroup in place of the copying warp. It reads tiles
of keys and values into registers, a half ahead, widens them to the 16 bits of the queries, which
hold all numbers of 8, and stores them where the products read them. Pages may have any size. What
an FP8 cache is scaled by goes into the scores, and into the output. A cache of integers has a scale
for each token: it lies beside the tile, and goes into the columns of the scores and into the
probabilities.
"""

from ._linked.compat import gl, gluon, hopper, mbarrier
from ._linked.pipeline import EMPTY, FIELDS, TURN, barrier_sync
from .attention import pipeline_of
from .consumer import consume
from .producer import (
    announce,
    announce_the_end,
    copy_new,
    copy_queries,
    leave,
    next_ticket,
    next_tile,
)
from .structures import (
    Counts,
    Inputs,
    Options,
    Results,
    Rows,
    Scores,
    Sequences,
    Table,
    Tickets,
    Tile,
    TokenScales,
    WideArguments,
    WideCache,
    WideStrides,
)
from .tiles import seen_of, tile_of, tiles_of
from .widening import widened

# a named barrier of the warpgroup that widens
WRITTEN = gl.constexpr(TURN.value + 2)


@gluon.constexpr_function
def _numbers_of_word(stored):
    """Return how many numbers a word of 32 bits holds; a byte of uint8 holds two."""
    return 8 if stored == gl.uint8 else 4


@gluon.jit
def _read(first, cache, seen, entries, stride_page, NUMBERS: gl.constexpr, TILE: gl.constexpr):
    """Read half a tile of one head in words, ``[BLOCK_N // 2, HEAD_DIM // NUMBERS]``.

    It begins at the key ``first``. Keys that are not seen are zeros.
    """
    COUNT: gl.constexpr = TILE.BLOCK_N // 2
    PAGE: gl.constexpr = TILE.PAGE
    LANES: gl.constexpr = TILE.HEAD_DIM // NUMBERS // 4
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
    key = first + gl.arange(0, COUNT, gl.SliceLayout(1, layout))  # [BLOCK_N // 2]
    # [HEAD_DIM // NUMBERS]
    cols = gl.arange(0, TILE.HEAD_DIM // NUMBERS, gl.SliceLayout(0, layout))
    is_seen = (key >= seen.first) & (key < seen.last)
    if PAGE % COUNT == 0:
        is_wanted = (first < seen.last) & (first + COUNT > seen.first)
        entry = entries + (first // PAGE).to(gl.int64) * stride_page
        page = gl.load(entry, mask=is_wanted, other=0).to(gl.int32)
    else:
        entry = entries + (key // PAGE).to(gl.int64) * stride_page
        page = gl.load(entry, mask=is_seen, other=0).to(gl.int32)
    row = page * cache.page_rows + key % PAGE
    at = cache.ptr + (row.to(gl.int64) * cache.stride_slot)[:, None]
    at = gl.multiple_of(at, [16, 16]) + cols[None, :]
    mask = is_seen[:, None]
    if TILE.WIDTH < TILE.HEAD_DIM:
        mask = mask & (cols < TILE.WIDTH // NUMBERS)[None, :]
    return gl.load(at, mask=mask, other=0)


@gluon.jit
def _read_scales(first, inputs, seen, entries, TILE: gl.constexpr):
    """Read the scales of a tile's keys and of its values, each ``[BLOCK_N]``."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    key = first + gl.arange(0, TILE.BLOCK_N, layout)  # [BLOCK_N]
    is_seen = (key >= seen.first) & (key < seen.last)
    entry = entries + (key // TILE.PAGE).to(gl.int64) * inputs.table.stride_page
    page = gl.load(entry, mask=is_seen, other=0).to(gl.int64)
    slot = (key % TILE.PAGE).to(gl.int64)
    k, v = inputs.k_scales, inputs.v_scales
    head = seen.head.to(gl.int64)
    k_at = k.ptr + (head * k.stride_head + page * k.stride_page + slot * k.stride_slot)
    v_at = v.ptr + (head * v.stride_head + page * v.stride_page + slot * v.stride_slot)
    k_scale = gl.load(k_at, mask=is_seen, other=0.0)
    v_scale = gl.load(v_at, mask=is_seen, other=0.0)
    return k_scale, v_scale


@gluon.jit
def _put_scales(k_scale, v_scale, stage, scales_s):
    """Store the scales of a tile in fp32."""
    scales_s.index(2 * stage).store(k_scale.to(gl.float32))
    scales_s.index(2 * stage + 1).store(v_scale.to(gl.float32))


@gluon.jit
def _put(words, memory, half: gl.constexpr, STORED: gl.constexpr, TILE: gl.constexpr):
    """Store half a tile in 16 bits."""
    COUNT: gl.constexpr = TILE.BLOCK_N // 2
    tile = widened(words, STORED, memory.dtype)
    memory = memory.reshape([TILE.BLOCK_N, TILE.HEAD_DIM])
    memory.slice(half * COUNT, COUNT, 0).store(tile)


@gluon.jit
def _announce_keys(full):
    """Say that a tile is there: one thread arrives for all."""
    hopper.fence_async_shared()
    barrier_sync(WRITTEN, 128, 4)
    mbarrier.arrive(full, count=1)


@gluon.jit
def _words_of(cache, head):
    """Return the cache of one head, in words."""
    ptr = cache.ptr + head.to(gl.int64) * cache.stride_head
    ptr = ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    return WideCache(ptr, cache.page_rows, cache.stride_slot // 4, cache.stride_head)


@gluon.jit
def _bring_new(
    work, turn, tiles, seen, inputs, pipeline, OPTIONS: gl.constexpr, TILE: gl.constexpr
):
    """Copy new keys and values by TMA, tile by tile; return how many tiles there have been."""
    STAGES_K: gl.constexpr = TILE.STAGES_K
    STAGES_V: gl.constexpr = TILE.STAGES_V
    LEFT: gl.constexpr = OPTIONS.HAS_LEFT
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    q_start = work.q_start
    for step in range(tiles.cached, tiles.high - tiles.low):
        number = tile_of(step, tiles, OPTIONS) - tiles.new
        stage = turn % STAGES_K
        if turn >= STAGES_K:
            barrier_sync(EMPTY + stage, TILE.PARTIES, 4)
        if inputs.scales_s is not None:
            # new keys and values have no scale
            ones = gl.full([TILE.BLOCK_N], 1.0, gl.float32, layout)
            _put_scales(ones, ones, stage, inputs.scales_s)
            barrier_sync(WRITTEN, 128, 4)
        full, memory = pipeline.k_full.index(stage), pipeline.k_s.index(stage)
        copy_new(number, q_start, inputs.new_k_desc, seen, full, memory, LEFT, TILE)
        stage = turn % STAGES_V
        if turn >= STAGES_V:
            barrier_sync(EMPTY + STAGES_K + stage, TILE.PARTIES, 4)
        full, memory = pipeline.v_full.index(stage), pipeline.v_s.index(stage)
        copy_new(number, q_start, inputs.new_v_desc, seen, full, memory, LEFT, TILE)
        turn += 1
    return turn


@gluon.jit
def _bring(work, turn, inputs, pipeline, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Bring the keys and values that a tile of queries sees, tile by tile.

    Return how many tiles there have been by now.
    """
    STAGES_K: gl.constexpr = TILE.STAGES_K
    STAGES_V: gl.constexpr = TILE.STAGES_V
    PARTIES: gl.constexpr = TILE.PARTIES
    HALF: gl.constexpr = TILE.BLOCK_N // 2
    STORED: gl.constexpr = inputs.k.ptr.dtype.element_ty
    NUMBERS: gl.constexpr = _numbers_of_word(STORED)
    tiles = tiles_of(work.first_row, work.len_q, work.len_k, inputs.scores, OPTIONS, TILE)
    head_k = work.ticket % inputs.tickets.packs * TILE.PACK // TILE.GROUP
    # ahead of the first tile there is none: its keys are not seen
    first = 0
    if OPTIONS.HAS_LEFT:
        first = gl.maximum(work.first_row + work.len_k - work.len_q - inputs.scores.window_left, 0)
    seen, new_seen = seen_of(head_k, first, work.len_k, tiles, OPTIONS)
    table = inputs.table
    entries = table.ptr + work.sequence.to(gl.int64) * table.stride_sequence
    stride_page = table.stride_page
    keys, vals = _words_of(inputs.k, head_k), _words_of(inputs.v, head_k)
    steps = tiles.high - tiles.low
    if OPTIONS.HAS_NEW:
        steps = tiles.cached
    last = (tiles.new - 1) * TILE.BLOCK_N
    low = _read(last, keys, seen, entries, stride_page, NUMBERS, TILE)
    high = _read(last + HALF, keys, seen, entries, stride_page, NUMBERS, TILE)
    if inputs.scales_s is not None:
        k_scale, v_scale = _read_scales(last, inputs, seen, entries, TILE)
    for step in range(steps):
        # while one half is stored, the two behind it are read
        begin = (tiles.new - 1 - step) * TILE.BLOCK_N
        stage = turn % STAGES_K
        if turn >= STAGES_K:
            barrier_sync(EMPTY + stage, PARTIES, 4)
        if inputs.scales_s is not None:
            _put_scales(k_scale, v_scale, stage, inputs.scales_s)
            k_scale, v_scale = _read_scales(begin - TILE.BLOCK_N, inputs, seen, entries, TILE)
        memory = pipeline.k_s.index(stage)
        _put(low, memory, 0, STORED, TILE)
        low = _read(begin, vals, seen, entries, stride_page, NUMBERS, TILE)
        _put(high, memory, 1, STORED, TILE)
        _announce_keys(pipeline.k_full.index(stage))
        high = _read(begin + HALF, vals, seen, entries, stride_page, NUMBERS, TILE)
        stage = turn % STAGES_V
        if turn >= STAGES_V:
            barrier_sync(EMPTY + STAGES_K + stage, PARTIES, 4)
        begin -= TILE.BLOCK_N
        memory = pipeline.v_s.index(stage)
        _put(low, memory, 0, STORED, TILE)
        low = _read(begin, keys, seen, entries, stride_page, NUMBERS, TILE)
        _put(high, memory, 1, STORED, TILE)
        _announce_keys(pipeline.v_full.index(stage))
        high = _read(begin + HALF, keys, seen, entries, stride_page, NUMBERS, TILE)
        turn += 1
    if OPTIONS.HAS_NEW:
        turn = _bring_new(work, turn, tiles, new_seen, inputs, pipeline, OPTIONS, TILE)
    return turn


@gluon.jit
def _widen(inputs, pipeline, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Bring tiles of queries, keys and values into shared memory until no ticket is left."""
    TOKENS: gl.constexpr = TILE.ROWS // TILE.PACK  # of a warpgroup
    index = gl.arange(0, FIELDS, gl.BlockedLayout([1], [32], [4], [0]))  # [FIELDS]
    count = 0  # tiles of queries
    turn = 0  # tiles of keys, and of values
    tickets, sequences = inputs.tickets, inputs.sequences
    work = next_tile(gl.program_id(0), tickets, sequences, TILE)
    while work.ticket < tickets.total:
        head = work.ticket % tickets.packs * TILE.PACK
        announce(index, work, head, count, pipeline)
        copy_queries(work, head, count, inputs.q_desc, pipeline, TOKENS)
        turn = _bring(work, turn, inputs, pipeline, OPTIONS, TILE)
        count += 1
        work = next_tile(next_ticket(tickets), tickets, sequences, TILE)
    announce_the_end(index, count, pipeline)
    leave(work, turn, turn, tickets, TILE)


# integers and pointers are taken as they come; see ``runtime.py``
NUMBERS = Scores._fields + Counts._fields + WideStrides._fields
POINTERS = tuple(name for name in WideArguments._fields if name.endswith("_ptr"))


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def prefill_wide_kernel(
    q_desc,
    new_k_desc,
    new_v_desc,
    out_desc,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    lse_ptr,
    ticket_ptr,
    block_table_ptr,
    cu_seqlens_q_ptr,
    seqlens_k_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    k_descale_ptr,
    v_descale_ptr,
    k_scale_cache_ptr,
    v_scale_cache_ptr,
    scale,
    softcap,
    window_left,
    window_right,
    batch,
    packs,
    tokens,
    total,
    page_rows_k,
    page_rows_v,
    stride_kcs,
    stride_kch,
    stride_vcs,
    stride_vch,
    stride_os,
    stride_oh,
    stride_table_b,
    stride_table_p,
    stride_alibi_b,
    stride_skp,
    stride_sks,
    stride_skh,
    stride_svp,
    stride_svs,
    stride_svh,
    heads_k,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_NEW: gl.constexpr,
    DESCALE_NDIM: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    PAGE: gl.constexpr,
    PIECE: gl.constexpr,
    NEW_PIECE: gl.constexpr,
    MIN_TOKENS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES_K: gl.constexpr,
    STAGES_V: gl.constexpr,
    SHARE: gl.constexpr,
    WARPS: gl.constexpr,
    PARTIES: gl.constexpr,
):
    """``out = softmax(mask(scale * q @ k.T)) @ v``, with ``k`` and ``v`` in pages of 8 or 4 bits.

    Those of the queries' tokens may lie beside it, in 16 bits. A persistent program: one warpgroup
    produces, two consume.
    """
    OPTIONS: gl.constexpr = Options(HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_NEW, DESCALE_NDIM)
    TILE: gl.constexpr = Tile(
        GROUP,
        PACK,
        PAGE,
        PIECE,
        NEW_PIECE,
        MIN_TOKENS,
        ROWS,
        BLOCK_N,
        HEAD_DIM,
        WIDTH,
        STAGES_K,
        STAGES_V,
        SHARE,
        WARPS,
        PARTIES,
    )
    dtype: gl.constexpr = q_desc.dtype
    box: gl.constexpr = [1, 1, 1, BLOCK_N, HEAD_DIM]  # as TMA copies it
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(box, dtype)
    k_s = gl.allocate_shared_memory(dtype, [STAGES_K, 1, 1, 1, BLOCK_N, HEAD_DIM], layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES_V, 1, 1, 1, BLOCK_N, HEAD_DIM], layout)
    scales_s, k_scales, v_scales = None, None, None
    if k_scale_cache_ptr is not None:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        scales_s = gl.allocate_shared_memory(gl.float32, [2 * STAGES_K, BLOCK_N], plain)
        k_scales = TokenScales(k_scale_cache_ptr, stride_skp, stride_sks, stride_skh)
        v_scales = TokenScales(v_scale_cache_ptr, stride_svp, stride_svs, stride_svh)
    pipeline = pipeline_of(q_desc, k_s, v_s, out_desc, TILE)
    scores = Scores(scale, softcap, window_left, window_right)
    results = Results(
        Rows(out_ptr, stride_os, stride_oh),
        lse_ptr,
        alibi_slopes_ptr,
        sinks_ptr,
        k_descale_ptr,
        v_descale_ptr,
        scores,
        tokens,
        stride_alibi_b,
        heads_k,
        scales_s,
    )
    inputs = Inputs(
        q_desc,
        WideCache(k_cache_ptr, page_rows_k, stride_kcs, stride_kch),
        WideCache(v_cache_ptr, page_rows_v, stride_vcs, stride_vch),
        new_k_desc,
        new_v_desc,
        Table(block_table_ptr, stride_table_b, stride_table_p),
        Sequences(cu_seqlens_q_ptr, seqlens_k_ptr, batch),
        Tickets(ticket_ptr, packs, total),
        scores,
        k_scales,
        v_scales,
        scales_s,
    )
    gl.warp_specialize(
        [
            (consume, (0, out_desc, pipeline, results, OPTIONS, TILE)),
            (consume, (1, out_desc, pipeline, results, OPTIONS, TILE)),
            (_widen, (inputs, pipeline, OPTIONS, TILE)),
        ],
        [4, 4],
        [216, 80],
    )
