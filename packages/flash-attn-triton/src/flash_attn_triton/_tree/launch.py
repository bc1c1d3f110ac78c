"""The launchers of attention over a tree, and the functions that the operators call."""

from __future__ import annotations

import math

import torch
from attn_common import detect
from torch import Tensor

from .._dense.call import Options, Tensors
from .._dense.portable.arguments import Inputs
from .._dense.portable.backward_launch import RowSums, empty_like, sink_gradient
from .._dense.portable.form import Form, layout_of, readable
from .._dense.tiles import (
    backward_dkdv_tile,
    backward_dq_tile,
    forward_tile,
    takes_hopper_backward,
    takes_hopper_forward,
)
from .._linked.host.forms import Memory
from .._linked.launch.entries import flat
from .._linked.launch.kernels import Kernel
from .._linked.launch.runtime import aligned, dense, first_columns, widened
from .call import TreeBackwardCall, TreeCall
from .portable.arguments import ForwardTensors, Numbers, Strides, Tree
from .portable.links import Links

tree_dkdv_kernel = Kernel(__package__, ".portable.backward", "tree_dkdv_kernel")
tree_dq_kernel = Kernel(__package__, ".portable.backward", "tree_dq_kernel")
tree_forward_kernel = Kernel(__package__, ".portable.forward", "tree_forward_kernel")


