"""Attention in which a row's bits depend only on its query and its keys; see docs/numerics.md.

A row is one query head of one token. Its keys are cut into segments and these into tiles, both
counted from the first key of the sequence. The sums of each segment start from zero, and segments
are merged in order: by the program that walked them, or by ``invariant_merge_kernel``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launch.entries import entry
from ..portable.mask import Mask, seen_keys
from ..portable.primitives import pointer_to
from .arguments import MergeNumbers, MergeTensors, MergeTile, Numbers, Options, Tensors, Tile
from .arithmetic import finish, merge_segment, sink_alone
from .structures import Rows, Softmax, Source
from .walk import load_rows, locate, walk_segment


@triton.jit
def _store(total, out_rows, lse_rows, inside, TILE: tl.constexpr):
    """Write the outputs and the log-sum-exps of rows to given pointers."""
    out, lse = finish(total)
    cols = tl.arange(0, TILE.BLOCK_DV)  # [BLOCK_DV]
    mask = inside[:, None] & (cols < TILE.HEAD_DIM_V)[None, :]
    pointers = out_rows[:, None] + cols[None, :]
    tl.store(pointers, out.to(out_rows.dtype.element_ty), mask=mask)
    if lse_rows is not None:
        tl.store(lse_rows, lse, mask=inside)


@triton.jit
def _seen(place, diagonal, is_real, numbers, OPTIONS: tl.constexpr, TILE: tl.constexpr):
    """Return ``(first, last, full_first, full_last)`` of a tile of rows; see ``Rows``."""
    scores = numbers.scores
    first_row = place.tile * TILE.BLOCK_M
    last_row = tl.minimum(first_row + TILE.BLOCK_M, place.seqlen_q * OPTIONS.GROUP) - 1
    first_position = first_row // OPTIONS.GROUP + diagonal
    last_position = last_row // OPTIONS.GROUP + diagonal
    seqlen_k = tl.where(is_real, place.seqlen_k, 0)
    mask = Mask(None, seqlen_k, 0, scores.window_left, scores.window_right)
    return seen_keys(first_position, last_position, mask, OPTIONS)


@entry(triton.jit)
def invariant_kernel(tensors: Tensors, numbers: Numbers, OPTIONS: Options, TILE: Tile):
    """``out = softmax(mask(scale * q @ k.T)) @ v`` of a tile of rows, or the sums of a segment."""
    heads_k = numbers.heads_k
    # heads change fastest: their keys are neighbours in a page
    pid = tl.program_id(0)
    head_k = pid % heads_k
    part = pid // heads_k % numbers.parts
    unit = pid // heads_k // numbers.parts
    place = locate(unit, tensors, numbers, OPTIONS, TILE)
    if place.tile < 0:
        return
    is_real = (place.sequence >= 0) & (place.sequence < numbers.batch)
    # padding has no entry in tensors with one per sequence
    sequence_64 = tl.maximum(tl.minimum(place.sequence, numbers.batch - 1), 0).to(tl.int64)
    head_k_64 = head_k.to(tl.int64)

    row = place.tile * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)  # [BLOCK_M]
    inside = row < place.seqlen_q * OPTIONS.GROUP
    token = row // OPTIONS.GROUP
    token_64 = place.q_start + token
    head = head_k_64 * OPTIONS.GROUP + row % OPTIONS.GROUP
    diagonal = place.seqlen_k - place.seqlen_q
    q_rows = token_64 * numbers.q.token + head * numbers.q.head
    q_base = tensors.q_ptr + sequence_64 * numbers.q.batch
    # [BLOCK_M, BLOCK_D]
    q = load_rows(q_base, q_rows, 1, inside, TILE.HEAD_DIM, TILE.BLOCK_D, OPTIONS.ROW_BYTES)
    first, last, full_first, full_last = _seen(place, diagonal, is_real, numbers, OPTIONS, TILE)
    rows = Rows(q, token + diagonal, first, last, full_first, full_last)

    k_base = tensors.k_ptr + head_k_64 * numbers.k.head
    v_base = tensors.v_ptr + head_k_64 * numbers.v.head
    table = tensors.block_table_ptr
    if OPTIONS.PAGE > 0:
        table += sequence_64 * numbers.table.sequence
    else:
        k_base += sequence_64 * numbers.k.page + place.k_start * numbers.k.slot
        v_base += sequence_64 * numbers.v.page + place.k_start * numbers.v.slot
    descale_at = head_k if OPTIONS.DESCALE_NDIM > 0 else 0
    if OPTIONS.DESCALE_NDIM == 2:
        descale_at += sequence_64 * heads_k
    k_descale, v_descale = None, None
    if tensors.k_descale_ptr is not None:
        k_descale = tl.load(tensors.k_descale_ptr + descale_at)
    if tensors.v_descale_ptr is not None:
        v_descale = tl.load(tensors.v_descale_ptr + descale_at)
    context = place.seqlen_k
    new_k, new_v = tensors.new_k_ptr, tensors.new_v_ptr
    if tensors.new_k_ptr is not None:
        context = tl.maximum(diagonal, 0)
        if OPTIONS.DECODE_FROM_CACHE:
            context = tl.where(place.seqlen_q == 1, place.seqlen_k, context)
        new_k += place.q_start * numbers.new_k.token + head_k_64 * numbers.new_k.head
        new_v += place.q_start * numbers.new_v.token + head_k_64 * numbers.new_v.head
    source = Source(
        k_base, v_base, table, new_k, new_v, context, place.seqlen_k, k_descale, v_descale
    )

    if tensors.part_out_ptr is not None:
        sums = walk_segment(part, rows, source, numbers, OPTIONS, TILE)
        # the sums of a row are indexed by its token and head
        heads_q = (heads_k * OPTIONS.GROUP).to(tl.int64)
        all_rows = numbers.tokens_q * heads_q
        at = token_64 * heads_q + head
        if tensors.cu_seqlens_q_ptr is None:
            at += sequence_64 * all_rows
            all_rows *= numbers.batch
        at += part * all_rows
        tl.store(tensors.part_max_ptr + at, sums.m_i, mask=inside)
        tl.store(tensors.part_sum_ptr + at, sums.l_i, mask=inside)
        cols = tl.arange(0, TILE.BLOCK_DV)  # [BLOCK_DV]
        saw = inside & (sums.m_i != float("-inf"))
        mask = saw[:, None] & (cols < TILE.HEAD_DIM_V)[None, :]
        part_rows = tensors.part_out_ptr + (at * TILE.HEAD_DIM_V)[:, None]
        tl.store(part_rows + cols[None, :], sums.acc, mask=mask)
    else:
        # tokens of no sequence have no sink
        counts = row < tl.where(is_real, place.seqlen_q * OPTIONS.GROUP, 0)
        total = sink_alone(tensors.sinks_ptr, head, counts, TILE.BLOCK_M, TILE.BLOCK_DV)
        acc, l_i, m_i = total.acc, total.l_i, total.m_i
        for segment in tl.range(first // TILE.SEGMENT, tl.cdiv(last, TILE.SEGMENT)):
            sums = walk_segment(segment, rows, source, numbers, OPTIONS, TILE)
            merged = merge_segment(Softmax(acc, l_i, m_i), sums)
            acc, l_i, m_i = merged.acc, merged.l_i, merged.m_i
        out_rows = pointer_to(tensors.out_ptr, numbers.out, sequence_64, token_64, head)
        lse_rows = tensors.lse_ptr
        if tensors.lse_ptr is not None:
            lse_rows += sequence_64 * numbers.lse.batch + head * numbers.lse.head + token_64
        _store(Softmax(acc, l_i, m_i), out_rows, lse_rows, inside, TILE)


@entry(triton.jit)
def invariant_merge_kernel(tensors: MergeTensors, numbers: MergeNumbers, TILE: MergeTile):
    """``out = sum_i 2^(m_i - m) acc_i / sum_i 2^(m_i - m) l_i`` over segments i, in their order."""
    row = tl.program_id(0).to(tl.int64) * TILE.ROWS + tl.arange(0, TILE.ROWS)  # [ROWS]
    inside = row < numbers.rows
    head = row % numbers.heads_q
    token = row // numbers.heads_q % numbers.tokens_q
    sequence = row // numbers.heads_q // numbers.tokens_q
    counts = inside
    if tensors.cu_seqlens_q_ptr is not None:
        # tokens of no sequence have no sink
        counts &= token >= tl.load(tensors.cu_seqlens_q_ptr)
        counts &= token < tl.load(tensors.cu_seqlens_q_ptr + numbers.batch)
    cols = tl.arange(0, TILE.BLOCK_DV)  # [BLOCK_DV]
    total = sink_alone(tensors.sinks_ptr, head, counts, TILE.ROWS, TILE.BLOCK_DV)
    acc, l_i, m_i = total.acc, total.l_i, total.m_i
    at = row  # [ROWS]
    for _ in tl.range(0, numbers.parts, loop_unroll_factor=4):
        part_max = tl.load(tensors.part_max_ptr + at, mask=inside, other=float("-inf"))
        # sums of segments without a visible key were not written
        saw = part_max != float("-inf")
        wide = saw[:, None] & (cols < TILE.HEAD_DIM_V)[None, :]
        part_rows = tensors.part_out_ptr + (at * TILE.HEAD_DIM_V)[:, None]
        sums = Softmax(
            tl.load(part_rows + cols, mask=wide, other=0.0),
            tl.load(tensors.part_sum_ptr + at, mask=saw, other=0.0),
            part_max,
        )
        merged = merge_segment(Softmax(acc, l_i, m_i), sums)
        acc, l_i, m_i = merged.acc, merged.l_i, merged.m_i
        at += numbers.rows
    out_rows = pointer_to(tensors.out_ptr, numbers.out, sequence, token, head)
    lse_rows = tensors.lse_ptr
    if tensors.lse_ptr is not None:
        lse_rows += sequence * numbers.lse.batch + head * numbers.lse.head + token
    _store(Softmax(acc, l_i, m_i), out_rows, lse_rows, inside, TILE)
