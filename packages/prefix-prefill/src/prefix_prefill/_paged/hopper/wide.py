"""Prefill over a cache of 8 or 4 bits on Hopper; keys and values are widened to 16 bits.

The kernel of ``attention.py``, with one or two widening warpgroups in place of the copying warp.
They read tiles of keys and values into registers, two parts ahead, widen them to the dtype of the
queries, which holds all numbers of 8 bits exactly, and store them in shared memory. Pages may have
any size. The descales of an FP8 cache are applied to scores and output. A cache of integers has a
scale per token: shared memory holds the scales of each tile, which are applied to the columns of
the scores (keys) and to the probabilities (values).
"""

from ..._linked.hopper.compat import gl, gluon
from .attention import pipeline_of
from .consumer import consume
from .structures import (
    Counts,
    Inputs,
    Options,
    Results,
    Rows,
    Scores,
    Sequences,
    Table,
    Tickets,
    Tile,
    TokenScales,
    WideArguments,
    WideCache,
    WideStrides,
)
from .wide_producer import bring_first, bring_values

# no specialisation on values or alignment: see ``runtime.py``
NUMBERS = Scores._fields + Counts._fields + WideStrides._fields
POINTERS = tuple(name for name in WideArguments._fields if name.endswith("_ptr"))


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def prefill_wide_kernel(
    q_desc,
    new_k_desc,
    new_v_desc,
    out_desc,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    lse_ptr,
    ticket_ptr,
    block_table_ptr,
    cu_seqlens_q_ptr,
    seqlens_k_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    k_descale_ptr,
    v_descale_ptr,
    k_scale_cache_ptr,
    v_scale_cache_ptr,
    scale,
    softcap,
    window_left,
    window_right,
    batch,
    packs,
    tokens,
    total,
    page_rows_k,
    page_rows_v,
    stride_kcs,
    stride_kch,
    stride_vcs,
    stride_vch,
    stride_os,
    stride_oh,
    stride_table_b,
    stride_table_p,
    stride_alibi_b,
    stride_skp,
    stride_sks,
    stride_skh,
    stride_svp,
    stride_svs,
    stride_svh,
    heads_k,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_NEW: gl.constexpr,
    DESCALE_NDIM: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    PAGE: gl.constexpr,
    PIECE: gl.constexpr,
    NEW_PIECE: gl.constexpr,
    MIN_TOKENS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES_K: gl.constexpr,
    STAGES_V: gl.constexpr,
    BUFFERS_Q: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    SHARE: gl.constexpr,
    WARPS: gl.constexpr,
    WIDENERS: gl.constexpr,
    PARTIES: gl.constexpr,
):
    """``out = softmax(mask(scale * q @ k.T)) @ v``, with ``k`` and ``v`` in pages of 8 or 4 bits.

    Keys and values of the queries' tokens may be separate tensors, in 16 bits. A persistent kernel:
    one or two warpgroups produce, two consume.
    """
    OPTIONS: gl.constexpr = Options(HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_NEW, DESCALE_NDIM)
    TILE: gl.constexpr = Tile(
        GROUP,
        PACK,
        PAGE,
        PIECE,
        NEW_PIECE,
        MIN_TOKENS,
        ROWS,
        BLOCK_N,
        HEAD_DIM,
        WIDTH,
        STAGES_K,
        STAGES_V,
        BUFFERS_Q,
        WARPGROUPS,
        SHARE,
        WARPS,
        WIDENERS,
        PARTIES,
    )
    dtype: gl.constexpr = q_desc.dtype
    box: gl.constexpr = [1, 1, 1, BLOCK_N, HEAD_DIM]  # as TMA copies it
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(box, dtype)
    k_s = gl.allocate_shared_memory(dtype, [STAGES_K, 1, 1, 1, BLOCK_N, HEAD_DIM], layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES_V, 1, 1, 1, BLOCK_N, HEAD_DIM], layout)
    scales_s, k_scales, v_scales = None, None, None
    if k_scale_cache_ptr is not None:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        scales_s = gl.allocate_shared_memory(gl.float32, [2 * STAGES_K, BLOCK_N], plain)
        k_scales = TokenScales(k_scale_cache_ptr, stride_skp, stride_sks, stride_skh)
        v_scales = TokenScales(v_scale_cache_ptr, stride_svp, stride_svs, stride_svh)
    pipeline = pipeline_of(q_desc, k_s, v_s, out_desc, TILE)
    scores = Scores(scale, softcap, window_left, window_right)
    results = Results(
        Rows(out_ptr, stride_os, stride_oh),
        lse_ptr,
        alibi_slopes_ptr,
        sinks_ptr,
        k_descale_ptr,
        v_descale_ptr,
        scores,
        tokens,
        stride_alibi_b,
        heads_k,
        scales_s,
    )
    inputs = Inputs(
        q_desc,
        WideCache(k_cache_ptr, page_rows_k, stride_kcs, stride_kch),
        WideCache(v_cache_ptr, page_rows_v, stride_vcs, stride_vch),
        new_k_desc,
        new_v_desc,
        Table(block_table_ptr, stride_table_b, stride_table_p),
        Sequences(cu_seqlens_q_ptr, seqlens_k_ptr, batch),
        Tickets(ticket_ptr, packs, total),
        scores,
        k_scales,
        v_scales,
        scales_s,
    )
    if WIDENERS == 2:
        gl.warp_specialize(
            [
                (consume, (0, out_desc, pipeline, results, OPTIONS, TILE)),
                (consume, (1, out_desc, pipeline, results, OPTIONS, TILE)),
                (bring_first, (inputs, pipeline, OPTIONS, TILE)),
                (bring_values, (inputs, pipeline, OPTIONS, TILE)),
            ],
            [4, 4, 4],
            [200, 64, 48],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, out_desc, pipeline, results, OPTIONS, TILE)),
                (consume, (1, out_desc, pipeline, results, OPTIONS, TILE)),
                (bring_first, (inputs, pipeline, OPTIONS, TILE)),
            ],
            [4, 4],
            [216, 80],
        )
