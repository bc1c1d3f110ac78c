"""Operators with their schemas and fakes, and the autograd function over them.

Importing this module imports torch, but neither triton nor the kernels. CUDA and HIP tensors run
the Triton kernels. CPU tensors run :mod:`.eager` or, in a process started with
``TRITON_INTERPRET=1``, the Triton kernels in the interpreter.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._linked.host.forms import interpreted
from .._linked.host.internals import refuse_tangents
from .._linked.host.operators import (
    check_written,
    free_namespace,
    may_skip_operator,
    no_second_derivative,
    register,
    schema_of,
    without_repeats,
)
from . import eager as linear_eager
from .call import (
    BackwardTensors,
    CachedTensors,
    Checked,
    CheckedStep,
    Gradients,
    Needs,
    Options,
    StepTensors,
    Tensors,
)
from .validate import validate_decay, validate_slots, validate_varlen

NAMESPACE = free_namespace(__name__, "forward")
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor decay"


def _states(k: Tensor, v: Tensor, *leading: Any) -> Tensor:
    size = (*leading, k.shape[-2], k.shape[-1], v.shape[-1])
    return k.new_empty(size, dtype=torch.float32)


def _states_or_none(k: Tensor, v: Tensor, cu_seqlens: Tensor | None, is_asked: bool) -> Tensor:
    """Return a state per sequence, or an empty tensor for none."""
    if not is_asked:
        return k.new_empty((0,), dtype=torch.float32)
    return _states(k, v, k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)


def _forward_fake(x: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    out = x.q.new_empty((*x.q.shape[:-1], x.v.shape[-1]))
    return out, _states_or_none(x.k, x.v, x.cu_seqlens, options.output_final_state)


def _forward_with_states_fake(x: Tensors, scale: float, block_size: int) -> tuple[Tensor, Tensor]:
    batch, seqlen, heads, d = x.q.shape
    blocks = (seqlen + block_size - 1) // block_size
    states = x.q.new_empty((batch, heads, blocks + 1, d, x.v.shape[-1]), dtype=torch.float32)
    return x.q.new_empty((*x.q.shape[:-1], x.v.shape[-1])), states


def _final_state_fake(x: Tensors, *rest: Any) -> Tensor:
    return _states(x.k, x.v, x.k.shape[0])


def _read_gradient_fake(x: BackwardTensors, *rest: Any) -> Tensor:
    return x.k.new_empty(x.k.shape)


def _write_gradients_fake(
    x: BackwardTensors, scale: float, schedule: str, needs_dinitial: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dinitial = _states_or_none(x.k, x.v, x.cu_seqlens, needs_dinitial)
    return x.k.new_empty(x.k.shape), x.v.new_empty(x.v.shape), dinitial


def _decay_gradient_fake(x: BackwardTensors, scale: float) -> Tensor:
    return x.decay.new_empty(x.decay.shape)


def _nothing(*_arguments: Any) -> None:
    return None


class _Operator(NamedTuple):
    """An operator: its schema is flat, its implementations take structures of the same names."""

    schema: str
    # what its implementations take first; further arguments follow in the order of the schema
    structures: tuple[type[Any], ...]
    # takes what the implementations take
    fake: Callable[..., Any]


_OPERATORS = {
    # final_state is empty if not needed
    "forward": _Operator(
        f"({schema_of(Tensors)}, {schema_of(Options)}) -> (Tensor out, Tensor final_state)",
        (Tensors, Options),
        _forward_fake,
    ),
    # with a cache of states; writes rows and slots in place
    "forward_cached": _Operator(
        f"(Tensor(a!) out, {schema_of(CachedTensors)}, float scale, str schedule) -> ()",
        (CachedTensors,),
        _nothing,
    ),
    # the states before every block of tokens, and after the last
    "forward_with_states": _Operator(
        f"({_INPUTS}, Tensor? initial_state, float scale, SymInt block_size) "
        "-> (Tensor out, Tensor states)",
        (Tensors,),
        _forward_with_states_fake,
    ),
    # only the final state, or in reverse the gradient of the initial state
    "final_state": _Operator(
        "(Tensor k, Tensor v, Tensor decay, Tensor? initial_state, float scale, bool reverse, "
        "str schedule) -> Tensor",
        (Tensors,),
        _final_state_fake,
    ),
    "read_gradient": _Operator(
        "(Tensor dout, Tensor k, Tensor v, Tensor decay, Tensor? cu_seqlens, "
        "Tensor? initial_state, float scale, str schedule) -> Tensor",
        (BackwardTensors,),
        _read_gradient_fake,
    ),
    "write_gradients": _Operator(
        f"(Tensor dout, {_INPUTS}, Tensor? cu_seqlens, Tensor? dfinal_state, float scale, "
        "str schedule, bool needs_dinitial) -> (Tensor dk, Tensor dv, Tensor dinitial_state)",
        (BackwardTensors,),
        _write_gradients_fake,
    ),
    "decay_gradient": _Operator(
        f"({schema_of(BackwardTensors)}, float scale) -> Tensor",
        (BackwardTensors,),
        _decay_gradient_fake,
    ),
    "decode": _Operator(
        f"({schema_of(StepTensors)}, float scale) -> ()",
        (StepTensors,),
        _nothing,
    ),
}


_BACKWARD = ("read_gradient", "write_gradients", "decay_gradient")


def _check_values(*structures: Any) -> None:
    """Check the data of CPU tensors; traces do not run this."""
    for x in structures:
        if isinstance(x, (Tensors, CachedTensors, StepTensors)):
            validate_decay(x.decay)
        if isinstance(x, (Tensors, CachedTensors)) and x.cu_seqlens is not None:
            validate_varlen(x.q, x.cu_seqlens)
        if isinstance(x, CachedTensors) and x.state_indices is not None:
            validate_slots(x.state_indices, x.state_cache, "state_indices")
        if isinstance(x, StepTensors):
            validate_slots(x.slot_idx, x.state_cache, "slot_idx")


def _define(
    name: str, schema: str, structures: tuple[type[Any], ...], fake: Callable[..., Any]
) -> Any:
    """Define an operator for the CPU, for GPUs and for traces."""

    def by_name(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        given = dict(zip((x.name for x in operator._schema.arguments), arguments, strict=True))
        made = (kind(**{x: given.pop(x, None) for x in kind._fields}) for kind in structures)
        return *made, *given.values()

    def kernels(*arguments: Any) -> Any:
        from . import launch

        return getattr(launch, name)(*by_name(arguments))

    def eager(*arguments: Any) -> Any:
        # under autocast the products within would be rounded to 16 bits
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return getattr(linear_eager, name)(*by_name(arguments))

    def check(*arguments: Any) -> None:
        _check_values(*by_name(arguments))

    operator = register(
        f"{NAMESPACE}::{name}",
        schema,
        fake=lambda *arguments: fake(*by_name(arguments)),
        kernels=kernels,
        eager=eager,
        check=None if name in _BACKWARD else check,
    )
    return operator


forward, forward_cached, forward_with_states, final_state, *_gradient_operators, decode = (
    _define(name, *operator) for name, operator in _OPERATORS.items()
)
read_gradient, write_gradients, decay_gradient = _gradient_operators
for _operator in _gradient_operators:
    torch.library.register_autograd(
        _operator.name(), no_second_derivative("lightning_attention_reference")
    )


def _gradients(x: BackwardTensors, needs: Needs, options: Options) -> Gradients:
    """Return the needed gradients, by operators."""
    dq = dk = dv = ddecay = dinitial = None
    how = options.scale, options.schedule
    *inputs, initial_state, dfinal_state = x
    if needs.q:
        dq = read_gradient(x.dout, x.k, x.v, x.decay, x.cu_seqlens, initial_state, *how)
    if needs.k or needs.v or needs.initial_state:
        dk, dv, dinitial = write_gradients(*inputs, dfinal_state, *how, needs.initial_state)
    if needs.decay:
        ddecay = decay_gradient(*x, options.scale)
    return Gradients(dq, dk, dv, ddecay, dinitial if needs.initial_state else None)


class _LightningAttention(torch.autograd.Function):
    """The forward pass and its derivative, by the launcher or by operators."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Take the fields of ``Tensors``, then a ``Checked``."""
        *tensors, known = arguments
        if known.plan is None:
            out, final = forward(*tensors, *known.options)
        else:
            out, final = known.plan.forward(Tensors(*tensors))
        ctx.save_for_backward(*tensors)
        ctx.known = known
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        given = Tensors(*ctx.saved_tensors)
        *needed, _, needs_dinitial, _ = ctx.needs_input_grad
        options, plan = ctx.known
        if dout is None:
            dout = given.q.new_zeros((*given.q.shape[:-1], given.v.shape[-1]))
        if not options.output_final_state:
            dfinal = None
        x = BackwardTensors(dout, *given, dfinal)
        needs = Needs._make((*needed, needs_dinitial))
        others = (dout, dfinal, x.initial_state, x.cu_seqlens)
        if plan is not None and may_skip_operator(*others) and plan.fits(x):
            grads = plan.backward(x, needs)
        else:
            grads = _gradients(x, needs, options)
        *of_inputs, dinitial = grads
        return *of_inputs, None, dinitial, None


