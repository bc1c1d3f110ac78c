"""Prefill on Hopper: one warp gathers pages by TMA, two or three MMA warpgroups run wgmma.

A warpgroup owns 64 rows of a tile (query heads of one head of keys, times tokens). It visits its
keys from the last to the first, with the online softmax of FlashAttention-2 (Dao, 2023) and the two
overlaps of FlashAttention-3 (Shah et al., 2024): the softmax of a warpgroup overlaps with the
products of the other warpgroups (ping-pong), and with its own product of the previous tile's
probabilities and values.
"""

from __future__ import annotations

from ..._linked.hopper.compat import gl, gluon, hopper
from ..._linked.hopper.pipeline import FIELDS, SLOTS, barriers
from ..._linked.launch.entries import entry
from .arguments import Numbers, Options, Tensors, Tile
from .consumer import consume
from .producer import produce
from .structures import CacheMap, Inputs, Pipeline, Results, Rows, Sequences, Table, Tickets


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


@entry(gluon.jit)
def prefill_kernel(tensors: Tensors, numbers: Numbers, OPTIONS: Options, TILE: Tile):
    """``out = softmax(mask(scale * q @ k.T)) @ v``, with ``k`` and ``v`` in the pages of a cache.

    Keys and values of the queries' tokens may be separate tensors. A persistent kernel: one warp
    produces, two or three warpgroups consume.
    """
    dtype: gl.constexpr = tensors.q_desc.dtype
    box: gl.constexpr = [1, 1, 1, TILE.BLOCK_N, TILE.HEAD_DIM]
    k_s = gl.allocate_shared_memory(dtype, [TILE.STAGES_K] + box, tensors.k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [TILE.STAGES_V] + box, tensors.v_desc.layout)
    out_desc = tensors.out_desc
    pipeline = pipeline_of(tensors.q_desc, k_s, v_s, out_desc, TILE)
    results = Results(
        Rows(tensors.out_ptr, numbers.out),
        tensors.lse_ptr,
        tensors.alibi_slopes_ptr,
        tensors.sinks_ptr,
        None,
        None,
        numbers.scores,
        numbers.tokens,
        numbers.slopes,
    )
    inputs = Inputs(
        tensors.q_desc,
        CacheMap(tensors.k_desc, numbers.page_rows_k),
        CacheMap(tensors.v_desc, numbers.page_rows_v),
        tensors.new_k_desc,
        tensors.new_v_desc,
        Table(tensors.block_table_ptr, numbers.table.sequence, numbers.table.page),
        Sequences(tensors.cu_seqlens_q_ptr, tensors.seqlens_k_ptr, numbers.batch),
        Tickets(tensors.ticket_ptr, numbers.packs, numbers.total),
        numbers.scores,
    )
    # with a window, the producer has fewer: see EARLY in ``_copy_tile``
    REGISTERS: gl.constexpr = [240, 24] if OPTIONS.HAS_LEFT else [232, 40]
    gl.warp_specialize(
        [
            (consume, (TILE.WARPGROUPS - 3, out_desc, pipeline, results, OPTIONS, TILE)),
            (consume, (TILE.WARPGROUPS - 2, out_desc, pipeline, results, OPTIONS, TILE)),
            (consume, (TILE.WARPGROUPS - 1, out_desc, pipeline, results, OPTIONS, TILE)),
            (produce, (inputs, pipeline, OPTIONS, TILE)),
        ][3 - TILE.WARPGROUPS :],
        [4, 4, 1][3 - TILE.WARPGROUPS :],
        REGISTERS if TILE.WARPGROUPS == 2 else [160, 160, 32],
    )
