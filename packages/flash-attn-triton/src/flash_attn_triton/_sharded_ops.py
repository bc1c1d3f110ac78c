"""Operators of sequences that are cut across ranks, and the autograd function over them.

Each is opaque to a trace, with its exchange of keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _ops
from ._call import Tensors
from ._linked.host.operators import no_second_derivative, register
from ._sharded import Sharded, backward, forward

_OPTIONS = "float softmax_scale, float softcap, bool deterministic, str layout, str group"


def _forward(*given: Any) -> tuple[Tensor, Tensor]:
    q, k, v, sinks, *options, claims = given
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return forward(q, k, v, sinks, Sharded(*options), claims)


def _backward(*given: Any) -> tuple[Tensor, ...]:
    dout, q, k, v, sinks, out, lse, dlse, *options = given
    x = Tensors(q, k, v, sinks=sinks)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return backward(x, out, lse, dout, dlse, Sharded(*options))


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    return *grads, q.new_empty((0,)) if sinks is None else sinks.new_empty(sinks.shape)


sharded_forward = register(
    f"{_ops.NAMESPACE}::sharded_forward",
    f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_OPTIONS}, str[] claims) "
    "-> (Tensor out, Tensor lse)",
    fake=_forward_fake,
    kernels=_forward,
    eager=_forward,
)
sharded_backward = register(
    f"{_ops.NAMESPACE}::sharded_backward",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse, "
    f"Tensor? dlse, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    fake=_backward_fake,
    kernels=_backward,
    eager=_backward,
)
torch.library.register_autograd(
    sharded_backward.name(), no_second_derivative("attention_reference")
)


class ShardedAttention(torch.autograd.Function):
    """The forward pass of one rank's tokens, with the gradients as its derivative."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        """Take q, k, v, sinks, options, and what is compared."""
        q, k, v, sinks, options, claims = given
        out, lse = sharded_forward(q, k, v, sinks, *options, claims)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "second derivatives are not offered across ranks: differentiate without "
                "create_graph=True"
            )
        q, k, v, sinks, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        grads = sharded_backward(dout, q, k, v, sinks, out, lse, dlse, *ctx.options)
        needs = ctx.needs_input_grad
        return *(g if need else None for g, need in zip(grads, needs, strict=False)), None, None
