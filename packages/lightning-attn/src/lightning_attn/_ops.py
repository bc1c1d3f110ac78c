"""Operator schemas, their fakes and their CPU kernels, and the autograd function over them.

Importing this module imports torch, but neither triton nor the kernels. CUDA and HIP tensors run
the Triton kernels. CPU tensors run the eager code of :mod:`._eager`, or, in a process started
with ``TRITON_INTERPRET=1``, the Triton kernels in the interpreter.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _eager
from ._call import Checked, CheckedStep, Gradients, Needs, Plan, StepPlan
from ._linked.host.arguments import on_one_device
from ._linked.host.forms import interpreted
from ._linked.host.internals import is_plain_tensor, is_watched, refuse_tangents

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor decay"

# The gradient of a walk is made of walks: of (dout, v, k) for dq, and from the last token to the
# first of (k, q, dout) for dv and of (v, dout, q) for dk. See ``_kernels/walk.py``.
_SCHEMAS = {
    # the empty state stands for none
    "forward": (
        f"({_INPUTS}, Tensor? cu_seqlens, Tensor? initial_state, float scale, str schedule, "
        "bool output_final_state) -> (Tensor out, Tensor final_state)"
    ),
    # on a cache of states; writes rows and slots in place
    "forward_cached": (
        f"(Tensor(a!) out, {_INPUTS}, Tensor cu_seqlens, Tensor(b!) state_cache, "
        "Tensor? state_indices, Tensor? has_initial_state, float scale, str schedule) -> ()"
    ),
    # the states before every block of tokens, and behind the last
    "forward_with_states": (
        f"({_INPUTS}, Tensor? initial_state, float scale, SymInt block_size) "
        "-> (Tensor out, Tensor states)"
    ),
    # the final state alone, or going backwards the gradient of the first
    "final_state": (
        "(Tensor k, Tensor v, Tensor decay, Tensor? initial_state, float scale, bool reverse, "
        "str schedule) -> Tensor"
    ),
    "read_gradient": (
        "(Tensor dout, Tensor k, Tensor v, Tensor decay, Tensor? cu_seqlens, "
        "Tensor? initial_state, float scale, str schedule) -> Tensor"
    ),
    "write_gradients": (
        f"(Tensor dout, {_INPUTS}, Tensor? cu_seqlens, Tensor? dfinal_state, float scale, "
        "str schedule, bool needs_dinitial) -> (Tensor dk, Tensor dv, Tensor dinitial_state)"
    ),
    "decay_gradient": (
        f"(Tensor dout, {_INPUTS}, Tensor? cu_seqlens, Tensor? initial_state, "
        "Tensor? dfinal_state, float scale) -> Tensor"
    ),
    "decode": (
        "(Tensor(a!) out, Tensor q, Tensor k, Tensor v, Tensor(b!) state_cache, Tensor decay, "
        "Tensor slot_idx, Tensor(c!)? states_out, float scale) -> ()"
    ),
}


def _batch(q: Tensor, cu_seqlens: Tensor | None) -> Any:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _states(k: Tensor, v: Tensor, *leading: Any) -> Tensor:
    size = (*leading, k.shape[-2], k.shape[-1], v.shape[-1])
    return k.new_empty(size, dtype=torch.float32)


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, cu_seqlens: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    wants_state = rest[-1]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    if not wants_state:
        return out, q.new_empty((0,), dtype=torch.float32)
    return out, _states(k, v, _batch(q, cu_seqlens))


def _forward_with_states_fake(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, initial: Any, scale: float, block_size: int
) -> tuple[Tensor, Tensor]:
    batch, seqlen, heads, d = q.shape
    blocks = (seqlen + block_size - 1) // block_size
    states = q.new_empty((batch, heads, blocks + 1, d, v.shape[-1]), dtype=torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), states


def _final_state_fake(k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return _states(k, v, k.shape[0])


def _read_gradient_fake(dout: Tensor, k: Tensor, *rest: Any) -> Tensor:
    return k.new_empty(k.shape)


def _write_gradients_fake(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    needs_dinitial = rest[-1]
    dinitial = (
        _states(k, v, _batch(q, cu_seqlens))
        if needs_dinitial
        else q.new_empty((0,), dtype=torch.float32)
    )
    return k.new_empty(k.shape), v.new_empty(v.shape), dinitial


def _decay_gradient_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, *rest: Any
) -> Tensor:
    return decay.new_empty(decay.shape)


def _nothing(*_arguments: Any) -> None:
    return None


_FAKES: dict[str, Callable[..., Any]] = {
    "forward": _forward_fake,
    "forward_cached": _nothing,
    "forward_with_states": _forward_with_states_fake,
    "final_state": _final_state_fake,
    "read_gradient": _read_gradient_fake,
    "write_gradients": _write_gradients_fake,
    "decay_gradient": _decay_gradient_fake,
    "decode": _nothing,
}


def _on_gpu(name: str, *arguments: Any) -> Any:
    from ._kernels import plans

    return getattr(plans, name)(*arguments)


def _on_cpu(name: str, *arguments: Any) -> Any:
    if interpreted():
        return _on_gpu(name, *arguments)
    # under autocast the products within would be rounded to 16 bits
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return getattr(_eager, name)(*arguments)


for _name, _schema in _SCHEMAS.items():
    _operator = f"lightning_attn::{_name}"
    torch.library.define(_operator, _schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.register_fake(_operator, _FAKES[_name])
    torch.library.impl(_operator, "cuda", on_one_device(functools.partial(_on_gpu, _name)))
    torch.library.impl(_operator, "cpu", functools.partial(_on_cpu, _name))

forward = torch.ops.lightning_attn.forward.default
forward_cached = torch.ops.lightning_attn.forward_cached.default
forward_with_states = torch.ops.lightning_attn.forward_with_states.default
final_state = torch.ops.lightning_attn.final_state.default
read_gradient = torch.ops.lightning_attn.read_gradient.default
write_gradients = torch.ops.lightning_attn.write_gradients.default
decay_gradient = torch.ops.lightning_attn.decay_gradient.default
decode = torch.ops.lightning_attn.decode.default


def _gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    dfinal_state: Tensor | None,
    needs: Needs,
    scale: float,
    schedule: str,
) -> Gradients:
    """Return the gradients that are asked for, by operators."""
    dq = dk = dv = ddecay = dinitial = None
    options = scale, schedule
    if needs.q:
        dq = read_gradient(dout, k, v, decay, cu_seqlens, initial_state, *options)
    if needs.k or needs.v or needs.initial_state:
        dk, dv, dinitial = write_gradients(
            dout, q, k, v, decay, cu_seqlens, dfinal_state, *options, needs.initial_state
        )
    if needs.decay:
        ddecay = decay_gradient(
            dout, q, k, v, decay, cu_seqlens, initial_state, dfinal_state, scale
        )
    return Gradients(dq, dk, dv, ddecay, dinitial if needs.initial_state else None)


class _LightningAttention(torch.autograd.Function):
    """The forward pass, with the gradients as its derivative: planned, or by operators."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        schedule: str,
        output_final_state: bool,
        known: Checked,
    ) -> tuple[Tensor, Tensor]:
        tensors = q, k, v, decay, cu_seqlens, initial_state
        if known.plan is None:
            out, final = forward(*tensors, known.scale, schedule, output_final_state)
        else:
            out, final = known.plan.forward(*tensors, output_final_state)
        ctx.save_for_backward(q, k, v, decay, initial_state, cu_seqlens)
        ctx.known, ctx.schedule = known, schedule
        ctx.has_final = output_final_state
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        q, k, v, decay, initial_state, cu_seqlens = ctx.saved_tensors
        needs = Needs(*ctx.needs_input_grad[: len(Needs._fields)])
        known: Checked = ctx.known
        if dout is None:
            dout = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        if not ctx.has_final:
            dfinal = None
        given = dout, q, k, v, decay, cu_seqlens, initial_state, dfinal, needs
        plan = known.plan
        others = (dout, dfinal, initial_state, cu_seqlens)
        if (
            plan is not None
            and not is_watched()
            and all(t is None or is_plain_tensor(t) for t in others)
            and plan.fits(q, k, v, decay)
        ):
            grads = plan.backward(*given)
        else:
            grads = _gradients(*given, known.scale, ctx.schedule)
        return *grads, None, None, None, None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    schedule: str,
    output_final_state: bool,
    known: Checked,
) -> tuple[Tensor, Tensor]:
    """Compute ``(out, final state)``, through the autograd function where a gradient is asked."""
    refuse_tangents((q, k, v, decay, initial_state))
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or decay.requires_grad
        or (initial_state is not None and initial_state.requires_grad)
    ):
        if torch.compiler.is_compiling():
            # dynamo refuses one tensor as two inputs of an autograd function
            k = k.view_as(k) if k is q else k
            v = v.view_as(v) if v is q or v is k else v
        result: tuple[Tensor, Tensor] = _LightningAttention.apply(  # type: ignore[no-untyped-call]
            q, k, v, decay, initial_state, cu_seqlens, schedule, output_final_state, known
        )
        return result
    tensors = q, k, v, decay, cu_seqlens, initial_state
    if known.plan is not None:
        return known.plan.forward(*tensors, output_final_state)
    return forward(*tensors, known.scale, schedule, output_final_state)  # type: ignore[no-any-return]


