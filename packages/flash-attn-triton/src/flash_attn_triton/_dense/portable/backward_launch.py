"""The backward launcher of a signature: its launches are made once."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from attn_common import cdiv
from torch import Tensor

from ..._linked.host.forms import ACCESS_BYTES
from ..._linked.launch.entries import flat
from ..._linked.launch.kernels import Kernel
from ..._linked.launch.runtime import Launch, aligned, compact, dense, token_strides
from ..._linked.portable.strides import Strides
from ..call import Backward, PlannedGrads, Tensors
from ..tiles import (
    backward_dkdv_tile,
    backward_dq_tile,
    bias_gradient_tile,
    short_tile,
    takes_hopper_backward,
    takes_short_backward,
)
from .arguments import (
    PIECE,
    BiasCounts,
    Counts,
    Extras,
    GradientStrides,
    HullNumbers,
    HullTensors,
    HullTile,
    Inputs,
    RowNumbers,
    RowTensors,
    RowTile,
    ShortNumbers,
    ShortTensors,
)
from .form import Counted, Form, Work

dkdv_kernel = Kernel(__package__, ".backward_dkdv", "dkdv_kernel")
dq_kernel = Kernel(__package__, ".backward_dq", "dq_kernel")
row_kernel = Kernel(__package__, ".backward_rows", "row_kernel")
hull_kernel = Kernel(__package__, ".hulls", "hull_kernel")
short_kernel = Kernel(__package__, ".backward_short", "short_kernel")
bias_gradient_kernel = Kernel(__package__, ".bias_gradient", "bias_gradient_kernel")

# rows per program of the row kernel
ROWS = 32


class RowSums:
    """The two numbers per row that every tile of the row needs; see ``row_kernel``."""

    def __init__(self, form: Form, out_dtype: torch.dtype) -> None:
        self._heads_q = form.heads_q
        row_bytes = math.gcd(form.head_dim_v * out_dtype.itemsize, ACCESS_BYTES)
        tile = RowTile(form.head_dim_v, form.block_dv, row_bytes, ROWS, PIECE)
        # by whether dlse is given and whether sums is given
        self._counted = [
            [
                Counted(Launch(row_kernel, {"TILE": tile, "num_warps": 4}), self._count)
                for _ in range(2)
            ]
            for _ in range(2)
        ]

    def __call__(
        self,
        out: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        lse: Tensor,
        sums: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return ``(delta, lse2)``, shaped like the LSE, and set ``sums`` to 0."""
        shape = lse.shape
        delta, lse2 = lse.new_empty(*shape), lse.new_empty(*shape)
        key = shape, dout.stride(), 0 if sums is None else sums.numel()
        tensors = RowTensors(out, dout, lse, dense(dlse), delta, lse2, sums)
        counted = self._counted[dlse is not None][sums is not None]
        grid, numbers = counted.work(key, lse, dout, sums)
        counted.launch(grid, tensors, numbers)
        return delta, lse2

    def _count(self, lse: Tensor, dout: Tensor, sums: Tensor | None) -> Work:
        rows = lse.numel()
        programs = cdiv(rows, ROWS)
        pieces = 0 if sums is None else sums.numel() // PIECE
        return programs, flat(
            RowNumbers(
                tokens=lse.shape[-1],
                rows=rows,
                heads_q=self._heads_q,
                dout=Strides(*token_strides(dout)),
                share=cdiv(pieces, programs),
                pieces=pieces,
            )
        )


class Hulls:
    """The launch that makes the table of hulls of a call's spans; see ``hull_kernel``."""

    def __init__(self, form: Form, block: int) -> None:
        """Take a signature, and the rows of a tile."""
        self._form, self._block = form, block
        # sequences that have spans of their own, at fixed length
        self._batch = form.batch if form.constants.SPANS_BATCH else 1
        tile = HullTile(SPANS=form.constants.SPANS, BLOCK=block)
        self._counted = Counted(Launch(hull_kernel, {"TILE": tile, "num_warps": 4}), self._count)

    def __call__(self, x: Tensors, spans: Tensor) -> Tensor:
        """Return the table of contiguous spans."""
        counts = x.q.shape[-3], x.k.shape[-3]
        grid, numbers = self._counted.work(counts, *counts)
        hulls = spans.new_empty(grid, spans.shape[-2], 4)
        lengths = dense(x.cu_seqlens_q), dense(x.cu_seqlens_k), dense(x.seqused_k)
        self._counted.launch(grid, HullTensors(hulls, spans, *lengths), numbers)
        return hulls

    def _count(self, tokens_q: int, tokens_k: int) -> Work:
        tiles = self._form.tiles(tokens_q, self._block)
        numbers = HullNumbers(self._form.batch, tokens_q, tokens_k, tiles)
        return tiles * self._batch, flat(numbers)


