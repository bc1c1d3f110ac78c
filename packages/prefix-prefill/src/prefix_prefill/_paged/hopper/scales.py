"""Scales per token: from the cache to shared memory."""

from ..._linked.hopper.compat import gl, gluon


@gluon.jit
def _pointers_to(scales, head, page, slot):
    strides = scales.strides
    return scales.ptr + (head * strides.head + page * strides.page + slot * strides.slot)


@gluon.jit
def read_scales(first, inputs, seen, entries, TILE: gl.constexpr):
    """Read the scales of a tile's keys and values, each ``[BLOCK_N]``."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    key = first + gl.arange(0, TILE.BLOCK_N, layout)  # [BLOCK_N]
    is_seen = (key >= seen.first) & (key < seen.last)
    entry = entries + (key // TILE.PAGE).to(gl.int64) * inputs.table.stride_page
    page = gl.load(entry, mask=is_seen, other=0).to(gl.int64)
    slot = (key % TILE.PAGE).to(gl.int64)
    head = seen.head.to(gl.int64)
    k_at = _pointers_to(inputs.k_scales, head, page, slot)
    v_at = _pointers_to(inputs.v_scales, head, page, slot)
    k_scale = gl.load(k_at, mask=is_seen, other=0.0)
    v_scale = gl.load(v_at, mask=is_seen, other=0.0)
    return k_scale, v_scale


@gluon.jit
def put_scales(k_scale, v_scale, stage, scales_s):
    """Store the scales of a tile in shared memory, in fp32."""
    scales_s.index(2 * stage).store(k_scale.to(gl.float32))
    scales_s.index(2 * stage + 1).store(v_scale.to(gl.float32))
