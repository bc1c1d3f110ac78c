"""The operators of attention over a tree: schemas, fakes, CPU kernels and derivatives.

As in :mod:`._ops`: importing this module imports neither triton nor the kernels. CUDA and HIP
tensors run the Triton kernels; CPU tensors run the eager code, or in a process started with
``TRITON_INTERPRET=1`` the Triton kernels in the interpreter. The forward operator's derivative is
its formula, under ``torch.func`` in the form that its transforms take; the backward operator's
raises.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ._linked.host.arguments import on_one_device
from ._linked.host.forms import interpreted
from ._linked.host.internals import is_transformed, refuse_tangents
from ._ops import NAMESPACE, refuse_forward_mode
from ._tree_checks import check_tree_values
from ._tree_eager import tree_backward, tree_forward

# gradients of q, k, v and the sinks
Grads = tuple[Tensor, Tensor, Tensor, Tensor]

_FORWARD, _BACKWARD = f"{NAMESPACE}::tree_forward", f"{NAMESPACE}::tree_backward"
_TREE = "Tensor cu_seqlens, Tensor parents, Tensor? sinks, SymInt max_seqlen"

torch.library.define(
    _FORWARD,
    f"(Tensor q, Tensor k, Tensor v, {_TREE}, float softmax_scale, float softcap, "
    "bool deterministic=False) -> (Tensor out, Tensor lse)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    _BACKWARD,
    f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, {_TREE}, "
    "float softmax_scale, float softcap, bool deterministic) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q.shape
    out = q.new_empty((tokens, heads, v.shape[-1]))
    return out, q.new_empty((heads, tokens), dtype=torch.float32)


def _backward_fake(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    cu_seqlens: Tensor,
    parents: Tensor,
    sinks: Tensor | None,
    *rest: Any,
) -> Grads:
    dsinks = q.new_empty((0,)) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _forward_triton(*arguments: Any) -> tuple[Tensor, Tensor]:
    from ._kernels.tree_plans import launch_tree_forward

    return launch_tree_forward(*arguments[:9])


def _backward_triton(*arguments: Any) -> Grads:
    from ._kernels.tree_plans import launch_tree_backward

    return launch_tree_backward(*arguments)


def _forward_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    parents: Tensor,
    sinks: Tensor | None,
    max_seqlen: int,
    softmax_scale: float,
    softcap: float,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    tree = cu_seqlens.tolist(), parents.tolist()
    check_tree_values(*tree, q.shape[0], max_seqlen)
    if interpreted():
        return _forward_triton(
            q, k, v, cu_seqlens, parents, sinks, max_seqlen, softmax_scale, softcap
        )
    return tree_forward(q, k, v, *tree, sinks, softmax_scale, softcap)


def _backward_cpu(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    cu_seqlens: Tensor,
    parents: Tensor,
    sinks: Tensor | None,
    max_seqlen: int,
    softmax_scale: float,
    softcap: float,
    deterministic: bool,
) -> Grads:
    tree = cu_seqlens.tolist(), parents.tolist()
    check_tree_values(*tree, q.shape[0], max_seqlen)
    if interpreted():
        return _backward_triton(
            dout,
            q,
            k,
            v,
            out,
            lse,
            dlse,
            cu_seqlens,
            parents,
            sinks,
            max_seqlen,
            softmax_scale,
            softcap,
            deterministic,
        )
    return tree_backward(dout, q, k, v, lse, dlse, *tree, sinks, softmax_scale, softcap)


torch.library.register_fake(_FORWARD, _forward_fake)
torch.library.register_fake(_BACKWARD, _backward_fake)
torch.library.impl(_FORWARD, "cuda", on_one_device(_forward_triton))
torch.library.impl(_BACKWARD, "cuda", on_one_device(_backward_triton))
torch.library.impl(_FORWARD, "cpu", _forward_cpu)
torch.library.impl(_BACKWARD, "cpu", _backward_cpu)

forward = getattr(torch.ops, NAMESPACE).tree_forward.default
backward = getattr(torch.ops, NAMESPACE).tree_backward.default


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Put away what the derivative of the forward operator needs."""
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.options = inputs[6:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of the forward operator's arguments."""
    q, k, v, cu_seqlens, parents, sinks, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    run = _Backward.apply if is_transformed() else backward
    dq, dk, dv, dsinks = run(
        dout, q, k, v, out, lse, dlse, cu_seqlens, parents, sinks, *ctx.options
    )
    needs = ctx.needs_input_grad
    return dq, dk, dv, None, None, dsinks if needs[5] else None, *[None] * (len(needs) - 6)


def _refuse_second(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "second derivatives are not offered: the gradients of this attention cannot be "
        "differentiated again; tree_attention_reference can be differentiated twice"
    )


torch.library.register_autograd(_FORWARD, _differentiate, setup_context=_keep)
torch.library.register_autograd(_BACKWARD, _refuse_second)


class _Forward(torch.autograd.Function):
    """The forward operator with its derivative, as the transforms of torch.func take it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        """Take the arguments of the operator, all of them."""
        return forward(*arguments)  # type: ignore[no-any-return]

    setup_context = staticmethod(_keep)
    backward = staticmethod(_differentiate)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_forward_mode()


class _Backward(torch.autograd.Function):
    """The backward operator likewise."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Grads:
        """Take the arguments of the operator, all of them."""
        return backward(*arguments)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Grads) -> None:
        """Keep nothing: the derivative raises."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _refuse_second()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_forward_mode()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    parents: Tensor,
    sinks: Tensor | None,
    max_seqlen: int,
    softmax_scale: float,
    softcap: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """Compute ``(out, lse)``, differentiable where a gradient is asked for."""
    refuse_tangents((q, k, v, sinks))
    run = _Forward.apply if is_transformed() else forward
    return run(  # type: ignore[no-any-return]
        q,
        k,
        v,
        cu_seqlens,
        parents,
        sinks,
        max_seqlen,
        softmax_scale,
        softcap,
        deterministic,
    )