class TreeForward:
    """The forward launcher of a signature, by the kernel for every GPU."""

    def __init__(self, form: Form) -> None:
        options = form.options
        is_scaled = options.softcap == 0.0 and options.softmax_scale >= 0
        constants = form.constants._replace(FOLD=is_scaled)
        self._form = form
        self._tile = forward_tile(form.platform, form.widest_head, form.itemsize)
        self._launch = form.launch(tree_forward_kernel, self._tile, constants)

    def __call__(self, x: Tensors, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``; the tensors have passed ``readable``."""
        form = self._form
        out = x.q.new_empty((*x.q.shape[:-1], form.head_dim_v))
        lse = x.q.new_empty((form.heads_q, x.q.shape[0]), dtype=torch.float32)
        tiles, numbers = _work(form, x, self._tile.block_m)
        tensors = ForwardTensors(
            x.q, x.k, x.v, out, lse, dense(x.sinks), dense(x.cu_seqlens_q), dense(parents)
        )
        self._launch(tiles * form.heads_q, tensors, numbers)
        return out, lse


class TreeGradients:
    """The backward launcher of a signature, by the kernels for every GPU."""

    def __init__(self, form: Form) -> None:
        shape_class = form.platform, form.widest_head, form.itemsize
        self._form = form
        self._link = Links()
        self._tile_dkdv = backward_dkdv_tile(*shape_class)
        self._tile_dq = backward_dq_tile(*shape_class)
        self._launch_dkdv = form.launch(tree_dkdv_kernel, self._tile_dkdv, settle=True)
        self._launch_dq = form.launch(tree_dq_kernel, self._tile_dq)

    def __call__(
        self, x: Tensors, inputs: Inputs, parents: Tensor, grads: tuple[Tensor, ...]
    ) -> None:
        """Fill the gradients of q, k and v."""
        form = self._form
        dq, dk, dv = grads
        tree = Tree(dense(x.cu_seqlens_q), dense(parents))
        links = self._link(tree.parents_ptr)
        tiles, numbers = _work(form, x, self._tile_dkdv.block_n, inputs.dout_ptr)
        self._launch_dkdv(tiles * form.heads_k, (*inputs, dk, dv, *tree, links), numbers)
        tiles, numbers = _work(form, x, self._tile_dq.block_m, inputs.dout_ptr)
        self._launch_dq(tiles * form.heads_q, (*inputs, dq, *tree), numbers)


class TreePlan:
    """The launchers of a signature; calls have at least one segment and one token."""

    def __init__(self, form: Form, x: Tensors) -> None:
        self.form = form
        self._forward = TreeForward(form)
        self._row_numbers = RowSums(form, x.q.dtype)
        self._gradients = TreeGradients(form)
        self._hopper_forward = None
        if takes_hopper_forward(x, form.options, x.q.dtype):
            from .hopper.launch import HopperTreeForward

            self._hopper_forward = HopperTreeForward(form, x)
        self._hopper_gradients = None
        if takes_hopper_backward(x, form.options):
            from .hopper.launch import HopperTreeBackward

            self._hopper_gradients = HopperTreeBackward(form)

    def forward(self, x: Tensors, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``; the tensors have passed ``readable``."""
        if self._hopper_forward is not None and self._hopper_forward.takes(x.q.shape[0]):
            return self._hopper_forward(x, parents)
        return self._forward(x, parents)

    def backward(
        self, x: Tensors, call: TreeBackwardCall
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of q, k, v and the sinks; ``x`` has passed ``readable``."""
        grads = tuple(empty_like(t) for t in (x.q, x.k, x.v))
        # as wide as the values, which ``readable`` may have widened
        width = self.form.head_dim_v
        dout, out = (aligned(widened(t, width)) for t in (call.dout, call.out.contiguous()))
        lse = call.lse.contiguous()
        # the Hopper kernel adds to dq in no fixed order
        hopper = None if call.deterministic else self._hopper_gradients
        sums = None if hopper is None else hopper.new_sums(x.q)
        delta, lse2 = self._row_numbers(out, dout, call.dlse, lse, sums)
        inputs = Inputs(x.q, x.k, x.v, dout, lse2, delta)
        if hopper is None:
            self._gradients(x, inputs, call.parents, grads)
        else:
            hopper(x, inputs, call.parents, grads, sums)
        dsinks = None if x.sinks is None else sink_gradient(dense(x.sinks), lse, delta)
        return *grads, dsinks


# by signature
_plans: Memory[TreePlan] = Memory()


def _plan_of(x: Tensors, options: Options) -> TreePlan:
    """Return the launchers of all calls with a signature; the tensors have passed ``readable``."""
    shapes = (t.shape[1:] for t in x[:3])
    key = (
        detect(x.q.device),
        x.q.device,
        x.q.dtype,
        # with one token, its stride means nothing
        min(x.q.shape[0], 2),
        *shapes,
        *layout_of(x),
        x.cu_seqlens_q.shape,
        None if x.sinks is None else x.sinks.dtype,
        options,
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.keep(key, TreePlan(Form(x, options), x))
    return plan


def launch_tree_forward(call: TreeCall) -> tuple[Tensor, Tensor]:
    """Run the forward operator on checked inputs."""
    q, width = call.q, call.v.shape[-1]
    tokens, heads, _ = q.shape
    if tokens == 0 or call.parents.shape[0] == 0:  # nothing but padding
        out = q.new_zeros((tokens, heads, width))
        return out, q.new_full((heads, tokens), -math.inf, dtype=torch.float32)
    x = readable(call.tensors)
    out, lse = _plan_of(x, call.options).forward(x, call.parents)
    return first_columns(out, width), lse


def launch_tree_backward(call: TreeBackwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the backward operator on checked inputs."""
    inputs, sinks = (call.q, call.k, call.v), call.sinks
    none = call.q.new_empty(0)
    if call.q.shape[0] == 0 or call.parents.shape[0] == 0:
        dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in inputs)
        return dq, dk, dv, none if sinks is None else torch.zeros_like(dense(sinks))
    x = readable(call.forward.tensors)
    dq, dk, dv, dsinks = _plan_of(x, call.forward.options).backward(x, call)
    dq, dk, dv = (first_columns(g, t.shape[-1]) for g, t in zip((dq, dk, dv), inputs, strict=True))
    return dq, dk, dv, none if dsinks is None else dsinks


def _work(
    form: Form, x: Tensors, block: int, dout: Tensor | None = None
) -> tuple[int, tuple[float, ...]]:
    """Return the tiles and the numbers of a launch whose programs own ``block`` tokens each."""
    tokens = x.q.shape[0]
    tiles = form.tiles(tokens, block)
    numbers = Numbers(
        scale=form.scalars.scale,
        softcap=form.scalars.softcap,
        segments=form.batch,
        heads_q=form.heads_q,
        tokens=tokens,
        tiles=tiles,
        q=Strides(*x.q.stride()[:2]),
        k=Strides(*x.k.stride()[:2]),
        v=Strides(*x.v.stride()[:2]),
        dout=Strides(*((0, 0) if dout is None else dout.stride()[:2])),
    )
    return tiles, flat(numbers)