def attention(x: Tensors, known: Checked) -> tuple[Tensor, Tensor]:
    """Compute ``(out, final state)``, through the autograd function if a gradient is needed."""
    refuse_tangents(x)
    if known.plan is not None and x.q.is_cpu:
        _check_values(x)
    if torch.is_grad_enabled() and (
        x.q.requires_grad
        or x.k.requires_grad
        or x.v.requires_grad
        or x.decay.requires_grad
        or (x.initial_state is not None and x.initial_state.requires_grad)
    ):
        if torch.compiler.is_compiling():
            x = without_repeats(x)
        return _LightningAttention.apply(*x, known)  # type: ignore[no-any-return, no-untyped-call]
    if known.plan is not None:
        return known.plan.forward(x)
    return forward(*x, *known.options)  # type: ignore[no-any-return]


def advance(out: Tensor, x: CachedTensors, known: Checked) -> None:
    """Fill ``out``, and advance the sequences' slots of the cache."""
    if known.plan is None:
        forward_cached(out, *x, known.options.scale, known.options.schedule)
    else:
        check_written(x)
        if out.is_cpu:
            _check_values(x)
        known.plan.fill(out, x)


def step(x: StepTensors, known: CheckedStep) -> None:
    """Advance each sequence by its new tokens."""
    if known.plan is None:
        decode(*x, known.scale)
    else:
        check_written(x)
        if x.q.is_cpu:
            _check_values(x)
        known.plan.decode(x)


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" or (device.type == "cpu" and interpreted())


def planned(x: Tensors | CachedTensors, options: Options) -> Checked:
    """Return the ``Checked`` of calls of this form, with a launcher if kernels run them."""
    if not _has_kernels(x.q.device):
        return Checked(options)
    from .launch import plan_forward

    return Checked(options, plan_forward(x, options))


def planned_step(x: StepTensors, scale: float) -> CheckedStep:
    """Return the ``CheckedStep`` of decoding steps, with a launcher if kernels run them."""
    if not _has_kernels(x.q.device) or not (x.decay.is_contiguous() and x.slot_idx.is_contiguous()):
        return CheckedStep(scale)
    from .launch import DecodePlan

    return CheckedStep(scale, DecodePlan(x, scale))
