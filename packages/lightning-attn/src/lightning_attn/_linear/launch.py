"""Launchers of calls of one form (``..Plan``), and the operators' implementations by kernels.

A ``..Plan`` bypasses the operators of ``ops.py``. The functions implement these operators on a GPU,
or in the interpreter. Both consist of walks (``portable/walk_launch.py``), also for gradients.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from attn_common import cdiv, detect
from torch import Tensor

from .._linked.host.forms import ACCESS_BYTES, Memory
from .._linked.host.internals import is_plain_tensor
from .._linked.launch.entries import flat
from .._linked.launch.kernels import Kernel
from .._linked.launch.runtime import Launch, aligned, is_aligned
from .call import (
    BackwardTensors,
    CachedTensors,
    Gradients,
    Inputs,
    Needs,
    Options,
    StepTensors,
    Tensors,
)
from .portable.arguments import (
    DecodeNumbers,
    DecodeOptions,
    ElementStrides,
    StateStrides,
    StateTile,
)
from .portable.decay_launch import DecayGradientPlan
from .portable.walk_launch import States, Walk, launch_all, readable, walk_of
from .tiles import decode_tile, padded_head_dim

decode_kernel = Kernel(__package__, ".portable.decode", "decode_kernel")


class ForwardPlan:
    """The launcher of the forward pass and of the gradients for calls of one form."""

    def __init__(self, x: Inputs, options: Options) -> None:
        self._options = options
        is_exact = options.output_final_state
        self._walk = Walk(x, schedule=options.schedule, is_exact=is_exact)
        self._layout = _layout(x.read, x.key, x.value, x.decay)
        # walks of gradients, by name, need of a final state, and strides of ``dout``
        self._walks: Memory[Walk] = Memory()
        self._decays: Memory[DecayGradientPlan] = Memory()

    def forward(self, x: Tensors) -> tuple[Tensor, Tensor]:
        """Return the output and the final states (without elements if not needed)."""
        final = states_like(x.k, x.v, x.cu_seqlens) if self._options.output_final_state else None
        out = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)
        calls = self._walk.reads(Inputs(*x, final), out, self._options.scale)
        for launch, grid, tensors, numbers in calls:  # a function would be one frame more
            launch(grid, tensors, numbers)
        return out, _absent(x.q) if final is None else final

    def fill(self, out: Tensor, x: CachedTensors) -> None:
        """Fill ``out``, and advance the sequences' slots of the cache."""
        calls = self._walk.reads(_on_cache(x), out, self._options.scale)
        for launch, grid, tensors, numbers in calls:
            launch(grid, tensors, numbers)

    def fits(self, x: BackwardTensors) -> bool:
        """Return whether saved tensors still have the memory layout of the forward pass."""
        return _layout(x.q, x.k, x.v, x.decay) == self._layout

    def backward(self, x: BackwardTensors, needs: Needs) -> Gradients:
        """Return the needed gradients; the others are None."""
        dout = aligned(x.dout)
        if dout is not x.dout:
            x = x._replace(dout=dout)
        dq = dk = dv = dinitial = ddecay = None
        form = dout.stride()
        if needs.q:
            of_dq = x.walk_of_dq()
            dq = self._gradient_walk("dq", of_dq, form).out(of_dq, self._options.scale)
        if needs.k or needs.v or needs.initial_state:
            dinitial = states_like(x.k, x.v, x.cu_seqlens) if needs.initial_state else None
            of_dk, of_dv = x.walk_of_dk(), x.walk_of_dv(dinitial)
            walk_dk = self._gradient_walk("dk", of_dk, form)
            walk_dv = self._gradient_walk("dv", of_dv, form)
            dk, dv = write_gradients_by(walk_dk, walk_dv, of_dk, of_dv)
        if needs.decay:
            plan = self._decays.get(form)
            if plan is None:
                plan = self._decays.keep(form, DecayGradientPlan(x, self._options.scale))
            ddecay = plan.gradient(x)
        return Gradients(dq, dk, dv, ddecay, dinitial)

    def _gradient_walk(self, name: str, x: Inputs, dout_strides: tuple[int, ...]) -> Walk:
        """Return the walk of a gradient: dq walks forward, dk and dv in reverse."""
        form = name, x.last is None, dout_strides
        walk = self._walks.get(form)
        if walk is None:
            scale, schedule, _ = self._options
            if name == "dq":
                walk = Walk(x, schedule=schedule)
            else:
                walk = Walk(x, write_scale=scale, reverse=True, schedule=schedule)
            self._walks.keep(form, walk)
        return walk


