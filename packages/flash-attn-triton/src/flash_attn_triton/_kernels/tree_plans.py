"""How attention over a tree is launched: what the operators call.

The kernels here serve every GPU. One for Hopper would be chosen in the two launchers, from the same
tensors.
"""

from __future__ import annotations

import math

import torch
from attn_common import cdiv
from torch import Tensor

from .._call import Options, Tensors
from .._configs import backward_dkdv_tile, backward_dq_tile, forward_tile
from .._linked.host.forms import interpreted
from . import structures
from .backward_plans import RowNumbers, _sink_gradient
from .form import Form, readable
from .launch.runtime import Launch, aligned, dense, first_columns, widened
from .tree_backward import _tree_dkdv_kernel, _tree_dq_kernel
from .tree_forward import _tree_forward_kernel
from .tree_structures import (
    LinkTensors,
    Tree,
    TreeForwardTensors,
    TreeGradientStrides,
    TreeNumbers,
)
from .tree_walk import _link_kernel

# segments that a program links
LINKS = 64


def launch_tree_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    parents: Tensor,
    sinks: Tensor | None,
    max_seqlen: int,
    softmax_scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Run the forward operator on checked inputs; see ``_tree_ops.py`` for its schema."""
    width = v.shape[-1]
    x, form = _readable(q, k, v, cu_seqlens, sinks, softmax_scale, softcap)
    tokens, heads, _ = q.shape
    out = q.new_empty((tokens, heads, form.head_dim_v))
    lse = q.new_empty((heads, tokens), dtype=torch.float32)
    if form.batch == 0:  # nothing but padding
        return first_columns(out.zero_(), width), lse.fill_(-math.inf)
    tile = forward_tile(form.platform, form.widest_head, form.itemsize)
    constants = structures.ForwardOptions(
        *form.constants,
        FOLD=softcap == 0.0 and softmax_scale >= 0,
        DESCALE_PER_HEAD=False,
        SHIFT=0,
        OUT_MAX=0.0,
    )
    numbers = _numbers(form, x, tile.block_m)
    form.launch(_tree_forward_kernel, tile, constants)(
        numbers.tiles * form.heads_q,
        TreeForwardTensors(
            x.q, x.k, x.v, out, lse, dense(sinks), dense(cu_seqlens), dense(parents)
        ),
        numbers,
    )
    return first_columns(out, width), lse


def launch_tree_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the backward operator on checked inputs; see ``_tree_ops.py`` for its schema."""
    x, form = _readable(q, k, v, cu_seqlens, sinks, softmax_scale, softcap)
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in x[:3])
    dsinks = q.new_empty(0) if sinks is None else torch.zeros_like(dense(sinks))
    if form.batch == 0 or q.numel() == 0:
        return *(
            torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)
        ), dsinks
    # as wide as the values that the kernels read
    dout, out = (aligned(widened(t, form.head_dim_v)) for t in (dout, out.contiguous()))
    lse = lse.contiguous()
    delta, lse2 = RowNumbers(form, out.dtype)(out, dout, dlse, lse)
    inputs = structures.Inputs(x.q, x.k, x.v, dout, lse2, delta)
    tree = Tree(dense(cu_seqlens), dense(parents))
    links = parents.new_empty((2, form.batch))
    Launch(_link_kernel, {"BLOCK": LINKS, "num_warps": 4})(
        cdiv(form.batch, LINKS), LinkTensors(tree.parents_ptr, links), (form.batch,)
    )
    strides = TreeGradientStrides(*dout.stride()[:2])

    tile = backward_dkdv_tile(form.platform, form.widest_head, form.itemsize)
    numbers = _numbers(form, x, tile.block_n)
    settle = form.platform.is_hopper and not interpreted()
    form.launch(_tree_dkdv_kernel, tile, SETTLE=settle)(
        numbers.tiles * form.heads_k, (*inputs, dk, dv, *tree, links), (*numbers, *strides)
    )
    tile = backward_dq_tile(form.platform, form.widest_head, form.itemsize)
    numbers = _numbers(form, x, tile.block_m)
    form.launch(_tree_dq_kernel, tile)(
        numbers.tiles * form.heads_q, (*inputs, dq, *tree), (*numbers, *strides)
    )
    if sinks is not None:
        dsinks = _sink_gradient(dense(sinks), lse, delta)
    dq, dk, dv = (first_columns(g, t.shape[-1]) for g, t in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv, dsinks


def _readable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None,
    softmax_scale: float,
    softcap: float,
) -> tuple[Tensors, Form]:
    """Return the tensors as the kernels may read them, and their form: packed and causal."""
    x = readable(Tensors(q, k, v, cu_seqlens, cu_seqlens, sinks=sinks))
    return x, Form(x, Options(softmax_scale, -1, 0, softcap, 0.0))


def _numbers(form: Form, x: Tensors, block: int) -> TreeNumbers:
    """Return the numbers of a launch whose programs own so many tokens each."""
    tokens = x.q.shape[0]
    return TreeNumbers(
        *form.scalars[:2],
        form.batch,
        form.heads_q,
        tokens,
        form.tiles(tokens, block),
        *x.q.stride()[:2],
        *x.k.stride()[:2],
        *x.v.stride()[:2],
    )
