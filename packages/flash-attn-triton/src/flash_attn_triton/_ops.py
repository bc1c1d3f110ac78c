"""Operator schemas, their fakes and their CPU kernels, and the autograd function over them.

Importing this module imports torch, but neither triton nor the kernels. CUDA and HIP tensors run
the Triton kernels. CPU tensors run the eager code of :mod:`.reference`, or, in a process started
with ``TRITON_INTERPRET=1``, the Triton kernels in the interpreter.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._call import Checked, Grads, Options, Plan, Tensors
from ._eager import attention_backward, attention_forward
from ._linked.host.arguments import FP8_DTYPES, on_one_device
from ._linked.host.forms import interpreted
from ._linked.host.internals import is_plain_tensor, is_watched, refuse_tangents
from .reference import dropout_marked_probabilities

__all__ = ["attention", "backward", "dropout_marked_probabilities", "forward"]

_OPTIONS = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, SymInt window_left, "
    "SymInt window_right, float softcap, float dropout_p"
)

torch.library.define(
    "flash_attn_triton::forward",
    "(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? seqused_k, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? q_descale, "
    "Tensor? k_descale, Tensor? v_descale, Tensor? out_scale, Tensor? rng_state, "
    f"{_OPTIONS}, ScalarType? out_dtype) -> (Tensor out, Tensor lse)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "flash_attn_triton::backward",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? bias, "
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? rng_state, "
    f"{_OPTIONS}, bool deterministic, bool needs_dbias) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out_dtype = rest[-1] or (torch.bfloat16 if q.dtype in FP8_DTYPES else q.dtype)
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


def _forward_triton(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    from ._kernels.plans import launch_forward

    return launch_forward(q, k, v, *rest)


def _backward_triton(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any
) -> Grads:
    from ._kernels.plans import launch_backward

    return launch_backward(dout, q, k, v, out, *rest)


def _forward_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    out_scale: Tensor | None,
    rng_state: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    if interpreted():
        return _forward_triton(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, bias, alibi_slopes, sinks,
            q_descale, k_descale, v_descale, out_scale, rng_state, max_seqlen_q, max_seqlen_k,
            softmax_scale, window_left, window_right, softcap, dropout_p, out_dtype,
        )  # fmt: skip
    return attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, bias, alibi_slopes, sinks,
        q_descale, k_descale, v_descale, out_scale, rng_state,
        softmax_scale, window_left, window_right, softcap, dropout_p, out_dtype,
    )  # fmt: skip


def _backward_cpu(
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
    rng_state: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    needs_dbias: bool,
) -> Grads:
    if interpreted():
        return _backward_triton(
            dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k, seqused_k,
            bias, alibi_slopes, sinks, rng_state, max_seqlen_q, max_seqlen_k,
            softmax_scale, window_left, window_right, softcap, dropout_p, deterministic,
            needs_dbias,
        )  # fmt: skip
    dq, dk, dv, dbias, dsinks = attention_backward(
        dout,
        q,
        k,
        v,
        lse,
        dlse,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        bias,
        alibi_slopes,
        sinks,
        rng_state,
        softmax_scale,
        window_left,
        window_right,
        softcap,
        dropout_p,
    )
    return dq, dk, dv, dbias if needs_dbias else q.new_empty((0,)), dsinks


torch.library.register_fake("flash_attn_triton::forward", _forward_fake)
torch.library.register_fake("flash_attn_triton::backward", _backward_fake)
torch.library.impl("flash_attn_triton::forward", "cuda", on_one_device(_forward_triton))
torch.library.impl("flash_attn_triton::backward", "cuda", on_one_device(_backward_triton))
torch.library.impl("flash_attn_triton::forward", "cpu", _forward_cpu)
torch.library.impl("flash_attn_triton::backward", "cpu", _backward_cpu)

forward = torch.ops.flash_attn_triton.forward.default
backward = torch.ops.flash_attn_triton.backward.default


def plan_of(
    x: Tensors, options: Options, out_dtype: torch.dtype, deterministic: bool
) -> Plan | None:
    """Return how to launch calls of this form past the operators; None if they are to be asked."""
    device = x.q.device.type
    if device != "cuda" and not (device == "cpu" and interpreted()):
        return None
    from ._kernels.plans import plan_calls

    return plan_calls(
        x, options, out_dtype, deterministic=deterministic, needs_gradient=_needs_gradient(x)
    )


class _FlashAttention(torch.autograd.Function):
    """The forward pass, with the backward pass as its derivative: planned, or by operators."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Take the fields of ``Tensors``, then the two bounds of lengths and what is known."""
        x, bounds, known = Tensors(*arguments[:-2]), arguments[-2], arguments[-1]
        if known.plan is None:
            out, lse = forward(*x, *bounds, *known.options, known.out_dtype)
        else:
            out, lse = known.plan.forward(x)
        ctx.save_for_backward(*x, out, lse)
        ctx.bounds, ctx.known = bounds, known
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        x, plan = Tensors(*tensors), ctx.known.plan
        if dout is None:
            dout = torch.zeros_like(out)
        needs = Tensors(*ctx.needs_input_grad[: len(x)])
        is_planned = plan is not None and not is_watched() and is_plain_tensor(dout)
        if is_planned and (dlse is None or is_plain_tensor(dlse)) and plan.fits(x):
            grads = plan.backward(x, out, lse, dout, dlse, needs.bias)
        else:
            grads = backward(
                dout,
                x.q,
                x.k,
                x.v,
                out,
                lse,
                dlse,
                *x[3:9],
                x.rng_state,
                *ctx.bounds,
                *ctx.known.options,
                ctx.known.deterministic,
                needs.bias,
            )
        dq, dk, dv, dbias, dsinks = grads
        by_name = Tensors(
            dq,
            dk,
            dv,
            bias=dbias if needs.bias else None,
            sinks=dsinks if needs.sinks else None,
        )
        return *by_name, None, None


def attention(
    x: Tensors, max_seqlen_q: int, max_seqlen_k: int, known: Checked
) -> tuple[Tensor, Tensor]:
    """Compute ``(out, lse)``, through the autograd function where a gradient is asked for."""
    refuse_tangents(x)
    bounds = max_seqlen_q, max_seqlen_k
    if _needs_gradient(x):
        if torch.compiler.is_compiling():
            x = _without_repeats(x)
        return _FlashAttention.apply(*x, bounds, known)  # type: ignore[no-any-return, no-untyped-call]
    if known.plan is not None:
        return known.plan.forward(x)
    return forward(*x, *bounds, *known.options, known.out_dtype)  # type: ignore[no-any-return]


def _needs_gradient(x: Tensors) -> bool:
    """Say whether a gradient may be asked for later."""
    return torch.is_grad_enabled() and (
        x.q.requires_grad
        or x.k.requires_grad
        or x.v.requires_grad
        or (x.bias is not None and x.bias.requires_grad)
        or (x.sinks is not None and x.sinks.requires_grad)
    )


def _without_repeats(x: Tensors) -> Tensors:
    """Return the tensors under several identities: dynamo refuses one as two inputs."""
    k = x.k.view_as(x.k) if x.k is x.q else x.k
    v = x.v.view_as(x.v) if x.v is x.q or x.v is x.k else x.v
    cu_seqlens_k = x.cu_seqlens_k
    if cu_seqlens_k is not None and cu_seqlens_k is x.cu_seqlens_q:
        cu_seqlens_k = cu_seqlens_k.view_as(cu_seqlens_k)
    return x._replace(k=k, v=v, cu_seqlens_k=cu_seqlens_k)
