"""Forward pass over a tree: one program owns a block of queries and walks up to the root.

The walk over the keys of one segment is the walk of the dense forward: whole tiles, then tiles that
the diagonal or the end of the segment cuts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._dense.portable.forward import attend, finish_softmax, start_softmax
from ..._dense.portable.primitives import key_range, load_tile
from ..._dense.portable.structures import ForwardOptions, Head, Keys, Scores, Tile
from .structures import TREE_FOREIGN, TREE_NUMBERS
from .walk import bounds_of, locate_segment, parent_of, start_of


@triton.jit(do_not_specialize=TREE_NUMBERS, do_not_specialize_on_alignment=TREE_FOREIGN)
def tree_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
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
    GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BIAS_BYTES: tl.constexpr,
    FOLD: tl.constexpr,
    DESCALE_PER_HEAD: tl.constexpr,
    SHIFT: tl.constexpr,
    OUT_MAX: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``out = softmax(s) v`` and ``lse = log(sum(exp(s)))`` over the keys of a path.

    One program writes one block of rows of one query head. The parameters are the fields of
    ``TreeForwardTensors``, ``TreeNumbers``, ``ForwardOptions`` and ``Tile``.
    """
    OPTIONS: tl.constexpr = ForwardOptions(
        GROUP, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, BIAS_BYTES, FOLD, DESCALE_PER_HEAD, SHIFT, OUT_MAX
    )
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
    cols_dv = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    q_base = q_ptr + start * stride_qs + head_64 * stride_qh
    # [BLOCK_M, BLOCK_D]
    q = load_tile(q_base, rows, stride_qs, 0, length, cols_d, HEAD_DIM, BLOCK_D, True)
    k_base = k_ptr + head_k_64 * stride_kh
    v_base = v_ptr + head_k_64 * stride_vh
    l_i, m_i = start_softmax(sinks_ptr, head, above < 0, SHIFT, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # [BLOCK_M, BLOCK_DV]
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
            acc, l_i, m_i = attend(
                acc,
                l_i,
                m_i,
                q,
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

    out, lse = finish_softmax(acc, l_i, m_i, 1.0, None, 0, None, OPTIONS)
    inside = rows < length
    tl.store(lse_ptr + head_64 * tokens + start + rows, lse, mask=inside)
    # out is contiguous: [tokens, heads_q, HEAD_DIM_V]
    out_rows = start + rows
    out_ptrs = out_ptr + ((out_rows * heads_q + head) * HEAD_DIM_V)[:, None] + cols_dv[None, :]
    out_mask = inside[:, None] & (cols_dv < HEAD_DIM_V)[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=out_mask)
