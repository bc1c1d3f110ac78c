"""Prefill over an FP8 cache on Hopper: keys and values are widened on their way.

The kernel of ``attention.py``, with a third warpgroup in place of the copying warp. It reads tiles
of keys and values into registers, a half ahead, widens them to the 16 bits of the queries, which
hold all numbers of 8, and stores them where the products read them. Pages may have any size. What
the cache is scaled by goes into the scores, and into the output.
"""

from ._linked.compat import gl, gluon, hopper, mbarrier
from ._linked.pipeline import EMPTY, FIELDS, TURN, barrier_sync
from .attention import consume, pipeline_of
from .producer import (
    announce,
    announce_the_end,
    copy_queries,
    leave,
    next_ticket,
    next_tile,
    tiles_of,
)
from .structures import (
    Counts,
    Inputs,
    Options,
    Results,
    Rows,
    Scores,
    Seen,
    Sequences,
    Table,
    Tickets,
    Tile,
    WideArguments,
    WideCache,
    WideStrides,
)

# a named barrier of the warpgroup that widens
WRITTEN = gl.constexpr(TURN.value + 2)


def _widening(stored: str, to_bf16: bool) -> str:
    """Return PTX that widens the four numbers of a word, which all four inputs hold."""
    lines = [".reg .b16 lo, hi;", "mov.b32 {lo, hi}, $2;"]
    if to_bf16:
        lines += [".reg .b16 a, b;", ".reg .b32 x;", ".reg .f32 f, g;"]
    for out, half in (("$0", "lo"), ("$1", "hi")):
        lines.append(f"cvt.rn.f16x2.{stored}x2 {'x' if to_bf16 else out}, {half};")
        if to_bf16:
            lines += ["mov.b32 {a, b}, x;", "cvt.f32.f16 f, a;", "cvt.f32.f16 g, b;"]
            lines.append(f"cvt.rn.bf16x2.f32 {out}, g, f;")
    return "{" + " ".join(lines) + "}"


_E4M3_BF16 = gl.constexpr(_widening("e4m3", True))
_E4M3_FP16 = gl.constexpr(_widening("e4m3", False))
_E5M2_BF16 = gl.constexpr(_widening("e5m2", True))
_E5M2_FP16 = gl.constexpr(_widening("e5m2", False))


@gluon.jit
def _by_ptx(words, PTX: gl.constexpr, BF16: gl.constexpr):
    if BF16:
        tile = gl.inline_asm_elementwise(
            PTX, "=&r,=&r,r,r,r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=4
        )
    else:
        tile = gl.inline_asm_elementwise(
            PTX, "=&r,=&r,r,r,r,r", [words], dtype=gl.float16, is_pure=True, pack=4
        )
    return tile


@gluon.jit
def _widened(words, PTX: gl.constexpr, BF16: gl.constexpr):
    """Return the numbers of words of four, ``[BLOCK_N, 4 * words]``, in 16 bits."""
    COUNT: gl.constexpr = words.shape[0]
    WIDTH: gl.constexpr = words.shape[1] * 4
    # each word four times, at the places of its bytes
    pairs = gl.join(words, words)
    words = gl.reshape(gl.join(pairs, pairs), [COUNT, WIDTH])
    return _by_ptx(words, PTX, BF16)


