"""The launchers of a signature, and the two functions that the operators call."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from attn_common import fp8_info
from torch import Tensor

from .._linked.host.forms import noting
from .._linked.launch import builds
from .._linked.launch.entries import flat
from .._linked.launch.kernels import Kernel
from .._linked.launch.runtime import dense, first_columns, widened
from .call import (
    Backward,
    BackwardCall,
    Forward,
    ForwardCall,
    Grads,
    Merge,
    Options,
    Tensors,
)
from .invariant import InvariantForward
from .portable.arguments import Counts, ForwardTensors
from .portable.backward_launch import plan_backward
from .portable.form import Counted, Form, Work, expand_descales, is_served_as_is, readable
from .tiles import forward_tile, takes_hopper_forward, takes_short_backward

forward_kernel = Kernel(__package__, ".portable.forward", "forward_kernel")


class PortableForward:
    """The forward launcher of a signature, by the kernel for every GPU."""

    def __init__(self, form: Form, x: Tensors, out_dtype: torch.dtype) -> None:
        options = form.options
        descales = x.q_descale, x.k_descale, x.v_descale
        # only the scale comes between the products and the softmax
        has_scale_alone = x.bias is None and x.alibi_slopes is None and options.softcap == 0.0
        no_factor = x.q_descale is x.k_descale is None
        constants = form.constants._replace(
            FOLD=has_scale_alone and no_factor and options.softmax_scale >= 0,
            DESCALE_PER_HEAD=any(d is not None and d.numel() != 1 for d in descales),
            # e4m3fn holds 2**8, e4m3fnuz 2**7
            SHIFT=int(math.log2(fp8_info(x.q.dtype).max)) if form.itemsize == 1 else 0,
            OUT_MAX=fp8_info(out_dtype).max if out_dtype.itemsize == 1 else 0.0,
        )
        self._form = form
        self._out_dtype = out_dtype
        self._has_descales = any(d is not None for d in descales)
        self._tile = forward_tile(form.platform, form.widest_head, form.itemsize)
        self._counted = Counted(form.launch(forward_kernel, self._tile, constants), self._count)

    def __call__(self, x: Tensors) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``; the tensors have passed ``readable``."""
        form, q = self._form, x.q
        tokens_q, tokens_k = q.shape[-3], x.k.shape[-3]
        out = q.new_empty((*q.shape[:-1], form.head_dim_v), dtype=self._out_dtype)
        per_head = (form.heads_q, tokens_q)
        lse_shape = per_head if form.is_packed else (form.batch, *per_head)
        lse = q.new_empty(lse_shape, dtype=torch.float32)
        if form.batch == 0:  # a packed call may hold nothing but padding
            return out.zero_(), lse.fill_(-math.inf)
        descales: tuple[Tensor | None, ...] = x.q_descale, x.k_descale, x.v_descale
        if self._has_descales:
            descales = expand_descales(descales, (form.batch, form.heads_k))
        tensors = ForwardTensors(
            q,
            x.k,
            x.v,
            out,
            lse,
            x.bias,
            dense(x.alibi_slopes),
            dense(x.sinks),
            *descales,
            x.out_scale,
            x.rng_state,
            dense(x.cu_seqlens_q),
            dense(x.cu_seqlens_k),
            dense(x.seqused_k),
            dense(x.spans),
        )
        grid, numbers = self._counted.work((tokens_q, tokens_k), tokens_q, tokens_k)
        self._counted.launch(grid, tensors, numbers)
        return out, lse

    def _count(self, tokens_q: int, tokens_k: int) -> Work:
        form = self._form
        tiles = form.tiles(tokens_q, self._tile.block_m)
        counts = Counts(tokens_q, tokens_k, tiles, form.span_q(tokens_k))
        return tiles * form.heads_q * form.grid_batch, flat(form.scalars, counts, form.strides)


class Plan(NamedTuple):
    """The launcher of calls with one signature, without the operators."""

    form: Form
    forward: Forward
    # None if no call with the signature asks for a gradient
    backward: Backward | None

    @property
    def merge(self) -> Merge | None:
        """The launcher that merges results over other keys; None if no kernel merges."""
        return getattr(self.forward, "merge", None)

    def fits(self, x: Tensors) -> bool:
        """Tell whether saved tensors still have the layout that the launcher was made for."""
        return self.form.fits(x)


