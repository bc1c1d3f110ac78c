"""Attention over a paged cache: one program owns a tile of rows of one head of keys.

A row is one query head of one token, and the rows of a tile share their keys, so that these are
read once for the whole GQA group. The program walks the keys once, those in the cache and then the
dense new ones, with the online softmax of FlashAttention-2 (Dao, 2023): running maximum and sum per
row, in base 2. Each walk has two parts: tiles that every row sees whole, without masks, and tiles
that a window, the diagonal or the end cuts. Tiles that no row sees are never visited, nor are their
pages looked up.
"""

import triton
import triton.language as tl

from ._linked.primitives import LN2, LOG2E, NEG_INF, count_steps, dot, dot_add, step_start
from .primitives import (
    cut_range,
    is_looked_up,
    is_visible,
    key_range,
    load_columns,
    load_rows,
    logits_of,
    look_up,
    matched,
    rows_of,
)
from .schedule import locate
from .structures import (
    Counts,
    Layout,
    Options,
    Pointers,
    Positions,
    Queries,
    RowLayout,
    Rows,
    Schedule,
    Scores,
    Softmax,
    Source,
    Strides,
    Tile,
    pointers_of_callers,
)

# integers and pointers are taken as they come: a variant per value or alignment would give a stride
# its own rounding and a length its own compilation
NUMBERS = Scores._fields + Counts._fields + Strides._fields
POINTERS = pointers_of_callers(Pointers._fields)


