"""The host side of the Hopper backward: tensor maps, the sums of the gradients, the launches."""

from __future__ import annotations

import torch
from attn_common import cdiv
from torch import Tensor

from ..._configs import hopper_backward_tile, is_covered, padded_head_dim
from ..._pairs import heads_at_once
from ..._pieces import SIDE, piece_of
from ..backward_rows import CONSTANTS, ROWS, Rows
from ..common import BackwardInputs, Plan
from ._linked.tma import MapForm, MapLaunch
from .backward import hopper_backward_kernel
from .backward_round import PIECE, prepare_kernel, round_kernel
from .forward_plan import PANEL

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
    plan: Plan,
    inputs: BackwardInputs,
    rows: Rows,
    walk: tuple[Tensor, ...],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
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
    dq_sums, dk_sums, dv_sums = (
        q.new_empty(SIDE * slots * width, dtype=torch.float32)
        for slots, width in ((slots_q, wide), (slots_k, wide), (slots_k, wide_v))
    )
    parts, owners = walk[1], walk[3]
    constants, scale = plan.constants, plan.options.softmax_scale
    lists = plan.heads_k if constants["PER_HEAD"] else 1
    list_pieces = parts.shape[0] // lists
    piece = piece_of((plan.pattern.block_q, plan.pattern.block_k))
    blocks_q = cdiv(plan.extent_q, SIDE)
    sizes = tokens_q, tokens_k
    widths = {"TOKENS": piece, "WIDTH": wide, "WIDTH_V": wide_v, "num_warps": 4}
    prepare = plan.launch(
        prepare_kernel, rows.dlse is not None, constants, ("PER_HEAD", *CONSTANTS), None,
        BLOCK=ROWS, PIECE=PIECE, num_stages=1, **widths,
    )  # fmt: skip
    grid, pieces = max(rows.programs, slots_k), dq_sums.numel() // PIECE
    prepare(
        grid,
        (*rows, dq_sums, dk_sums, dv_sums, parts, cu_seqlens),
        (
            *rows.numbers, plan.heads_q, plan.batch, plan.heads_k, tokens_k, tiles_k, list_pieces,
            slots_k, cdiv(pieces, grid), pieces,
        ),
    )  # fmt: skip
    launch = plan.launch(
        hopper_backward_kernel, None, constants, ("GROUP", "IS_CAUSAL", "PER_HEAD"), None,
        MapLaunch,
        PIECE=piece,
        HEAD_DIM=wide,
        HEAD_DIM_V=wide_v,
        STAGES=tile.stages,
        num_warps=4,
        maxnreg=REGISTERS,
    )  # fmt: skip
    mapped = q, k, v, dout, dk, dv
    strides, maps = plan.maps
    if strides != dout.stride():
        columns = wide, wide, wide_v, wide_v, wide, wide_v
        # pieces are copied panel by panel
        maps = [
            MapForm(t, piece, n if piece == SIDE else PANEL, ragged=plan.is_packed)
            for t, n in zip(mapped, columns, strict=True)
        ]
        plan.maps = dout.stride(), maps
    launch(
        # as many as there might be
        owners.shape[0] * (plan.heads_k // lists) * plan.batch,
        (
            *[form(t) for form, t in zip(maps, mapped, strict=True)],
            dq_sums, dk_sums, dv_sums, inputs.lse2, inputs.delta, *walk, cu_seqlens,
        ),
        (
            scale, plan.batch, plan.heads_k, heads_at_once(blocks_q), *sizes, tiles_q, tiles_k,
            blocks_q, list_pieces,
        ),
    )  # fmt: skip
    names = "PER_HEAD", "HEAD_DIM", "HEAD_DIM_V"
    finish = plan.launch(round_kernel, None, constants, names, None, **widths)
    finish(
        slots_q + slots_k,
        (dq_sums, dk_sums, dv_sums, dq, dk, dv, parts, cu_seqlens),
        (
            scale, slots_q, plan.batch, plan.heads_q, plan.heads_k, *sizes, tiles_q, tiles_k,
            list_pieces,
        ),
    )  # fmt: skip
