"""Operator schemas, their fakes and their CPU kernels, and the autograd function over them.

Importing this module imports torch, but neither triton nor the kernels. CUDA and HIP tensors run
the Triton kernels. CPU tensors run the eager code of :mod:`.reference`, or, in a process started
with ``TRITON_INTERPRET=1``, the Triton kernels in the interpreter.
"""

import functools
import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from ._eager import Grads, attention_backward, attention_forward
from ._options import FP8_DTYPES
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
    f"{_OPTIONS}, bool needs_dbias) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
    tags=torch.Tag.pt2_compliant_tag,
)


@functools.cache
def interpreted() -> bool:
    """Return whether this process interprets Triton kernels; Triton decides at its import."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on")


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
    from ._kernels.forward import launch_forward

    result: tuple[Tensor, Tensor] = launch_forward(q, k, v, *rest)  # type: ignore[no-untyped-call]
    return result


def _backward_triton(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any
) -> Grads:
    from ._kernels.backward import launch_backward

    result: Grads = launch_backward(dout, q, k, v, out, *rest)  # type: ignore[no-untyped-call]
    return result


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
    needs_dbias: bool,
) -> Grads:
    if interpreted():
        return _backward_triton(
            dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k, seqused_k,
            bias, alibi_slopes, sinks, rng_state, max_seqlen_q, max_seqlen_k,
            softmax_scale, window_left, window_right, softcap, dropout_p, needs_dbias,
        )  # fmt: skip
    dq, dk, dv, dbias, dsinks = attention_backward(
        dout, q, k, v, lse, dlse, cu_seqlens_q, cu_seqlens_k, seqused_k,
        bias, alibi_slopes, sinks, rng_state,
        softmax_scale, window_left, window_right, softcap, dropout_p,
    )  # fmt: skip
    return dq, dk, dv, dbias if needs_dbias else q.new_empty((0,)), dsinks


torch.library.register_fake("flash_attn_triton::forward", _forward_fake)
torch.library.register_fake("flash_attn_triton::backward", _backward_fake)
torch.library.impl("flash_attn_triton::forward", "cuda", _forward_triton)
torch.library.impl("flash_attn_triton::backward", "cuda", _backward_triton)
torch.library.impl("flash_attn_triton::forward", "cpu", _forward_cpu)
torch.library.impl("flash_attn_triton::backward", "cpu", _backward_cpu)

forward = torch.ops.flash_attn_triton.forward.default
backward = torch.ops.flash_attn_triton.backward.default


class _FlashAttention(torch.autograd.Function):
    """The forward operator, with the backward operator as its derivative."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        seqused_k: Tensor | None,
        alibi_slopes: Tensor | None,
        rng_state: Tensor | None,
        options: tuple[Any, ...],
        out_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, bias, alibi_slopes, sinks,
            None, None, None, None, rng_state, *options, out_dtype,
        )  # fmt: skip
        ctx.save_for_backward(
            q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_k,
            bias, alibi_slopes, sinks, rng_state,
        )  # fmt: skip
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        needs_dbias, needs_dsinks = ctx.needs_input_grad[3:5]
        dq, dk, dv, dbias, dsinks = backward(
            dout, q, k, v, out, lse, dlse, *rest, *ctx.options, needs_dbias
        )
        return (
            dq, dk, dv, dbias if needs_dbias else None, dsinks if needs_dsinks else None,
            None, None, None, None, None, None, None,
        )  # fmt: skip


def _has_tangent(x: Tensor) -> bool:
    """Say whether a tensor has a tangent, at any level of torch.func's transforms."""
    functorch = torch._C._functorch
    unpack_dual: Any = forward_ad.unpack_dual
    while True:
        # unpacking has no batching rule
        batched = functorch.is_batchedtensor(x)
        if not batched and unpack_dual(x).tangent is not None:
            return True
        if not (batched or functorch.is_gradtrackingtensor(x)):
            return False
        x = functorch.get_unwrapped(x)


def attention(
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
    """Call the forward operator, through the autograd function where a gradient is asked for."""
    if forward_ad._current_level >= 0:
        # an operator without a formula for them would drop the tangents in silence
        for x in (q, k, v, bias, alibi_slopes, sinks, q_descale, k_descale, v_descale, out_scale):
            if x is not None and _has_tangent(x):
                raise NotImplementedError(
                    "forward-mode differentiation (torch.func.jvp, jacfwd, forward_ad) is not "
                    "offered, got an input with a tangent"
                )
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    ):
        if torch.compiler.is_compiling():
            # dynamo refuses one tensor as two inputs of an autograd function
            k = k.view_as(k) if k is q else k
            v = v.view_as(v) if v is q or v is k else v
            if cu_seqlens_q is not None and cu_seqlens_q is cu_seqlens_k:
                cu_seqlens_k = cu_seqlens_k.view_as(cu_seqlens_k)
        options = (
            max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right, softcap,
            dropout_p,
        )  # fmt: skip
        result: tuple[Tensor, Tensor] = _FlashAttention.apply(  # type: ignore[no-untyped-call]
            q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes,
            rng_state, options, out_dtype,
        )  # fmt: skip
        return result
    return forward(  # type: ignore[no-any-return]
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, bias, alibi_slopes, sinks,
        q_descale, k_descale, v_descale, out_scale, rng_state, max_seqlen_q, max_seqlen_k,
        softmax_scale, window_left, window_right, softcap, dropout_p, out_dtype,
    )  # fmt: skip
