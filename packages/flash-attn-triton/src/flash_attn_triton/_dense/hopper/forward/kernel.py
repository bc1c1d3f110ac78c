"""Forward pass on Hopper: one warp issues TMA copies, two or three warpgroups issue wgmma."""

from ...._linked.hopper.compat import gl, gluon, hopper
from ...._linked.hopper.pipeline import FIELDS, SLOTS, barriers
from ..panels import allocate
from .bias import make_ring
from .consumer import consume
from .producer import produce
from .structures import Before, Options, Pipeline, Problem, Schedule, Tile

# not specialised on values or alignment; see ``runtime.py``
NUMBERS = (
    "dropout_threshold",
    "window_left",
    "window_right",
    "batch",
    "heads_q",
    "tokens_q",
    "tokens_k",
    "tiles",
    "span",
    "last",
    "total",
    "stride_alibi_b",
    "stride_lse_b",
    "stride_lse_h",
)
POINTERS = (
    "lse_ptr",
    "ticket_ptr",
    "alibi_slopes_ptr",
    "sinks_ptr",
    "factors_ptr",
    "rng_state_ptr",
    "cu_seqlens_q_ptr",
    "cu_seqlens_k_ptr",
    "seqused_k_ptr",
)


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    q_narrow_desc,
    k_narrow_desc,
    v_narrow_desc,
    out_narrow_desc,
    bias_desc,
    lse_ptr,
    ticket_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    factors_ptr,
    rng_state_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_k_ptr,
    scale,
    softcap,
    keep_scale,
    dropout_threshold,
    window_left,
    window_right,
    batch,
    heads_q,
    tokens_q,
    tokens_k,
    tiles,
    span,
    last,
    total,
    stride_alibi_b,
    stride_lse_b,
    stride_lse_h,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    RAGGED: gl.constexpr,
    BIAS_BATCH: gl.constexpr,
    BIAS_HEADS: gl.constexpr,
    BIAS_ROWS: gl.constexpr,
    MERGES: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    NARROW: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    NARROW_V: gl.constexpr,
    BUFFERS_Q: gl.constexpr,
    STAGES_K: gl.constexpr,
    STAGES_V: gl.constexpr,
    STAGES_B: gl.constexpr,
    SHARE: gl.constexpr,
    PIPELINE: gl.constexpr,
    LAG: gl.constexpr,
    ORDERED: gl.constexpr,
):
    """``out = softmax(s) @ v`` and ``lse = logsumexp(s)``, where ``s = scale * q @ k.T + bias``.

    With ``MERGES``, ``out`` and ``lse`` hold results over other keys; the results over all keys
    replace them.

    The programs are persistent and warp-specialised: the last warp copies by TMA, the other
    warpgroups multiply. ``structures.py`` explains the arguments.
    """
    OPTIONS: gl.constexpr = Options(
        GROUP,
        PACK,
        HAS_LEFT,
        HAS_RIGHT,
        HAS_SOFTCAP,
        RAGGED,
        BIAS_BATCH,
        BIAS_HEADS,
        BIAS_ROWS,
        MERGES,
    )
    TILE: gl.constexpr = Tile(
        WARPGROUPS,
        ROWS,
        BLOCK_N,
        HEAD_DIM,
        NARROW,
        HEAD_DIM_V,
        NARROW_V,
        BUFFERS_Q,
        STAGES_K,
        STAGES_V,
        STAGES_B,
        SHARE,
        PIPELINE,
        LAG,
        ORDERED,
    )
    q_descs = (q_desc, q_narrow_desc) if NARROW > 0 else (q_desc,)
    k_descs = (k_desc, k_narrow_desc) if NARROW > 0 else (k_desc,)
    v_descs = (v_desc, v_narrow_desc) if NARROW_V > 0 else (v_desc,)
    out_descs = (out_desc, out_narrow_desc) if NARROW_V > 0 else (out_desc,)
    bias = None
    if bias_desc is not None:
        bias = make_ring(bias_desc, OPTIONS, TILE)
    before = None
    if MERGES:
        before = Before(stride_lse_b, stride_lse_h, barriers(WARPGROUPS, 1))
    problem = Problem(
        lse_ptr,
        cu_seqlens_q_ptr,
        alibi_slopes_ptr,
        sinks_ptr,
        factors_ptr,
        rng_state_ptr,
        scale,
        softcap,
        keep_scale,
        dropout_threshold,
        window_left,
        window_right,
        batch,
        heads_q,
        tokens_q,
        stride_alibi_b,
        bias,
        before,
    )
    schedule = Schedule(
        ticket_ptr, cu_seqlens_k_ptr, seqused_k_ptr, tokens_k, tiles, span, last, total, bias_desc
    )
    pipeline = make_pipeline(q_descs, k_descs, v_descs, out_descs, TILE)
    # two or three consumers, the last is WARPGROUPS - 1; with two, the slices drop the first line
    gl.warp_specialize(
        [
            (consume, (WARPGROUPS - 3, out_descs, pipeline, problem, OPTIONS, TILE)),
            (consume, (WARPGROUPS - 2, out_descs, pipeline, problem, OPTIONS, TILE)),
            (consume, (WARPGROUPS - 1, out_descs, pipeline, problem, OPTIONS, TILE)),
            (produce, (q_descs, k_descs, v_descs, pipeline, problem, schedule, OPTIONS, TILE)),
        ][3 - WARPGROUPS :],
        [4, 4, 1][3 - WARPGROUPS :],
        [240, 24] if WARPGROUPS == 2 else [160, 160, 32],
    )


@gluon.jit
def make_pipeline(q_descs, k_descs, v_descs, out_descs, TILE: gl.constexpr):
    """Allocate the buffers in shared memory and initialise the mbarriers."""
    QUERIES: gl.constexpr = TILE.BUFFERS_Q * TILE.WARPGROUPS
    q_s = allocate(q_descs, QUERIES)
    k_s = allocate(k_descs, TILE.STAGES_K)
    v_s = allocate(v_descs, TILE.STAGES_V)
    if TILE.SHARE:
        out_s = q_s
    else:
        out_s = allocate(out_descs, TILE.WARPGROUPS)
    fields_s = gl.allocate_shared_memory(
        gl.int32, [SLOTS, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_full = barriers(QUERIES, 1)
    q_empty = barriers(QUERIES, 1)
    k_full = barriers(TILE.STAGES_K, 1)
    v_full = barriers(TILE.STAGES_V, 1)
    tile_full = barriers(SLOTS, 1)
    tile_empty = barriers(SLOTS, TILE.WARPGROUPS)
    hopper.fence_async_shared()
    return Pipeline(
        q_s, k_s, v_s, out_s, fields_s, q_full, q_empty, k_full, v_full, tile_full, tile_empty
    )
