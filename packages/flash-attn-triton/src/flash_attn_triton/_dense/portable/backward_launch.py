"""The backward launcher of a signature: its launches are made once."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from attn_common import cdiv
from torch import Tensor

from ..._linked.host.forms import ACCESS_BYTES, Memory
from ..._linked.launch.entries import flat
from ..._linked.launch.runtime import MAX_COUNTS, Launch, aligned, compact, dense, token_strides
from ..._linked.portable.primitives import Strides
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
    Inputs,
    RowNumbers,
    RowTensors,
    RowTile,
    ShortNumbers,
    ShortTensors,
)
from .backward_dkdv import dkdv_kernel
from .backward_dq import dq_kernel
from .backward_rows import row_kernel
from .backward_short import short_kernel
from .bias_gradient import bias_gradient_kernel
from .form import Form, Work, new_memory

# rows per program of the row kernel
ROWS = 32


class RowSums:
    """The two numbers per row that every tile of the row needs; see ``row_kernel``."""

    def __init__(self, form: Form, out_dtype: torch.dtype) -> None:
        self._form = form
        self._work = new_memory()
        row_bytes = math.gcd(form.head_dim_v * out_dtype.itemsize, ACCESS_BYTES)
        tile = RowTile(form.head_dim_v, form.block_dv, row_bytes, ROWS, PIECE)
        # by whether dlse is given and whether sums is given
        self._launches = [
            [Launch(row_kernel, {"TILE": tile, "num_warps": 4}) for _ in range(2)] for _ in range(2)
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
        counts = shape, dout.stride(), 0 if sums is None else sums.numel()
        programs, numbers = self._work.get(counts) or self._work.keep(
            counts, self._count(lse, dout, sums)
        )
        tensors = RowTensors(out, dout, lse, dense(dlse), delta, lse2, sums)
        self._launches[dlse is not None][sums is not None](programs, tensors, numbers)
        return delta, lse2

    def _count(self, lse: Tensor, dout: Tensor, sums: Tensor | None) -> Work:
        rows = lse.numel()
        programs = cdiv(rows, ROWS)
        pieces = 0 if sums is None else sums.numel() // PIECE
        return programs, flat(
            RowNumbers(
                tokens=lse.shape[-1],
                rows=rows,
                heads_q=self._form.heads_q,
                dout=Strides(*token_strides(dout)),
                share=cdiv(pieces, programs),
                pieces=pieces,
            )
        )


class KeyGradients:
    """Gradients of keys and values."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._tile = backward_dkdv_tile(form.platform, form.widest_head, form.itemsize)
        self._launch = form.launch(dkdv_kernel, self._tile, settle=True)
        self._work = new_memory()

    def __call__(self, inputs: Inputs, extras: Extras, dk: Tensor, dv: Tensor) -> None:
        """Fill ``dk`` and ``dv``."""
        counts = _counts_of(inputs)
        grid, numbers = self._work.get(counts) or self._work.keep(counts, self._count(inputs))
        self._launch(grid, (*inputs, dk, dv, *extras), numbers)

    def _count(self, inputs: Inputs) -> Work:
        form = self._form
        tokens_q, tokens_k = inputs.q_ptr.shape[-3], inputs.k_ptr.shape[-3]
        tiles = form.tiles(tokens_k, self._tile.block_n)
        counts = Counts(tokens_q, tokens_k, tiles, form.span_k(tokens_q))
        numbers = flat(form.scalars, counts, _strides(form, inputs.dout_ptr))
        return tiles * form.heads_k * form.grid_batch, numbers


class QueryGradient:
    """Gradient of the queries."""

    def __init__(self, form: Form, has_bias: bool) -> None:
        self._form = form
        self._tile = backward_dq_tile(form.platform, form.widest_head, form.itemsize, has_bias)
        self._launch = form.launch(dq_kernel, self._tile)
        self._work = new_memory()

    def __call__(self, inputs: Inputs, extras: Extras, dq: Tensor) -> None:
        """Fill ``dq``."""
        counts = _counts_of(inputs)
        grid, numbers = self._work.get(counts) or self._work.keep(counts, self._count(inputs))
        self._launch(grid, (*inputs, dq, *extras), numbers)

    def _count(self, inputs: Inputs) -> Work:
        form = self._form
        tokens_q, tokens_k = inputs.q_ptr.shape[-3], inputs.k_ptr.shape[-3]
        tiles = form.tiles(tokens_q, self._tile.block_m)
        counts = Counts(tokens_q, tokens_k, tiles, form.span_q(tokens_k))
        numbers = flat(form.scalars, counts, _strides(form, inputs.dout_ptr))
        return tiles * form.heads_q * form.grid_batch, numbers


