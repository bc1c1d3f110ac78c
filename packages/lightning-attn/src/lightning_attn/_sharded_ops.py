"""Operators of sequences that are cut across ranks, and the autograd function over them.

Each is opaque to a trace, with its exchange of states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _ops
from ._call import BackwardTensors
from ._linked.host.operators import no_second_derivative, register
from ._sharded import Sharded, backward, forward
from ._shards import table_of

_OPTIONS = "float scale, str schedule, bool is_exact, str layout, str group"


def _backend(name: str) -> Any:
    if name == "eager":
        from . import _eager_sharded

        return _eager_sharded
    from ._kernels import sharded_plans

    return sharded_plans


def _forward_by(name: str) -> Any:
    def implementation(*given: Any) -> tuple[Tensor, Tensor]:
        q, k, v, decay, initial_state, *options, claims = given
        known = Sharded(*options)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return forward(_backend(name), q, k, v, decay, initial_state, known, claims)

    return implementation


def _backward_by(name: str) -> Any:
    def implementation(*given: Any) -> tuple[Tensor, ...]:
        dout, q, k, v, decay, before, dfinal, needs, *options = given
        x = BackwardTensors(dout, q, k, v, decay, None)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return backward(_backend(name), x, before, dfinal, needs, Sharded(*options))

    return implementation


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows = table_of(rest[-3]).rows
    states = q.new_empty((rows, q.shape[1], q.shape[2], v.shape[2]), dtype=torch.float32)
    return q.new_empty(v.shape), states


def _backward_fake(*given: Any) -> tuple[Tensor, ...]:
    _, q, k, v, decay, _, _, needs, _, _, _, layout, _ = given
    needs_q, needs_kv, needs_decay, needs_initial, _ = needs
    absent = (0,)
    writes = needs_kv or needs_initial
    initial = (table_of(layout).batch, q.shape[1], q.shape[2], v.shape[2])
    return (
        q.new_empty(q.shape if needs_q else absent),
        k.new_empty(k.shape if writes else absent),
        v.new_empty(v.shape if writes else absent),
        decay.new_empty(decay.shape if needs_decay else absent),
        q.new_empty(initial if needs_initial else absent, dtype=torch.float32),
    )


sharded_forward = register(
    f"{_ops.NAMESPACE}::sharded_forward",
    f"(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? initial_state, {_OPTIONS}, "
    "str[] claims) -> (Tensor out, Tensor states)",
    fake=_forward_fake,
    kernels=_forward_by("kernels"),
    eager=_forward_by("eager"),
)
sharded_backward = register(
    f"{_ops.NAMESPACE}::sharded_backward",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor decay, Tensor states, "
    f"Tensor? dfinal_state, bool[] needs, {_OPTIONS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor ddecay, Tensor dinitial_state)",
    fake=_backward_fake,
    kernels=_backward_by("kernels"),
    eager=_backward_by("eager"),
)
torch.library.register_autograd(
    sharded_backward.name(), no_second_derivative("lightning_attention_reference")
)


class ShardedAttention(torch.autograd.Function):
    """The forward pass of one rank's tokens, with the gradients as its derivative."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        """Take q, k, v, decays and initial states, options, what is compared, final states."""
        *tensors, options, claims, finals = given
        out, states = sharded_forward(*tensors, *options, claims)
        ctx.save_for_backward(*tensors[:4], states)
        ctx.options, ctx.finals = options, finals
        ctx.has_initial = tensors[4] is not None
        ctx.set_materialize_grads(False)
        # no view of what is put away
        return out, states[states.shape[0] - finals :].clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "second derivatives are not offered across ranks: differentiate without "
                "create_graph=True"
            )
        q, k, v, decay, states = ctx.saved_tensors
        needs_q, needs_k, needs_v, needs_decay, needs_initial, *_ = ctx.needs_input_grad
        if dout is None:
            dout = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        if not ctx.finals:
            dfinal = None
        needs = [needs_q, needs_k or needs_v, needs_decay, needs_initial, ctx.has_initial]
        dq, dk, dv, ddecay, dinitial = sharded_backward(
            dout, q, k, v, decay, states, dfinal, needs, *ctx.options
        )
        return (
            dq if needs_q else None,
            dk if needs_k else None,
            dv if needs_v else None,
            ddecay if needs_decay else None,
            dinitial if needs_initial else None,
            None,
            None,
            None,
        )
