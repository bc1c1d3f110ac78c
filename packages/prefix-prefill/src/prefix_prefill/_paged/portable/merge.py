"""Kernels that merge results over disjoint keys: of the splits of a row, or of two calls."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import entry
from ..._linked.portable.primitives import LN2, LOG2E, NEG_INF
from .arguments import (
    Schedule,
    SplitMergeNumbers,
    SplitMergeTensors,
    SplitMergeTile,
    StateMergeNumbers,
    StateMergeTensors,
    StateMergeTile,
)
from .results import scaled_out
from .schedule import locate


@triton.jit
def _store_rows(out, lse, token, head, inside, cols, tensors, numbers, TILE: tl.constexpr):
    """Store rows of the output in its dtype, and their log-sum-exps."""
    out_rows = token * numbers.out.token + head * numbers.out.head
    out = scaled_out(out, tensors.out_scale_ptr, TILE.OUT_MAX)
    pointers = tensors.out_ptr + out_rows[:, None] + cols[None, :]  # [ROWS, BLOCK_D]
    mask = inside[:, None] & (cols < TILE.HEAD_DIM)[None, :]
    tl.store(pointers, out.to(tensors.out_ptr.dtype.element_ty), mask=mask)
    if tensors.lse_ptr is not None:
        tl.store(tensors.lse_ptr + head * numbers.tokens + token, lse, mask=inside)


@entry(triton.jit)
def split_merge_kernel(
    tensors: SplitMergeTensors, numbers: SplitMergeNumbers, SCHEDULE: Schedule, TILE: SplitMergeTile
):
    """``out = sum_i exp(lse_i - lse) out_i``, ``lse = log(sum_i exp(lse_i))``, over splits i."""
    heads_k, splits = numbers.heads_k, numbers.splits
    pid = tl.program_id(0)
    parts = tl.cdiv(numbers.rows, TILE.ROWS)
    in_tile = pid % parts * TILE.ROWS + tl.arange(0, TILE.ROWS)  # [ROWS]
    head_k = pid // parts % heads_k
    unit = pid // parts // heads_k
    place = locate(unit, tensors.cu_seqlens_q_ptr, numbers.batch, SCHEDULE)
    first_row = place.tile * SCHEDULE.BLOCK_M
    row = first_row + in_tile
    if TILE.OVERLAP:
        # Wait until all splits are stored. The offsets that are read above existed before the
        # kernel of the splits began, because it waits for everything before it.
        tl.extra.cuda.gdc_wait()
    if place.tile < 0 or first_row + pid % parts * TILE.ROWS >= place.seqlen_q * SCHEDULE.GROUP:
        return
    inside = (row < place.seqlen_q * SCHEDULE.GROUP) & (in_tile < SCHEDULE.BLOCK_M)
    cols = tl.arange(0, TILE.BLOCK_D)  # [BLOCK_D]
    base = (unit.to(tl.int64) * heads_k + head_k) * splits * SCHEDULE.BLOCK_M + in_tile
    m_i = tl.full([TILE.ROWS], NEG_INF, tl.float32)
    l_i = tl.zeros([TILE.ROWS], tl.float32)
    acc = tl.zeros([TILE.ROWS, TILE.BLOCK_D], tl.float32)
    for first in range(0, splits, TILE.CHUNK):
        split = first + tl.arange(0, TILE.CHUNK)  # [CHUNK]
        at = base[None, :] + split.to(tl.int64)[:, None] * SCHEDULE.BLOCK_M  # [CHUNK, ROWS]
        mask = (split < splits)[:, None] & inside[None, :]
        lse2 = tl.load(tensors.part_lse_ptr + at, mask=mask, other=NEG_INF)  # [CHUNK, ROWS]
        part = tl.load(
            tensors.part_out_ptr + (at * TILE.HEAD_DIM)[:, :, None] + cols[None, None, :],
            mask=mask[:, :, None] & (cols < TILE.HEAD_DIM)[None, None, :],
            other=0.0,
        )  # [CHUNK, ROWS, BLOCK_D]
        m_new = tl.maximum(m_i, tl.max(lse2, 0))
        # splits without keys add nothing; the pivot stays finite
        pivot = tl.where(m_new == NEG_INF, 0.0, m_new)
        weights = tl.exp2(lse2 - pivot[None, :])  # [CHUNK, ROWS]
        alpha = tl.exp2(m_i - pivot)
        l_i = l_i * alpha + tl.sum(weights, 0)
        acc = acc * alpha[:, None] + tl.sum(part * weights[:, :, None], 0)  # [ROWS, BLOCK_D]
        m_i = m_new
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    lse = tl.where(l_i == 0.0, NEG_INF, (m_i + tl.log2(l_safe)) * LN2)
    token = place.q_start.to(tl.int64) + row // SCHEDULE.GROUP
    head = (head_k * SCHEDULE.GROUP + row % SCHEDULE.GROUP).to(tl.int64)
    out = acc / l_safe[:, None]  # [ROWS, BLOCK_D]
    _store_rows(out, lse, token, head, inside, cols, tensors, numbers, TILE)


@entry(triton.jit)
def state_merge_kernel(
    tensors: StateMergeTensors, numbers: StateMergeNumbers, TILE: StateMergeTile
):
    """``out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b``, ``lse`` over all keys.

    A program merges some rows. The output of a fully masked row is not read.
    """
    row = tl.program_id(0).to(tl.int64) * TILE.ROWS + tl.arange(0, TILE.ROWS)  # [ROWS]
    head = row % numbers.heads_q
    token = row // numbers.heads_q
    inside = token < numbers.tokens
    cols = tl.arange(0, TILE.BLOCK_D)  # [BLOCK_D]
    at = head * numbers.tokens + token
    lse_a = tl.load(tensors.lse_a_ptr + at, mask=inside, other=NEG_INF)
    lse_b = tl.load(tensors.lse_b_ptr + at, mask=inside, other=NEG_INF)
    # some kernels mark fully masked rows with +inf
    lse_a = tl.where(lse_a == float("inf"), NEG_INF, lse_a)
    lse_b = tl.where(lse_b == float("inf"), NEG_INF, lse_b)
    m = tl.maximum(lse_a, lse_b)
    pivot = tl.where(m == NEG_INF, 0.0, m)
    weight_a = tl.exp2((lse_a - pivot) * LOG2E)
    weight_b = tl.exp2((lse_b - pivot) * LOG2E)
    total = weight_a + weight_b
    safe = tl.where(total == 0.0, 1.0, total)
    begin = (row * TILE.HEAD_DIM)[:, None] + cols[None, :]  # [ROWS, BLOCK_D]
    width = (cols < TILE.HEAD_DIM)[None, :]
    part_a = tl.load(tensors.out_a_ptr + begin, mask=width & (lse_a != NEG_INF)[:, None], other=0.0)
    part_b = tl.load(tensors.out_b_ptr + begin, mask=width & (lse_b != NEG_INF)[:, None], other=0.0)
    out = part_a.to(tl.float32) * (weight_a / safe)[:, None]  # [ROWS, BLOCK_D]
    out += part_b.to(tl.float32) * (weight_b / safe)[:, None]
    lse = tl.where(total == 0.0, NEG_INF, pivot + tl.log2(safe) * LN2)
    _store_rows(out, lse, token, head, inside, cols, tensors, numbers, TILE)
