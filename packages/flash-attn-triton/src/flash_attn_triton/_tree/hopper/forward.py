"""Forward pass over a tree on Hopper: the dense pipeline, whose producer warp follows a path."""

from ..._dense.hopper.forward.kernel import make_pipeline
from ..._dense.hopper.forward.structures import Options, Problem, Tile
from ..._linked.hopper.compat import gl, gluon
from .consumer import consume
from .producer import produce
from .structures import TreeForwardNumbers, TreeSchedule

POINTERS = ("lse_ptr", "ticket_ptr", "sinks_ptr", "cu_seqlens_ptr", "parents_ptr")


@gluon.jit(do_not_specialize=TreeForwardNumbers._fields, do_not_specialize_on_alignment=POINTERS)
def tree_forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse_ptr,
    ticket_ptr,
    sinks_ptr,
    cu_seqlens_ptr,
    parents_ptr,
    scale,
    softcap,
    segments,
    heads_q,
    tokens,
    total,
    GROUP: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
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
    """``out = softmax(s) v`` and ``lse = log(sum(exp(s)))`` over the keys of a path.

    The programs are persistent and warp-specialised, like those of ``forward_kernel``. The
    parameters are the fields of ``TreeForwardTensors``, ``TreeForwardNumbers``, ``TreeOptions`` and
    ``Tile``.
    """
    # no GQA packing; causal within the own segment
    OPTIONS: gl.constexpr = Options(
        GROUP, 1, False, True, HAS_SOFTCAP, True, False, False, False, False
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
    problem = Problem(
        lse_ptr,
        cu_seqlens_ptr,
        None,
        sinks_ptr,
        None,
        None,
        scale,
        softcap,
        1.0,
        0,
        -1,
        0,
        segments,
        heads_q,
        tokens,
        0,
        None,
        None,
    )
    schedule = TreeSchedule(ticket_ptr, parents_ptr, total)
    pipeline = make_pipeline((q_desc,), (k_desc,), (v_desc,), (out_desc,), TILE)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tails_s = gl.allocate_shared_memory(gl.int32, [STAGES_K, 1], PLAIN)
    # two or three consumers, the last is WARPGROUPS - 1; with two, the slices drop the first line
    gl.warp_specialize(
        [
            (consume, (WARPGROUPS - 3, (out_desc,), pipeline, tails_s, problem, OPTIONS, TILE)),
            (consume, (WARPGROUPS - 2, (out_desc,), pipeline, tails_s, problem, OPTIONS, TILE)),
            (consume, (WARPGROUPS - 1, (out_desc,), pipeline, tails_s, problem, OPTIONS, TILE)),
            (
                produce,
                (
                    (q_desc,),
                    (k_desc,),
                    (v_desc,),
                    pipeline,
                    tails_s,
                    problem,
                    schedule,
                    OPTIONS,
                    TILE,
                ),
            ),
        ][3 - WARPGROUPS :],
        [4, 4, 1][3 - WARPGROUPS :],
        [240, 24] if WARPGROUPS == 2 else [160, 160, 32],
    )
