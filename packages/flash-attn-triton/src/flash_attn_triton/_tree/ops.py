"""The operators of attention over a tree: schemas, fakes, CPU kernels and derivatives.

Like ``_dense/ops.py``, this module imports neither triton nor the kernels. On the CPU the values
of the tree are also checked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dense.ops import NAMESPACE
from .._linked.host.internals import refuse_tangents
from .._linked.host.operators import differentiable, no_second_derivative, register
from .checks import check_tree_values
from .eager import tree_backward, tree_forward

# gradients of q, k, v and the sinks
Grads = tuple[Tensor, Tensor, Tensor, Tensor]

_TREE = "Tensor cu_seqlens, Tensor parents, Tensor? sinks, SymInt max_seqlen"


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
    from .launch import launch_tree_forward

    q, _, _, cu_seqlens, parents, _, max_seqlen, *_ = arguments
    _values(q, cu_seqlens, parents, max_seqlen)
    return launch_tree_forward(*arguments[:9])


def _backward_triton(*arguments: Any) -> Grads:
    from .launch import launch_tree_backward

    _, q, _, _, _, _, _, cu_seqlens, parents, _, max_seqlen, *_ = arguments
    _values(q, cu_seqlens, parents, max_seqlen)
    return launch_tree_backward(*arguments)


def _forward_eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    parents: Tensor,
    sinks: Tensor | None,
    max_seqlen: int,
    softmax_scale: float,
    softcap: float,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    tree = _values(q, cu_seqlens, parents, max_seqlen)
    return tree_forward(q, k, v, *tree, sinks, softmax_scale, softcap)


def _backward_eager(
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
    *rest: Any,
) -> Grads:
    tree = _values(q, cu_seqlens, parents, max_seqlen)
    return tree_backward(dout, q, k, v, lse, dlse, *tree, sinks, softmax_scale, softcap)


def _values(
    q: Tensor, cu_seqlens: Tensor, parents: Tensor, max_seqlen: int
) -> tuple[list[int], list[int]]:
    """Check a tree on the CPU and return it as lists; a tree on a GPU is not read."""
    if q.device.type != "cpu":
        return [], []
    tree = cu_seqlens.tolist(), parents.tolist()
    check_tree_values(*tree, q.shape[0], max_seqlen)
    return tree


forward = register(
    f"{NAMESPACE}::tree_forward",
    f"(Tensor q, Tensor k, Tensor v, {_TREE}, float softmax_scale, float softcap, "
    "bool deterministic=False) -> (Tensor out, Tensor lse)",
    fake=_forward_fake,
    kernels=_forward_triton,
    eager=_forward_eager,
)
backward = register(
    f"{NAMESPACE}::tree_backward",
    f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, {_TREE}, "
    "float softmax_scale, float softcap, bool deterministic) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    fake=_backward_fake,
    kernels=_backward_triton,
    eager=_backward_eager,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the derivative of the forward operator needs."""
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.options = inputs[6:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of the forward operator's arguments."""
    q, k, v, cu_seqlens, parents, sinks, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dsinks = _call_backward(
        dout, q, k, v, out, lse, dlse, cu_seqlens, parents, sinks, *ctx.options
    )
    needs = ctx.needs_input_grad
    return dq, dk, dv, None, None, dsinks if needs[5] else None, *[None] * (len(needs) - 6)


_call_forward = differentiable(forward, _differentiate, _keep)
_call_backward = differentiable(backward, no_second_derivative("tree_attention_reference"))


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
    """Compute ``(out, lse)``, differentiable if a gradient is asked for."""
    refuse_tangents((q, k, v, sinks))
    return _call_forward(  # type: ignore[no-any-return]
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
