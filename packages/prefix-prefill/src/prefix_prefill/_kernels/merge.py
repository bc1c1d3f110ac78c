"""Merging partial results over disjoint keys: of the splits of a row, or of two whole calls."""

import triton
import triton.language as tl

from ._linked.primitives import LN2, LOG2E, NEG_INF
from .arguments import NUMBERS, POINTERS
from .schedule import locate


@triton.jit
def _store_rows(
    out, lse, out_ptr, lse_ptr, out_scale_ptr, out_rows, lse_at, inside, cols,
    HEAD_DIM: tl.constexpr, OUT_MAX: tl.constexpr,
):  # fmt: skip
    """Write rows of the output, in its dtype, and their log-sum-exps."""
    if out_scale_ptr is not None:
        out /= tl.load(out_scale_ptr)
    if OUT_MAX > 0:
        out = tl.clamp(out, -OUT_MAX, OUT_MAX, propagate_nan=tl.PropagateNan.ALL)
    pointers = out_ptr + out_rows[:, None] + cols[None, :]
    mask = inside[:, None] & (cols < HEAD_DIM)[None, :]
    tl.store(pointers, out.to(out_ptr.dtype.element_ty), mask=mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + lse_at, lse, mask=inside)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def _split_merge_kernel(
    part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, cu_seqlens_q_ptr, out_scale_ptr,
    batch, heads_k, tokens, splits, rows, stride_os, stride_oh,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    OUT_MAX: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,  # rows of one program
    CHUNK: tl.constexpr,  # splits that are read at once
):  # fmt: skip
    """Merge the splits of some rows of a tile; ``rows`` is how many of a tile can hold any."""
    pid = tl.program_id(0)
    parts = tl.cdiv(rows, ROWS)
    in_tile = pid % parts * ROWS + tl.arange(0, ROWS)
    head_k = pid // parts % heads_k
    unit = pid // parts // heads_k
    _, tile, q_start, seqlen_q = locate(
        unit, cu_seqlens_q_ptr, batch, GROUP, BLOCK_M, TILES, MIN_TOKENS, MAX_TOKENS
    )
    row = tile * BLOCK_M + in_tile
    if tile < 0 or tile * BLOCK_M + pid % parts * ROWS >= seqlen_q * GROUP:
        return
    inside = (row < seqlen_q * GROUP) & (in_tile < BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    base = (unit.to(tl.int64) * heads_k + head_k) * splits * BLOCK_M + in_tile
    m_i = tl.full([ROWS], NEG_INF, tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in range(0, splits, CHUNK):
        split = first + tl.arange(0, CHUNK)
        at = base[None, :] + split.to(tl.int64)[:, None] * BLOCK_M  # [C, R]
        mask = (split < splits)[:, None] & inside[None, :]
        lse2 = tl.load(part_lse_ptr + at, mask=mask, other=NEG_INF)
        part = tl.load(
            part_out_ptr + (at * HEAD_DIM)[:, :, None] + cols[None, None, :],
            mask=mask[:, :, None] & (cols < HEAD_DIM)[None, None, :], other=0.0,
        )  # [C, R, D]  # fmt: skip
        m_new = tl.maximum(m_i, tl.max(lse2, 0))
        # splits without a key have nothing to say, and leave the pivot finite
        pivot = tl.where(m_new == NEG_INF, 0.0, m_new)
        weights = tl.exp2(lse2 - pivot[None, :])
        alpha = tl.exp2(m_i - pivot)
        l_i = l_i * alpha + tl.sum(weights, 0)
        acc = acc * alpha[:, None] + tl.sum(part * weights[:, :, None], 0)
        m_i = m_new
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    lse = tl.where(l_i == 0.0, NEG_INF, (m_i + tl.log2(l_safe)) * LN2)
    token = q_start.to(tl.int64) + row // GROUP
    head = (head_k * GROUP + row % GROUP).to(tl.int64)
    _store_rows(
        acc / l_safe[:, None], lse, out_ptr, lse_ptr, out_scale_ptr,
        token * stride_os + head * stride_oh, head * tokens + token, inside, cols, HEAD_DIM,
        OUT_MAX,
    )  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def _state_merge_kernel(
    out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, out_ptr, lse_ptr, out_scale_ptr,
    heads_q, tokens, stride_os, stride_oh,
    HEAD_DIM: tl.constexpr,
    OUT_MAX: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Merge rows of two results; what a side holds that saw no key is not read."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = row % heads_q
    token = row // heads_q
    inside = token < tokens
    cols = tl.arange(0, BLOCK_D)
    at = head * tokens + token
    lse_a = tl.load(lse_a_ptr + at, mask=inside, other=NEG_INF)
    lse_b = tl.load(lse_b_ptr + at, mask=inside, other=NEG_INF)
    # +inf is how some kernels mark a row without keys
    lse_a = tl.where(lse_a == float("inf"), NEG_INF, lse_a)
    lse_b = tl.where(lse_b == float("inf"), NEG_INF, lse_b)
    m = tl.maximum(lse_a, lse_b)
    pivot = tl.where(m == NEG_INF, 0.0, m)
    weight_a = tl.exp2((lse_a - pivot) * LOG2E)
    weight_b = tl.exp2((lse_b - pivot) * LOG2E)
    total = weight_a + weight_b
    safe = tl.where(total == 0.0, 1.0, total)
    begin = (row * HEAD_DIM)[:, None] + cols[None, :]
    width = (cols < HEAD_DIM)[None, :]
    part_a = tl.load(out_a_ptr + begin, mask=width & (lse_a != NEG_INF)[:, None], other=0.0)
    part_b = tl.load(out_b_ptr + begin, mask=width & (lse_b != NEG_INF)[:, None], other=0.0)
    out = part_a.to(tl.float32) * (weight_a / safe)[:, None]
    out += part_b.to(tl.float32) * (weight_b / safe)[:, None]
    lse = tl.where(total == 0.0, NEG_INF, pivot + tl.log2(safe) * LN2)
    _store_rows(
        out, lse, out_ptr, lse_ptr, out_scale_ptr, token * stride_os + head * stride_oh, at,
        inside, cols, HEAD_DIM, OUT_MAX,
    )  # fmt: skip
