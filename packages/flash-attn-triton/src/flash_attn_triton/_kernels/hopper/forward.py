"""Forward pass on Hopper: one warp copies, two or three warpgroups multiply in turns."""

from ._linked.compat import gl, gluon, hopper
from ._linked.pipeline import FIELDS, SLOTS, barriers
from .consumer import consume
from .producer import produce

# the kernel takes numbers and pointers as they come; see ``runtime.py``
NUMBERS = (
    "window_left", "window_right", "batch", "heads_q", "tokens_q", "tokens_k", "tiles", "span",
    "last", "total", "stride_alibi_b",
)  # fmt: skip
POINTERS = (
    "lse_ptr", "ticket_ptr", "alibi_slopes_ptr", "sinks_ptr", "factors_ptr", "cu_seqlens_q_ptr",
    "cu_seqlens_k_ptr", "seqused_k_ptr",
)  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, ticket_ptr, alibi_slopes_ptr, sinks_ptr,
    factors_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, scale, softcap, window_left,
    window_right, batch, heads_q, tokens_q, tokens_k, tiles, span, last, total, stride_alibi_b,
    GROUP: gl.constexpr,  # query heads per key head
    PACK: gl.constexpr,  # those of them that share a tile
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    RAGGED: gl.constexpr,  # form of the tensor maps; see ``coordinates``
    WARPGROUPS: gl.constexpr,
    ROWS: gl.constexpr,  # of a warpgroup
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BUFFERS_Q: gl.constexpr,
    STAGES_K: gl.constexpr,
    STAGES_V: gl.constexpr,
    SHARE: gl.constexpr,  # the output leaves through the memory of the queries
    PIPELINE: gl.constexpr,  # the walk does not stop between tiles of queries
    LAG: gl.constexpr,  # pivots may lag behind the maxima
):  # fmt: skip
    """Share out the work of a persistent program: one producer, two or three consumers."""
    dtype: gl.constexpr = q_desc.dtype
    QUERIES: gl.constexpr = BUFFERS_Q * WARPGROUPS
    TOKENS: gl.constexpr = ROWS // PACK
    q_s = gl.allocate_shared_memory(dtype, [QUERIES, 1, 1, PACK, TOKENS, HEAD_DIM], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES_K, 1, 1, 1, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_shape: gl.constexpr = v_desc.block_type.shape
    v_s = gl.allocate_shared_memory(
        dtype, [STAGES_V, 1, 1, 1, v_shape[3], v_shape[4]], v_desc.layout
    )
    if SHARE:
        out_s = q_s
    else:
        out_s = gl.allocate_shared_memory(
            out_desc.dtype, [WARPGROUPS, 1, 1, PACK, TOKENS, HEAD_DIM_V], out_desc.layout
        )
    fields_s = gl.allocate_shared_memory(
        gl.int32, [SLOTS, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_full = barriers(QUERIES, 1)
    q_empty = barriers(QUERIES, 1)
    k_full = barriers(STAGES_K, 1)
    v_full = barriers(STAGES_V, 1)
    tile_full = barriers(SLOTS, 1)
    tile_empty = barriers(SLOTS, WARPGROUPS)
    hopper.fence_async_shared()
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (consume, (
                    0, out_desc, q_s, k_s, v_s, out_s, fields_s, q_full, q_empty, k_full, v_full,
                    tile_full, tile_empty, lse_ptr, cu_seqlens_q_ptr, alibi_slopes_ptr, sinks_ptr,
                    factors_ptr, scale, softcap, window_left, window_right, batch, heads_q,
                    tokens_q, stride_alibi_b, GROUP, PACK, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, RAGGED,
                    WARPGROUPS, ROWS, BLOCK_N, HEAD_DIM, HEAD_DIM_V, BUFFERS_Q, STAGES_K,
                    STAGES_V, SHARE, PIPELINE, LAG,
                )),
                (consume, (
                    1, out_desc, q_s, k_s, v_s, out_s, fields_s, q_full, q_empty, k_full, v_full,
                    tile_full, tile_empty, lse_ptr, cu_seqlens_q_ptr, alibi_slopes_ptr, sinks_ptr,
                    factors_ptr, scale, softcap, window_left, window_right, batch, heads_q,
                    tokens_q, stride_alibi_b, GROUP, PACK, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, RAGGED,
                    WARPGROUPS, ROWS, BLOCK_N, HEAD_DIM, HEAD_DIM_V, BUFFERS_Q, STAGES_K,
                    STAGES_V, SHARE, PIPELINE, LAG,
                )),
                (produce, (
                    q_desc, k_desc, v_desc, q_s, k_s, v_s, fields_s, q_full, q_empty, k_full,
                    v_full, tile_full, tile_empty, ticket_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
                    seqused_k_ptr, window_left, window_right, batch, heads_q, tokens_q, tokens_k,
                    tiles, span, last, total, GROUP, PACK, HAS_LEFT, HAS_RIGHT,
                    RAGGED, WARPGROUPS, ROWS, BLOCK_N, BUFFERS_Q, STAGES_K, STAGES_V,
                    PIPELINE,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (
                    0, out_desc, q_s, k_s, v_s, out_s, fields_s, q_full, q_empty, k_full, v_full,
                    tile_full, tile_empty, lse_ptr, cu_seqlens_q_ptr, alibi_slopes_ptr, sinks_ptr,
                    factors_ptr, scale, softcap, window_left, window_right, batch, heads_q,
                    tokens_q, stride_alibi_b, GROUP, PACK, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, RAGGED,
                    WARPGROUPS, ROWS, BLOCK_N, HEAD_DIM, HEAD_DIM_V, BUFFERS_Q, STAGES_K,
                    STAGES_V, SHARE, PIPELINE, LAG,
                )),
                (consume, (
                    1, out_desc, q_s, k_s, v_s, out_s, fields_s, q_full, q_empty, k_full, v_full,
                    tile_full, tile_empty, lse_ptr, cu_seqlens_q_ptr, alibi_slopes_ptr, sinks_ptr,
                    factors_ptr, scale, softcap, window_left, window_right, batch, heads_q,
                    tokens_q, stride_alibi_b, GROUP, PACK, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, RAGGED,
                    WARPGROUPS, ROWS, BLOCK_N, HEAD_DIM, HEAD_DIM_V, BUFFERS_Q, STAGES_K,
                    STAGES_V, SHARE, PIPELINE, LAG,
                )),
                (consume, (
                    2, out_desc, q_s, k_s, v_s, out_s, fields_s, q_full, q_empty, k_full, v_full,
                    tile_full, tile_empty, lse_ptr, cu_seqlens_q_ptr, alibi_slopes_ptr, sinks_ptr,
                    factors_ptr, scale, softcap, window_left, window_right, batch, heads_q,
                    tokens_q, stride_alibi_b, GROUP, PACK, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, RAGGED,
                    WARPGROUPS, ROWS, BLOCK_N, HEAD_DIM, HEAD_DIM_V, BUFFERS_Q, STAGES_K,
                    STAGES_V, SHARE, PIPELINE, LAG,
                )),
                (produce, (
                    q_desc, k_desc, v_desc, q_s, k_s, v_s, fields_s, q_full, q_empty, k_full,
                    v_full, tile_full, tile_empty, ticket_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
                    seqused_k_ptr, window_left, window_right, batch, heads_q, tokens_q, tokens_k,
                    tiles, span, last, total, GROUP, PACK, HAS_LEFT, HAS_RIGHT,
                    RAGGED, WARPGROUPS, ROWS, BLOCK_N, BUFFERS_Q, STAGES_K, STAGES_V,
                    PIPELINE,
                )),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip
