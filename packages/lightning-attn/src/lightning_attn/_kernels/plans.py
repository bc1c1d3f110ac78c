"""Plans, which hold what the calls of one form share, and the launchers of the operators.

A plan goes past the operators of ``_ops.py``; a launcher is such an operator on a GPU, or in the
interpreter. Both consist of walks (:mod:`.walks`): the gradient of a walk is made of walks, too.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from attn_common import cdiv, detect
from torch import Tensor

from .._call import Gradients, Needs
from .._configs import decode_tile, padded_head_dim
from .._linked.host.forms import ACCESS_BYTES, Memory
from .._linked.host.internals import is_plain_tensor
from .decay_plan import DecayGradientPlan
from .decode import decode_kernel
from .launch.runtime import Launch, aligned, is_aligned
from .structures import DecodeNumbers, DecodeOptions
from .walks import Inputs, States, Walk, launch_all, walk_of


class ForwardPlan:
    """The forward pass of the calls of one form, and the gradients of those that have any.

    Args:
        q: queries.
        x: the other tensors of a call; ``first``: what it starts from.
        scale: factor of the queries.
        schedule: as the public functions take it.
        is_exact: calls return or keep a final state.
    """

    def __init__(self, q: Tensor, x: Inputs, scale: float, schedule: str, is_exact: bool) -> None:
        self._scale, self._schedule = scale, schedule
        self._walk = Walk(x, schedule=schedule, is_exact=is_exact)
        self._layout = _layout(q, x.key, x.value, x.decay)
        # walks of gradients, by the strides of the output's and by what is asked for
        self._walks: Memory[Walk] = Memory()
        self._decays: Memory[DecayGradientPlan] = Memory()

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
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        for launch, grid, tensors, numbers in self._walk.reads(x, out, q, self._scale):
            launch(grid, tensors, numbers)
        return out, _absent(q) if final is None else final

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
        for launch, grid, tensors, numbers in self._walk.reads(x, out, q, self._scale):
            launch(grid, tensors, numbers)

    def fits(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> bool:
        """Return whether tensors that were put away since still lie in memory as they did."""
        return _layout(q, k, v, decay) == self._layout

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        cu_seqlens: Tensor | None,
        initial_state: Tensor | None,
        dfinal_state: Tensor | None,
        needs: Needs,
    ) -> Gradients:
        """Return the gradients that are asked for; the others are None."""
        dout = aligned(dout)
        dq = dk = dv = dinitial = ddecay = None
        if needs.q:
            x = Inputs(v, k, decay, cu_seqlens, _turned(initial_state))
            dq = self._gradient_walk("dq", x, dout.stride()).out(x, dout, self._scale)
        if needs.k or needs.v or needs.initial_state:
            dinitial = _states_like(k, v, cu_seqlens) if needs.initial_state else None
            for_dv = Inputs(q, dout, decay, cu_seqlens, dfinal_state, dinitial)
            for_dk = Inputs(dout, q, decay, cu_seqlens, _turned(dfinal_state))
            walk_dv = self._gradient_walk("dv", for_dv, dout.stride())
            walk_dk = self._gradient_walk("dk", for_dk, dout.stride())
            dk, dv = _write_gradients(walk_dk, walk_dv, for_dk, for_dv, k, v)
        if needs.decay:
            form = dout.stride()
            plan = self._decays.get(form)
            if plan is None:
                made = DecayGradientPlan(dout, q, k, v, decay, cu_seqlens, self._scale)
                plan = self._decays.keep(form, made)
            ddecay = plan.gradient(dout, q, k, v, decay, cu_seqlens, initial_state, dfinal_state)
        return Gradients(dq, dk, dv, ddecay, dinitial)

    def _gradient_walk(self, name: str, x: Inputs, dout_strides: tuple[int, ...]) -> Walk:
        """Return the walk of a gradient: that of the queries reads, the others write."""
        form = name, x.last is None, dout_strides
        walk = self._walks.get(form)
        if walk is None:
            if name == "dq":
                walk = Walk(x, schedule=self._schedule)
            else:
                walk = Walk(x, write_scale=self._scale, reverse=True, schedule=self._schedule)
            self._walks.keep(form, walk)
        return walk


class DecodePlan:
    """The decoding steps of one form: all but the data."""

    def __init__(
        self,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state_cache: Tensor,
        states_out: Tensor | None,
        scale: float,
    ) -> None:
        batch, tokens, heads, d = q.shape
        e = v.shape[-1]
        tile = decode_tile(detect(q.device), d, e)
        block_d = padded_head_dim(d)
        self._grid = batch * heads * cdiv(e, tile.block_e)
        self._numbers = DecodeNumbers(
            scale,
            tokens,
            heads,
            *q.stride(),
            *k.stride(),
            *v.stride(),
            *out.stride(),
            *state_cache.stride(),
            *((0,) * 5 if states_out is None else states_out.stride()),
        )
        options = DecodeOptions(
            d, e, block_d, tile.block_e, *_rows_of(state_cache), *_rows_of(states_out)
        )
        constants = options._asdict() | {"num_warps": tile.num_warps, "num_stages": 1}
        self._launch = Launch(decode_kernel, constants)

    def decode(
        self,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state_cache: Tensor,
        decay: Tensor,
        slot_idx: Tensor,
        states_out: Tensor | None,
    ) -> None:
        """Advance every sequence; ``decay`` and ``slot_idx`` are dense."""
        # the fields of DecodeTensors
        tensors = q, k, v, out, state_cache, states_out, decay, slot_idx
        self._launch(self._grid, tensors, self._numbers)


def plan_forward(
    q: Tensor, x: Inputs, scale: float, schedule: str, is_exact: bool
) -> ForwardPlan | None:
    """Return the plan of calls of this form; None where copies have to come first."""
    small = (x.decay, x.slots, x.has_first)
    if not all(map(is_aligned, (q, x.key, x.value))) or any(
        t is not None and not t.is_contiguous() for t in small
    ):
        return None
    return ForwardPlan(q, x, scale, schedule, is_exact)


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
        launch_all(walk.reads(x, out, q, scale))
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
    x = Inputs(v, k, decay, cu_seqlens, _turned(initial_state)).readable
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
    for_dv = Inputs(q, dout, decay, cu_seqlens, dfinal_state, dinitial).readable
    for_dk = Inputs(for_dv.value, for_dv.key, for_dv.decay, cu_seqlens, _turned(dfinal_state))
    k, v = aligned(k), aligned(v)
    walk_dv = walk_of(for_dv, k, write_scale=scale, reverse=True, schedule=schedule)
    walk_dk = walk_of(for_dk, v, write_scale=scale, reverse=True, schedule=schedule)
    dk, dv = _write_gradients(walk_dk, walk_dv, for_dk, for_dv, k, v)
    return dk, dv, _absent(q) if dinitial is None else dinitial


def decay_gradient(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    dfinal_state: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the gradient of the decays."""
    dout, q, k, v = map(aligned, (dout, q, k, v))
    decay = decay.contiguous()
    plan = DecayGradientPlan(dout, q, k, v, decay, cu_seqlens, scale)
    return plan.gradient(dout, q, k, v, decay, cu_seqlens, initial_state, dfinal_state)


