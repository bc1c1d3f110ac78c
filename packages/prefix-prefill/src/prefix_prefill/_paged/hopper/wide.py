"""Prefill over a cache of 8 or 4 bits on Hopper; keys and values are widened to 16 bits.

The kernel of ``attention.py``, with one or two widening warpgroups in place of the copying warp.
They read tiles of keys and values into registers, two parts ahead, widen them to the dtype of the
queries, which holds all numbers of 8 bits exactly, and store them in shared memory. Pages may have
any size. The descales of an FP8 cache are applied to scores and output. A cache of integers has a
scale per token: shared memory holds the scales of each tile, which are applied to the columns of
the scores (keys) and to the probabilities (values).
"""

from __future__ import annotations

from ..._linked.hopper.compat import gl, gluon
from ..._linked.launch.entries import entry
from .arguments import Numbers, Options, Tensors, Tile, WideNumbers, WideTensors
from .attention import pipeline_of
from .consumer import consume
from .structures import Inputs, Results, Rows, Sequences, Table, Tickets, TokenScales, WideCache
from .wide_producer import bring_first, bring_values


@entry(gluon.jit)
def prefill_wide_kernel(
    tensors: Tensors,
    cache: WideTensors,
    numbers: Numbers,
    wide: WideNumbers,
    OPTIONS: Options,
    TILE: Tile,
):
    """``out = softmax(mask(scale * q @ k.T)) @ v``, with ``k`` and ``v`` in pages of 8 or 4 bits.

    Keys and values of the queries' tokens may be separate tensors, in 16 bits. A persistent kernel:
    one or two warpgroups produce, two consume.
    """
    dtype: gl.constexpr = tensors.q_desc.dtype
    box: gl.constexpr = [1, 1, 1, TILE.BLOCK_N, TILE.HEAD_DIM]  # as TMA copies it
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(box, dtype)
    k_s = gl.allocate_shared_memory(dtype, [TILE.STAGES_K] + box, layout)
    v_s = gl.allocate_shared_memory(dtype, [TILE.STAGES_V] + box, layout)
    scales_s, k_scales, v_scales = None, None, None
    if cache.k_scale_cache_ptr is not None:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        shape: gl.constexpr = [2 * TILE.STAGES_K, TILE.BLOCK_N]
        scales_s = gl.allocate_shared_memory(gl.float32, shape, plain)
        k_scales = TokenScales(cache.k_scale_cache_ptr, wide.k_scales)
        v_scales = TokenScales(cache.v_scale_cache_ptr, wide.v_scales)
    out_desc = tensors.out_desc
    pipeline = pipeline_of(tensors.q_desc, k_s, v_s, out_desc, TILE)
    results = Results(
        Rows(tensors.out_ptr, numbers.out),
        tensors.lse_ptr,
        tensors.alibi_slopes_ptr,
        tensors.sinks_ptr,
        cache.k_descale_ptr,
        cache.v_descale_ptr,
        numbers.scores,
        numbers.tokens,
        numbers.slopes,
        wide.heads_k,
        scales_s,
    )
    inputs = Inputs(
        tensors.q_desc,
        WideCache(cache.k_cache_ptr, numbers.page_rows_k, wide.k_cache),
        WideCache(cache.v_cache_ptr, numbers.page_rows_v, wide.v_cache),
        tensors.new_k_desc,
        tensors.new_v_desc,
        Table(tensors.block_table_ptr, numbers.table.sequence, numbers.table.page),
        Sequences(tensors.cu_seqlens_q_ptr, tensors.seqlens_k_ptr, numbers.batch),
        Tickets(tensors.ticket_ptr, numbers.packs, numbers.total),
        numbers.scores,
        k_scales,
        v_scales,
        scales_s,
    )
    if TILE.WIDENERS == 2:
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
