"""The end of a forward tile: writing its rows, or merging what splits of its keys found."""

from __future__ import annotations

import triton
import triton.language as tl

from .._configs import SHORT
from ._linked.primitives import LN2, NEG_INF
from .common import NUMBERS, POINTERS
from .schedule import locate_queries


@triton.jit
def store_rows(
    out_ptr, lse_ptr, out, lse2, cu_seqlens_q_ptr, batch_64, q_start, first_row, first_head, inside,
    heads_q, tokens_q, HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Write the rows of a tile, and their log-sum-exp in natural units.

    Addresses are a scalar in 64 bits and what a tile spans in 32: they live through the walk.
    """
    m = tl.arange(0, BLOCK_M)
    cols_dv = tl.arange(0, BLOCK_DV)
    first_row = first_row.to(tl.int64)
    first_head = first_head.to(tl.int64)
    if cu_seqlens_q_ptr is None:
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
        out_ptr + (at[:, None] + cols_dv[None, :]), out.to(out_ptr.dtype.element_ty),
        mask=inside[:, None] & (cols_dv < HEAD_DIM_V)[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def _merge_kernel(
    part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    batch, heads_q, tokens_q, tokens_k, tiles, splits,
    GROUP: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    POSITIONS: tl.constexpr, HEADS: tl.constexpr, PACKS: tl.constexpr, SHORT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Merge what the splits of a short tile found over their keys."""
    units = heads_q // GROUP * PACKS
    tile, is_alive, sequence, unit, _split, q_start, _k_start, seqlen_q, seqlen_k = locate_queries(
        tl.program_id(0), cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, units, tokens_q, tokens_k,
        tiles, 1, 1, POSITIONS, True, True, SHORT,
    )  # fmt: skip
    if not is_alive:
        return
    m = tl.arange(0, BLOCK_M)
    cols_dv = tl.arange(0, BLOCK_DV)
    in_group = unit % PACKS * HEADS + m % HEADS
    rows = tile * POSITIONS + m // HEADS - (seqlen_k - seqlen_q)
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
            mask=(cols_dv < HEAD_DIM_V)[None, :], other=0.0,
        )  # fmt: skip
        m_new = tl.maximum(m_i, lse2)
        pivot = tl.where(m_new == NEG_INF, 0.0, m_new)
        alpha = tl.exp2(m_i - pivot)
        weight = tl.exp2(lse2 - pivot)
        acc = acc * alpha[:, None] + part * weight[:, None]
        l_i = l_i * alpha + weight
        m_i = m_new
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    store_rows(
        out_ptr, lse_ptr, acc / l_safe[:, None],
        tl.where(l_i == 0.0, NEG_INF, m_i + tl.log2(l_safe)),
        cu_seqlens_q_ptr, sequence.to(tl.int64), q_start,
        tile * POSITIONS - (seqlen_k - seqlen_q), unit // PACKS * GROUP + unit % PACKS * HEADS,
        inside, heads_q, tokens_q, HEADS, HEAD_DIM_V, BLOCK_M, BLOCK_DV,
    )  # fmt: skip


def launch_merge(plan, queries, x, written, tiles, splits, programs):
    """Fill the rows of short tiles from their parts."""
    names = ("GROUP", "HEAD_DIM_V", "BLOCK_DV", "POSITIONS", "HEADS", "PACKS")
    launch = plan.launch(_merge_kernel, None, queries.constants, names, queries.tile, SHORT=SHORT)
    out, lse, *parts = written
    launch(
        programs,
        (*parts, out, lse, x.cu_seqlens_q, x.cu_seqlens_k),
        (*plan.sizes(x.q, x.k), tiles, splits),
    )