def decode(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_cache: Tensor,
    decay: Tensor,
    slot_idx: Tensor,
    states_out: Tensor | None,
    scale: float,
) -> None:
    """Advance every sequence."""
    plan = DecodePlan(out, q, k, v, state_cache, states_out, scale)
    plan.decode(out, q, k, v, state_cache, decay.contiguous(), slot_idx.contiguous(), states_out)


def _write_gradients(
    walk_dk: Walk, walk_dv: Walk, for_dk: Inputs, for_dv: Inputs, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Return dk and dv; one pass over the states serves both, where they agree on the segments."""
    tokens = k.shape[-3]
    plan_dv, plan_dk = walk_dv.plan(tokens), walk_dk.plan(tokens)
    states = walk_dv.segment_states(for_dv) if plan_dv.segmented and walk_dv.batch else None
    dv = walk_dv.out(for_dv, k, 1.0, states)
    shared = None
    if states is not None and plan_dk.segmented and plan_dk.size == plan_dv.size:
        shared = states.transposed
    return walk_dk.out(for_dk, v, 1.0, shared), dv


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


def _turned(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.transpose(-1, -2)


def _absent(q: Tensor) -> Tensor:
    return torch.empty((0,), dtype=torch.float32, device=q.device)


def _layout(*tensors: Tensor) -> tuple[Hashable, ...]:
    """Return how tensors lie in memory, as far as a plan depends on it."""
    return tuple(
        (is_plain_tensor(t), t.dtype, t.device, t.stride(), is_aligned(t)) for t in tensors
    )


def _rows_of(x: Tensor | None) -> tuple[int, int]:
    """Return the alignment of a state's rows in bytes, and the dimension along which they run."""
    if x is None:
        return 0, -1
    *outer, stride_d, stride_e = x.stride()
    if 1 not in (stride_d, stride_e):
        return 0, -1
    along, between = (1, stride_d) if stride_e == 1 else (0, stride_e)
    size = x.element_size()
    starts = (x.data_ptr(), *(stride * size for stride in (*outer, between)))
    return ACCESS_BYTES if all(start % ACCESS_BYTES == 0 for start in starts) else size, along
