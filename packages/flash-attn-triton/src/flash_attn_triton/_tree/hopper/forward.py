"""Forward pass over a tree on Hopper: the dense pipeline, whose producer warp follows a path."""

from __future__ import annotations

from ..._dense.hopper.constants import named
from ..._dense.hopper.forward.arguments import Numbers, PanelMaps, Tensors
from ..._dense.hopper.forward.kernel import make_pipeline
from ..._dense.hopper.forward.structures import Panels, Program
from ..._linked.hopper.compat import gl, gluon
from ..._linked.launch.entries import Foreign, entry
from .arguments import ForwardNumbers
from .consumer import consume
from .producer import produce


@entry(gluon.jit)
def tree_forward_kernel(
    maps: PanelMaps,
    tensors: Tensors,
    parents_ptr: Foreign,
    numbers: ForwardNumbers,
    OPTIONS: gl.constexpr,
    TILE: gl.constexpr,
):
    """``out = softmax(s) v`` and ``lse = log(sum(exp(s)))`` over the keys of a path.

    The programs are persistent and warp-specialised, like those of ``forward_kernel``.
    """
    CALL: gl.constexpr = named(OPTIONS)
    SHAPE: gl.constexpr = named(TILE)
    WARPGROUPS: gl.constexpr = SHAPE.WARPGROUPS
    panels = Panels((maps.q,), (maps.k,), (maps.v,), (maps.out,))
    pipeline = make_pipeline(panels, SHAPE)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tails_s = gl.allocate_shared_memory(gl.int32, [SHAPE.STAGES_K, 1], PLAIN)
    # causal within the own segment
    dense = Numbers(
        scale=numbers.scale,
        softcap=numbers.softcap,
        keep_scale=1.0,
        dropout_threshold=0,
        window_left=-1,
        window_right=0,
        batch=numbers.segments,
        heads_q=numbers.heads_q,
        tokens_q=numbers.tokens,
        tokens_k=numbers.tokens,
        tiles=0,
        span=0,
        last=0,
        total=numbers.total,
        stride_alibi_b=0,
        stride_lse_b=0,
        stride_lse_h=0,
    )
    program = Program(panels, pipeline, tensors, dense, None, None, tails_s, None)
    # two or three consumers, the last is WARPGROUPS - 1; with two, the slices drop the first line
    gl.warp_specialize(
        [
            (consume, (WARPGROUPS - 3, program, CALL, SHAPE)),
            (consume, (WARPGROUPS - 2, program, CALL, SHAPE)),
            (consume, (WARPGROUPS - 1, program, CALL, SHAPE)),
            (produce, (program, parents_ptr, CALL, SHAPE)),
        ][3 - WARPGROUPS :],
        [4, 4, 1][3 - WARPGROUPS :],
        [240, 24] if WARPGROUPS == 2 else [160, 160, 32],
    )
