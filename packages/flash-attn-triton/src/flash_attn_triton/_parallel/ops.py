"""Operators for sequences that are cut across ranks, and their derivative.

Each operator is opaque to a trace and includes its exchange of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .._dense import ops
from .._dense.call import Tensors
from .._linked.host.internals import apply_of, is_watched
from .._linked.host.operators import (
    differentiable,
    may_skip_operator,
    no_second_derivative,
    register,
)
from .backward import backward
from .claims import claims_of, compare
from .passes import Sharded, forward

_OPTIONS = (
    "float softmax_scale, float softcap, bool deterministic, Tensor? lengths, SymInt[] numbers, "
    "str group"
)


def _compare(*given: Any) -> Tensor:
    q: Tensor
    q, k, v, sinks, *options, has_gradient, groups = given
    known = Sharded(*options)
    claims = claims_of(Tensors(q, k, v), known, has_gradient)
    compare(claims, sinks, groups, q.device)
    return q.new_empty((0,))


def _forward(*given: Any) -> tuple[Tensor, Tensor]:
    q, k, v, sinks, *options, _ = given
    with _undisturbed(q):
        return forward(q, k, v, sinks, Sharded(*options))


def _backward(*given: Any) -> tuple[Tensor, ...]:
    dout, q, k, v, sinks, out, lse, dlse, *options = given
    x = Tensors(q, k, v, sinks=sinks)
    with _undisturbed(q):
        return backward(x, out, lse, dout, dlse, Sharded(*options))


@contextmanager
def _on_cpu() -> Iterator[None]:
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def _undisturbed(q: Tensor) -> AbstractContextManager[None]:
    """Shield eager code from the caller's gradient and autocast modes; kernels ignore them."""
    return _on_cpu() if q.is_cpu else nullcontext()


def _compare_fake(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((0,))


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    return *grads, q.new_empty((0,)) if sinks is None else sinks.new_empty(sinks.shape)


# the result is empty: operators that take it run after the comparison
compare_calls = register(
    f"{ops.NAMESPACE}::compare_calls",
    f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_OPTIONS}, bool has_gradient, str[] groups) "
    "-> Tensor",
    fake=_compare_fake,
    kernels=_compare,
    eager=_compare,
    on_host=("lengths",),
)
sharded_forward = register(
    f"{ops.NAMESPACE}::sharded_forward",
    f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_OPTIONS}, Tensor? compared) "
    "-> (Tensor out, Tensor lse)",
    fake=_forward_fake,
    kernels=_forward,
    eager=_forward,
    on_host=("lengths",),
)
sharded_backward = register(
    f"{ops.NAMESPACE}::sharded_backward",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse, "
    f"Tensor? dlse, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    fake=_backward_fake,
    kernels=_backward,
    eager=_backward,
    on_host=("lengths",),
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the derivative needs."""
    q, k, v, sinks, *options, _ = inputs
    known = Sharded(*options)
    ctx.save_for_backward(q, k, v, sinks, known.lengths, *output)
    ctx.options = known._replace(lengths=None)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of the forward operator's arguments."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            "second derivatives are not offered across ranks: differentiate without "
            "create_graph=True"
        )
    q, k, v, sinks, lengths, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    options = ctx.options._replace(lengths=lengths)
    pass_ = _backward if may_skip_operator(dout, dlse) else sharded_backward
    grads = pass_(dout, q, k, v, sinks, out, lse, dlse, *options)
    needs = ctx.needs_input_grad
    found = [g if need else None for g, need in zip(grads, needs, strict=False)]
    return *found, *(None,) * (len(needs) - len(found))


_call_operator = differentiable(sharded_forward, _differentiate, _keep)
torch.library.register_autograd(
    sharded_backward.name(), no_second_derivative("attention_reference")
)


class _Passes(torch.autograd.Function):
    """The two passes without the operators."""

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, Tensor]:
        # PyTorch forbids writing to a result that is a view
        out, lse = _forward(*given)
        return out.detach(), lse.detach()

    setup_context = staticmethod(_keep)
    backward = staticmethod(_differentiate)


_apply_passes = apply_of(_Passes)


def call_forward(*given: Any) -> tuple[Tensor, Tensor]:
    """Call the forward operator, or skip it if PyTorch does not watch; same arguments."""
    out, lse = (_call_operator if is_watched() else _apply_passes)(*given)
    return out, lse
