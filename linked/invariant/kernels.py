"""Attention in which a row's bits depend only on its query and its keys; see docs/numerics.md.

A row is one query head of one token. Its keys are cut into segments and these into tiles, both
counted from the first key of the sequence. The sums of each segment start from zero, and segments
are merged in order: by the program that walked them, or by ``invariant_merge_kernel``.
"""

import triton
import triton.language as tl

from .arithmetic import finish, merge_segment, sink_alone
from .structures import (
    FOREIGN,
    MERGE_FOREIGN,
    MergeNumbers,
    MergeTile,
    Numbers,
    Options,
    Rows,
    Softmax,
    Source,
    Tile,
)
from .walk import load_rows, locate, walk_segment


@triton.jit
def _store(total, out_rows, lse_rows, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write the outputs and the log-sum-exps of rows to given pointers."""
    out, lse = finish(total)
    cols = tl.arange(0, BLOCK)  # [BLOCK_DV]
    mask = inside[:, None] & (cols < WIDTH)[None, :]
    pointers = out_rows[:, None] + cols[None, :]
    tl.store(pointers, out.to(out_rows.dtype.element_ty), mask=mask)
    if lse_rows is not None:
        tl.store(lse_rows, lse, mask=inside)


@triton.jit
def _seen(place, diagonal, is_real, numbers, OPTIONS: tl.constexpr, TILE: tl.constexpr):
    """Return ``(first, last, full_first, full_last)`` of a tile of rows; see ``Rows``."""
    first_row = place.tile * TILE.BLOCK_M
    last_row = tl.minimum(first_row + TILE.BLOCK_M, place.seqlen_q * OPTIONS.GROUP) - 1
    first_position = first_row // OPTIONS.GROUP + diagonal
    last_position = last_row // OPTIONS.GROUP + diagonal
    first = 0
    last = tl.where(is_real, place.seqlen_k, 0)
    full_first = 0
    full_last = last
    if OPTIONS.HAS_LEFT:
        first = tl.maximum(first, first_position - numbers.window_left)
        full_first = tl.maximum(full_first, last_position - numbers.window_left)
    if OPTIONS.HAS_RIGHT:
        last = tl.maximum(tl.minimum(last, last_position + numbers.window_right + 1), 0)
        full_last = tl.minimum(full_last, first_position + numbers.window_right + 1)
        full_last = tl.maximum(full_last, 0)
    return first, last, full_first, full_last


@triton.jit(do_not_specialize=Numbers._fields, do_not_specialize_on_alignment=FOREIGN)
def invariant_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    k_descale_ptr,
    v_descale_ptr,
    block_table_ptr,
    new_k_ptr,
    new_v_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqlens_k_ptr,
    part_out_ptr,
    part_max_ptr,
    part_sum_ptr,
    scale,
    softcap,
    window_left,
    window_right,
    batch,
    heads_k,
    tokens_q,
    tokens_k,
    tiles,
    parts,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_ob,
    stride_os,
    stride_oh,
    stride_lb,
    stride_lh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_kx,
    stride_kd,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_vd,
    stride_new_ks,
    stride_new_kh,
    stride_new_vs,
    stride_new_vh,
    stride_table_b,
    stride_table_p,
    GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FOLD: tl.constexpr,
    DESCALE_NDIM: tl.constexpr,
    PAGE: tl.constexpr,
    K_RUN: tl.constexpr,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    DECODE_FROM_CACHE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``out = softmax(mask(scale * q @ k.T)) @ v`` of a tile of rows, or the sums of a segment."""
    OPTIONS: tl.constexpr = Options(
        GROUP,
        HAS_LEFT,
        HAS_RIGHT,
        HAS_SOFTCAP,
        FOLD,
        DESCALE_NDIM,
        PAGE,
        K_RUN,
        K_BYTES,
        V_BYTES,
        ROW_BYTES,
        DECODE_FROM_CACHE,
    )
    TILE: tl.constexpr = Tile(
        HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, SEGMENT, PRECISION, UPCAST
    )
    numbers = Numbers(
        scale,
        softcap,
        window_left,
        window_right,
        batch,
        heads_k,
        tokens_q,
        tokens_k,
        tiles,
        parts,
        stride_qb,
        stride_qs,
        stride_qh,
        stride_ob,
        stride_os,
        stride_oh,
        stride_lb,
        stride_lh,
        stride_kb,
        stride_ks,
        stride_kh,
        stride_kx,
        stride_kd,
        stride_vb,
        stride_vs,
        stride_vh,
        stride_vd,
        stride_new_ks,
        stride_new_kh,
        stride_new_vs,
        stride_new_vh,
        stride_table_b,
        stride_table_p,
    )
    # heads change fastest: their keys are neighbours in a page
    pid = tl.program_id(0)
    head_k = pid % heads_k
    part = pid // heads_k % parts
    unit = pid // heads_k // parts
    place = locate(unit, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqlens_k_ptr, numbers, OPTIONS, TILE)
    if place.tile < 0:
        return
    is_real = (place.sequence >= 0) & (place.sequence < batch)
    # padding has no entry in tensors with one per sequence
    sequence_64 = tl.maximum(tl.minimum(place.sequence, batch - 1), 0).to(tl.int64)
    head_k_64 = head_k.to(tl.int64)

    row = place.tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    inside = row < place.seqlen_q * GROUP
    token = row // GROUP
    token_64 = place.q_start + token
    head = head_k_64 * GROUP + row % GROUP
    diagonal = place.seqlen_k - place.seqlen_q
    q_rows = token_64 * stride_qs + head * stride_qh
    q_base = q_ptr + sequence_64 * stride_qb
    # [BLOCK_M, BLOCK_D]
    q = load_rows(q_base, q_rows, 1, inside, HEAD_DIM, BLOCK_D, ROW_BYTES)
    first, last, full_first, full_last = _seen(place, diagonal, is_real, numbers, OPTIONS, TILE)
    rows = Rows(q, token + diagonal, first, last, full_first, full_last)

    k_base = k_ptr + head_k_64 * stride_kh
    v_base = v_ptr + head_k_64 * stride_vh
    table = block_table_ptr
    if PAGE > 0:
        table += sequence_64 * stride_table_b
    else:
        k_base += sequence_64 * stride_kb + place.k_start * stride_ks
        v_base += sequence_64 * stride_vb + place.k_start * stride_vs
    descale_at = head_k if DESCALE_NDIM > 0 else 0
    if DESCALE_NDIM == 2:
        descale_at += sequence_64 * heads_k
    k_descale, v_descale = None, None
    if k_descale_ptr is not None:
        k_descale = tl.load(k_descale_ptr + descale_at)
    if v_descale_ptr is not None:
        v_descale = tl.load(v_descale_ptr + descale_at)
    context = place.seqlen_k
    new_k, new_v = new_k_ptr, new_v_ptr
    if new_k_ptr is not None:
        context = tl.maximum(diagonal, 0)
        if DECODE_FROM_CACHE:
            context = tl.where(place.seqlen_q == 1, place.seqlen_k, context)
        new_k += place.q_start * stride_new_ks + head_k_64 * stride_new_kh
        new_v += place.q_start * stride_new_vs + head_k_64 * stride_new_vh
    source = Source(
        k_base, v_base, table, new_k, new_v, context, place.seqlen_k, k_descale, v_descale
    )

    if part_out_ptr is not None:
        sums = walk_segment(part, rows, source, numbers, OPTIONS, TILE)
        # the sums of a row are indexed by its token and head
        heads_q = (heads_k * GROUP).to(tl.int64)
        all_rows = tokens_q * heads_q
        at = token_64 * heads_q + head
        if cu_seqlens_q_ptr is None:
            at += sequence_64 * all_rows
            all_rows *= batch
        at += part * all_rows
        tl.store(part_max_ptr + at, sums.m_i, mask=inside)
        tl.store(part_sum_ptr + at, sums.l_i, mask=inside)
        cols = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
        saw = inside & (sums.m_i != float("-inf"))
        mask = saw[:, None] & (cols < HEAD_DIM_V)[None, :]
        tl.store(part_out_ptr + (at * HEAD_DIM_V)[:, None] + cols[None, :], sums.acc, mask=mask)
    else:
        # tokens of no sequence have no sink
        counts = row < tl.where(is_real, place.seqlen_q * GROUP, 0)
        total = sink_alone(sinks_ptr, head, counts, BLOCK_M, BLOCK_DV)
        acc, l_i, m_i = total.acc, total.l_i, total.m_i
        for segment in tl.range(first // SEGMENT, tl.cdiv(last, SEGMENT)):
            sums = walk_segment(segment, rows, source, numbers, OPTIONS, TILE)
            merged = merge_segment(Softmax(acc, l_i, m_i), sums)
            acc, l_i, m_i = merged.acc, merged.l_i, merged.m_i
        out_rows = out_ptr + sequence_64 * stride_ob + token_64 * stride_os + head * stride_oh
        lse_rows = lse_ptr
        if lse_ptr is not None:
            lse_rows += sequence_64 * stride_lb + head * stride_lh + token_64
        _store(Softmax(acc, l_i, m_i), out_rows, lse_rows, inside, HEAD_DIM_V, BLOCK_DV)


@triton.jit(do_not_specialize=MergeNumbers._fields, do_not_specialize_on_alignment=MERGE_FOREIGN)
def invariant_merge_kernel(
    out_ptr,
    part_out_ptr,
    part_max_ptr,
    part_sum_ptr,
    lse_ptr,
    sinks_ptr,
    cu_seqlens_q_ptr,
    batch,
    heads_q,
    tokens_q,
    rows,
    parts,
    stride_ob,
    stride_os,
    stride_oh,
    stride_lb,
    stride_lh,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``out = sum_i 2^(m_i - m) acc_i / sum_i 2^(m_i - m) l_i`` over segments i, in their order."""
    TILE: tl.constexpr = MergeTile(HEAD_DIM_V, BLOCK_DV, ROWS)
    row = tl.program_id(0).to(tl.int64) * TILE.ROWS + tl.arange(0, TILE.ROWS)  # [ROWS]
    inside = row < rows
    head = row % heads_q
    token = row // heads_q % tokens_q
    sequence = row // heads_q // tokens_q
    counts = inside
    if cu_seqlens_q_ptr is not None:
        # tokens of no sequence have no sink
        counts &= token >= tl.load(cu_seqlens_q_ptr)
        counts &= token < tl.load(cu_seqlens_q_ptr + batch)
    cols = tl.arange(0, TILE.BLOCK_DV)  # [BLOCK_DV]
    total = sink_alone(sinks_ptr, head, counts, TILE.ROWS, TILE.BLOCK_DV)
    acc, l_i, m_i = total.acc, total.l_i, total.m_i
    at = row  # [ROWS]
    for _ in tl.range(0, parts, loop_unroll_factor=4):
        part_max = tl.load(part_max_ptr + at, mask=inside, other=float("-inf"))
        # sums of segments without a visible key were not written
        saw = part_max != float("-inf")
        wide = saw[:, None] & (cols < TILE.HEAD_DIM_V)[None, :]
        sums = Softmax(
            tl.load(part_out_ptr + (at * TILE.HEAD_DIM_V)[:, None] + cols, mask=wide, other=0.0),
            tl.load(part_sum_ptr + at, mask=saw, other=0.0),
            part_max,
        )
        merged = merge_segment(Softmax(acc, l_i, m_i), sums)
        acc, l_i, m_i = merged.acc, merged.l_i, merged.m_i
        at += rows
    out_rows = out_ptr + sequence * stride_ob + token * stride_os + head * stride_oh
    lse_rows = lse_ptr
    if lse_ptr is not None:
        lse_rows += sequence * stride_lb + head * stride_lh + token
    _store(Softmax(acc, l_i, m_i), out_rows, lse_rows, inside, TILE.HEAD_DIM_V, TILE.BLOCK_DV)