class DecodePlan:
    """The launcher of decoding steps of one form."""

    def __init__(self, x: StepTensors, scale: float) -> None:
        batch, tokens, heads, d = x.q.shape
        e = x.v.shape[-1]
        tile = decode_tile(detect(x.q.device), d, e)
        block_d = padded_head_dim(d)
        self._grid = batch * heads * cdiv(e, tile.block_e)
        states_out = x.states_out
        numbers = DecodeNumbers(
            scale=scale,
            tokens=tokens,
            heads=heads,
            out=ElementStrides(*x.out.stride()),
            q=ElementStrides(*x.q.stride()),
            k=ElementStrides(*x.k.stride()),
            v=ElementStrides(*x.v.stride()),
            state_cache=States.of(x.state_cache).strides,
            states_out=StateStrides(*((0,) * 5 if states_out is None else states_out.stride())),
        )
        self._numbers = flat(numbers)
        constants = {
            "OPTIONS": DecodeOptions(d, e, *_rows_of(x.state_cache), *_rows_of(states_out)),
            "TILE": StateTile(block_d, tile.block_e),
            "num_warps": tile.num_warps,
            "num_stages": 1,
        }
        self._launch = Launch(decode_kernel, constants)

    def decode(self, x: StepTensors) -> None:
        """Advance every sequence; ``decay`` and ``slot_idx`` must be contiguous."""
        self._launch(self._grid, x, self._numbers)


def plan_forward(x: Tensors | CachedTensors, options: Options) -> ForwardPlan | None:
    """Return the launcher of calls of this form; None if tensors have to be copied first."""
    inputs = _on_cache(x) if isinstance(x, CachedTensors) else Inputs(*x)
    small = (inputs.decay, inputs.slots, inputs.has_first)
    if not all(map(is_aligned, (x.q, x.k, x.v))) or any(
        t is not None and not t.is_contiguous() for t in small
    ):
        return None
    return ForwardPlan(inputs, options)