@gluon.jit
def _read(first, cache, seen, entries, stride_page, TILE: gl.constexpr):
    """Read half a tile of one head, ``[BLOCK_N // 2, HEAD_DIM // 4]`` words of four numbers.

    It begins at the key ``first``. Keys that are not seen are zeros.
    """
    COUNT: gl.constexpr = TILE.BLOCK_N // 2
    PAGE: gl.constexpr = TILE.PAGE
    LANES: gl.constexpr = TILE.HEAD_DIM // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [32 // LANES, LANES], [4, 1], [1, 0])
    key = first + gl.arange(0, COUNT, gl.SliceLayout(1, layout))  # [BLOCK_N // 2]
    cols = gl.arange(0, TILE.HEAD_DIM // 4, gl.SliceLayout(0, layout))  # [HEAD_DIM // 4]
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
        mask = mask & (cols < TILE.WIDTH // 4)[None, :]
    return gl.load(at, mask=mask, other=0)


@gluon.jit
def _put(words, memory, half: gl.constexpr, PTX: gl.constexpr, TILE: gl.constexpr):
    """Store half a tile in 16 bits."""
    COUNT: gl.constexpr = TILE.BLOCK_N // 2
    tile = _widened(words, PTX, memory.dtype == gl.bfloat16)
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
    """Return the cache of one head, in words of four numbers."""
    ptr = cache.ptr + head.to(gl.int64) * cache.stride_head
    ptr = ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    return WideCache(ptr, cache.page_rows, cache.stride_slot // 4, cache.stride_head)


@gluon.jit
def _bring(work, turn, inputs, pipeline, OPTIONS: gl.constexpr, TILE: gl.constexpr):
    """Bring the keys and values that a tile of queries sees, tile by tile.

    Return how many tiles there have been by now.
    """
    STAGES_K: gl.constexpr = TILE.STAGES_K
    STAGES_V: gl.constexpr = TILE.STAGES_V
    PARTIES: gl.constexpr = TILE.PARTIES
    tiles = tiles_of(work.first_row, work.len_q, work.len_k, inputs.scores, OPTIONS, TILE)
    head_k = work.ticket % inputs.tickets.packs * TILE.PACK // TILE.GROUP
    # no tile before the first is read, of which there are no keys
    first = tiles.low * TILE.BLOCK_N
    if OPTIONS.HAS_LEFT:
        row = work.first_row + work.len_k - work.len_q
        first = gl.maximum(first, row - inputs.scores.window_left)
    seen = Seen(head_k, first, work.len_k)
    table = inputs.table
    entries = table.ptr + work.sequence.to(gl.int64) * table.stride_sequence
    stored: gl.constexpr = inputs.k.ptr.dtype.element_ty
    is_bf16: gl.constexpr = pipeline.k_s.dtype == gl.bfloat16
    if stored == gl.float8e5:
        PTX: gl.constexpr = _E5M2_BF16 if is_bf16 else _E5M2_FP16
    else:
        PTX: gl.constexpr = _E4M3_BF16 if is_bf16 else _E4M3_FP16
    keys, vals = _words_of(inputs.k, head_k), _words_of(inputs.v, head_k)
    HALF: gl.constexpr = TILE.BLOCK_N // 2
    stride_page = table.stride_page
    last = (tiles.high - 1) * TILE.BLOCK_N
    low = _read(last, keys, seen, entries, stride_page, TILE)
    high = _read(last + HALF, keys, seen, entries, stride_page, TILE)
    for step in range(tiles.high - tiles.low):
        # while one half is stored, the two behind it are read
        begin = (tiles.high - 1 - step) * TILE.BLOCK_N
        stage = turn % STAGES_K
        if turn >= STAGES_K:
            barrier_sync(EMPTY + stage, PARTIES, 4)
        memory = pipeline.k_s.index(stage)
        _put(low, memory, 0, PTX, TILE)
        low = _read(begin, vals, seen, entries, stride_page, TILE)
        _put(high, memory, 1, PTX, TILE)
        _announce_keys(pipeline.k_full.index(stage))
        high = _read(begin + HALF, vals, seen, entries, stride_page, TILE)
        stage = turn % STAGES_V
        if turn >= STAGES_V:
            barrier_sync(EMPTY + STAGES_K + stage, PARTIES, 4)
        begin -= TILE.BLOCK_N
        memory = pipeline.v_s.index(stage)
        _put(low, memory, 0, PTX, TILE)
        low = _read(begin, keys, seen, entries, stride_page, TILE)
        _put(high, memory, 1, PTX, TILE)
        _announce_keys(pipeline.v_full.index(stage))
        high = _read(begin + HALF, keys, seen, entries, stride_page, TILE)
        turn += 1
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
def prefill_fp8_kernel(
    q_desc,
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
    heads_k,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    DESCALE_NDIM: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    PAGE: gl.constexpr,
    PIECE: gl.constexpr,
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
    """``out = softmax(mask(scale * q @ k.T)) @ v``, with ``k`` and ``v`` in pages of 8 bits.

    A persistent program: one warpgroup produces, two consume.
    """
    OPTIONS: gl.constexpr = Options(HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, DESCALE_NDIM)
    TILE: gl.constexpr = Tile(
        GROUP,
        PACK,
        PAGE,
        PIECE,
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
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    k_s = gl.allocate_shared_memory(dtype, [STAGES_K, BLOCK_N, HEAD_DIM], layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES_V, BLOCK_N, HEAD_DIM], layout)
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
    )
    inputs = Inputs(
        q_desc,
        WideCache(k_cache_ptr, page_rows_k, stride_kcs, stride_kch),
        WideCache(v_cache_ptr, page_rows_v, stride_vcs, stride_vch),
        Table(block_table_ptr, stride_table_b, stride_table_p),
        Sequences(cu_seqlens_q_ptr, seqlens_k_ptr, batch),
        Tickets(ticket_ptr, packs, total),
        scores,
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
