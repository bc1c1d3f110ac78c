"""Operators on sequences cut across ranks, and their derivative.

An operator includes its exchange of states, so a trace does not see the exchange.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._linear import ops
from .._linked.host.operators import (
    differentiable,
    no_second_derivative,
    register,
    schema_of,
    structured,
)
from .passes import BackwardCall, CompareCall, ForwardCall, backward, claims_of, compare, forward


def _backend(name: str) -> Any:
    if name == "eager":
        from . import eager

        return eager
    from .kernels import launch

    return launch


def _compare(*given: Any) -> Tensor:
    call = structured(CompareCall, given)
    compare(claims_of(call), call.decay, call.options.group, call.q.device)
    return call.q.new_empty((0,))


def _forward_by(name: str) -> Any:
    def implementation(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return forward(_backend(name), structured(ForwardCall, given))

    return implementation


def _backward_by(name: str) -> Any:
    def implementation(*given: Any) -> tuple[Tensor, ...]:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return backward(_backend(name), structured(BackwardCall, given))

    return implementation


def _compare_fake(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((0,))


def _forward_fake(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, _, v, _, _, known, _ = structured(ForwardCall, given)
    states, final = (
        q.new_empty((rows, *q.shape[1:], v.shape[2]), dtype=torch.float32)
        for rows in (known.runs + known.finals, known.finals)
    )
    return q.new_empty(v.shape), states, final


def _backward_fake(*given: Any) -> tuple[Tensor, ...]:
    _, q, k, v, decay, _, _, needs, known = structured(BackwardCall, given)
    needs_q, needs_kv, needs_decay, needs_initial, _ = needs
    absent = (0,)
    writes = needs_kv or needs_initial
    initial = (known.batch, q.shape[1], q.shape[2], v.shape[2])
    return (
        q.new_empty(q.shape if needs_q else absent),
        k.new_empty(k.shape if writes else absent),
        v.new_empty(v.shape if writes else absent),
        decay.new_empty(decay.shape if needs_decay else absent),
        q.new_empty(initial if needs_initial else absent, dtype=torch.float32),
    )


# the empty result orders its consumers after the comparison
compare_calls = register(
    f"{ops.NAMESPACE}::compare_calls",
    f"({schema_of(CompareCall)}) -> Tensor",
    fake=_compare_fake,
    kernels=_compare,
    eager=_compare,
    on_host=("lengths",),
)
sharded_forward = register(
    f"{ops.NAMESPACE}::sharded_forward",
    f"({schema_of(ForwardCall)}) -> (Tensor out, Tensor states, Tensor final)",
    fake=_forward_fake,
    kernels=_forward_by("kernels"),
    eager=_forward_by("eager"),
    on_host=("lengths",),
)
sharded_backward = register(
    f"{ops.NAMESPACE}::sharded_backward",
    f"({schema_of(BackwardCall)}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor ddecay, Tensor dinitial_state)",
    fake=_backward_fake,
    kernels=_backward_by("kernels"),
    eager=_backward_by("eager"),
    on_host=("lengths",),
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save what the derivative needs."""
    q, k, v, decay, initial_state, known, _ = structured(ForwardCall, inputs)
    _, states, _ = output
    ctx.save_for_backward(q, k, v, decay, states, known.lengths)
    ctx.options, ctx.has_initial = known._replace(lengths=None), initial_state is not None
    ctx.mark_non_differentiable(states)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dout: Tensor | None, _: Tensor | None, dfinal: Tensor | None
) -> tuple[Any, ...]:
    """Return the gradients of the forward operator's arguments."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            "second derivatives are not offered across ranks: differentiate without "
            "create_graph=True"
        )
    q, k, v, decay, states, lengths = ctx.saved_tensors
    options = ctx.options._replace(lengths=lengths)
    needs_q, needs_k, needs_v, needs_decay, needs_initial, *rest = ctx.needs_input_grad
    if dout is None:
        dout = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    if not options.has_final:
        dfinal = None
    needs = [needs_q, needs_k or needs_v, needs_decay, needs_initial, ctx.has_initial]
    dq, dk, dv, ddecay, dinitial = sharded_backward(
        dout, q, k, v, decay, states, dfinal, needs, *options
    )
    return (
        dq if needs_q else None,
        dk if needs_k else None,
        dv if needs_v else None,
        ddecay if needs_decay else None,
        dinitial if needs_initial else None,
        *(None for _ in rest),
    )


call_forward = differentiable(sharded_forward, _differentiate, _keep)
torch.library.register_autograd(
    sharded_backward.name(), no_second_derivative("lightning_attention_reference")
)