def plan_calls(
    x: Tensors,
    options: Options,
    out_dtype: torch.dtype,
    *,
    deterministic: bool,
    needs_gradient: bool,
    invariant: bool,
) -> Plan | None:
    """Return the launcher of all calls with a signature; None if tensors must be copied first."""
    if not is_served_as_is(x):
        return None
    form = Form(x, options)
    forward = plan_forward(form, x, out_dtype, invariant, is_kept=True)
    backward = plan_backward(form, x, out_dtype, deterministic) if needs_gradient else None
    if x.q.device.type != "cpu" and (needs_gradient or form.itemsize == 1):
        _build_others(form, x, out_dtype, deterministic, needs_gradient, invariant)
    return Plan(form, forward, backward)


def _build_others(
    form: Form,
    x: Tensors,
    out_dtype: torch.dtype,
    deterministic: bool,
    needs_gradient: bool,
    invariant: bool,
) -> None:
    """Begin to build all kernels of a new kind of call, while its first kernel is built."""
    dims = form.head_dim, form.head_dim_v, form.options.dropout_p > 0.0
    absent = (t is None for t in x)
    is_short = takes_short_backward(x, form.options, out_dtype)
    kind = (
        x.q.device,
        x.q.dtype,
        out_dtype,
        deterministic,
        invariant,
        form.constants,
        *dims,
        *absent,
        is_short,
    )
    if kind not in _begun:
        _begun.add(kind)
        noted = _builds_of(form, x, out_dtype, deterministic, needs_gradient, invariant)
        builds.start(noted, x.q.device)


# kinds of calls whose builds were begun
_begun: set[tuple[Any, ...]] = set()


def build_calls(call: ForwardCall, backward: bool, out: Path | None) -> None:
    """Build the kernels of calls with this signature, all at once, and wait for them.

    With ``out`` they are compiled into that folder.
    """
    x = readable(call.tensors)
    form = Form(x, call.options)
    noted = _builds_of(form, x, call.dtype, call.deterministic, backward, call.invariant)
    if out is not None:
        from .._linked.launch.compiler.shipping import ship

        ship(noted, x.q.device, out)
        return
    for future in builds.start(noted, x.q.device):
        future.result()


def _builds_of(
    form: Form,
    x: Tensors,
    out_dtype: torch.dtype,
    deterministic: bool,
    backward: bool,
    invariant: bool,
) -> list[builds.Build]:
    """Return the builds of a signature's calls, noted by launching on tensors without data."""
    shapes = Tensors(*map(_without_data, x))
    if form.options.dropout_p > 0.0:
        shapes = shapes._replace(rng_state=torch.empty(2, dtype=torch.int64, device="meta"))
    with noting() as noted:
        out, lse = plan_forward(form, x, out_dtype, invariant)(shapes)
        if backward:
            plan = plan_backward(form, x, out_dtype, deterministic)
            needs_dbias = x.bias is not None and x.bias.requires_grad
            plan(shapes, out, lse, out, None, needs_dbias)
    return noted


def _without_data(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def plan_forward(
    form: Form, x: Tensors, out_dtype: torch.dtype, invariant: bool, *, is_kept: bool = False
) -> Forward:
    """Return the forward launcher of a call, or if it ``is_kept`` of all calls with its signature.

    Tensors have to pass ``readable`` first.
    """
    if invariant:
        return InvariantForward(form, out_dtype, is_kept)
    portable = PortableForward(form, x, out_dtype)
    if takes_hopper_forward(x, form.options, out_dtype):
        from .hopper.forward.launch import HopperForward

        return HopperForward(form, x, out_dtype, portable, is_kept=is_kept)
    return portable


def launch_forward(call: ForwardCall) -> tuple[Tensor, Tensor]:
    """Run the forward operator on checked inputs."""
    x = readable(call.tensors)
    form = Form(x, call.options)
    out, lse = plan_forward(form, x, call.dtype, call.invariant)(x)
    return first_columns(out, call.tensors.v.shape[-1]), lse


def launch_backward(call: BackwardCall) -> Grads:
    """Run the backward operator on checked inputs."""
    x = readable(call.tensors)
    form = Form(x, call.options)
    # as wide as the values, in any output dtype
    out, dout = (widened(t, form.head_dim_v) for t in (call.out, call.dout))
    backward = plan_backward(form, x, out.dtype, call.deterministic)
    dq, dk, dv, dbias, dsinks = backward(x, out, call.lse, dout, call.dlse, call.needs_dbias)
    dq, dk, dv = (
        first_columns(g, t.shape[-1]) for g, t in ((dq, call.q), (dk, call.k), (dv, call.v))
    )
    # two empty tensors, not one: outputs of an operator may not alias
    dbias, dsinks = (x.q.new_empty(0) if g is None else g for g in (dbias, dsinks))
    return dq, dk, dv, dbias, dsinks
