"""Writes the rows of a tile of queries, or merges the results of its splits."""

import triton
import triton.language as tl

from ..._linked.portable.primitives import LN2, NEG_INF


@triton.jit
def store_tile(x, rows, tensors, numbers, WIDTH: tl.constexpr, OPTIONS: tl.constexpr):
    """Write a tile of queries to the contiguous output or dq, ``[tokens, heads_q, WIDTH]``.

    Addresses stay in registers through the walk: a 64-bit scalar and 32-bit offsets in the tile.
    """
    HEADS: tl.constexpr = OPTIONS.HEADS
    work = rows.work
    m = tl.arange(0, x.shape[0])  # [BLOCK_M]
    cols = tl.arange(0, x.shape[1])
    token = rows.batch * numbers.tokens_q if tensors.cu_seqlens_q_ptr is None else work.q_start
    first_row = (work.tile * OPTIONS.POSITIONS - work.diagonal).to(tl.int64)
    first_head = work.unit // OPTIONS.PACKS * OPTIONS.GROUP + work.unit % OPTIONS.PACKS * HEADS
    pointer = tensors.out_ptr + ((token + first_row) * numbers.heads_q + first_head) * WIDTH
    at = (m // HEADS * numbers.heads_q + m % HEADS) * WIDTH
    tl.store(
        pointer + (at[:, None] + cols[None, :]),
        x.to(tensors.out_ptr.dtype.element_ty),
        mask=rows.inside[:, None] & (cols < WIDTH)[None, :],
    )


@triton.jit
def store_rows(out, lse2, rows, tensors, numbers, OPTIONS: tl.constexpr):
    """Write the output of a tile of queries, and its log-sum-exp in natural units."""
    HEADS: tl.constexpr = OPTIONS.HEADS
    work = rows.work
    tokens_q = numbers.tokens_q
    m = tl.arange(0, out.shape[0])  # [BLOCK_M]
    first_row = (work.tile * OPTIONS.POSITIONS - work.diagonal).to(tl.int64)
    first_head = work.unit // OPTIONS.PACKS * OPTIONS.GROUP + work.unit % OPTIONS.PACKS * HEADS
    lse_ptr = tensors.lse_ptr + first_head.to(tl.int64) * tokens_q + first_row
    if tensors.cu_seqlens_q_ptr is None:
        lse_ptr += rows.batch * numbers.heads_q * tokens_q
    else:
        lse_ptr += work.q_start
    lse_at = (m % HEADS).to(tl.int64) * tokens_q + m // HEADS
    tl.store(lse_ptr + lse_at, lse2 * LN2, mask=rows.inside)
    store_tile(out, rows, tensors, numbers, OPTIONS.HEAD_DIM_V, OPTIONS)


@triton.jit
def merge_parts(rows, tensors, numbers, OPTIONS: tl.constexpr):
    """Write ``out = sum(exp(lse_i) out_i) / sum(exp(lse_i))`` over the splits of a short tile."""
    m = tl.arange(0, OPTIONS.BLOCK_M)  # [BLOCK_M]
    cols_dv = tl.arange(0, OPTIONS.BLOCK_DV)  # [BLOCK_DV]
    m_i = tl.full([OPTIONS.BLOCK_M], NEG_INF, tl.float32)
    l_i = tl.zeros([OPTIONS.BLOCK_M], tl.float32)
    acc = tl.zeros([OPTIONS.BLOCK_M, OPTIONS.BLOCK_DV], tl.float32)
    first = tl.program_id(0).to(tl.int64) * numbers.splits
    for split in tl.range(0, numbers.splits):
        at = (first + split) * OPTIONS.BLOCK_M + m
        lse2 = tl.load(tensors.part_lse_ptr + at)  # no mask: every row was written
        part = tl.load(
            tensors.part_out_ptr + at[:, None] * OPTIONS.HEAD_DIM_V + cols_dv[None, :],
            mask=(cols_dv < OPTIONS.HEAD_DIM_V)[None, :],
            other=0.0,
        )
        m_new = tl.maximum(m_i, lse2)
        pivot = tl.where(m_new == NEG_INF, 0.0, m_new)
        alpha = tl.exp2(m_i - pivot)
        weight = tl.exp2(lse2 - pivot)
        acc = acc * alpha[:, None] + part * weight[:, None]
        l_i = l_i * alpha + weight
        m_i = m_new
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    out, lse2 = acc / l_safe[:, None], tl.where(l_i == 0.0, NEG_INF, m_i + tl.log2(l_safe))
    store_rows(out, lse2, rows, tensors, numbers, OPTIONS)
