"""How calls are launched: the plan of each form, and the two launchers that operators call.

Forward: one program owns a tile of queries. Sequences of a few queries have tiles of their own,
over whose keys several programs may be split. Backward: first two numbers per row; then dk and dv
by tiles of keys, which walk the transposed layout, and dq by tiles of queries, which walk the
layout. The method is FlashAttention-2's (Dao, 2023). On Hopper kernels of ``hopper`` serve what
they can of either pass.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from attn_common import cdiv
from torch import Tensor

from .. import _configs
from .._call import Bounds, Common, Options, Pattern, Tensors, Walks
from .._configs import (
    SHORT,
    Shape,
    backward_dkdv_tile,
    backward_dq_shape,
    short_shape,
    takes_hopper_forward,
    tall_shape,
)
from .._linked.host.forms import interpreted
from .backward_dkdv import _dkdv_kernel
from .backward_dq import _dq_kernel
from .backward_rows import _row_kernel
from .form import (
    Form,
    QueryTiles,
    launch_of,
    launch_on,
    processors,
    readable,
    rule_stride,
    select,
)
from .forward import _forward_kernel
from .launch.runtime import aligned, dense, first_columns, token_strides, widened
from .merge import _merge_kernel
from .structures import (
    ForwardNumbers,
    ForwardOptions,
    ForwardTensors,
    GradientNumbers,
    GradientTensors,
    MergeNumbers,
    MergeOptions,
    MergeTensors,
    RowNumbers,
    RowOptions,
    RowTensors,
)

# programs per multiprocessor that a decode is split into, and the least steps of a program
WAVES = 4
LEAST_STEPS = 4
# rows per program of the launch that numbers them
ROWS = 32

# a grid, tensors and numbers: what a launch is called with
Arguments = tuple[int, tuple[Any, ...], tuple[Any, ...]]


class Plan:
    """The launches of all calls of one form.

    Args:
        x: tensors of a call, as ``readable`` leaves them.
        pattern: what depends on its layout.
        options: what is no tensor.
        is_kept: whether the plan serves later calls.
    """

    def __init__(
        self, x: Tensors, pattern: Pattern, options: Options, is_kept: bool = False
    ) -> None:
        form = self._form = Form(x, pattern, options)
        if takes_hopper_forward(x, pattern, options):
            from .hopper.plans import HopperForward

            self._tall: Any = HopperForward(form, x, is_kept)
        else:
            shape = tall_shape(form.platform, *form.choice)
            self._tall = PortableForward(form, x, shape, is_short=False)
        shape = short_shape(form.platform, *form.choice[:-1])
        self._short = PortableForward(form, x, shape, is_short=True)

    def fits(self, x: Tensors) -> bool:
        """Say whether tensors that were put away since still lie in memory as they did."""
        return self._form.fits(x)

    def forward(self, x: Tensors, walks: Walks, bounds: Bounds) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)`` of tensors as ``readable`` leaves them.

        Launches are called here, and nowhere further down: each frame takes its time.
        """
        form, q = self._form, x.q
        out = q.new_empty((*q.shape[:-1], form.head_dim_v))
        per_head = (form.heads_q, q.shape[-3])
        lse_shape = per_head if form.is_packed else (form.batch, *per_head)
        lse = q.new_empty(lse_shape, dtype=torch.float32)
        if form.batch == 0:  # a packed call may hold nothing but padding
            return out.zero_(), lse.fill_(-math.inf)
        if walks.tall:
            self._tall.launch(*self._tall.arguments(x, walks.tall, out, lse))
        if walks.short:
            short = self._short
            share = short.share(x, bounds)
            fills = form.is_packed and not walks.tall
            launch = short.launch if share.splits == 1 else short.launch_split
            launch(*short.arguments(x, walks.short, out, lse, share, fills))
            if share.splits > 1:
                short.merge(*short.merge_arguments(x, out, lse, share))
        return out, lse

    @functools.cached_property
    def _backward(self) -> BackwardPlan:
        return BackwardPlan(self._form)

    def backward(
        self,
        x: Tensors,
        walks: Walks,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(dq, dk, dv)`` of tensors that fit."""
        return self._backward(x, walks, out, lse, dout, dlse)


class Share(NamedTuple):
    """How tiles of queries are shared out, and where what splits find is kept."""

    tiles: int
    programs: int  # of each split
    splits: int = 1
    part_out: Tensor | None = None
    part_lse: Tensor | None = None


class PortableForward:
    """The launches of the portable kernel for sequences of many queries, or of a few."""

    def __init__(self, form: Form, x: Tensors, shape: Shape, is_short: bool) -> None:
        self._form = form
        queries = self._queries = QueryTiles(form, shape)
        options = ForwardOptions(
            PAGE=0 if x.block_table is None else x.k.shape[1],
            IS_SHORT=is_short,
            SHORT=SHORT,
            FOLD=form.options.softmax_scale >= 0,
        )
        constants = form.constants, queries.constants, options
        self.launch = launch_on(_forward_kernel, queries.tile, *constants)
        if is_short:
            # of splits, which tell of more
            self.launch_split = launch_on(_forward_kernel, queries.tile, *constants)
            self.merge = launch_on(_merge_kernel, queries.tile, select(MergeOptions, *constants))

    def share(self, x: Tensors, bounds: Bounds) -> Share:
        """Share out the tiles of a few queries, over whose keys programs may be split."""
        form, queries = self._form, self._queries
        # a tile may begin ahead of the sequence's first query
        longest = min(bounds.seqlen_q, SHORT)
        tiles = cdiv(longest - 1, queries.shape.positions) + 1 if longest > 1 else 1
        programs = form.batch * tiles * queries.units
        splits = form.options.num_splits or self._wanted(x, bounds, programs)
        if splits == 1:
            return Share(tiles, programs)
        rows = programs * splits * queries.tile.block_m
        part_out = x.q.new_empty((rows, form.head_dim_v), dtype=torch.float32)
        return Share(tiles, programs, splits, part_out, part_out.new_empty(rows))

    def _wanted(self, x: Tensors, bounds: Bounds, programs: int) -> int:
        """Return how many programs the keys of a tile are best split over."""
        pattern, shape = self._form.pattern, self._queries.shape
        blocks = min(pattern.max_row * shape.pack, cdiv(bounds.seqlen_k, pattern.block_k))
        steps = cdiv(blocks * pattern.block_k, shape.tile.block_n)
        wanted = cdiv(WAVES * processors(x.q.device), max(programs, 1))
        return max(1, min(wanted, steps // LEAST_STEPS, 64))

    def arguments(
        self,
        x: Tensors,
        walk: tuple[Tensor, ...],
        out: Tensor,
        lse: Tensor,
        share: Share | None = None,
        fills: bool = False,
    ) -> Arguments:
        """Return what the launch is called with; it may have to write what padding gives."""
        form, queries = self._form, self._queries
        tokens_q, tokens_k = x.q.shape[-3], x.k.shape[-3]
        if share is None:
            tiles = queries.count(tokens_q, tokens_k)
            share = Share(tiles, queries.programs(tiles))
        table = dense(x.block_table)
        offsets = x.cu_seqlens_q, x.cu_seqlens_k
        parts = share.part_out, share.part_lse
        tensors = ForwardTensors(x.q, x.k, x.v, out, lse, *parts, *walk, *offsets, table, x.rule)
        numbers = ForwardNumbers(
            form.options.softmax_scale,
            form.batch,
            form.heads_q,
            tokens_q,
            tokens_k,
            share.tiles,
            queries.span(tokens_k),
            share.splits,
            int(fills),
            queries.list_rows,
            queries.list_stride,
            form.extent_k,
            0 if table is None else table.stride(0),
            rule_stride(x),
            *form.strides,
        )
        return share.programs * share.splits, tensors, numbers

    def merge_arguments(self, x: Tensors, out: Tensor, lse: Tensor, share: Share) -> Arguments:
        """Return what the launch that merges splits is called with."""
        form, counts = self._form, (x.q.shape[-3], x.k.shape[-3])
        offsets = x.cu_seqlens_q, x.cu_seqlens_k
        tensors = MergeTensors(share.part_out, share.part_lse, out, lse, *offsets)
        numbers = MergeNumbers(form.batch, form.heads_q, *counts, share.tiles, share.splits)
        return share.programs, tensors, numbers


class BackwardPlan:
    """The launches of the backward pass of all calls of one form."""

    def __init__(self, form: Form) -> None:
        self._form = form
        constants = form.constants
        options = select(RowOptions, constants, BLOCK=ROWS)
        # without a gradient of the LSE, and with one
        self._rows = tuple(
            launch_of(_row_kernel, options, num_warps=4, num_stages=1) for _ in range(2)
        )
        self._key_tile = backward_dkdv_tile(form.platform, *form.choice[:3])
        settle = form.platform.is_hopper and not interpreted()
        self._keys = launch_on(_dkdv_kernel, self._key_tile, constants, settle=settle)
        queries = self._queries = QueryTiles(form, backward_dq_shape(form.platform, *form.choice))
        self._dq = launch_on(_dq_kernel, queries.tile, constants, queries.constants)

        # the launches for Hopper, by whether gradients repeat
        self._hopper: dict[bool, Any] = {}

    def _for_hopper(self, repeats: bool) -> Any:
        if repeats not in self._hopper:
            from .hopper.backward_plans import HopperBackward

            self._hopper[repeats] = HopperBackward(self._form, repeats=repeats)
        return self._hopper[repeats]

    def __call__(
        self,
        x: Tensors,
        walks: Walks,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(dq, dk, dv)``; the tensors of ``x`` are of the form."""
        q, k, v = x.q, x.k, x.v
        dout, out, lse = aligned(dout), aligned(out.contiguous()), lse.contiguous()
        dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        if self._form.batch == 0 or q.numel() == 0 or k.numel() == 0:  # nobody sees a key
            return dq.zero_(), dk.zero_(), dv.zero_()
        delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
        rows = RowTensors(out, dout, lse, dense(dlse), delta, lse2)
        if self._is_for_hopper(x, walks):
            self._for_hopper(walks.repeat)(x, rows, walks.pairs, dq, dk, dv)
        else:
            self._run(x, rows, walks, dq, dk, dv)
        return dq, dk, dv

    def _is_for_hopper(self, x: Tensors, walks: Walks) -> bool:
        if not walks.pairs:
            return False
        must_repeat = _configs.repeats()
        if must_repeat and not (walks.repeat or walks.by_key):
            raise NotImplementedError(
                "gradients that repeat are asked for, but were not before the forward pass: call "
                "torch.use_deterministic_algorithms(True) ahead of it"
            )
        if must_repeat and not walks.repeat:
            return False
        return not walks.by_key or self._for_hopper(False).is_worth_it(x)

    def _run(
        self, x: Tensors, rows: RowTensors, walks: Walks, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> None:
        """Fill the gradients by the portable kernels."""
        form, lse = self._form, rows.lse_ptr
        tokens_q, tokens_k = x.q.shape[-3], x.k.shape[-3]
        strides = token_strides(rows.dout_ptr)
        offsets = x.cu_seqlens_q, x.cu_seqlens_k
        read = x.q, x.k, x.v, rows.dout_ptr, rows.lse2_ptr, rows.delta_ptr
        self._rows[rows.dlse_ptr is not None](
            cdiv(lse.numel(), ROWS),
            rows,
            RowNumbers(lse.shape[-1], lse.numel(), *strides, form.heads_q),
        )
        tile = self._key_tile
        tiles = form.tiles_k(tokens_k, tile.block_n)
        list_rows = cdiv(form.extent_k, max(tile.block_n, form.pattern.block_k))
        list_stride = form.lists_apart(form.heads_k * list_rows, list_rows)

        def numbers(*of_walk: int) -> GradientNumbers:
            sizes = form.options.softmax_scale, form.batch, form.heads_q, tokens_q, tokens_k
            return GradientNumbers(*sizes, *of_walk, rule_stride(x), *strides, *form.strides)

        self._keys(
            tiles * form.heads_k * form.grid_batch,
            GradientTensors(*read, None, dk, dv, *walks.by_key, *offsets, x.rule),
            numbers(tiles, form.span_k(tokens_q), list_rows, list_stride, form.extent_q),
        )
        queries = self._queries
        tiles, span = queries.count(tokens_q, tokens_k), queries.span(tokens_k)
        self._dq(
            queries.programs(tiles),
            GradientTensors(*read, dq, None, None, *walks.by_query, *offsets, x.rule),
            numbers(tiles, span, queries.list_rows, queries.list_stride, form.extent_k),
        )


def launch_forward(x: Tensors, walks: Walks, call: Common) -> tuple[Tensor, Tensor]:
    """Run the forward operator on checked inputs; see ``_ops.py`` for its schema."""
    width = x.v.shape[-1]
    x = readable(x)
    out, lse = Plan(x, call.pattern, call.options).forward(x, walks, call.bounds)
    return first_columns(out, width), lse


def launch_backward(
    x: Tensors,
    walks: Walks,
    call: Common,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward operator on checked inputs; see ``_ops.py`` for its schema."""
    widths = [t.shape[-1] for t in x[:3]]
    x = readable(x)
    plan = BackwardPlan(Form(x, call.pattern, call.options))
    # as wide as the values
    out, dout = (widened(t, x.v.shape[-1]) for t in (out, dout))
    dq, dk, dv = map(first_columns, plan(x, walks, out, lse, dout, dlse), widths)
    return dq, dk, dv
