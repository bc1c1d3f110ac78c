"""The host side of the Hopper backward: tensor maps, the sums of dq, the launches."""

from __future__ import annotations

import torch
from attn_common import cdiv
from torch import Tensor

from ..._configs import HopperBackwardTile, hopper_backward_tile
from ..common import BackwardInputs, Plan
from ._linked.compat import gl
from ._linked.gradients import ROWS
from ._linked.tma import MapForm, MapLaunch
from .backward import backward_kernel
from .round_dq import round_dq_kernel

# of 32 sums: more than a GPU holds, and no more than int32 counts
MOST_ROWS = 0x7FFF0000
# registers a thread at the start
REGISTERS = 168


class SumsForm(MapForm):
    """How sums of dq are mapped: rows of 32, of which so many are added to at once."""

    def __init__(self, rows: int) -> None:
        # in place of the base class's: these are no tokens, and no call has more or less of them
        self._copies = False
        self.shape = [MOST_ROWS, 32]
        self.strides = [32, 1]
        self.block_shape = [rows, 32]
        self.layout = gl.NVMMASharedLayout.get_default_for(self.block_shape, gl.float32)
        self.encoded = {}


def is_worth_it(plan: Plan, tokens_q: int) -> bool:
    """Say whether sequences fill half of a tile of queries, in the mean of a packed call.

    Below, most of the sums of dq, fp32 and a whole tile for each sequence and head, would be
    padding: many times the memory of the inputs.
    """
    tile = hopper_backward_tile(plan.widest_head, plan.options.softcap != 0.0)
    sequences = plan.batch if plan.is_packed else 1
    return tokens_q >= sequences * tile.block_m // 2


def new_sums(plan: Plan, q: Tensor, tile: HopperBackwardTile | None = None) -> Tensor:
    """Return the memory in which dq is summed: tiles of queries, which are to be set to 0."""
    tile = tile or hopper_backward_tile(plan.widest_head, plan.options.softcap != 0.0)
    slots = plan.tiles(q.shape[-3], tile.block_m) * plan.heads_q * plan.grid_batch
    return q.new_empty((slots, tile.block_m * plan.constants["BLOCK_D"]), dtype=torch.float32)


def launch_backward_hopper(
    plan: Plan, inputs: BackwardInputs, dq: Tensor, dk: Tensor, dv: Tensor, sums: Tensor,
    tile: HopperBackwardTile | None = None,
) -> None:  # fmt: skip
    """Fill ``dq``, ``dk`` and ``dv`` for a call that ``takes_hopper_backward`` took.

    ``sums`` are those of ``new_sums``, set to 0.
    """
    q, k, v, dout = *inputs[:3], inputs.dout
    cu_seqlens_q, cu_seqlens_k = inputs.optional[3:5]
    options, ragged = plan.options, plan.is_packed
    tile = tile or hopper_backward_tile(plan.widest_head, options.softcap != 0.0)
    block_d = plan.constants["BLOCK_D"]
    tokens_q, tokens_k = q.shape[-3], k.shape[-3]
    tiles_k = plan.tiles(tokens_k, tile.block_n)
    tiles_q = plan.tiles(tokens_q, tile.block_m)
    if options.window_left >= 0:
        # keys that no query sees
        dk.zero_()
        dv.zero_()
    launch = plan.launch(
        backward_kernel,
        of=MapLaunch,
        GROUP=plan.group,
        HAS_LEFT=options.window_left >= 0,
        HAS_RIGHT=options.window_right >= 0,
        HAS_SOFTCAP=options.softcap != 0.0,
        RAGGED=ragged,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        HEAD_DIM=block_d,
        HEAD_DIM_V=plan.constants["BLOCK_DV"],
        QUARTERS=cdiv(q.shape[-1], block_d // 4),
        QUARTERS_V=cdiv(v.shape[-1], plan.constants["BLOCK_DV"] // 4),
        STAGES_Q=tile.stages_q,
        STAGES_O=tile.stages_o,
        num_warps=4,
        maxnreg=REGISTERS,
    )
    tensors = q, k, v, dout, dk, dv
    strides, maps = plan.maps
    if strides != dout.stride():
        keys = ROWS.value
        block_dv = plan.constants["BLOCK_DV"]
        rows = tile.block_m, keys, keys, tile.block_m, keys, keys
        columns = block_d, block_d, block_dv, block_dv, block_d, block_dv
        maps = [MapForm(*box, ragged=ragged) for box in zip(tensors, rows, columns, strict=True)]
        # those that a warpgroup has of a tile
        maps.append(SumsForm(tile.block_m * block_d // 64))
        plan.maps = dout.stride(), maps
    *forms, form_of_sums = maps
    launch(
        tiles_k * plan.heads_k * plan.grid_batch,
        (
            *[form(t) for form, t in zip(forms, tensors, strict=True)],
            sums if tile.block_n == ROWS.value else form_of_sums(sums),
            inputs.lse2, inputs.delta, cu_seqlens_q, cu_seqlens_k,
        ),
        (
            options.softmax_scale, options.softcap, *plan.window,
            plan.batch, plan.heads_k, tokens_q, tokens_k, tiles_k, tiles_q,
            plan.span_sums(tokens_q),
        ),
    )  # fmt: skip
    launch = plan.launch(
        round_dq_kernel,
        HAS_RIGHT=options.window_right >= 0,
        BLOCK_M=tile.block_m,
        HEAD_DIM=q.shape[-1],
        BLOCK_D=block_d,
        num_warps=4,
    )
    launch(
        sums.shape[0],
        (sums, dq, cu_seqlens_q, cu_seqlens_k),
        (
            options.softmax_scale, plan.window[1], plan.batch, plan.heads_q, tokens_q, tokens_k,
            tiles_q,
        ),
    )  # fmt: skip
