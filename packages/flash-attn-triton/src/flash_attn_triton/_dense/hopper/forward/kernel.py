"""Forward pass on Hopper: one warp issues TMA copies, two or three warpgroups issue wgmma."""

from __future__ import annotations

from ...._linked.hopper.compat import gl, gluon, hopper
from ...._linked.hopper.pipeline import FIELDS, SLOTS, barriers
from ...._linked.launch.entries import entry
from ..panels import allocate
from .arguments import Maps, Numbers, Options, Tensors, Tile
from .bias import make_ring
from .consumer import consume
from .producer import produce
from .structures import Panels, Pipeline, Program


@entry(gluon.jit)
def forward_kernel(maps: Maps, tensors: Tensors, numbers: Numbers, OPTIONS: Options, TILE: Tile):
    """``out = softmax(s) @ v`` and ``lse = logsumexp(s)``, where ``s = scale * q @ k.T + bias``.

    With ``MERGES``, ``out`` and ``lse`` hold results over other keys; the results over all keys
    replace them.

    The programs are persistent and warp-specialised: the last warp copies by TMA, the other
    warpgroups multiply.
    """
    wide, narrow = maps.wide, maps.narrow
    panels = Panels(
        (wide.q, narrow.q) if TILE.NARROW > 0 else (wide.q,),
        (wide.k, narrow.k) if TILE.NARROW > 0 else (wide.k,),
        (wide.v, narrow.v) if TILE.NARROW_V > 0 else (wide.v,),
        (wide.out, narrow.out) if TILE.NARROW_V > 0 else (wide.out,),
    )
    bias = None
    if maps.bias is not None:
        bias = make_ring(maps.bias, OPTIONS, TILE)
    before = None
    if OPTIONS.MERGES:
        before = barriers(TILE.WARPGROUPS, 1)
    pipeline = make_pipeline(panels, TILE)
    program = Program(panels, pipeline, tensors, numbers, bias, before, None, None)
    # two or three consumers, the last is WARPGROUPS - 1; with two, the slices drop the first line
    gl.warp_specialize(
        [
            (consume, (TILE.WARPGROUPS - 3, program, OPTIONS, TILE)),
            (consume, (TILE.WARPGROUPS - 2, program, OPTIONS, TILE)),
            (consume, (TILE.WARPGROUPS - 1, program, OPTIONS, TILE)),
            (produce, (program, OPTIONS, TILE)),
        ][3 - TILE.WARPGROUPS :],
        [4, 4, 1][3 - TILE.WARPGROUPS :],
        [240, 24] if TILE.WARPGROUPS == 2 else [160, 160, 32],
    )


@gluon.jit
def make_pipeline(maps, TILE: gl.constexpr):
    """Allocate the buffers in shared memory and initialise the mbarriers."""
    QUERIES: gl.constexpr = TILE.BUFFERS_Q * TILE.WARPGROUPS
    q_s = allocate(maps.q_descs, QUERIES)
    k_s = allocate(maps.k_descs, TILE.STAGES_K)
    v_s = allocate(maps.v_descs, TILE.STAGES_V)
    if TILE.SHARE:
        out_s = q_s
    else:
        out_s = allocate(maps.out_descs, TILE.WARPGROUPS)
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
