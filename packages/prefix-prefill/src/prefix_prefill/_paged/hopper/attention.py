"""Prefill on Hopper: one warp gathers pages by TMA, two or three MMA warpgroups run wgmma.

A warpgroup owns 64 rows of a tile (query heads of one head of keys, times tokens). It visits its
keys from the last to the first, with the online softmax of FlashAttention-2 (Dao, 2023) and the two
overlaps of FlashAttention-3 (Shah et al., 2024): the softmax of a warpgroup overlaps with the
products of the other warpgroups (ping-pong), and with its own product of the previous tile's
probabilities and values.
"""

from ..._linked.hopper.compat import gl, gluon, hopper
from ..._linked.hopper.pipeline import FIELDS, SLOTS, barriers
from .consumer import consume
from .producer import produce
from .structures import (
    Arguments,
    CacheMap,
    Counts,
    Inputs,
    Options,
    Pipeline,
    Results,
    Rows,
    Scores,
    Sequences,
    Strides,
    Table,
    Tickets,
    Tile,
)


@gluon.jit
def pipeline_of(q_desc, k_s, v_s, out_desc, TILE: gl.constexpr):
    """Return the ``Pipeline`` with these tiles of keys and values; all warps call it."""
    dtype: gl.constexpr = q_desc.dtype
    COUNT: gl.constexpr = TILE.WARPGROUPS * TILE.BUFFERS_Q  # buffers for tiles of queries
    box: gl.constexpr = [1, 1, TILE.PACK, TILE.ROWS // TILE.PACK, TILE.HEAD_DIM]
    q_s = gl.allocate_shared_memory(dtype, [COUNT] + box, q_desc.layout)
    if TILE.SHARE or out_desc is None:
        out_s = q_s
    else:
        out_s = gl.allocate_shared_memory(dtype, [TILE.WARPGROUPS] + box, out_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    fields_s = gl.allocate_shared_memory(gl.int32, [SLOTS, FIELDS], plain)
    q_full, q_empty = barriers(COUNT, 1), barriers(COUNT, 1)
    k_full, v_full = barriers(TILE.STAGES_K, 1), barriers(TILE.STAGES_V, 1)
    # an announcement is read by the MMA warpgroups, and by the warpgroup that widens values
    READERS: gl.constexpr = TILE.WARPGROUPS + (TILE.WIDENERS == 2)
    tile_full, tile_empty = barriers(SLOTS, 1), barriers(SLOTS, READERS)
    hopper.fence_async_shared()
    return Pipeline(
        q_s, k_s, v_s, out_s, fields_s, q_full, q_empty, k_full, v_full, tile_full, tile_empty
    )


# no specialisation on values or alignment: see ``runtime.py``
NUMBERS = Scores._fields + Counts._fields + Strides._fields
POINTERS = tuple(name for name in Arguments._fields if name.endswith("_ptr"))


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def prefill_kernel(
    q_desc,
    k_desc,
    v_desc,
    new_k_desc,
    new_v_desc,
    out_desc,
    out_ptr,
    lse_ptr,
    ticket_ptr,
    block_table_ptr,
    cu_seqlens_q_ptr,
    seqlens_k_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
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
    stride_os,
    stride_oh,
    stride_table_b,
    stride_table_p,
    stride_alibi_b,
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
    """``out = softmax(mask(scale * q @ k.T)) @ v``, with ``k`` and ``v`` in the pages of a cache.

    Keys and values of the queries' tokens may be separate tensors. A persistent kernel: one warp
    produces, two or three warpgroups consume.
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
    k_s = gl.allocate_shared_memory(dtype, [STAGES_K, 1, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES_V, 1, 1, 1, BLOCK_N, HEAD_DIM], v_desc.layout)
    pipeline = pipeline_of(q_desc, k_s, v_s, out_desc, TILE)
    scores = Scores(scale, softcap, window_left, window_right)
    out = Rows(out_ptr, stride_os, stride_oh)
    results = Results(
        out, lse_ptr, alibi_slopes_ptr, sinks_ptr, None, None, scores, tokens, stride_alibi_b
    )
    inputs = Inputs(
        q_desc,
        CacheMap(k_desc, page_rows_k),
        CacheMap(v_desc, page_rows_v),
        new_k_desc,
        new_v_desc,
        Table(block_table_ptr, stride_table_b, stride_table_p),
        Sequences(cu_seqlens_q_ptr, seqlens_k_ptr, batch),
        Tickets(ticket_ptr, packs, total),
        scores,
    )
    # with a window, the producer has fewer: see EARLY in ``_copy_tile``
    REGISTERS: gl.constexpr = [240, 24] if HAS_LEFT else [232, 40]
    gl.warp_specialize(
        [
            (consume, (WARPGROUPS - 3, out_desc, pipeline, results, OPTIONS, TILE)),
            (consume, (WARPGROUPS - 2, out_desc, pipeline, results, OPTIONS, TILE)),
            (consume, (WARPGROUPS - 1, out_desc, pipeline, results, OPTIONS, TILE)),
            (produce, (inputs, pipeline, OPTIONS, TILE)),
        ][3 - WARPGROUPS :],
        [4, 4, 1][3 - WARPGROUPS :],
        REGISTERS if WARPGROUPS == 2 else [160, 160, 32],
    )
