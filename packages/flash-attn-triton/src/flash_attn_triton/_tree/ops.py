"""The operators of attention over a tree: schemas, fakes, CPU kernels and derivatives.

Like ``_dense/ops.py``, this module imports neither triton nor the kernels. On the CPU the values
of the tree are also checked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dense.ops import NAMESPACE
from .._linked.host.forms import checks_values
from .._linked.host.internals import refuse_tangents
from .._linked.host.operators import (
    differentiable,
    no_second_derivative,
    register,
    schema_of,
    structured,
)
from .call import TreeBackwardCall, TreeCall
from .checks import check_tree_values
from .eager import tree_backward, tree_forward

# gradients of q, k, v and the sinks
Grads = tuple[Tensor, Tensor, Tensor, Tensor]


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = structured(TreeCall, arguments)
    tokens, heads, _ = call.q.shape
    out = call.q.new_empty((tokens, heads, call.v.shape[-1]))
    return out, call.q.new_empty((heads, tokens), dtype=torch.float32)


def _backward_fake(*arguments: Any) -> Grads:
    call = structured(TreeBackwardCall, arguments)
    q, k, v, sinks = call.q, call.k, call.v, call.sinks
    dsinks = q.new_empty((0,)) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _forward_triton(*arguments: Any) -> tuple[Tensor, Tensor]:
    from .launch import launch_tree_forward

    call = structured(TreeCall, arguments)
    _values(call)
    return launch_tree_forward(call)


def _backward_triton(*arguments: Any) -> Grads:
    from .launch import launch_tree_backward

    call = structured(TreeBackwardCall, arguments)
    _values(call.forward)
    return launch_tree_backward(call)


def _forward_eager(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = structured(TreeCall, arguments)
    return tree_forward(call, *_values(call))


def _backward_eager(*arguments: Any) -> Grads:
    call = structured(TreeBackwardCall, arguments)
    return tree_backward(call, *_values(call.forward))


def _values(call: TreeCall) -> tuple[list[int], list[int]]:
    """Check a tree and return it as lists; on a GPU it is read with ``ATTN_VALIDATE=1`` alone."""
    if not checks_values(call.q):
        return [], []
    tree = call.cu_seqlens.tolist(), call.parents.tolist()
    check_tree_values(*tree, call.q.shape[0], call.max_seqlen)
    return tree


forward = register(
    f"{NAMESPACE}::tree_forward",
    f"({schema_of(TreeCall)}) -> (Tensor out, Tensor lse)",
    fake=_forward_fake,
    kernels=_forward_triton,
    eager=_forward_eager,
)
backward = register(
    f"{NAMESPACE}::tree_backward",
    f"({schema_of(TreeBackwardCall)}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    fake=_backward_fake,
    kernels=_backward_triton,
    eager=_backward_eager,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the derivative of the forward operator needs."""
    x = structured(TreeCall, inputs)
    ctx.save_for_backward(x.q, x.k, x.v, x.cu_seqlens, x.parents, x.sinks, *output)
    ctx.options = x.max_seqlen, x.softmax_scale, x.softcap, x.deterministic
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of the forward operator's arguments."""
    q, k, v, cu_seqlens, parents, sinks, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dsinks = _call_backward(
        dout, q, k, v, out, lse, dlse, cu_seqlens, parents, sinks, *ctx.options
    )
    needs = structured(TreeCall, ctx.needs_input_grad)
    grads = dq, dk, dv, None, None, dsinks if needs.sinks else None
    return *grads, *[None] * (len(ctx.needs_input_grad) - len(grads))


_call_forward = differentiable(forward, _differentiate, _keep)
_call_backward = differentiable(backward, no_second_derivative("tree_attention_reference"))


def attention(call: TreeCall) -> tuple[Tensor, Tensor]:
    """Compute ``(out, lse)``, differentiable if a gradient is asked for."""
    refuse_tangents((call.q, call.k, call.v, call.sinks))
    return _call_forward(*call)  # type: ignore[no-any-return]