def dkdv_launch(form: Form) -> Counted:
    """Return the launch of the gradients of keys and values."""
    tile = backward_dkdv_tile(form.platform, form.widest_head, form.itemsize)

    def count(inputs: Inputs) -> Work:
        tokens_q, tokens_k = inputs.q_ptr.shape[-3], inputs.k_ptr.shape[-3]
        tiles = form.tiles(tokens_k, tile.block_n)
        counts = Counts(tokens_q, tokens_k, tiles, form.span_k(tokens_q))
        numbers = flat(form.scalars, counts, _strides(form, inputs.dout_ptr))
        return tiles * form.heads_k * form.grid_batch, numbers

    return Counted(form.launch(dkdv_kernel, tile, settle=True), count)


def dq_launch(form: Form, has_bias: bool) -> Counted:
    """Return the launch of the gradient of the queries."""
    tile = backward_dq_tile(form.platform, form.widest_head, form.itemsize, has_bias)

    def count(inputs: Inputs) -> Work:
        tokens_q, tokens_k = inputs.q_ptr.shape[-3], inputs.k_ptr.shape[-3]
        tiles = form.tiles(tokens_q, tile.block_m)
        counts = Counts(tokens_q, tokens_k, tiles, form.span_q(tokens_k))
        numbers = flat(form.scalars, counts, _strides(form, inputs.dout_ptr))
        return tiles * form.heads_q * form.grid_batch, numbers

    return Counted(form.launch(dq_kernel, tile), count)


def bias_gradient_launch(form: Form) -> Counted:
    """Return the launch of the gradient of the bias, contiguous and shaped like the bias."""
    tile = bias_gradient_tile(form.platform, form.widest_head, form.itemsize)

    def count(inputs: Inputs, dbias: Tensor) -> Work:
        batch, heads, rows, columns = dbias.shape
        tiles = cdiv(rows, tile.block_m) * cdiv(columns, tile.block_n)
        counts = BiasCounts(
            inputs.q_ptr.shape[-3],
            inputs.k_ptr.shape[-3],
            heads,
            rows,
            columns,
            *(int(size == 1) for size in dbias.shape),
        )
        numbers = flat(form.scalars, counts, _strides(form, inputs.dout_ptr))
        return batch * heads * tiles, numbers

    return Counted(form.launch(bias_gradient_kernel, tile), count)


class ShortGradients:
    """Gradients of queries, keys and values of short sequences, in one launch."""

    def __init__(self, form: Form, x: Tensors) -> None:
        tile = short_tile(form.platform, form.widest_head, form.itemsize)
        scalars, (tokens_q, tokens_k) = form.scalars, (x.q.shape[1], x.k.shape[1])
        # by whether dlse is given; the strides of dout are open
        self._counted = [
            Counted(form.launch(short_kernel, tile, settle=True), self._count) for _ in range(2)
        ]
        programs = form.batch * form.heads_k * cdiv(tokens_k, tile.block_n)
        self._grid = programs + form.batch * form.heads_q * cdiv(tokens_q, tile.block_m)
        strides = form.strides
        self._form_numbers = ShortNumbers(
            scale=scalars.scale,
            softcap=scalars.softcap,
            window_left=scalars.window_left,
            window_right=scalars.window_right,
            heads_q=form.heads_q,
            tokens_q=tokens_q,
            tokens_k=tokens_k,
            key_programs=programs,
            dout=strides.q,  # replaced by those of dout
            q=strides.q,
            k=strides.k,
            v=strides.v,
        )
        self._shapes = x.q.shape, x.k.shape, x.v.shape

    def __call__(
        self,
        x: Tensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        needs_dbias: bool,
    ) -> PlannedGrads:
        """Return ``(dq, dk, dv, None, None)``; these calls have neither bias nor sinks."""
        q, k, v, dout, out = x.q, x.k, x.v, aligned(dout), compact(out)
        shape_q, shape_k, shape_v = self._shapes
        dq, dk, dv = q.new_empty(*shape_q), k.new_empty(*shape_k), v.new_empty(*shape_v)
        tensors = ShortTensors(q, k, v, dout, out, lse.contiguous(), dense(dlse), dq, dk, dv)
        counted = self._counted[dlse is not None]
        grid, numbers = counted.work(dout.stride(), dout)
        counted.launch(grid, tensors, numbers)
        return dq, dk, dv, None, None

    def _count(self, dout: Tensor) -> Work:
        strides = Strides(*token_strides(dout))
        return self._grid, flat(self._form_numbers._replace(dout=strides))