def forward(x: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output and the final states (without elements if not needed)."""
    final = states_like(x.k, x.v, x.cu_seqlens) if options.output_final_state else None
    inputs = readable(Inputs(*x, final))
    out = walk_of(inputs, schedule=options.schedule).out(inputs, options.scale)
    return out, _absent(x.q) if final is None else final


def forward_cached(x: CachedTensors, out: Tensor, scale: float, schedule: str) -> None:
    """Fill ``out``, and advance the sequences' slots of the cache."""
    inputs = readable(_on_cache(x))
    walk = walk_of(inputs, schedule=schedule)
    if is_aligned(out) and out.is_contiguous():
        launch_all(walk.reads(inputs, out, scale))
    else:
        out.copy_(walk.out(inputs, scale))


def forward_with_states(x: Tensors, scale: float, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the output, and the states before every block and after the last."""
    batch, seqlen, heads, d = x.k.shape
    shape = (batch, heads, cdiv(seqlen, block_size) + 1, d, x.v.shape[-1])
    memory = torch.empty(shape, dtype=torch.float32, device=x.k.device)
    inputs = readable(Inputs(*x, memory[:, :, -1]))
    walk = Walk(inputs, schedule="parallel", size=block_size)
    per_sequence, per_head, per_block, per_row, _ = memory.stride()
    states = States(memory, StateStrides(per_sequence, per_block, per_head, per_row, 1))
    return walk.out(inputs, scale, walk.segment_states(inputs, states)), memory


def final_state(x: Tensors, scale: float, reverse: bool, schedule: str) -> Tensor:
    """Return the states after the last tokens; without queries."""
    final = states_like(x.k, x.v, None)
    inputs = readable(Inputs(*x, final))
    Walk(inputs, write_scale=scale, reverse=reverse, schedule=schedule).finish(inputs)
    return final


def read_gradient(x: BackwardTensors, scale: float, schedule: str) -> Tensor:
    """Return dq."""
    inputs = readable(x.walk_of_dq())
    return walk_of(inputs, schedule=schedule).out(inputs, scale)


def write_gradients(
    x: BackwardTensors, scale: float, schedule: str, needs_dinitial: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dk, dv and, if needed, the gradient of the initial states."""
    x = readable_gradient(x)
    dinitial = states_like(x.k, x.v, x.cu_seqlens) if needs_dinitial else None
    of_dk, of_dv = x.walk_of_dk(), x.walk_of_dv(dinitial)
    walk_dv = walk_of(of_dv, write_scale=scale, reverse=True, schedule=schedule)
    walk_dk = walk_of(of_dk, write_scale=scale, reverse=True, schedule=schedule)
    dk, dv = write_gradients_by(walk_dk, walk_dv, of_dk, of_dv)
    return dk, dv, _absent(x.q) if dinitial is None else dinitial


def decay_gradient(x: BackwardTensors, scale: float) -> Tensor:
    """Return the gradient of the decays."""
    x = readable_gradient(x)
    return DecayGradientPlan(x, scale).gradient(x)


def decode(x: StepTensors, scale: float) -> None:
    """Advance every sequence."""
    x = x._replace(decay=x.decay.contiguous(), slot_idx=x.slot_idx.contiguous())
    DecodePlan(x, scale).decode(x)


def write_gradients_by(
    walk_dk: Walk, walk_dv: Walk, of_dk: Inputs, of_dv: Inputs, written: States | None = None
) -> tuple[Tensor, Tensor]:
    """Return dk and dv; one pass over the states serves both if their segments are equal.

    ``written``: the contribution of each segment, if known.
    """
    tokens = of_dk.key.shape[-3]
    plan_dv, plan_dk = walk_dv.plan(tokens), walk_dk.plan(tokens)
    states = written
    if written is not None:
        walk_dv.combine(of_dv, written)
    elif plan_dv.segmented and walk_dv.batch:
        states = walk_dv.segment_states(of_dv)
    dv = walk_dv.out(of_dv, 1.0, states)
    shared = None
    if states is not None and plan_dk.segmented and plan_dk.size == plan_dv.size:
        shared = states.transposed
    return walk_dk.out(of_dk, 1.0, shared), dv


def _on_cache(x: CachedTensors) -> Inputs:
    """Return the walk that starts from a cache and ends in it."""
    *rest, cache, slots, has_first = x
    # the interpreter has no pointers to booleans
    flags = None if has_first is None else has_first.view(torch.uint8)
    return Inputs(*rest, cache, cache, slots, flags)


def readable_gradient(x: BackwardTensors) -> BackwardTensors:
    """Return the tensors, copied if kernels cannot read them."""
    dout, q, k, v, decay, *others = x
    return BackwardTensors(*map(aligned, (dout, q, k, v)), decay.contiguous(), *others)


def states_like(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return memory for a state per sequence."""
    batch = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (batch, k.shape[-2], k.shape[-1], v.shape[-1])
    return torch.empty(shape, dtype=torch.float32, device=k.device)


def _absent(q: Tensor) -> Tensor:
    return torch.empty((0,), dtype=torch.float32, device=q.device)


def _layout(*tensors: Tensor) -> tuple[Hashable, ...]:
    """Return the memory layout of tensors, as far as a launcher depends on it."""
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
