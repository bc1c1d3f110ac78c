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
from .arguments import NUMBERS, POINTERS
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


@triton.jit
def _attend(
    acc, l_i, m_i, q, position, k_base, v_base, table_base, stride_table,
    stride_kp, stride_ks, stride_kx, stride_kd, stride_vp, stride_vs, stride_vd,
    first, last, start, full_start, full_end,
    scale, softcap, slopes, window_left, window_right,
    MASKED: tl.constexpr, FOLD: tl.constexpr, SHIFT: tl.constexpr, PAGE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, SIGNED_ALIBI: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, K_RUN: tl.constexpr, K_UNIT: tl.constexpr,
    K_BYTES: tl.constexpr, V_COLUMN_RUN: tl.constexpr, V_UNIT: tl.constexpr,
    V_BYTES: tl.constexpr, V_AS_K: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Fold keys of one source into the running softmax of a tile: masked tiles, or whole ones."""
    cols = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_N)
    steps = count_steps(start, full_start, full_end, last, BLOCK_N, MASKED)
    # pages are looked up a step ahead: else their loads would take a stage of the pipeline
    next_begin = step_start(0, start, full_start, full_end, BLOCK_N, MASKED)
    is_wanted = is_looked_up(next_begin, 0, steps, first, last, PAGE, BLOCK_N, MASKED)
    next_pages = look_up(table_base, stride_table, next_begin, is_wanted, PAGE, BLOCK_N)
    for step in tl.range(0, steps):
        begin = next_begin
        pages = next_pages
        next_begin = step_start(step + 1, start, full_start, full_end, BLOCK_N, MASKED)
        is_wanted = is_looked_up(next_begin, step + 1, steps, first, last, PAGE, BLOCK_N, MASKED)
        next_pages = look_up(table_base, stride_table, next_begin, is_wanted, PAGE, BLOCK_N)
        keys = begin + lane
        inside = (keys >= first) & (keys < last)
        k_rows = rows_of(pages, begin, stride_kp, stride_ks, PAGE, BLOCK_N)
        k = load_rows(
            k_base, k_rows, inside, cols, stride_kx, stride_kd, HEAD_DIM, BLOCK_D, K_RUN, K_UNIT,
            K_BYTES, MASKED,
        )  # [N, D]  # fmt: skip
        k = matched(k, q)
        s = dot(matched(q, k), tl.trans(k), PRECISION, UPCAST)  # [M, N]
        if FOLD and not MASKED:
            # the scale goes into the exponential's multiply-add; it is positive, so max commutes
            factor = scale * LOG2E
        else:
            factor = 1.0
            s = logits_of(
                s, scale, softcap, slopes, position, keys, HAS_SOFTCAP, HAS_ALIBI, SIGNED_ALIBI
            )
        if MASKED:
            visible = is_visible(
                position, keys, last, window_left, window_right, HAS_LEFT, HAS_RIGHT
            )
            s = tl.where(visible, s, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(s, 1) * factor)
        if MASKED:
            # a row that has seen no key yet keeps a finite pivot: -inf - -inf is NaN
            pivot = tl.where(m_new == NEG_INF, 0.0, m_new)
        else:
            pivot = m_new
        p = tl.exp2(s * factor - (pivot - SHIFT)[:, None])
        alpha = tl.exp2(m_i - pivot)
        l_i = l_i * alpha + tl.sum(p, 1)
        if V_AS_K:
            v_rows = k_rows
        else:
            v_rows = rows_of(pages, begin, stride_vp, stride_vs, PAGE, BLOCK_N)
        if V_COLUMN_RUN > 0:
            v = load_columns(
                v_base, v_rows, inside, cols, stride_vd, HEAD_DIM, BLOCK_D, V_COLUMN_RUN, V_BYTES,
                MASKED,
            )  # [N, D]  # fmt: skip
        else:
            v = load_rows(
                v_base, v_rows, inside, cols, 0, stride_vd, HEAD_DIM, BLOCK_D, HEAD_DIM, V_UNIT,
                V_BYTES, MASKED,
            )  # [N, D]  # fmt: skip
        acc = dot_add(acc * alpha[:, None], p, matched(v, q), PRECISION, UPCAST)  # [M, D]
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def _row_pointers(base, rows, cols, BYTES: tl.constexpr):
    """Return where rows are written, each of which begins on a multiple of ``BYTES``."""
    return tl.multiple_of(base + rows[:, None], [BYTES, BYTES]) + cols[None, :]


@triton.jit
def _fill_padding(
    out_ptr, lse_ptr, cu_seqlens_q_ptr, block, head_k, batch, tokens, heads_q,
    stride_os, stride_oh,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Write 0 and -inf to those of a block of tokens that belong to no sequence."""
    begin = tl.load(cu_seqlens_q_ptr)
    end = tl.load(cu_seqlens_q_ptr + batch)
    cols = tl.arange(0, BLOCK_D)
    for first in range(0, TOKENS * GROUP, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        token = block * TOKENS + row // GROUP
        head = (head_k * GROUP + row % GROUP).to(tl.int64)
        is_padding = ((token < begin) | (token >= end)) & (token < tokens)
        is_padding &= row < TOKENS * GROUP
        token = token.to(tl.int64)
        pointers = out_ptr + (token * stride_os + head * stride_oh)[:, None] + cols[None, :]
        zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(pointers, zeros, mask=is_padding[:, None] & (cols < HEAD_DIM)[None, :])
        if lse_ptr is not None:
            nothing = tl.full([BLOCK_M], NEG_INF, tl.float32)
            tl.store(lse_ptr + head * tokens + token, nothing, mask=is_padding)


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
    GROUP: tl.constexpr,  # query heads per key head
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    K_RUN: tl.constexpr,  # numbers of a key that follow each other in the cache
    K_UNIT: tl.constexpr,  # without gaps
    K_BYTES: tl.constexpr,  # alignment of every run
    V_COLUMN_RUN: tl.constexpr,  # neighbouring slots follow each other, so many of them; 0: columns
    V_UNIT: tl.constexpr,
    V_BYTES: tl.constexpr,
    V_AS_K: tl.constexpr,  # values have the strides of keys, in the cache
    NEW_V_AS_K: tl.constexpr,  # and beside it
    ROW_BYTES: tl.constexpr,  # alignment of the rows of q, k and v
    OUT_BYTES: tl.constexpr,  # alignment of the rows of out, as far as stores are to be that wide
    PART_BYTES: tl.constexpr,  # and of those of partial results
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SIGNED_ALIBI: tl.constexpr,
    FOLD: tl.constexpr,  # plain scores with a positive scale
    DESCALE_PER_HEAD: tl.constexpr,
    SHIFT: tl.constexpr,  # binary exponent added to p, so that fp8 holds it well
    OUT_MAX: tl.constexpr,  # largest finite value of an fp8 output, 0 for other outputs
    DECODE_FROM_CACHE: tl.constexpr,  # the key of a single query is in the cache, not dense
    MIN_TOKENS: tl.constexpr,  # queries of the sequences served here
    MAX_TOKENS: tl.constexpr,
    TILES: tl.constexpr,  # tiles per sequence; 0: any number
    FILL_TOKENS: tl.constexpr,  # tokens that a program behind all clears of padding; 0: none
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter multiplies in fp32
):  # fmt: skip
    pid = tl.program_id(0)
    heads_q = heads_k * GROUP
    if FILL_TOKENS > 0:
        programs = units * splits * heads_k
        if pid >= programs:
            block = (pid - programs) // heads_k
            _fill_padding(
                out_ptr, lse_ptr, cu_seqlens_q_ptr, block, pid % heads_k, batch, tokens, heads_q,
                stride_os, stride_oh, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, FILL_TOKENS,
            )  # fmt: skip
            return
    # heads first: their keys are neighbours in a page
    head_k = pid % heads_k
    split = pid // heads_k % splits
    unit = pid // heads_k // splits
    sequence, tile, q_start, seqlen_q = locate(
        unit, cu_seqlens_q_ptr, batch, GROUP, BLOCK_M, TILES, MIN_TOKENS, MAX_TOKENS
    )
    if tile < 0:
        return
    seqlen_k = tl.load(seqlens_k_ptr + sequence)
    sequence_64 = sequence.to(tl.int64)
    head_k_64 = head_k.to(tl.int64)
    q_start_64 = q_start.to(tl.int64)

    # keys from `context` on are dense
    context = seqlen_k
    HAS_DENSE: tl.constexpr = k_ptr is not None
    if HAS_DENSE:
        context = tl.maximum(seqlen_k - seqlen_q, 0)
        if DECODE_FROM_CACHE:
            context = tl.where(seqlen_q == 1, seqlen_k, context)

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = rows // GROUP
    in_group = rows % GROUP
    inside = rows < seqlen_q * GROUP
    cols = tl.arange(0, BLOCK_D)
    head_64 = head_k_64 * GROUP + in_group
    q_rows = (q_start_64 + token) * stride_qs + head_64 * stride_qh
    q = load_rows(
        q_ptr, q_rows, inside, cols, 0, 1, HEAD_DIM, BLOCK_D, HEAD_DIM, True, ROW_BYTES, True
    )  # [M, D]

    HAS_ALIBI: tl.constexpr = alibi_slopes_ptr is not None
    HAS_POSITIONS: tl.constexpr = positions_ptr is not None
    if HAS_POSITIONS:
        position = tl.load(positions_ptr + q_start_64 + token, mask=inside, other=0)
        first_position = tl.min(tl.where(inside, position, 2147483647), 0)
        last_position = tl.max(tl.where(inside, position, -2147483648), 0)
    else:
        diagonal = seqlen_k - seqlen_q
        position = token + diagonal
        first_position = tile * BLOCK_M // GROUP + diagonal
        last_row = tl.minimum(tile * BLOCK_M + BLOCK_M, seqlen_q * GROUP) - 1
        last_position = last_row // GROUP + diagonal
    slopes = 0.0
    if HAS_ALIBI:
        # per head, per sequence and head, or, with positions, per token and head
        of = q_start_64 + token if HAS_POSITIONS else sequence_64 + token * 0
        slopes = tl.load(alibi_slopes_ptr + of * stride_alibi_b + head_64, mask=inside, other=0.0)
    descale_at = head_k if DESCALE_PER_HEAD else 0
    if q_descale_ptr is not None:
        scale *= tl.load(q_descale_ptr + descale_at)
    cache_scale = scale
    if k_descale_ptr is not None:
        cache_scale *= tl.load(k_descale_ptr + descale_at)

    m_i = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        # a sink is a first key without a value; one of the splits alone counts it
        sink = tl.load(sinks_ptr + head_64, mask=inside, other=NEG_INF).to(tl.float32) * LOG2E
        m_i = tl.where(split == 0, sink, NEG_INF)
        l_i = tl.where(m_i == NEG_INF, 0.0, 1.0 * (1 << SHIFT))
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # what this program's split is of the tiles of both sources
    first, last, full_first, full_last = key_range(
        first_position, last_position, context, window_left, window_right, HAS_LEFT, HAS_RIGHT
    )
    tile_begin = first // BLOCK_N
    cache_tiles = tl.where(first < last, tl.cdiv(last, BLOCK_N) - tile_begin, 0)
    all_tiles = cache_tiles
    if HAS_DENSE:
        new_first, new_last, new_full_first, new_full_last = key_range(
            first_position - context, last_position - context, seqlen_k - context,
            window_left, window_right, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        new_begin = new_first // BLOCK_N
        all_tiles += tl.where(new_first < new_last, tl.cdiv(new_last, BLOCK_N) - new_begin, 0)
    share, rest = all_tiles // splits, all_tiles % splits
    split_begin = split * share + tl.minimum(split, rest)
    split_end = split_begin + share + tl.where(split < rest, 1, 0)

    first, last, start, full_start, full_end = cut_range(
        first, last, full_first, full_last,
        tile_begin + tl.minimum(split_begin, cache_tiles),
        tile_begin + tl.minimum(split_end, cache_tiles), BLOCK_N,
    )  # fmt: skip
    k_base = k_cache_ptr + head_k_64 * stride_kch
    v_base = v_cache_ptr + head_k_64 * stride_vch
    table_base = block_table_ptr + sequence_64 * stride_table_b
    for masked in tl.static_range(2):
        acc, l_i, m_i = _attend(
            acc, l_i, m_i, q, position, k_base, v_base, table_base, stride_table_p,
            stride_kcp, stride_kcs, stride_kcx, stride_kcd, stride_vcp, stride_vcs, stride_vcd,
            first, last, start, full_start, full_end,
            cache_scale, softcap, slopes, window_left, window_right,
            MASKED=masked == 1, FOLD=FOLD, SHIFT=SHIFT, PAGE=PAGE,
            HAS_SOFTCAP=HAS_SOFTCAP, HAS_ALIBI=HAS_ALIBI, SIGNED_ALIBI=SIGNED_ALIBI,
            HAS_LEFT=HAS_LEFT, HAS_RIGHT=HAS_RIGHT, HEAD_DIM=HEAD_DIM, BLOCK_D=BLOCK_D,
            K_RUN=K_RUN, K_UNIT=K_UNIT, K_BYTES=K_BYTES, V_COLUMN_RUN=V_COLUMN_RUN, V_UNIT=V_UNIT,
            V_BYTES=V_BYTES, V_AS_K=V_AS_K, BLOCK_N=BLOCK_N, PRECISION=PRECISION, UPCAST=UPCAST,
        )  # fmt: skip
    v_descale = 1.0
    if v_descale_ptr is not None:
        v_descale = tl.load(v_descale_ptr + descale_at)
    if HAS_DENSE:
        # new keys and values have no scale
        acc *= v_descale
        v_descale = 1.0
        new_first, new_last, start, full_start, full_end = cut_range(
            new_first, new_last, new_full_first, new_full_last,
            new_begin + tl.maximum(split_begin - cache_tiles, 0),
            new_begin + tl.maximum(split_end - cache_tiles, 0), BLOCK_N,
        )  # fmt: skip
        k_base = k_ptr + q_start_64 * stride_ks + head_k_64 * stride_kh
        v_base = v_ptr + q_start_64 * stride_vs + head_k_64 * stride_vh
        for masked in tl.static_range(2):
            acc, l_i, m_i = _attend(
                acc, l_i, m_i, q, position - context, k_base, v_base, table_base, 0,
                0, stride_ks, 0, 1, 0, stride_vs, 1,
                new_first, new_last, start, full_start, full_end,
                scale, softcap, slopes, window_left, window_right,
                MASKED=masked == 1, FOLD=FOLD, SHIFT=SHIFT, PAGE=0,
                HAS_SOFTCAP=HAS_SOFTCAP, HAS_ALIBI=HAS_ALIBI, SIGNED_ALIBI=SIGNED_ALIBI,
                HAS_LEFT=HAS_LEFT, HAS_RIGHT=HAS_RIGHT, HEAD_DIM=HEAD_DIM, BLOCK_D=BLOCK_D,
                K_RUN=HEAD_DIM, K_UNIT=True, K_BYTES=ROW_BYTES, V_COLUMN_RUN=0, V_UNIT=True,
                V_BYTES=ROW_BYTES, V_AS_K=NEW_V_AS_K, BLOCK_N=BLOCK_N, PRECISION=PRECISION,
                UPCAST=UPCAST,
            )  # fmt: skip

    # rows that saw no key: output 0, lse -inf
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    out = acc * (v_descale / l_safe)[:, None]
    lse2 = tl.where(l_i == 0.0, NEG_INF, m_i + tl.log2(l_safe) - SHIFT)
    if part_out_ptr is not None:
        # one block of rows per tile, head and split; `_merge_kernel` reads it
        at = ((unit.to(tl.int64) * heads_k + head_k) * splits + split) * BLOCK_M
        at += tl.arange(0, BLOCK_M)
        tl.store(part_lse_ptr + at, lse2, mask=inside)
        pointers = _row_pointers(part_out_ptr, at * HEAD_DIM, cols, PART_BYTES)
        tl.store(pointers, out, mask=inside[:, None] & (cols < HEAD_DIM)[None, :])
    else:
        if out_scale_ptr is not None:
            out /= tl.load(out_scale_ptr)
        if OUT_MAX > 0:
            out = tl.clamp(out, -OUT_MAX, OUT_MAX, propagate_nan=tl.PropagateNan.ALL)
        at = q_start_64 + token
        if lse_ptr is not None:
            tl.store(lse_ptr + head_64 * tokens + at, lse2 * LN2, mask=inside)
        pointers = _row_pointers(out_ptr, at * stride_os + head_64 * stride_oh, cols, OUT_BYTES)
        out_mask = inside[:, None] & (cols < HEAD_DIM)[None, :]
        tl.store(pointers, out.to(out_ptr.dtype.element_ty), mask=out_mask)
