"""Operator schemas, their fakes, their CPU kernels and their derivatives.

Importing this module imports torch, but neither triton nor the kernels. CUDA and HIP tensors run
the Triton kernels. CPU tensors run the eager code of ``_reference/eager.py``, or, in a process
started with ``TRITON_INTERPRET=1``, the Triton kernels in the interpreter.

A call with a launcher (``Plan``) is differentiated by ``_Planned``, without the operators; every
other call by the operator's formula. Both give the same gradients. The backward operator has no
derivative: asking for one raises.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._linked.host.arguments import FP8_DTYPES
from .._linked.host.forms import interpreted
from .._linked.host.internals import apply_of, is_transformed, refuse_tangents
from .._linked.host.operators import (
    differentiable,
    free_namespace,
    may_skip_operator,
    no_second_derivative,
    register,
    schema_of,
    structured,
    without_repeats,
)
from .._reference.eager import EagerPlan, attention_backward, attention_forward
from .._reference.sequences import dropout_marked_probabilities
from .call import BackwardCall, Checked, ForwardCall, Grads, Options, Plan, Tensors
from .checks import check_values

NAMESPACE = free_namespace(__name__, "forward")


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = structured(ForwardCall, arguments)
    q, v = call.tensors.q, call.tensors.v
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=call.dtype)
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return out, q.new_empty(lse_shape, dtype=torch.float32)


def _backward_fake(*arguments: Any) -> Grads:
    call = structured(BackwardCall, arguments)
    q, bias, sinks = call.q, call.bias, call.sinks
    return (
        q.new_empty(q.shape),
        call.k.new_empty(call.k.shape),
        call.v.new_empty(call.v.shape),
        bias.new_empty(bias.shape) if bias is not None and call.needs_dbias else q.new_empty((0,)),
        sinks.new_empty(sinks.shape) if sinks is not None else q.new_empty((0,)),
    )


def _check_forward(*arguments: Any) -> None:
    call = structured(ForwardCall, arguments)
    check_values(call.tensors, call.max_seqlen_q, call.max_seqlen_k)


def _forward_triton(*arguments: Any) -> tuple[Tensor, Tensor]:
    from .launch import launch_forward

    return launch_forward(structured(ForwardCall, arguments))


def _backward_triton(*arguments: Any) -> Grads:
    from .launch import launch_backward

    return launch_backward(structured(BackwardCall, arguments))


def _forward_eager(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = structured(ForwardCall, arguments)
    return attention_forward(call.tensors, call.options, call.out_dtype, call.invariant)


def _backward_eager(*arguments: Any) -> Grads:
    call = structured(BackwardCall, arguments)
    results = call.out, call.lse, call.dout, call.dlse
    dq, dk, dv, dbias, dsinks = attention_backward(call.tensors, call.options, *results)
    return dq, dk, dv, dbias if call.needs_dbias else call.q.new_empty((0,)), dsinks


forward = register(
    f"{NAMESPACE}::forward",
    f"({schema_of(ForwardCall)}) -> (Tensor out, Tensor lse)",
    fake=_forward_fake,
    kernels=_forward_triton,
    eager=_forward_eager,
    check=_check_forward,
)
backward = register(
    f"{NAMESPACE}::backward",
    f"({schema_of(BackwardCall)}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
    fake=_backward_fake,
    kernels=_backward_triton,
    eager=_backward_eager,
)


def plan_of(
    x: Tensors,
    options: Options,
    out_dtype: torch.dtype,
    deterministic: bool,
    invariant: bool = False,
    *,
    needs_gradient: bool,
) -> Plan | None:
    """Return the launcher of calls with this signature; None if they must go through operators."""
    device = x.q.device.type
    if device == "cpu" and not interpreted():
        return EagerPlan(options, out_dtype, invariant)
    if device not in ("cpu", "cuda"):
        return None
    from .launch import plan_calls

    return plan_calls(
        x,
        options,
        out_dtype,
        deterministic=deterministic,
        needs_gradient=needs_gradient,
        invariant=invariant,
    )


def build_calls(arguments: Sequence[Any], backward: bool, out: Path | None) -> None:
    """Build the kernels that a call of the forward operator and its derivative would launch."""
    call = structured(ForwardCall, arguments)
    device = call.tensors.q.device.type
    if device == "cpu":
        if out is not None:
            raise ValueError(f"out must come with tensors on a GPU or on meta, q is on {device}")
        return
    from .launch import build_calls

    build_calls(call, backward and call.tensors.q.dtype not in FP8_DTYPES, out)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the derivative of the forward operator needs."""
    call = structured(ForwardCall, inputs)
    ctx.save_for_backward(*call.tensors, *output)
    ctx.bounds = call.max_seqlen_q, call.max_seqlen_k
    ctx.options, ctx.deterministic = call.options, call.deterministic
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of the forward operator's arguments."""
    *tensors, out, lse = ctx.saved_tensors
    x = Tensors(*tensors)
    needs: Any = Tensors(*ctx.needs_input_grad[: len(tensors)])
    options = *ctx.bounds, *ctx.options, ctx.deterministic
    dq, dk, dv, dbias, dsinks = _run_backward(x, out, lse, dout, dlse, options, needs.bias)
    by_name = Tensors(
        dq,
        dk,
        dv,
        bias=dbias if needs.bias else None,
        sinks=dsinks if needs.sinks else None,
    )
    return *by_name, *(None,) * (len(ctx.needs_input_grad) - len(tensors))