@triton.jit
def _attend(
    softmax,
    queries,
    source,
    walk,
    scores,
    MASKED: tl.constexpr,
    LAYOUT: tl.constexpr,
    OPTIONS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Fold keys of one source into the running softmax of a tile: masked tiles, or whole ones."""
    PAGE: tl.constexpr = LAYOUT.PAGE
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    acc, l_i, m_i = softmax.acc, softmax.l_i, softmax.m_i
    start, full_start, full_end = walk.start, walk.full_start, walk.full_end
    cols = tl.arange(0, TILE.BLOCK_D)  # [BLOCK_D]
    lane = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    steps = count_steps(start, full_start, full_end, walk.last, BLOCK_N, MASKED)
    # pages are looked up a step ahead: else their loads would take a stage of the pipeline
    next_begin = step_start(0, start, full_start, full_end, BLOCK_N, MASKED)
    is_wanted = is_looked_up(next_begin, 0, steps, walk.first, walk.last, PAGE, BLOCK_N, MASKED)
    next_pages = look_up(
        source.table_base, source.stride_table, next_begin, is_wanted, PAGE, BLOCK_N
    )
    for step in tl.range(0, steps):
        begin = next_begin
        pages = next_pages
        next_begin = step_start(step + 1, start, full_start, full_end, BLOCK_N, MASKED)
        is_wanted = is_looked_up(
            next_begin, step + 1, steps, walk.first, walk.last, PAGE, BLOCK_N, MASKED
        )
        next_pages = look_up(
            source.table_base, source.stride_table, next_begin, is_wanted, PAGE, BLOCK_N
        )
        keys = begin + lane  # [BLOCK_N]
        inside = (keys >= walk.first) & (keys < walk.last)
        k_rows = rows_of(pages, begin, source.stride_kp, source.stride_ks, PAGE, BLOCK_N)
        k = load_rows(
            source.k_base,
            k_rows,
            inside,
            cols,
            source.stride_kx,
            source.stride_kd,
            TILE.HEAD_DIM,
            TILE.BLOCK_D,
            LAYOUT.K_RUN,
            LAYOUT.K_UNIT,
            LAYOUT.K_BYTES,
            MASKED,
        )  # [BLOCK_N, BLOCK_D]
        k = matched(k, queries.q)
        # [BLOCK_M, BLOCK_N]
        s = dot(matched(queries.q, k), tl.trans(k), TILE.PRECISION, TILE.UPCAST)
        if OPTIONS.FOLD and not MASKED:
            # the scale goes into the exponential's multiply-add; it is positive, so max commutes
            factor = scores.scale * LOG2E
        else:
            factor = 1.0
            s = logits_of(s, queries, keys, scores, OPTIONS)
        if MASKED:
            visible = is_visible(queries.position, keys, walk.last, scores, OPTIONS)
            s = tl.where(visible, s, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(s, 1) * factor)  # [BLOCK_M]
        if MASKED:
            # a row that has seen no key yet keeps a finite pivot: -inf - -inf is NaN
            pivot = tl.where(m_new == NEG_INF, 0.0, m_new)
        else:
            pivot = m_new
        p = tl.exp2(s * factor - (pivot - OPTIONS.SHIFT)[:, None])  # [BLOCK_M, BLOCK_N]
        alpha = tl.exp2(m_i - pivot)
        l_i = l_i * alpha + tl.sum(p, 1)
        if LAYOUT.V_AS_K:
            v_rows = k_rows
        else:
            v_rows = rows_of(pages, begin, source.stride_vp, source.stride_vs, PAGE, BLOCK_N)
        if LAYOUT.V_COLUMN_RUN > 0:
            v = load_columns(
                source.v_base,
                v_rows,
                inside,
                cols,
                source.stride_vd,
                TILE.HEAD_DIM,
                TILE.BLOCK_D,
                LAYOUT.V_COLUMN_RUN,
                LAYOUT.V_BYTES,
                MASKED,
            )  # [BLOCK_N, BLOCK_D]
        else:
            v = load_rows(
                source.v_base,
                v_rows,
                inside,
                cols,
                0,
                source.stride_vd,
                TILE.HEAD_DIM,
                TILE.BLOCK_D,
                TILE.HEAD_DIM,
                LAYOUT.V_UNIT,
                LAYOUT.V_BYTES,
                MASKED,
            )  # [BLOCK_N, BLOCK_D]
        # [BLOCK_M, BLOCK_D]
        acc = dot_add(acc * alpha[:, None], p, matched(v, queries.q), TILE.PRECISION, TILE.UPCAST)
        m_i = m_new
    return Softmax(acc, l_i, m_i)


@triton.jit
def _attend_to_all(
    softmax,
    queries,
    source,
    walk,
    scores,
    LAYOUT: tl.constexpr,
    OPTIONS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Fold keys of one source into the running softmax: whole tiles, then those to be masked."""
    for masked in tl.static_range(2):
        softmax = _attend(
            softmax, queries, source, walk, scores, masked == 1, LAYOUT, OPTIONS, TILE
        )
    return softmax


@triton.jit
def _tiles_of(seen, BLOCK_N: tl.constexpr):
    """Return the first tile of a range of keys, and how many tiles there are."""
    begin = seen.first // BLOCK_N
    return begin, tl.where(seen.first < seen.last, tl.cdiv(seen.last, BLOCK_N) - begin, 0)


@triton.jit
def _share_of(split, splits, tiles):
    """Return the tiles ``[begin, end)`` of a split; they differ in number by one at most."""
    share, rest = tiles // splits, tiles % splits
    begin = split * share + tl.minimum(split, rest)
    return begin, begin + share + tl.where(split < rest, 1, 0)


@triton.jit
def _context_of(place, seqlen_k, k_ptr, OPTIONS: tl.constexpr):
    """Return how many keys of a sequence are in the cache; those behind them are new."""
    context = seqlen_k
    if k_ptr is not None:
        context = tl.maximum(seqlen_k - place.seqlen_q, 0)
        if OPTIONS.DECODE_FROM_CACHE:
            context = tl.where(place.seqlen_q == 1, seqlen_k, context)
    return context


@triton.jit
def _rows_of(place, q_start, head_k, SCHEDULE: tl.constexpr, TILE: tl.constexpr):
    """Return the ``Rows`` of a tile of queries."""
    GROUP: tl.constexpr = SCHEDULE.GROUP
    row = place.tile * SCHEDULE.BLOCK_M + tl.arange(0, SCHEDULE.BLOCK_M)  # [BLOCK_M]
    token = row // GROUP
    in_group = row % GROUP
    is_inside = row < place.seqlen_q * GROUP
    cols = tl.arange(0, TILE.BLOCK_D)  # [BLOCK_D]
    head = head_k * GROUP + in_group
    return Rows(token, q_start + token, head, is_inside, cols)


@triton.jit
def _load_queries(rows, q_ptr, strides, ROW_LAYOUT: tl.constexpr, TILE: tl.constexpr):
    """Load a tile of queries, ``[BLOCK_M, BLOCK_D]``."""
    q_rows = rows.token_64 * strides.stride_qs + rows.head * strides.stride_qh
    return load_rows(
        q_ptr,
        q_rows,
        rows.is_inside,
        rows.cols,
        0,
        1,
        TILE.HEAD_DIM,
        TILE.BLOCK_D,
        TILE.HEAD_DIM,
        True,
        ROW_LAYOUT.ROW_BYTES,
        True,
    )


@triton.jit
def _positions_of(rows, place, pointers, seqlen_k, SCHEDULE: tl.constexpr):
    """Return the ``Positions`` of a tile's rows: given ones, or the last ones of the keys."""
    BLOCK_M: tl.constexpr = SCHEDULE.BLOCK_M
    GROUP: tl.constexpr = SCHEDULE.GROUP
    if pointers.positions_ptr is not None:
        position = tl.load(pointers.positions_ptr + rows.token_64, mask=rows.is_inside, other=0)
        first = tl.min(tl.where(rows.is_inside, position, 2147483647), 0)
        last = tl.max(tl.where(rows.is_inside, position, -2147483648), 0)
    else:
        diagonal = seqlen_k - place.seqlen_q
        position = rows.token + diagonal
        first = place.tile * BLOCK_M // GROUP + diagonal
        last_row = tl.minimum(place.tile * BLOCK_M + BLOCK_M, place.seqlen_q * GROUP) - 1
        last = last_row // GROUP + diagonal
    return Positions(position, first, last)


@triton.jit
def _slopes_of(rows, sequence, pointers, stride_alibi_b):
    """Return the ALiBi slope of each row, or None.

    They are given by head, by sequence and head, or, with positions, by token and head.
    """
    if pointers.alibi_slopes_ptr is not None:
        if pointers.positions_ptr is not None:
            of = rows.token_64
        else:
            of = sequence + rows.token * 0
        at = pointers.alibi_slopes_ptr + of * stride_alibi_b + rows.head
        slopes = tl.load(at, mask=rows.is_inside, other=0.0)
    else:
        slopes = None
    return slopes


@triton.jit
def _scales_of(scale, descale_at, pointers):
    """Return the factor of products with new keys, and that of products with cached ones."""
    if pointers.q_descale_ptr is not None:
        scale *= tl.load(pointers.q_descale_ptr + descale_at)
    cache_scale = scale
    if pointers.k_descale_ptr is not None:
        cache_scale *= tl.load(pointers.k_descale_ptr + descale_at)
    return scale, cache_scale


@triton.jit
def _cached_source(sequence, head_k, pointers, strides):
    """Return where the cached keys and values of a sequence and a head lie."""
    return Source(
        pointers.k_cache_ptr + head_k * strides.stride_kch,
        pointers.v_cache_ptr + head_k * strides.stride_vch,
        pointers.block_table_ptr + sequence * strides.stride_table_b,
        strides.stride_table_p,
        strides.stride_kcp,
        strides.stride_kcs,
        strides.stride_kcx,
        strides.stride_kcd,
        strides.stride_vcp,
        strides.stride_vcs,
        strides.stride_vcd,
    )


@triton.jit
def _start_softmax(
    rows, split, sinks_ptr, OPTIONS: tl.constexpr, SCHEDULE: tl.constexpr, TILE: tl.constexpr
):
    """Return the ``Softmax`` of a tile that has seen no key, but its sinks."""
    m_i = tl.full([SCHEDULE.BLOCK_M], NEG_INF, tl.float32)
    l_i = tl.zeros([SCHEDULE.BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        # a sink is a first key without a value; one of the splits alone counts it
        sink = tl.load(sinks_ptr + rows.head, mask=rows.is_inside, other=NEG_INF)
        sink = sink.to(tl.float32) * LOG2E
        m_i = tl.where(split == 0, sink, NEG_INF)
        l_i = tl.where(m_i == NEG_INF, 0.0, 1.0 * (1 << OPTIONS.SHIFT))
    acc = tl.zeros([SCHEDULE.BLOCK_M, TILE.BLOCK_D], tl.float32)
    return Softmax(acc, l_i, m_i)


@triton.jit
def _finish_softmax(softmax, v_descale, SHIFT: tl.constexpr):
    """Return the output of each row, and its log-sum-exp in base 2."""
    # rows that saw no key: output 0, lse -inf
    l_i = softmax.l_i
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    out = softmax.acc * (v_descale / l_safe)[:, None]  # [BLOCK_M, BLOCK_D]
    return out, tl.where(l_i == 0.0, NEG_INF, softmax.m_i + tl.log2(l_safe) - SHIFT)


@triton.jit
def _row_pointers(base, rows, cols, BYTES: tl.constexpr):
    """Return where rows are written, each of which begins on a multiple of ``BYTES``."""
    return tl.multiple_of(base + rows[:, None], [BYTES, BYTES]) + cols[None, :]


@triton.jit
def _store_part(out, lse2, rows, at, pointers, ROW_LAYOUT: tl.constexpr, TILE: tl.constexpr):
    """Write what a split comes to, in fp32, from row ``at`` on, for ``_split_merge_kernel``."""
    cols = rows.cols
    at += tl.arange(0, out.shape[0])  # [BLOCK_M]
    tl.store(pointers.part_lse_ptr + at, lse2, mask=rows.is_inside)
    # [BLOCK_M, BLOCK_D]
    where = _row_pointers(pointers.part_out_ptr, at * TILE.HEAD_DIM, cols, ROW_LAYOUT.PART_BYTES)
    tl.store(where, out, mask=rows.is_inside[:, None] & (cols < TILE.HEAD_DIM)[None, :])


@triton.jit
def _store_out(
    out,
    lse2,
    rows,
    tokens,
    pointers,
    strides,
    ROW_LAYOUT: tl.constexpr,
    OPTIONS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write rows of the output, in its dtype, and their log-sum-exps."""
    cols = rows.cols
    if pointers.out_scale_ptr is not None:
        out /= tl.load(pointers.out_scale_ptr)
    if OPTIONS.OUT_MAX > 0:
        out = tl.clamp(out, -OPTIONS.OUT_MAX, OPTIONS.OUT_MAX, propagate_nan=tl.PropagateNan.ALL)
    if pointers.lse_ptr is not None:
        tl.store(
            pointers.lse_ptr + rows.head * tokens + rows.token_64, lse2 * LN2, mask=rows.is_inside
        )
    out_rows = rows.token_64 * strides.stride_os + rows.head * strides.stride_oh
    # [BLOCK_M, BLOCK_D]
    where = _row_pointers(pointers.out_ptr, out_rows, cols, ROW_LAYOUT.OUT_BYTES)
    out_mask = rows.is_inside[:, None] & (cols < TILE.HEAD_DIM)[None, :]
    tl.store(where, out.to(pointers.out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit
def _fill_padding(
    block, head_k, counts, pointers, strides, SCHEDULE: tl.constexpr, TILE: tl.constexpr
):
    """Write 0 and -inf to those of a block of tokens that belong to no sequence."""
    GROUP: tl.constexpr = SCHEDULE.GROUP
    BLOCK_M: tl.constexpr = SCHEDULE.BLOCK_M
    TOKENS: tl.constexpr = TILE.FILL_TOKENS
    begin = tl.load(pointers.cu_seqlens_q_ptr)
    end = tl.load(pointers.cu_seqlens_q_ptr + counts.batch)
    cols = tl.arange(0, TILE.BLOCK_D)  # [BLOCK_D]
    for first in range(0, TOKENS * GROUP, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        token = block * TOKENS + row // GROUP
        head = (head_k * GROUP + row % GROUP).to(tl.int64)
        is_padding = ((token < begin) | (token >= end)) & (token < counts.tokens)
        is_padding &= row < TOKENS * GROUP
        token = token.to(tl.int64)
        out_rows = token * strides.stride_os + head * strides.stride_oh
        where = pointers.out_ptr + out_rows[:, None] + cols[None, :]  # [BLOCK_M, BLOCK_D]
        zeros = tl.zeros([BLOCK_M, TILE.BLOCK_D], tl.float32)
        zeros = zeros.to(pointers.out_ptr.dtype.element_ty)
        tl.store(where, zeros, mask=is_padding[:, None] & (cols < TILE.HEAD_DIM)[None, :])
        if pointers.lse_ptr is not None:
            nothing = tl.full([BLOCK_M], NEG_INF, tl.float32)
            tl.store(pointers.lse_ptr + head * counts.tokens + token, nothing, mask=is_padding)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def _paged_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_out_ptr, part_lse_ptr,
    block_table_ptr, cu_seqlens_q_ptr, seqlens_k_ptr, positions_ptr,
    alibi_slopes_ptr, sinks_ptr, q_descale_ptr, k_descale_ptr, v_descale_ptr, out_scale_ptr,
    scale, softcap, window_left, window_right,
    batch, heads_k, tokens, units, splits,
    stride_qs, stride_qh, stride_os, stride_oh,
    stride_kcp, stride_kcs, stride_kch, stride_kcx, stride_kcd,
    stride_vcp, stride_vcs, stride_vch, stride_vcd,
    stride_ks, stride_kh, stride_vs, stride_vh,
    stride_table_b, stride_table_p, stride_alibi_b,
    PAGE: tl.constexpr, K_RUN: tl.constexpr, K_UNIT: tl.constexpr, K_BYTES: tl.constexpr,
    V_UNIT: tl.constexpr, V_BYTES: tl.constexpr, V_COLUMN_RUN: tl.constexpr, V_AS_K: tl.constexpr,
    NEW_V_AS_K: tl.constexpr, ROW_BYTES: tl.constexpr, OUT_BYTES: tl.constexpr,
    PART_BYTES: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    SIGNED_ALIBI: tl.constexpr, FOLD: tl.constexpr, DESCALE_PER_HEAD: tl.constexpr,
    SHIFT: tl.constexpr, OUT_MAX: tl.constexpr, DECODE_FROM_CACHE: tl.constexpr,
    GROUP: tl.constexpr, MIN_TOKENS: tl.constexpr, MAX_TOKENS: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    FILL_TOKENS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """``out = softmax(mask(scale * q @ k.T)) @ v``, of a tile of rows or of a split of their keys.

    ``k`` and ``v`` are the keys and values in the pages of a cache, and new ones that lie dense.
    """
    pointers = Pointers(
        q_ptr, k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, part_out_ptr,
        part_lse_ptr, block_table_ptr, cu_seqlens_q_ptr, seqlens_k_ptr, positions_ptr,
        alibi_slopes_ptr, sinks_ptr, q_descale_ptr, k_descale_ptr, v_descale_ptr, out_scale_ptr,
    )  # fmt: skip
    counts = Counts(batch, heads_k, tokens, units, splits)
    strides = Strides(
        stride_qs,
        stride_qh,
        stride_os,
        stride_oh,
        stride_kcp,
        stride_kcs,
        stride_kch,
        stride_kcx,
        stride_kcd,
        stride_vcp,
        stride_vcs,
        stride_vch,
        stride_vcd,
        stride_ks,
        stride_kh,
        stride_vs,
        stride_vh,
        stride_table_b,
        stride_table_p,
        stride_alibi_b,
    )
    LAYOUT: tl.constexpr = Layout(
        PAGE, K_RUN, K_UNIT, K_BYTES, V_UNIT, V_BYTES, V_COLUMN_RUN, V_AS_K
    )
    ROW_LAYOUT: tl.constexpr = RowLayout(NEW_V_AS_K, ROW_BYTES, OUT_BYTES, PART_BYTES)
    OPTIONS: tl.constexpr = Options(
        HAS_LEFT,
        HAS_RIGHT,
        HAS_SOFTCAP,
        SIGNED_ALIBI,
        FOLD,
        DESCALE_PER_HEAD,
        SHIFT,
        OUT_MAX,
        DECODE_FROM_CACHE,
    )
    SCHEDULE: tl.constexpr = Schedule(GROUP, MIN_TOKENS, MAX_TOKENS, TILES, BLOCK_M)
    TILE: tl.constexpr = Tile(HEAD_DIM, BLOCK_N, BLOCK_D, FILL_TOKENS, PRECISION, UPCAST)

    pid = tl.program_id(0)
    if FILL_TOKENS > 0:
        programs = units * splits * heads_k
        if pid >= programs:
            block = (pid - programs) // heads_k
            _fill_padding(block, pid % heads_k, counts, pointers, strides, SCHEDULE, TILE)
            return
    # heads first: their keys are neighbours in a page
    head_k = pid % heads_k
    split = pid // heads_k % splits
    unit = pid // heads_k // splits
    place = locate(unit, cu_seqlens_q_ptr, batch, SCHEDULE)
    if place.tile < 0:
        return
    seqlen_k = tl.load(seqlens_k_ptr + place.sequence)
    sequence_64 = place.sequence.to(tl.int64)
    head_k_64 = head_k.to(tl.int64)
    q_start_64 = place.q_start.to(tl.int64)

    # keys from `context` on are dense
    context = _context_of(place, seqlen_k, k_ptr, OPTIONS)
    HAS_DENSE: tl.constexpr = k_ptr is not None
    rows = _rows_of(place, q_start_64, head_k_64, SCHEDULE, TILE)
    q = _load_queries(rows, q_ptr, strides, ROW_LAYOUT, TILE)  # [BLOCK_M, BLOCK_D]
    positions = _positions_of(rows, place, pointers, seqlen_k, SCHEDULE)
    slopes = _slopes_of(rows, sequence_64, pointers, stride_alibi_b)
    descale_at = head_k if DESCALE_PER_HEAD else 0
    scale, cache_scale = _scales_of(scale, descale_at, pointers)
    softmax = _start_softmax(rows, split, sinks_ptr, OPTIONS, SCHEDULE, TILE)

    # what this program's split is of the tiles of both sources
    scores = Scores(cache_scale, softcap, window_left, window_right)
    seen = key_range(positions.first, positions.last, context, scores, OPTIONS)
    tile_begin, cache_tiles = _tiles_of(seen, BLOCK_N)
    all_tiles = cache_tiles
    if HAS_DENSE:
        new_seen = key_range(
            positions.first - context, positions.last - context, seqlen_k - context, scores, OPTIONS
        )
        new_begin, new_tiles = _tiles_of(new_seen, BLOCK_N)
        all_tiles += new_tiles
    split_begin, split_end = _share_of(split, splits, all_tiles)

    walk = cut_range(
        seen,
        tile_begin + tl.minimum(split_begin, cache_tiles),
        tile_begin + tl.minimum(split_end, cache_tiles),
        BLOCK_N,
    )
    source = _cached_source(sequence_64, head_k_64, pointers, strides)
    queries = Queries(q, positions.position, slopes)
    softmax = _attend_to_all(softmax, queries, source, walk, scores, LAYOUT, OPTIONS, TILE)
    v_descale = 1.0
    if v_descale_ptr is not None:
        v_descale = tl.load(v_descale_ptr + descale_at)
    if HAS_DENSE:
        # new keys and values have no scale
        softmax = Softmax(softmax.acc * v_descale, softmax.l_i, softmax.m_i)
        v_descale = 1.0
        new_walk = cut_range(
            new_seen,
            new_begin + tl.maximum(split_begin - cache_tiles, 0),
            new_begin + tl.maximum(split_end - cache_tiles, 0),
            BLOCK_N,
        )
        NEW_LAYOUT: tl.constexpr = Layout(
            0, HEAD_DIM, True, ROW_BYTES, True, ROW_BYTES, 0, NEW_V_AS_K
        )
        # new keys and values lie dense, in no page; made here, as Triton 3.6 returns no None
        source = Source(
            k_ptr + q_start_64 * stride_ks + head_k_64 * stride_kh,
            v_ptr + q_start_64 * stride_vs + head_k_64 * stride_vh,
            None,
            None,
            None,
            stride_ks,
            None,
            None,
            None,
            stride_vs,
            None,
        )
        queries = Queries(q, positions.position - context, slopes)
        scores = Scores(scale, softcap, window_left, window_right)
        softmax = _attend_to_all(
            softmax, queries, source, new_walk, scores, NEW_LAYOUT, OPTIONS, TILE
        )

    out, lse2 = _finish_softmax(softmax, v_descale, SHIFT)
    if part_out_ptr is not None:
        # one block of rows per tile, head and split
        at = ((unit.to(tl.int64) * heads_k + head_k) * splits + split) * BLOCK_M
        _store_part(out, lse2, rows, at, pointers, ROW_LAYOUT, TILE)
    else:
        _store_out(out, lse2, rows, tokens, pointers, strides, ROW_LAYOUT, OPTIONS, TILE)
