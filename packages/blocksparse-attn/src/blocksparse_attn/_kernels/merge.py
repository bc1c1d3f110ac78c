"""The end of a forward tile: writing its rows, or merging what splits of its keys found."""

import triton
import triton.language as tl

from ._linked.primitives import LN2, NEG_INF
from .schedule import locate_queries
from .structures import Grid, MergeNumbers, MergeTensors


@triton.jit
def store_rows(
    out,
    lse2,
    batch_64,
    q_start,
    first_row,
    first_head,
    inside,
    tensors,
    numbers,
    HEADS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
):
    """Write the rows of a tile, and their log-sum-exp in natural units.

    Addresses are a scalar in 64 bits and what a tile spans in 32: they live through the walk.
    """
    out_ptr, lse_ptr = tensors.out_ptr, tensors.lse_ptr
    heads_q, tokens_q = numbers.heads_q, numbers.tokens_q
    m = tl.arange(0, out.shape[0])  # [BLOCK_M]
    cols_dv = tl.arange(0, out.shape[1])  # [BLOCK_DV]
    first_row = first_row.to(tl.int64)
    first_head = first_head.to(tl.int64)
    if tensors.cu_seqlens_q_ptr is None:
        token = batch_64 * tokens_q + first_row
        lse_ptr += (batch_64 * heads_q + first_head) * tokens_q + first_row
    else:
        token = q_start + first_row
        lse_ptr += first_head * tokens_q + token
    tl.store(lse_ptr + ((m % HEADS).to(tl.int64) * tokens_q + m // HEADS), lse2 * LN2, mask=inside)
    # out is contiguous: [tokens, heads_q, HEAD_DIM_V]
    out_ptr += (token * heads_q + first_head) * HEAD_DIM_V
    at = (m // HEADS * heads_q + m % HEADS) * HEAD_DIM_V
    tl.store(
        out_ptr + (at[:, None] + cols_dv[None, :]),
        out.to(out_ptr.dtype.element_ty),
        mask=inside[:, None] & (cols_dv < HEAD_DIM_V)[None, :],
    )


@triton.jit(
    do_not_specialize=MergeNumbers._fields,
    do_not_specialize_on_alignment=MergeTensors._fields,
)
def _merge_kernel(
    part_out_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    batch,
    heads_q,
    tokens_q,
    tokens_k,
    tiles,
    splits,
    GROUP: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    POSITIONS: tl.constexpr,
    HEADS: tl.constexpr,
    PACKS: tl.constexpr,
    SHORT: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``out = sum(exp(lse_i) out_i) / sum(exp(lse_i))`` over the splits of a short tile."""
    tensors = MergeTensors(
        part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr
    )
    numbers = MergeNumbers(batch, heads_q, tokens_q, tokens_k, tiles, splits)
    units = heads_q // GROUP * PACKS
    grid = Grid(cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, units, tokens_q, tokens_k, tiles, 1, 1)
    work = locate_queries(tl.program_id(0), grid, POSITIONS, True, True, SHORT, TOP_LEFT)
    tile, is_alive, sequence, unit, _, q_start, _, seqlen_q, _, diagonal = work
    if not is_alive:
        return
    m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    cols_dv = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    in_group = unit % PACKS * HEADS + m % HEADS
    rows = tile * POSITIONS + m // HEADS - diagonal
    inside = (rows >= 0) & (rows < seqlen_q) & (in_group < GROUP)
    m_i = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    first = tl.program_id(0).to(tl.int64) * splits
    for split in tl.range(0, splits):
        at = (first + split) * BLOCK_M + m
        lse2 = tl.load(part_lse_ptr + at)  # the tile wrote every row
        part = tl.load(
            part_out_ptr + at[:, None] * HEAD_DIM_V + cols_dv[None, :],
            mask=(cols_dv < HEAD_DIM_V)[None, :],
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
    store_rows(
        acc / l_safe[:, None],
        tl.where(l_i == 0.0, NEG_INF, m_i + tl.log2(l_safe)),
        sequence.to(tl.int64),
        q_start,
        tile * POSITIONS - diagonal,
        unit // PACKS * GROUP + unit % PACKS * HEADS,
        inside,
        tensors,
        numbers,
        HEADS,
        HEAD_DIM_V,
    )
