"""Operator schemas, their fakes, their CPU kernels and their derivatives.

Importing this module imports torch, but neither triton nor the kernels. CUDA and HIP tensors run
the Triton kernels. CPU tensors run the eager code of ``_reference/eager.py``, or, in a process
started with ``TRITON_INTERPRET=1``, the Triton kernels in the interpreter.

A call with a launcher (``Plan``) is differentiated by ``_Planned``, without the operators; every
other call by the operator's formula. Both give the same gradients. The backward operator has no
derivative: asking for one raises.
"""

from collections.abc import Sequence
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
    without_repeats,
)
from .._reference.eager import EagerPlan, attention_backward, attention_forward
from .._reference.sequences import dropout_marked_probabilities
from .call import Checked, Grads, Options, Plan, Tensors
from .checks import check_values

__all__ = ["attention", "backward", "dropout_marked_probabilities", "forward"]


# positions of the forward operator's arguments: tensors come first; ``out_dtype`` is followed by
# ``deterministic``, which only the derivative needs, and ``invariant``
_TENSORS = len(Tensors._fields)
_BIAS, _SINKS = Tensors._fields.index("bias"), Tensors._fields.index("sinks")
_OUT_DTYPE = _TENSORS + 2 + len(Options._fields)

NAMESPACE = free_namespace(__name__, "forward")
_OPTIONS = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, SymInt window_left, "
    "SymInt window_right, float softcap, float dropout_p"
)


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    q, _, v = arguments[:3]
    out_dtype = arguments[_OUT_DTYPE] or (torch.bfloat16 if q.dtype in FP8_DTYPES else q.dtype)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype)
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return out, q.new_empty(lse_shape, dtype=torch.float32)


def _backward_fake(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    *rest: Any,
) -> Grads:
    needs_dbias = rest[-1]
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        bias.new_empty(bias.shape) if bias is not None and needs_dbias else q.new_empty((0,)),
        sinks.new_empty(sinks.shape) if sinks is not None else q.new_empty((0,)),
    )


def _check_forward(*arguments: Any) -> None:
    check_values(Tensors(*arguments[:_TENSORS]), *arguments[_TENSORS : _TENSORS + 2])


def _is_invariant(arguments: Sequence[Any]) -> bool:
    """Read ``invariant`` from the forward operator's arguments, whose last ones may be absent."""
    return any(arguments[_OUT_DTYPE + 2 :])


def _forward_triton(*arguments: Any) -> tuple[Tensor, Tensor]:
    from .launch import launch_forward

    return launch_forward(*arguments[: _OUT_DTYPE + 1], _is_invariant(arguments))


def _backward_triton(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any
) -> Grads:
    from .launch import launch_backward

    return launch_backward(dout, q, k, v, out, *rest)


def _forward_eager(*arguments: Any) -> tuple[Tensor, Tensor]:
    # leave out the longest lengths: eager code reads lengths from the tensors
    options = *arguments[_TENSORS + 2 : _OUT_DTYPE + 1], _is_invariant(arguments)
    return attention_forward(*arguments[:_TENSORS], *options)


def _backward_eager(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any
) -> Grads:
    *tensors, _, _, scale, left, right, softcap, dropout_p, _, needs_dbias = rest
    options = scale, left, right, softcap, dropout_p
    arguments: tuple[Any, ...] = (dout, q, k, v, *tensors, *options, out)
    dq, dk, dv, dbias, dsinks = attention_backward(*arguments)
    return dq, dk, dv, dbias if needs_dbias else q.new_empty((0,)), dsinks


forward = register(
    f"{NAMESPACE}::forward",
    "(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? seqused_k, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? q_descale, "
    "Tensor? k_descale, Tensor? v_descale, Tensor? out_scale, Tensor? rng_state, "
    f"{_OPTIONS}, ScalarType? out_dtype, bool deterministic=False, bool invariant=False) "
    "-> (Tensor out, Tensor lse)",
    fake=_forward_fake,
    kernels=_forward_triton,
    eager=_forward_eager,
    check=_check_forward,
)
backward = register(
    f"{NAMESPACE}::backward",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? bias, "
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? rng_state, "
    f"{_OPTIONS}, bool deterministic, bool needs_dbias) "
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


def build_calls(arguments: Sequence[Any], backward: bool) -> None:
    """Build the kernels that a call of the forward operator and its derivative would launch."""
    x, options = Tensors(*arguments[:_TENSORS]), Options(*arguments[_TENSORS + 2 : _OUT_DTYPE])
    if x.q.device.type == "cpu":
        return
    from .launch import build_calls

    is_fp8 = x.q.dtype in FP8_DTYPES
    out_dtype = arguments[_OUT_DTYPE] or (torch.bfloat16 if is_fp8 else x.q.dtype)
    # PyTorch does not pass an operator's last arguments if they have their defaults
    deterministic = any(arguments[_OUT_DTYPE + 1 : _OUT_DTYPE + 2])
    invariant = _is_invariant(arguments)
    build_calls(x, options, out_dtype, deterministic, invariant, backward and not is_fp8)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the derivative of the forward operator needs."""
    *arguments, _, deterministic, _ = inputs
    ctx.save_for_backward(*arguments[:_TENSORS], *output)
    ctx.options = *arguments[_TENSORS:], deterministic
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of the forward operator's arguments."""
    *tensors, out, lse = ctx.saved_tensors
    needs = ctx.needs_input_grad
    needs_dbias = needs[_BIAS]
    x = Tensors(*tensors)
    dq, dk, dv, dbias, dsinks = _run_backward(x, out, lse, dout, dlse, ctx.options, needs_dbias)
    by_name = Tensors(
        dq,
        dk,
        dv,
        bias=dbias if needs_dbias else None,
        sinks=dsinks if needs[_SINKS] else None,
    )
    return *by_name, *(None,) * (len(needs) - _TENSORS)


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
        *x.optional,
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
