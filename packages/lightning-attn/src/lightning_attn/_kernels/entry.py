"""The operators on a GPU, or in the interpreter, each a walk or two, and plans that go past them.

See ``_ops.py``.
"""

from __future__ import annotations

import torch
from attn_common import cdiv
from torch import Tensor

from .common import Inputs, States
from .decay_gradient import launch_decay_gradient as decay_gradient
from .decode import DecodePlan
from .decode import launch_decode as decode
from .launch.runtime import aligned, is_aligned
from .schedule import Walk, walk_of

__all__ = [
    "DecodePlan",
    "ForwardPlan",
    "Inputs",
    "decay_gradient",
    "decode",
    "final_state",
    "forward",
    "forward_cached",
    "forward_with_states",
    "read_gradient",
    "write_gradients",
]


class ForwardPlan:
    """The forward pass of the calls of one form."""

    def __init__(self, x: Inputs, scale: float, schedule: str, is_exact: bool) -> None:
        self._scale = scale
        self._walk = Walk(x, schedule=schedule, is_exact=is_exact)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        cu_seqlens: Tensor | None,
        initial_state: Tensor | None,
        output_final_state: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the final states (without elements if not asked for)."""
        final = _states_like(k, v, cu_seqlens) if output_final_state else None
        x = Inputs(k, v, decay, cu_seqlens, initial_state, final)
        return self._walk.out(x, q, self._scale), _absent(q) if final is None else final

    def fill(
        self,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        cu_seqlens: Tensor,
        state_cache: Tensor,
        state_indices: Tensor | None,
        has_initial_state: Tensor | None,
    ) -> None:
        """Fill ``out``, and advance the sequences' slots of ``state_cache``."""
        x = _on_cache(k, v, decay, cu_seqlens, state_cache, state_indices, has_initial_state)
        self._walk.fill(x, out, q, self._scale)


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
    x = Inputs(k, v, decay, cu_seqlens, initial_state, final).readable
    q = aligned(q)
    out = walk_of(x, q, schedule=schedule).out(x, q, scale)
    return out, _absent(q) if final is None else final


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
    cache = state_cache, state_indices, has_initial_state
    x = _on_cache(k, v, decay, cu_seqlens, *cache).readable
    q = aligned(q)
    walk = walk_of(x, q, schedule=schedule)
    if is_aligned(out) and out.is_contiguous():
        walk.fill(x, out, q, scale)
    else:
        out.copy_(walk.out(x, q, scale))


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
    x = Inputs(k, v, decay, None, initial_state, memory[:, :, -1]).readable
    walk = Walk(x, schedule="parallel", size=block_size)
    per_sequence, per_head, per_block, per_row, _ = memory.stride()
    states = States(memory, (per_sequence, per_block, per_head, per_row, 1))
    return walk.out(x, aligned(q), scale, walk.segment_states(x, states)), memory


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
    x = Inputs(k, v, decay, None, initial_state, final).readable
    Walk(x, write_scale=scale, reverse=reverse, schedule=schedule).finish(x)
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
    x = Inputs(v, k, decay, cu_seqlens, first).readable
    dout = aligned(dout)
    return walk_of(x, dout, schedule=schedule).out(x, dout, scale)


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
    turned = None if dfinal_state is None else dfinal_state.transpose(-1, -2)
    for_dv = Inputs(q, dout, decay, cu_seqlens, dfinal_state, dinitial).readable
    for_dk = Inputs(for_dv.value, for_dv.key, for_dv.decay, cu_seqlens, turned)
    k, v = aligned(k), aligned(v)
    walk_dv = walk_of(for_dv, k, write_scale=scale, reverse=True, schedule=schedule)
    walk_dk = walk_of(for_dk, v, write_scale=scale, reverse=True, schedule=schedule)
    tokens = k.shape[-3]
    plan_dv, plan_dk = walk_dv.plan(tokens), walk_dk.plan(tokens)
    states = walk_dv.segment_states(for_dv) if plan_dv.segmented and walk_dv.batch else None
    dv = walk_dv.out(for_dv, k, 1.0, states)
    # one pass over the states serves both, where they agree on the segments
    shared = states is not None and plan_dk.segmented and plan_dk.size == plan_dv.size
    dk = walk_dk.out(for_dk, v, 1.0, states.transposed if shared else None)
    return dk, dv, _absent(q) if dinitial is None else dinitial


def _on_cache(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    cache: Tensor,
    slots: Tensor | None,
    has_first: Tensor | None,
) -> Inputs:
    # the interpreter has no pointers to booleans
    flags = None if has_first is None else has_first.view(torch.uint8)
    return Inputs(k, v, decay, cu_seqlens, cache, cache, slots, flags)


def _states_like(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return memory for a state per sequence."""
    batch = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (batch, k.shape[-2], k.shape[-1], v.shape[-1])
    return torch.empty(shape, dtype=torch.float32, device=k.device)


def _absent(q: Tensor) -> Tensor:
    return torch.empty((0,), dtype=torch.float32, device=q.device)
