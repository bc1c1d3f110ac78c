"""The host side of the Hopper backward: tensor maps, the sums of the gradients, the launches."""

from __future__ import annotations

import torch
from attn_common import cdiv
from torch import Tensor

from .._configs import hopper_backward_tile, is_covered, padded_head_dim
from .._pairs import SIDE, lists_at_once
from .hopper_backward import hopper_backward_kernel
from .hopper_backward_round import (
    clear_keys_kernel,
    round_keys_kernel,
    round_queries_kernel,
)
from .hopper_encode import MapLaunch
from .hopper_launch import PANEL
from .hopper_maps import MapForm
from .launch import BackwardInputs, Plan

# registers a thread at the start
REGISTERS = 168


def is_worth_it(plan: Plan, inputs: BackwardInputs) -> bool:
    """Say whether a packed call has one list of offsets, and sequences as long as the layout asks.

    With two a sequence's first query may stand within a block, whose copy would begin ahead of the
    sequence: maps clip at its end alone.
    """
    cu_seqlens_q, cu_seqlens_k = inputs.offsets
    return cu_seqlens_q.data_ptr() == cu_seqlens_k.data_ptr() and is_covered(
        plan.pattern, inputs.k.shape[-3], plan.batch
    )


def launch_backward_hopper(
    plan: Plan, inputs: BackwardInputs, walk: tuple[Tensor, ...], dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Fill ``dq``, ``dk`` and ``dv`` for a call that ``takes_hopper_backward`` took."""
    q, k, v, dout = *inputs[:3], inputs.dout
    tokens_q, tokens_k = q.shape[-3], k.shape[-3]
    cu_seqlens = inputs.offsets[0]
    wide, wide_v = (max(PANEL, padded_head_dim(t.shape[-1])) for t in (q, v))
    tile = hopper_backward_tile(max(wide, wide_v))
    if plan.is_packed:
        tiles_q = tokens_q // SIDE + 2 * plan.batch + 4
    else:
        tiles_q = cdiv(tokens_k, SIDE) - (tokens_k - tokens_q) // SIDE
    tiles_k = plan.tiles_k(tokens_k, SIDE)
    slots_q, slots_k = (
        tiles * heads * plan.grid_batch
        for tiles, heads in ((tiles_q, plan.heads_q), (tiles_k, plan.heads_k))
    )
    dq_sums = q.new_zeros(SIDE * slots_q * wide, dtype=torch.float32)
    # those that several programs share are cleared below
    dk_sums, dv_sums = (
        q.new_empty(SIDE * slots_k * width, dtype=torch.float32) for width in (wide, wide_v)
    )
    begin, parts, items, owners = walk
    constants, scale = plan.constants, plan.options.softmax_scale
    lists = plan.heads_k if constants["PER_HEAD"] else 1
    programs, list_blocks = owners.shape[0], parts.shape[0] // lists
    rows = plan.extent_q // SIDE
    sizes = tokens_q, tokens_k
    keys = plan.batch, plan.heads_k, *sizes, tiles_k, list_blocks
    widths_k = {"BLOCK_D": wide, "BLOCK_DV": wide_v, "num_warps": 4}
    clear = plan.launch(clear_keys_kernel, None, constants, ("PER_HEAD",), None, **widths_k)
    clear(slots_k, (dk_sums, dv_sums, parts, cu_seqlens), keys)
    launch = plan.launch(
        hopper_backward_kernel, None, constants, ("GROUP", "IS_CAUSAL", "PER_HEAD"), None,
        MapLaunch,
        HEAD_DIM=wide,
        HEAD_DIM_V=wide_v,
        STAGES_Q=tile.stages_q,
        STAGES_O=tile.stages_o,
        num_warps=4,
        maxnreg=REGISTERS,
    )  # fmt: skip
    mapped = q, k, v, dout, dk, dv
    strides, maps = plan.maps
    if strides != dout.stride():
        widths = wide, wide, wide_v, wide_v, wide, wide_v
        maps = [MapForm(t, SIDE, plan.is_packed, n) for t, n in zip(mapped, widths, strict=True)]
        plan.maps = dout.stride(), maps
    launch(
        programs * (plan.heads_k // lists) * plan.batch,
        (
            *[form(t) for form, t in zip(maps, mapped, strict=True)],
            dq_sums, dk_sums, dv_sums, inputs.lse2, inputs.delta, begin, parts, items, owners,
            cu_seqlens,
        ),
        (
            scale, programs, plan.heads_k, lists_at_once(rows), *sizes, tiles_q, tiles_k, rows,
            list_blocks,
        ),
    )  # fmt: skip
    finish = plan.launch(
        round_queries_kernel, None, constants, ("HEAD_DIM",), None, BLOCK_D=wide, num_warps=4
    )
    finish(slots_q, (dq_sums, dq, cu_seqlens), (scale, plan.batch, plan.heads_q, *sizes, tiles_q))
    names = "PER_HEAD", "HEAD_DIM", "HEAD_DIM_V"
    finish = plan.launch(round_keys_kernel, None, constants, names, None, **widths_k)
    finish(slots_k, (dk_sums, dv_sums, dk, dv, parts, cu_seqlens), (scale, *keys))