class Gradients(NamedTuple):
    """Gradients to be filled, contiguous."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None


def plan_backward(form: Form, x: Tensors, out_dtype: torch.dtype, deterministic: bool) -> Backward:
    """Return the backward launcher of a signature."""
    if takes_short_backward(x, form.options, out_dtype):
        return ShortGradients(form, x)
    return BackwardPlan(form, x, out_dtype, deterministic)


class BackwardPlan:
    """The backward launcher of a signature, with one launch per step."""

    def __init__(self, form: Form, x: Tensors, out_dtype: torch.dtype, deterministic: bool) -> None:
        self._form = form
        # shapes of q, k and v, which the signature of a packed call does not fix
        self._shapes = None if form.is_packed else (x.q.shape, x.k.shape, x.v.shape)
        self._row_numbers = RowSums(form, out_dtype)
        self._dkdv = dkdv_launch(form)
        self._hulls = None
        if x.spans is not None:
            tile = backward_dkdv_tile(form.platform, form.widest_head, form.itemsize)
            self._hulls = Hulls(form, tile.block_m)
        self._dq = dq_launch(form, x.bias is not None)
        self._dbias = None if x.bias is None else bias_gradient_launch(form)
        self._hopper = None
        if takes_hopper_backward(x, form.options):
            from ..hopper.backward.launch import HopperBackward

            self._hopper = HopperBackward(form, x, ordered=deterministic)

    def __call__(
        self,
        x: Tensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        needs_dbias: bool,
    ) -> PlannedGrads:
        """Return ``(dq, dk, dv, dbias, dsinks)``; the last two may be None.

        The tensors of ``x`` have this signature.
        """
        q, k, v = x[:3]
        shape_q, shape_k, shape_v = self._shapes or (q.shape, k.shape, v.shape)
        dq, dk, dv = q.new_empty(*shape_q), k.new_empty(*shape_k), v.new_empty(*shape_v)
        dbias = None if x.bias is None or not needs_dbias else empty_like(x.bias)
        has_rows = self._form.batch != 0 and q.numel() != 0
        if not has_rows or k.numel() == 0:  # no row sees a key
            for gradient in (dq, dk, dv, dbias):
                if gradient is not None:
                    gradient.zero_()
        if has_rows:
            gradients = Gradients(dq, dk, dv, dbias)
            dsinks = self._fill(x, out, lse.contiguous(), dout, dlse, gradients)
        else:
            dsinks = None if x.sinks is None else torch.zeros_like(dense(x.sinks))
        return dq, dk, dv, dbias, dsinks

    def _fill(
        self,
        x: Tensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        gradients: Gradients,
    ) -> Tensor | None:
        """Fill the gradients of tensors that have rows; return the gradient of the sinks."""
        q, k, dout = x.q, x.k, aligned(dout)
        hopper = self._hopper
        if hopper is not None and not hopper.is_worth_it(q.shape[-3]):
            hopper = None
        sums = None if hopper is None else hopper.new_sums(q, k)
        delta, lse2 = self._row_numbers(compact(out), dout, dlse, lse, sums)
        if k.numel() != 0:
            # the output may have another dtype than q; products need one dtype
            dout = dout if dout.dtype == q.dtype else aligned(dout.to(q.dtype))
            inputs = Inputs(q, k, x.v, dout, lse2, delta)
            extras = NO_EXTRAS if self._form.is_plain else _extras(x)
            dq, dk, dv, dbias = gradients
            # what a signature leaves open
            key = q.shape[-3], k.shape[-3], dout.stride()
            if hopper is None:
                hulls = None if self._hulls is None else self._hulls(x, extras.spans_ptr)
                self._dkdv(key, (*inputs, dk, dv, *extras, hulls), inputs)
                self._dq(key, (*inputs, dq, *extras), inputs)
            else:
                hopper(inputs, extras, dq, dk, dv, sums, dbias)
            if dbias is not None and (hopper is None or not hopper.makes_dbias):
                self._dbias(key, (*inputs, dbias, *extras), inputs, dbias)
        return None if x.sinks is None else sink_gradient(dense(x.sinks), lse, delta)


# calls with only q, k and v
NO_EXTRAS = Extras(*(None,) * len(Extras._fields))


def _extras(x: Tensors) -> Extras:
    return Extras(
        x.bias,
        dense(x.alibi_slopes),
        x.rng_state,
        dense(x.cu_seqlens_q),
        dense(x.cu_seqlens_k),
        dense(x.seqused_k),
        dense(x.spans),
    )


def _strides(form: Form, dout: Tensor) -> GradientStrides:
    return GradientStrides(Strides(*token_strides(dout)), *form.strides)


def empty_like(x: Tensor) -> Tensor:
    """Return an uninitialised contiguous tensor of the shape and dtype of ``x``.

    ``torch.empty_like`` imports SymPy for meta tensors, while the first kernels wait to be built.
    PyTorch is faster with sizes one by one than with a tuple of them.
    """
    return x.new_empty(*x.shape)


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Sum ``-p * delta`` over rows: a sink is a key whose value is 0."""
    share = torch.exp(sinks.float()[:, None] - lse)
    # rows with an LSE of -inf, such as padding, have no denominator to share
    per_row = torch.where(lse == float("-inf"), 0.0, -share * delta)
    return per_row.sum(tuple(d for d in range(lse.ndim) if d != lse.ndim - 2)).to(sinks.dtype)
