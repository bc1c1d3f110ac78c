"""The operators on a GPU, or in the interpreter: each is a walk or two; see ``_ops.py``."""

from __future__ import annotations

import torch
from attn_common import cdiv
from torch import Tensor

from .decay_gradient import launch_decay_gradient as decay_gradient
from .decode import launch_decode as decode
from .walk import States, Walk

__all__ = [
    "decay_gradient",
    "decode",
    "final_state",
    "forward",
    "forward_cached",
    "forward_with_states",
    "read_gradient",
    "write_gradients",
]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    scale: float,
    schedule: str,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output and the final states (without elements if not asked for)."""
    final = _states_like(k, v, cu_seqlens) if output_final_state else None
    walk = Walk(k, v, decay, cu_seqlens, initial_state, final, schedule=schedule)
    return walk.out(q, scale), _absent(q) if final is None else final


def forward_cached(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    state_cache: Tensor,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    scale: float,
    schedule: str,
) -> None:
    """Fill ``out``, and advance the sequences' slots of ``state_cache``."""
    walk = Walk(
        k, v, decay, cu_seqlens, state_cache, state_cache,
        slots=state_indices, has_first=has_initial_state, schedule=schedule,
    )  # fmt: skip
    walk.fill(out, q, scale)


def forward_with_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    initial_state: Tensor | None,
    scale: float,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the states before every block and behind the last."""
    batch, seqlen, heads, d = k.shape
    shape = (batch, heads, cdiv(seqlen, block_size) + 1, d, v.shape[-1])
    memory = torch.empty(shape, dtype=torch.float32, device=k.device)
    walk = Walk(
        k, v, decay, None, initial_state, memory[:, :, -1], schedule="parallel", size=block_size
    )
    per_sequence, per_head, per_block, per_row, _ = memory.stride()
    states = States(memory, (per_sequence, per_block, per_head, per_row, 1))
    return walk.out(q, scale, walk.segment_states(states)), memory


def final_state(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    initial_state: Tensor | None,
    scale: float,
    reverse: bool,
    schedule: str,
) -> Tensor:
    """Return the states behind the last tokens of the walk."""
    final = _states_like(k, v, None)
    Walk(
        k, v, decay, None, initial_state, final,
        write_scale=scale, reverse=reverse, schedule=schedule,
    ).finish()  # fmt: skip
    return final


def read_gradient(
    dout: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    scale: float,
    schedule: str,
) -> Tensor:
    """Return dq."""
    first = None if initial_state is None else initial_state.transpose(-1, -2)
    return Walk(v, k, decay, cu_seqlens, first, None, schedule=schedule).out(dout, scale)


def write_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor | None,
    dfinal_state: Tensor | None,
    scale: float,
    schedule: str,
    needs_dinitial: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dk, dv and, if asked for, the gradient of the initial states."""
    dinitial = _states_like(k, v, cu_seqlens) if needs_dinitial else None
    backwards = {"write_scale": scale, "reverse": True, "schedule": schedule}
    for_dv = Walk(q, dout, decay, cu_seqlens, dfinal_state, dinitial, **backwards)
    turned = None if dfinal_state is None else dfinal_state.transpose(-1, -2)
    for_dk = Walk(dout, q, decay, cu_seqlens, turned, None, **backwards)
    states = for_dv.segment_states() if for_dv.segmented and for_dv.batch else None
    dv = for_dv.out(k, 1.0, states)
    # one pass over the states serves both, where they agree on the segments
    shared = states is not None and for_dk.segmented and for_dk.size == for_dv.size
    dk = for_dk.out(v, 1.0, states.transposed if shared else None)
    return dk, dv, _absent(q) if dinitial is None else dinitial


def _states_like(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return memory for a state per sequence."""
    batch = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (batch, k.shape[-2], k.shape[-1], v.shape[-1])
    return torch.empty(shape, dtype=torch.float32, device=k.device)


def _absent(q: Tensor) -> Tensor:
    return torch.empty((0,), dtype=torch.float32, device=q.device)
