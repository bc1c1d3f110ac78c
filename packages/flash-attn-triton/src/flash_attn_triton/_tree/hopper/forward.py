"""Forward pass over a tree on Hopper: the dense pipeline, whose producer warp follows a path."""

from __future__ import annotations

from ..._dense.hopper.forward.arguments import Numbers, Options, PanelMaps, Tensors, Tile
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
    OPTIONS: Options,
    TILE: Tile,
):
    """``out = softmax(s) v`` and ``lse = log(sum(exp(s)))`` over the keys of a path.

    The programs are persistent and warp-specialised, like those of ``forward_kernel``.
    """
    panels = Panels((maps.q,), (maps.k,), (maps.v,), (maps.out,))
    pipeline = make_pipeline(panels, TILE)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tails_s = gl.allocate_shared_memory(gl.int32, [TILE.STAGES_K, 1], PLAIN)
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
            (consume, (TILE.WARPGROUPS - 3, program, OPTIONS, TILE)),
            (consume, (TILE.WARPGROUPS - 2, program, OPTIONS, TILE)),
            (consume, (TILE.WARPGROUPS - 1, program, OPTIONS, TILE)),
            (produce, (program, parents_ptr, OPTIONS, TILE)),
        ][3 - TILE.WARPGROUPS :],
        [4, 4, 1][3 - TILE.WARPGROUPS :],
        [240, 24] if TILE.WARPGROUPS == 2 else [160, 160, 32],
    )
