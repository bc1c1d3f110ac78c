"""Backward pass over a tree: dq walks up to the root as the forward does, dk and dv walk down.

A program that owns a block of keys walks the queries of its own segment and of all segments below,
in preorder, and sums their gradients in registers. So there are no atomics, and the result repeats
bit for bit. Within one segment it uses the walks of the dense ``backward_dq`` and
``backward_dkdv``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._dense.portable.backward_dkdv import dkdv_walk
from ..._dense.portable.backward_dq import dq_walk
from ..._dense.portable.primitives import key_range, load_queries, load_tile, query_range
from ..._dense.portable.structures import Head, Keys, Options, Queries, Scores, Tile
from .structures import TREE_FOREIGN, TREE_NUMBERS
from .walk import bounds_of, locate_segment, next_below, parent_of, start_of


@triton.jit(do_not_specialize=TREE_NUMBERS, do_not_specialize_on_alignment=TREE_FOREIGN)
def tree_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    dq_ptr,
    cu_seqlens_ptr,
    parents_ptr,
    scale,
    softcap,
    segments,
    heads_q,
    tokens,
    tiles,
    stride_qs,
    stride_qh,
    stride_ks,
    stride_kh,
    stride_vs,
    stride_vh,
    stride_dos,
    stride_doh,
    GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BIAS_BYTES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``dq = scale * ds k`` over the keys of a path, with ``ds = p * (dout v^T - delta)``.

    One program writes one block of rows of one query head. The parameters are the fields of
    ``Inputs``, ``dq_ptr``, and the fields of ``Tree``, ``TreeNumbers``, ``TreeGradientStrides``,
    ``Options`` and ``Tile``.
    """
    OPTIONS: tl.constexpr = Options(GROUP, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, BIAS_BYTES)
    TILE: tl.constexpr = Tile(
        HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, UPCAST
    )
    # the last segments are the deepest, and their last blocks have the longest walks
    slot = tiles - 1 - tl.program_id(0) // heads_q
    head = tl.program_id(0) % heads_q
    block, segment, start, length = locate_segment(cu_seqlens_ptr, slot, segments, tokens, BLOCK_M)
    if block < 0:
        return
    above = start_of(segment, segments)
    head_64 = head.to(tl.int64)
    head_k_64 = head_64 // GROUP
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    cols_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    queries = load_queries(
        q_ptr + start * stride_qs + head_64 * stride_qh,
        dout_ptr + start * stride_dos + head_64 * stride_doh,
        lse2_ptr,
        delta_ptr,
        head_64 * tokens + start,
        rows,
        stride_qs,
        stride_dos,
        length,
        TILE,
    )
    k_base = k_ptr + head_k_64 * stride_kh
    v_base = v_ptr + head_k_64 * stride_vh
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]
    first_row = block * BLOCK_M
    last_row = tl.minimum(first_row + BLOCK_M, length) - 1
    while above >= 0:
        k_start, seqlen_k = bounds_of(cu_seqlens_ptr, above)
        # causal within the own segment; a segment above is visible as a whole
        diagonal = tl.where(above == segment, 0, seqlen_k)
        scores = Scores(scale, softcap, 0, 0, diagonal, length, seqlen_k, -1, 0, None, 0, 1.0)
        walk = key_range(first_row, last_row, scores, OPTIONS, BLOCK_N)
        source = Keys(
            k_base + k_start * stride_ks, v_base + k_start * stride_vs, stride_ks, stride_vs
        )
        for masked in tl.static_range(2):
            dq = dq_walk(
                dq,
                queries,
                rows,
                source,
                walk,
                scores,
                Head(None, None, None),
                masked == 1,
                OPTIONS,
                TILE,
            )
        above = parent_of(parents_ptr, above)
    # dq is contiguous: [tokens, heads_q, HEAD_DIM]
    dq_rows = start + rows
    dq_ptrs = dq_ptr + ((dq_rows * heads_q + head) * HEAD_DIM)[:, None] + cols_d[None, :]
    mask = (rows < length)[:, None] & (cols_d < HEAD_DIM)[None, :]
    tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=TREE_NUMBERS, do_not_specialize_on_alignment=TREE_FOREIGN)
