"""Attention on Hopper under the law of docs/numerics.md, over dense keys or pages of a cache.

One warp copies by TMA, or a warpgroup loads; one or two warpgroups multiply (wgmma). The products,
sums and roundings of a row are the same in all builds. Builds differ in the source of keys, in rows
per program, in masks that hide nothing, and in whether a program walks all segments or one.
"""

from ...hopper.compat import gl, gluon, hopper
from ...hopper.pipeline import FIELDS, SLOTS, barriers
from .consumer import consume
from .producer import produce
from .structures import (
    Arguments,
    Counts,
    Inputs,
    Options,
    Parts,
    Pipeline,
    Results,
    Scores,
    Strides,
    Tile,
)

# integers and pointers are not specialised; see ``runtime.py``
NUMBERS = Scores._fields + Counts._fields + Strides._fields
POINTERS = tuple(
    name for name in Arguments._fields if name.endswith("_ptr") and not name.startswith("pa")
)


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def invariant_hopper_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    k_ptr,
    v_ptr,
    new_k_ptr,
    new_v_ptr,
    k_descale_ptr,
    v_descale_ptr,
    lse_ptr,
    part_out_ptr,
    part_max_ptr,
    part_sum_ptr,
    park_ptr,
    ticket_ptr,
    sinks_ptr,
    block_table_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqlens_k_ptr,
    scale,
    softcap,
    window_left,
    window_right,
    batch,
    packs,
    heads_k,
    tokens_q,
    tokens_k,
    tiles,
    span,
    last,
    parts,
    total,
    page_rows_k,
    page_rows_v,
    stride_table_b,
    stride_table_p,
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
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    FOLD: gl.constexpr,
    PAGE: gl.constexpr,
    PIECE: gl.constexpr,
    DESCALE_NDIM: gl.constexpr,
    K_RUN: gl.constexpr,
    K_BYTES: gl.constexpr,
    V_BYTES: gl.constexpr,
    ROW_BYTES: gl.constexpr,
    DECODE_FROM_CACHE: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    WIDTH: gl.constexpr,
    WIDTH_V: gl.constexpr,
    STAGES_K: gl.constexpr,
    STAGES_V: gl.constexpr,
    SHARE: gl.constexpr,
    SEGMENT: gl.constexpr,
):
    """``out = softmax(mask(scale * q @ k.T)) @ v``, or the sums of single segments of the keys."""
    OPTIONS: gl.constexpr = Options(
        HAS_LEFT,
        HAS_RIGHT,
        HAS_SOFTCAP,
        FOLD,
        PAGE,
        PIECE,
        DESCALE_NDIM,
        K_RUN,
        K_BYTES,
        V_BYTES,
        ROW_BYTES,
        DECODE_FROM_CACHE,
    )
    TILE: gl.constexpr = Tile(
        GROUP,
        PACK,
        WARPGROUPS,
        ROWS,
        BLOCK_N,
        HEAD_DIM,
        HEAD_DIM_V,
        WIDTH,
        WIDTH_V,
        STAGES_K,
        STAGES_V,
        SHARE,
        SEGMENT,
    )
    TOKENS: gl.constexpr = ROWS // PACK
    dtype: gl.constexpr = q_desc.dtype
    box_q: gl.constexpr = [WARPGROUPS, 1, 1, PACK, TOKENS, HEAD_DIM]
    q_s = gl.allocate_shared_memory(dtype, box_q, q_desc.layout)
    # one warp copies by TMA, or a warpgroup loads
    WARPS: gl.constexpr = 1 if PIECE > 0 else 4
    box_k: gl.constexpr = [1, 1, 1, BLOCK_N, HEAD_DIM]
    box_v: gl.constexpr = [1, 1, 1, BLOCK_N, HEAD_DIM_V]
    layout_k: gl.constexpr = gl.NVMMASharedLayout.get_default_for(box_k, dtype)
    layout_v: gl.constexpr = gl.NVMMASharedLayout.get_default_for(box_v, dtype)
    k_s = gl.allocate_shared_memory(dtype, [STAGES_K, 1, 1, 1, BLOCK_N, HEAD_DIM], layout_k)
    v_s = gl.allocate_shared_memory(dtype, [STAGES_V, 1, 1, 1, BLOCK_N, HEAD_DIM_V], layout_v)
    out_s = q_s
    if not SHARE and part_out_ptr is None:
        box_out: gl.constexpr = [WARPGROUPS, 1, 1, PACK, TOKENS, HEAD_DIM_V]
        out_s = gl.allocate_shared_memory(dtype, box_out, out_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    fields_s = gl.allocate_shared_memory(gl.int32, [SLOTS, FIELDS], plain)
    q_full, q_empty = barriers(WARPGROUPS, 1), barriers(WARPGROUPS, 1)
    k_full, v_full = barriers(STAGES_K, 1), barriers(STAGES_V, 1)
    tile_full, tile_empty = barriers(SLOTS, 1), barriers(SLOTS, WARPGROUPS)
    hopper.fence_async_shared()
    pipeline = Pipeline(
        q_s, k_s, v_s, out_s, fields_s, q_full, q_empty, k_full, v_full, tile_full, tile_empty
    )
    scores = Scores(scale, softcap, window_left, window_right)
    counts = Counts(batch, packs, heads_k, tokens_q, tokens_k, tiles, span, last, parts, total)
    sums = Parts(part_out_ptr, part_max_ptr, part_sum_ptr, park_ptr)
    results = Results(lse_ptr, sums, sinks_ptr, cu_seqlens_q_ptr, scores, counts)
    strides = Strides(
        page_rows_k,
        page_rows_v,
        stride_table_b,
        stride_table_p,
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
    )
    inputs = Inputs(
        q_desc,
        k_desc,
        v_desc,
        k_ptr,
        v_ptr,
        new_k_ptr,
        new_v_ptr,
        k_descale_ptr,
        v_descale_ptr,
        block_table_ptr,
        cu_seqlens_q_ptr,
        cu_seqlens_k_ptr,
        seqlens_k_ptr,
        ticket_ptr,
        scores,
        counts,
        strides,
    )
    gl.warp_specialize(
        [
            (consume, (WARPGROUPS - 2, out_desc, pipeline, results, OPTIONS, TILE)),
            (consume, (WARPGROUPS - 1, out_desc, pipeline, results, OPTIONS, TILE)),
            (produce, (inputs, pipeline, OPTIONS, TILE, WARPS)),
        ][2 - WARPGROUPS :],
        [4, WARPS][2 - WARPGROUPS :],
        [240, 24 if PIECE > 0 else 232][2 - WARPGROUPS :],
    )
