"""Tiles of the Hopper kernels: functions that need no GPU; see ``tiles.py``."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from attn_common import cdiv

from .._linked.host.tiles import hopper_registers, padded_head_dim
from .call import Options, Tensors


@functools.cache
def panels_of(head_dim: int) -> tuple[int, int]:
    """Return the widths ``(wide, narrow)`` of the panels that a head dimension is cut into.

    Sides of tiles are powers of two. So a head dimension above 64 that would leave at least a
    quarter of the next power of two empty is cut in two: 96 into 64 and 32, 80 into 64 and 16, 192
    into 128 and 64. Every other head dimension is one panel, and ``narrow`` is 0.
    """
    width = padded_head_dim(head_dim)
    wide = width // 2
    if wide < 64 or 4 * head_dim > 3 * width:
        return width, 0
    return wide, padded_head_dim(head_dim - wide)


class ForwardPanels(NamedTuple):
    """Widths of the panels of queries and keys, and of values and output."""

    qk: tuple[int, int]
    v: tuple[int, int]

    @property
    def is_cut(self) -> bool:
        return self.qk[1] > 0 or self.v[1] > 0

    @property
    def can_share(self) -> bool:
        """Whether the output fits into the memory of the queries, panel by panel."""
        return self.qk[0] == self.v[0] and self.v[1] in (0, self.qk[1])


@functools.cache
def forward_panels(head_dim: int, head_dim_v: int, itemsize: int, has_bias: bool) -> ForwardPanels:
    """Return the panels of the forward on Hopper.

    Nothing is cut in FP8, whose values are transposed, nor if a head dimension is 256, nor with a
    bias if the output would not fit into the memory of the queries.
    """
    cut = ForwardPanels(panels_of(head_dim), panels_of(head_dim_v))
    if itemsize == 1 or max(cut.qk[0], cut.v[0]) > 128 or (has_bias and not cut.can_share):
        return ForwardPanels((padded_head_dim(head_dim), 0), (padded_head_dim(head_dim_v), 0))
    return cut


# most heads that share a tile
MOST_PACKED = 16
# queries and keys from which a causal call at d=64 uses three warpgroups: the larger tile computes
# more masked scores, but takes fewer steps
LONG = 8192


@dataclass(frozen=True)
class HopperTile:
    """The tile of a program; every warpgroup has 64 rows."""

    warpgroups: int
    block_n: int
    stages_k: int
    stages_v: int
    share: bool = False  # the output is stored from the buffer of the queries
    buffers_q: int = 1
    pipeline: bool = False  # the walk does not stop between tiles of queries
    lag: bool = False  # pivots of the softmax may be smaller than the maxima
    ordered: bool = False  # ptxas may not move the softmax after the product with the values
    stages_b: int = 0  # stages of the bias
    rows: int = 64

    @property
    def block_m(self) -> int:
        return self.warpgroups * self.rows

    @property
    def registers(self) -> int:
        """Registers per thread, at the start."""
        return hopper_registers(self.warpgroups)


def is_long_call(x: Tensors, options: Options) -> bool:
    """Tell whether sequences are known to be ``LONG`` and no option needs more registers.

    The host does not know the lengths of a packed call.
    """
    return (
        x.cu_seqlens_q is None
        and min(x.q.shape[1], x.k.shape[1]) >= LONG
        and options.window_left < 0
        and options.softcap == 0.0
        and x.alibi_slopes is None
    )


@functools.cache
def hopper_tile(
    head_dim: int, is_causal: bool, itemsize: int = 2, is_long: bool = False
) -> HopperTile:
    """Return the tile for the wider of the two head dimensions; see ``is_long_call``."""
    width = padded_head_dim(head_dim)
    if itemsize == 1:
        if width <= 128:
            return HopperTile(3, 128, 4, 4)
        return HopperTile(2, 128, 2, 2)
    if width <= 64:
        if is_causal and is_long:
            return HopperTile(3, 128, 2, 2, buffers_q=2, pipeline=True)
        if is_causal:
            return HopperTile(2, 128, 3, 3, buffers_q=2, pipeline=True)
        return HopperTile(3, 128, 2, 2, lag=True)
    if width <= 128:
        if is_causal:
            return HopperTile(2, 128, 3, 2, lag=True)
        return HopperTile(2, 128, 2, 2, buffers_q=2, pipeline=True)
    return HopperTile(2, 64, 3, 2, share=True, lag=True)


@functools.cache
def hopper_panel_tile(panels: ForwardPanels) -> HopperTile:
    """Return the tile for a head dimension in two panels, without a bias of many rows."""
    width, width_v = sum(panels.qk), sum(panels.v)
    if max(width, width_v) <= 96:
        return HopperTile(2, 128, 3, 3, buffers_q=2, pipeline=True)
    if max(width, width_v) <= 128:
        return HopperTile(2, 128, 2, 2, buffers_q=2, pipeline=True)
    if width_v <= 128 or width == width_v <= 160:
        return HopperTile(2, 128, 2, 2, share=True, lag=True)
    return HopperTile(2, 64, 3, 2, lag=True, ordered=True)


@functools.cache
def hopper_bias_tile(head_dim: int, bias_bytes: int, is_masked: bool) -> HopperTile:
    """Return the tile with a bias, which takes shared memory from the output and the keys.

    An fp32 bias has half as many keys per tile, because its elements are twice as large.
    """
    width = padded_head_dim(head_dim)
    if width > 128:
        return HopperTile(2, 64, 2, 2, share=True, lag=True, stages_b=4 // bias_bytes)
    block_n = 256 // bias_bytes
    if width <= 64 and is_masked:  # three warpgroups have no registers for a second loop
        return HopperTile(2, block_n, 3, 3, lag=True, stages_b=2)
    if width <= 64:
        return HopperTile(3, block_n, 2, 2, lag=True, stages_b=2)
    return HopperTile(2, block_n, 2, 2, share=True, lag=True, stages_b=2)


@functools.cache
def hopper_pack(tokens_q: int, group: int, block_m: int) -> int:
    """Return how many heads of a group share a tile of queries (GQA packing).

    If queries are few, one tile holds the tokens of several heads with the same keys, provided that
    this saves at least a quarter of the tiles. Else the result is 1; a third possible number would
    mean a third compilation.
    """
    most = min(group & -group, MOST_PACKED)
    saves = cdiv(tokens_q, block_m // most) <= 0.75 * most * cdiv(tokens_q, block_m)
    return most if saves else 1


# stages of queries, and of output gradients, in a separate launch for dv
VALUE_STAGES = 3


@dataclass(frozen=True)
class HopperBackwardTile:
    """The tile of the Hopper backward."""

    block_m: int  # queries per step
    stages_q: int
    stages_o: int
    block_n: int = 128  # keys per program
    stages_b: int = 0  # stages of the bias
    is_apart: bool = False  # a separate launch makes dv


@functools.cache
def hopper_backward_tile(
    head_dim: int, is_heavy: bool = False, can_part: bool = False
) -> HopperBackwardTile:
    """Return the tile for the wider of the two head dimensions.

    ``is_heavy``: the call has a softcap or dropout, which needs more registers. ``can_part``: dv
    may have a separate launch.
    """
    if padded_head_dim(head_dim) <= 64:
        if is_heavy:
            return HopperBackwardTile(64, 3, 3)
        return HopperBackwardTile(128, 3, 2)
    if padded_head_dim(head_dim) <= 128:
        return HopperBackwardTile(64, 2, 2)
    if head_dim <= 192 and can_part:
        # dk of 128 keys fills the registers
        return HopperBackwardTile(64, 2, 2, is_apart=True)
    # dk and dv of 64 keys fill the registers
    return HopperBackwardTile(64, 2, 2, block_n=64)


@functools.cache
def hopper_backward_bias_tile(head_dim: int, bias_bytes: int) -> HopperBackwardTile:
    """Return the tile with a bias, whose stages take shared memory and named barriers."""
    if padded_head_dim(head_dim) <= 64:
        return HopperBackwardTile(64, 2, 2, stages_b=2)
    if padded_head_dim(head_dim) <= 128:
        return HopperBackwardTile(64, 2, 2, stages_b=4 // bias_bytes)
    return HopperBackwardTile(64, 2, 1, block_n=64, stages_b=1)