class ShortGradients:
    """Gradients of queries, keys and values of short sequences, in one launch."""

    def __init__(self, form: Form, x: Tensors) -> None:
        tile = short_tile(form.platform, form.widest_head, form.itemsize)
        scalars, (tokens_q, tokens_k) = form.scalars, (x.q.shape[1], x.k.shape[1])
        # by whether dlse is given
        self._launches = [form.launch(short_kernel, tile, settle=True) for _ in range(2)]
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
        # by the strides of dout, which the signature does not fix
        self._numbers: Memory[tuple[float, ...]] = Memory(MAX_COUNTS)

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
        strides = dout.stride()
        numbers = self._numbers.get(strides) or self._numbers.keep(strides, self._count(dout))
        tensors = ShortTensors(q, k, v, dout, out, lse.contiguous(), dense(dlse), dq, dk, dv)
        self._launches[dlse is not None](self._grid, tensors, numbers)
        return dq, dk, dv, None, None

    def _count(self, dout: Tensor) -> tuple[float, ...]:
        return flat(self._form_numbers._replace(dout=Strides(*token_strides(dout))))


class BiasGradient:
    """Gradient of the additive bias."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._tile = bias_gradient_tile(form.platform, form.widest_head, form.itemsize)
        self._launch = form.launch(bias_gradient_kernel, self._tile)
        self._work = new_memory()

    def __call__(self, inputs: Inputs, extras: Extras, dbias: Tensor) -> None:
        """Fill ``dbias``, which is contiguous and shaped like the bias."""
        counts = _counts_of(inputs)
        grid, numbers = self._work.get(counts) or self._work.keep(
            counts, self._count(inputs, dbias)
        )
        self._launch(grid, (*inputs, dbias, *extras), numbers)

    def _count(self, inputs: Inputs, dbias: Tensor) -> Work:
        form = self._form
        batch, heads, rows, columns = dbias.shape
        tiles_m, tiles_n = cdiv(rows, self._tile.block_m), cdiv(columns, self._tile.block_n)
        counts = BiasCounts(
            inputs.q_ptr.shape[-3],
            inputs.k_ptr.shape[-3],
            heads,
            rows,
            columns,
            *(int(size == 1) for size in dbias.shape),
        )
        numbers = flat(form.scalars, counts, _strides(form, inputs.dout_ptr))
        return batch * heads * tiles_m * tiles_n, numbers


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
        self._key_gradients = KeyGradients(form)
        self._query_gradient = QueryGradient(form, x.bias is not None)
        self._bias_gradient = None if x.bias is None else BiasGradient(form)
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
        sums = None if hopper is None else hopper.new_sums(q)
        delta, lse2 = self._row_numbers(compact(out), dout, dlse, lse, sums)
        if k.numel() != 0:
            # the output may have another dtype than q; products need one dtype
            dout = dout if dout.dtype == q.dtype else aligned(dout.to(q.dtype))
            inputs = Inputs(q, k, x.v, dout, lse2, delta)
            extras = NO_EXTRAS if self._form.is_plain else _extras(x)
            if hopper is None:
                self._key_gradients(inputs, extras, gradients.dk, gradients.dv)
                self._query_gradient(inputs, extras, gradients.dq)
            else:
                hopper(inputs, extras, *gradients[:3], sums, gradients.dbias)
            if gradients.dbias is not None and (hopper is None or not hopper.makes_dbias):
                self._bias_gradient(inputs, extras, gradients.dbias)
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
    )


def _strides(form: Form, dout: Tensor) -> GradientStrides:
    return GradientStrides(Strides(*token_strides(dout)), *form.strides)


def _counts_of(inputs: Inputs) -> tuple[int, int, tuple[int, ...]]:
    """Return the key of ``new_memory``: token counts and strides of dout."""
    return inputs.q_ptr.shape[-3], inputs.k_ptr.shape[-3], inputs.dout_ptr.stride()


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