def tree_dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    cu_seqlens_ptr,
    parents_ptr,
    links_ptr,
    scale,
    softcap,
    segments,
    heads_q,
    tokens,
    tiles,
    stride_qs,
    stride_qh,
    stride_ks,
    stride_kh,
    stride_vs,
    stride_vh,
    stride_dos,
    stride_doh,
    GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BIAS_BYTES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    SETTLE: tl.constexpr,  # wait for the products at the end of each step
):
    """``dv = p^T dout`` and ``dk = scale * ds^T q`` over the queries of a segment and all below.

    One program writes one block of keys of one key head. The parameters are the fields of
    ``Inputs``, the gradients, the fields of ``Tree``, ``links_ptr``, the fields of ``TreeNumbers``,
    ``TreeGradientStrides``, ``Options`` and ``Tile``, and ``SETTLE``.
    """
    OPTIONS: tl.constexpr = Options(GROUP, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, BIAS_BYTES)
    TILE: tl.constexpr = Tile(
        HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, UPCAST
    )
    heads_k = heads_q // GROUP
    # the first segments have the most below them, and their first blocks the longest walks
    slot = tl.program_id(0) // heads_k
    head_k = tl.program_id(0) % heads_k
    block, segment, start, length = locate_segment(cu_seqlens_ptr, slot, segments, tokens, BLOCK_N)
    if block < 0:
        return
    below = start_of(segment, segments)
    head_k_64 = head_k.to(tl.int64)
    keys = block * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    cols_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    cols_dv = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    k_base = k_ptr + start * stride_ks + head_k_64 * stride_kh
    v_base = v_ptr + start * stride_vs + head_k_64 * stride_vh
    # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
    k = load_tile(k_base, keys, stride_ks, 0, length, cols_d, HEAD_DIM, BLOCK_D, True)
    v = load_tile(v_base, keys, stride_vs, 0, length, cols_dv, HEAD_DIM_V, BLOCK_DV, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)  # [BLOCK_N, BLOCK_D]
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)  # [BLOCK_N, BLOCK_DV]
    first_key = block * BLOCK_N
    while below >= 0:
        q_start, seqlen_q = bounds_of(cu_seqlens_ptr, below)
        # causal within the own segment; a segment below sees all keys
        diagonal = tl.where(below == segment, 0, length)
        scores = Scores(scale, softcap, 0, 0, diagonal, seqlen_q, length, -1, 0, None, 0, 1.0)
        walk = query_range(first_key, first_key + BLOCK_N - 1, scores, OPTIONS, BLOCK_M)
        queries = Queries(
            q_ptr + q_start * stride_qs,
            dout_ptr + q_start * stride_dos,
            lse2_ptr + q_start,
            delta_ptr + q_start,
            None,
            None,
            stride_qs,
            stride_qh,
            stride_dos,
            stride_doh,
            tokens,
            0,
            0,
            head_k,
            heads_q,
            None,
        )
        for masked in tl.static_range(2):
            dk, dv = dkdv_walk(
                dk, dv, k, v, keys, queries, walk, scores, masked == 1, OPTIONS, TILE, SETTLE
            )
        below = next_below(parents_ptr, links_ptr, segments, below, segment)

    # dk and dv are contiguous: [tokens, heads_k, width]
    inside = keys < length
    row = ((start + keys) * heads_k + head_k)[:, None]
    tl.store(
        dk_ptr + row * HEAD_DIM + cols_d[None, :],
        (dk * scale).to(dk_ptr.dtype.element_ty),
        mask=inside[:, None] & (cols_d < HEAD_DIM)[None, :],
    )
    tl.store(
        dv_ptr + row * HEAD_DIM_V + cols_dv[None, :],
        dv.to(dv_ptr.dtype.element_ty),
        mask=inside[:, None] & (cols_dv < HEAD_DIM_V)[None, :],
    )