def _run_backward(
    x: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    options: tuple[Any, ...],
    needs_dbias: bool,
) -> Grads:
    """Return the gradients by the backward operator."""
    return _call_backward(  # type: ignore[no-any-return]
        torch.zeros_like(out) if dout is None else dout,
        x.q,
        x.k,
        x.v,
        out,
        lse,
        dlse,
        x.cu_seqlens_q,
        x.cu_seqlens_k,
        x.seqused_k,
        x.bias,
        x.alibi_slopes,
        x.sinks,
        x.spans,
        x.rng_state,
        *options,
        needs_dbias,
    )


_call_forward = differentiable(forward, _differentiate, _keep)
_call_backward = differentiable(backward, no_second_derivative("attention_reference"))


class _Planned(torch.autograd.Function):
    """The two passes of a call with a launcher, without the operators."""

    @staticmethod
    def forward(
        ctx: Any, call: tuple[Tensors, tuple[int, int], Checked], *given: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Take a call and, for PyTorch, its given tensors once more.

        Every tensor that is taken, saved or returned costs time, so the LSE is returned only if it
        is asked for.
        """
        x, bounds, known = call
        out, lse = known.plan.forward(x)  # type: ignore[union-attr]
        ctx.save_for_backward(*given, out, lse)
        ctx.call = bounds, known
        if not known.returns_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        *given, out, lse = ctx.saved_tensors
        bounds, known = ctx.call
        if len(given) == 3:  # q, k and v alone
            x, needs_dbias, needs_dsinks = Tensors(*given), False, False
        else:
            x, needs = known.given.spread(given), known.given.spread(ctx.needs_input_grad[1:])
            needs_dbias, needs_dsinks = needs.bias is True, needs.sinks is True
        if may_skip_operator(dout, dlse) and known.plan.fits(x):
            if dout is None:
                dout = torch.zeros_like(out)
            grads = known.plan.backward(x, out, lse, dout, dlse, needs_dbias)
        else:
            options = *bounds, *known.options, known.deterministic
            grads = _run_backward(x, out, lse, dout, dlse, options, needs_dbias)
        dq, dk, dv, dbias, dsinks = grads
        if len(given) == 3:
            return None, dq, dk, dv
        extras = dbias if needs_dbias else None, dsinks if needs_dsinks else None
        return None, *known.given.of(Tensors(dq, dk, dv, bias=extras[0], sinks=extras[1]))


_apply_planned = apply_of(_Planned)


def attention(
    x: Tensors, max_seqlen_q: int, max_seqlen_k: int, known: Checked
) -> tuple[Tensor, Any]:
    """Compute ``(out, lse)``, differentiable if a gradient is asked for.

    The LSE may be None if ``known.returns_lse`` is False.
    """
    bounds = max_seqlen_q, max_seqlen_k
    if known.plan is None:
        refuse_tangents(x)
        options = *bounds, *known.options, known.out_dtype, known.deterministic, known.invariant
        if is_transformed() and torch.compiler.is_compiling():
            x = without_repeats(x)
        return _call_forward(*x, *options)  # type: ignore[no-any-return]
    if x.cu_seqlens_q is not None and x.q.device.type == "cpu":
        check_values(x, *bounds)
    if known.given is not None:
        results = _apply_planned((x, bounds, known), *known.given.of(x))
        return results if known.returns_lse else (results, None)
    return known.plan.forward(x)


def needs_gradient(x: Tensors) -> bool:
    """Tell whether a gradient may be asked for later."""
    return torch.is_grad_enabled() and (
        x.q.requires_grad
        or x.k.requires_grad
        or x.v.requires_grad
        or (x.bias is not None and x.bias.requires_grad)
        or (x.sinks is not None and x.sinks.requires_grad)
    )


def marked_probabilities(
    x: Tensors, lse: Tensor, max_seqlen_q: int, max_seqlen_k: int, options: Options
) -> Tensor | None:
    """Return the probabilities, negative where dropped; None without dropout."""
    if x.rng_state is None:
        return None
    return dropout_marked_probabilities(x, lse, max_seqlen_q, max_seqlen_k, options)