def advance(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    state_cache: Tensor,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    schedule: str,
    known: Checked,
) -> None:
    """Fill ``out``, and advance the sequences' slots of ``state_cache``."""
    cache = state_cache, state_indices, has_initial_state
    if known.plan is None:
        forward_cached(out, q, k, v, decay, cu_seqlens, *cache, known.scale, schedule)
    else:
        known.plan.fill(out, q, k, v, decay, cu_seqlens, *cache)


def step(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_cache: Tensor,
    decay: Tensor,
    slot_idx: Tensor,
    states_out: Tensor | None,
    known: CheckedStep,
) -> None:
    """Advance each sequence by its new tokens."""
    tensors = out, q, k, v, state_cache, decay, slot_idx, states_out
    if known.plan is None:
        decode(*tensors, known.scale)
    else:
        known.plan.decode(*tensors)


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" or (device.type == "cpu" and interpreted())


def plan_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor | None,
    state: Tensor | None,
    slots: Tensor | None,
    has_first: Tensor | None,
    scale: float,
    schedule: str,
    *,
    is_exact: bool,
) -> Plan | None:
    """Return how to launch calls of this form past the operators; None if these are to be asked.

    ``state`` is what the call starts from, ``is_exact`` says whether it returns or keeps another.
    """
    if not _has_kernels(q.device):
        return None
    from ._kernels import plans
    from ._kernels.walks import Inputs

    x = Inputs(k, v, decay, cu_seqlens, state, None, slots, has_first)
    return plans.plan_forward(q, x, scale, schedule, is_exact)


def plan_step(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_cache: Tensor,
    decay: Tensor,
    slot_idx: Tensor,
    states_out: Tensor | None,
    scale: float,
) -> StepPlan | None:
    """Return how to launch decoding steps of this form past the operator, or None."""
    if not _has_kernels(q.device) or not (decay.is_contiguous() and slot_idx.is_contiguous()):
        return None
    from ._kernels.plans import DecodePlan

    return DecodePlan(out, q, k, v, state_cache, states_out, scale)
