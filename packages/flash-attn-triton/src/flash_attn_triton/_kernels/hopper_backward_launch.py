"""The host side of the Hopper backward: which calls it takes, its tiles, the launches."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from attn_common import detect
from torch import Tensor

from .._call import Options, Tensors
from .._configs import padded_head_dim
from .hopper_launch import MAX_WINDOW, _mappable, has_gluon, tensor_map
from .launch import BackwardInputs, Plan
from .runtime import on_device_of

# keys of a program, and of each of its warpgroups
BLOCK_N = 128
ROWS = 64
# registers a thread at the start
REGISTERS = 168


@dataclass(frozen=True)
class HopperBackwardTile:
    """Queries of a step, and how many steps the copies are ahead."""

    block_m: int
    stages_q: int
    stages_o: int


@functools.cache
def hopper_backward_tile(head_dim: int, has_softcap: bool = False) -> HopperBackwardTile:
    """Return the tile for the wider of the two head dimensions."""
    if padded_head_dim(head_dim) <= 64:
        if has_softcap:  # what it computes besides takes registers
            return HopperBackwardTile(64, 3, 3)
        return HopperBackwardTile(128, 3, 2)
    return HopperBackwardTile(64, 2, 2)


def serves_backward(x: Tensors, options: Options, needs_dbias: bool, deterministic: bool) -> bool:
    """Say whether the Hopper kernel takes a call, on a Hopper GPU with a Triton that has Gluon.

    It adds to dq in no fixed order; dk and dv repeat bit for bit.
    """
    head_dim, head_dim_v = x.q.shape[-1], x.v.shape[-1]
    return (
        not deterministic
        and x.q.dtype in (torch.float16, torch.bfloat16)
        and x.bias is None
        and x.alibi_slopes is None
        and x.seqused_k is None
        and x.rng_state is None
        and not needs_dbias
        and 32 < head_dim <= 128
        and 32 < head_dim_v <= 128
        and head_dim % 8 == 0
        and head_dim_v % 8 == 0
        and detect(x.q.device).is_hopper
        and has_gluon()
    )


def launch_backward_hopper(
    plan: Plan, inputs: BackwardInputs, dq: Tensor, dk: Tensor, dv: Tensor,
    tile: HopperBackwardTile | None = None,
) -> None:  # fmt: skip
    """Fill ``dq``, ``dk`` and ``dv`` for a call that ``serves_backward`` took."""
    from .hopper_backward import backward_kernel
    from .hopper_backward_dq import round_dq_kernel

    q, k, v, dout = (_mappable(t, plan.is_packed) for t in (*inputs[:3], inputs.dout))
    cu_seqlens_q, cu_seqlens_k = inputs.optional[3:5]
    tile = tile or hopper_backward_tile(plan.widest_head, plan.options.softcap != 0.0)
    block_d = plan.constants["BLOCK_D"]
    tokens_q, tokens_k = q.shape[-3], k.shape[-3]
    tiles_k = plan.tiles(tokens_k, BLOCK_N)
    tiles_q = plan.tiles(tokens_q, tile.block_m)
    slots = tiles_q * plan.heads_q * plan.grid_batch
    sums = torch.zeros(slots, tile.block_m * block_d, dtype=torch.float32, device=q.device)
    ragged, options = plan.is_packed, plan.options
    scale, softcap = options.softmax_scale, options.softcap
    window_left = min(options.window_left, MAX_WINDOW)
    window_right = min(options.window_right, MAX_WINDOW)
    if options.window_left >= 0:
        # keys that no query sees
        dk.zero_()
        dv.zero_()
    with on_device_of(q):
        backward_kernel[(tiles_k * plan.heads_k * plan.grid_batch,)](
            tensor_map(q, tile.block_m, ragged),
            tensor_map(k, ROWS, ragged),
            tensor_map(v, ROWS, ragged),
            tensor_map(dout, tile.block_m, ragged),
            tensor_map(dk, ROWS, ragged),
            tensor_map(dv, ROWS, ragged),
            sums, inputs.lse2, inputs.delta, cu_seqlens_q, cu_seqlens_k,
            scale, softcap, window_left, window_right,
            plan.batch, plan.heads_k, tokens_q, tokens_k, tiles_k, tiles_q, plan.span_k(tokens_q),
            GROUP=plan.group,
            HAS_LEFT=options.window_left >= 0,
            HAS_RIGHT=options.window_right >= 0,
            HAS_SOFTCAP=softcap != 0.0,
            RAGGED=ragged,
            BLOCK_M=tile.block_m,
            HEAD_DIM=block_d,
            HEAD_DIM_V=plan.constants["BLOCK_DV"],
            STAGES_Q=tile.stages_q,
            STAGES_O=tile.stages_o,
            num_warps=4,
            maxnreg=REGISTERS,
            enable_fp_fusion=True,
        )  # fmt: skip
        round_dq_kernel[(slots, 2)](
            sums, dq, cu_seqlens_q, cu_seqlens_k,
            scale, window_right, plan.batch, plan.heads_q, tokens_q, tokens_k, tiles_q,
            HAS_RIGHT=options.window_right >= 0,
            BLOCK_M=tile.block_m,
            HEAD_DIM=q.shape[-1],
            BLOCK_D=block_d,
            num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
