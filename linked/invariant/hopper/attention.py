"""Attention on Hopper under the law of docs/numerics.md, over dense keys or pages of a cache.

One warp copies by TMA, or a warpgroup loads; one or two warpgroups multiply (wgmma). The products,
sums and roundings of a row are the same in all builds. Builds differ in the source of keys, in rows
per program, in masks that hide nothing, and in whether a program walks all segments or one.
"""

from __future__ import annotations

from ...hopper.compat import gl, gluon, hopper
from ...hopper.pipeline import FIELDS, SLOTS, barriers
from ...launch.entries import entry
from ..arguments import Options
from .arguments import Numbers, Tensors, Tile
from .consumer import consume
from .producer import produce
from .structures import Inputs, Parts, Pipeline, Results


@entry(gluon.jit)
def invariant_hopper_kernel(tensors: Tensors, numbers: Numbers, OPTIONS: Options, TILE: Tile):
    """``out = softmax(mask(scale * q @ k.T)) @ v``, or the sums of single segments of the keys."""
    TOKENS: gl.constexpr = TILE.ROWS // TILE.PACK
    dtype: gl.constexpr = tensors.q_desc.dtype
    box_q: gl.constexpr = [TILE.WARPGROUPS, 1, 1, TILE.PACK, TOKENS, TILE.HEAD_DIM]
    q_s = gl.allocate_shared_memory(dtype, box_q, tensors.q_desc.layout)
    # one warp copies by TMA, or a warpgroup loads
    WARPS: gl.constexpr = 1 if OPTIONS.PIECE > 0 else 4
    box_k: gl.constexpr = [1, 1, 1, TILE.BLOCK_N, TILE.HEAD_DIM]
    box_v: gl.constexpr = [1, 1, 1, TILE.BLOCK_N, TILE.HEAD_DIM_V]
    layout_k: gl.constexpr = gl.NVMMASharedLayout.get_default_for(box_k, dtype)
    layout_v: gl.constexpr = gl.NVMMASharedLayout.get_default_for(box_v, dtype)
    k_s = gl.allocate_shared_memory(dtype, [TILE.STAGES_K] + box_k, layout_k)
    v_s = gl.allocate_shared_memory(dtype, [TILE.STAGES_V] + box_v, layout_v)
    out_s = q_s
    if not TILE.SHARE and tensors.part_out_ptr is None:
        box_out: gl.constexpr = [TILE.WARPGROUPS, 1, 1, TILE.PACK, TOKENS, TILE.HEAD_DIM_V]
        out_s = gl.allocate_shared_memory(dtype, box_out, tensors.out_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    fields_s = gl.allocate_shared_memory(gl.int32, [SLOTS, FIELDS], plain)
    q_full, q_empty = barriers(TILE.WARPGROUPS, 1), barriers(TILE.WARPGROUPS, 1)
    k_full, v_full = barriers(TILE.STAGES_K, 1), barriers(TILE.STAGES_V, 1)
    tile_full, tile_empty = barriers(SLOTS, 1), barriers(SLOTS, TILE.WARPGROUPS)
    hopper.fence_async_shared()
    pipeline = Pipeline(
        q_s, k_s, v_s, out_s, fields_s, q_full, q_empty, k_full, v_full, tile_full, tile_empty
    )
    scores, counts, out_desc = numbers.scores, numbers.counts, tensors.out_desc
    sums = Parts(tensors.part_out_ptr, tensors.part_max_ptr, tensors.part_sum_ptr, tensors.park_ptr)
    starts = tensors.cu_seqlens_q_ptr
    results = Results(tensors.lse_ptr, sums, tensors.sinks_ptr, starts, scores, counts)
    inputs = Inputs(
        tensors.q_desc,
        tensors.k_desc,
        tensors.v_desc,
        tensors.k_ptr,
        tensors.v_ptr,
        tensors.new_k_ptr,
        tensors.new_v_ptr,
        tensors.k_descale_ptr,
        tensors.v_descale_ptr,
        tensors.block_table_ptr,
        starts,
        tensors.cu_seqlens_k_ptr,
        tensors.seqlens_k_ptr,
        tensors.ticket_ptr,
        scores,
        counts,
        numbers.places,
    )
    gl.warp_specialize(
        [
            (consume, (TILE.WARPGROUPS - 2, out_desc, pipeline, results, OPTIONS, TILE)),
            (consume, (TILE.WARPGROUPS - 1, out_desc, pipeline, results, OPTIONS, TILE)),
            (produce, (inputs, pipeline, OPTIONS, TILE, WARPS)),
        ][2 - TILE.WARPGROUPS :],
        [4, WARPS][2 - TILE.WARPGROUPS :],
        [240, 24 if OPTIONS.PIECE > 0 else 232][2 - TILE.WARPGROUPS :],
    )
