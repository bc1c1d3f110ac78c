"""The launcher of the calls of each signature (``Plan``), and the two functions of the operators.

Forward: one program owns a tile of queries. Sequences of a few queries have smaller tiles, and
several programs may split the keys of one tile. Backward: the first launch writes two numbers per
row. The second makes dk and dv by tiles of keys, which walk the transposed layout; the third makes
dq by tiles of queries, which walk the layout. The method is FlashAttention-2's (Dao, 2023). On
Hopper, the kernels in ``hopper`` run instead for the calls that they support.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from attn_common import cdiv
from torch import Tensor

from .._linked.host.forms import Memory, interpreted
from .._linked.launch.entries import flat
from .._linked.launch.kernels import Kernel
from .._linked.launch.runtime import (
    MAX_COUNTS,
    aligned,
    dense,
    first_columns,
    token_strides,
    widened,
)
from .._linked.portable.strides import Strides
from . import tiles as attention_tiles
from .call import (
    BackwardCall,
    BackwardWalks,
    Bounds,
    ForwardCall,
    Options,
    Pattern,
    Tensors,
    Walk,
    Walks,
)
from .portable import arguments
from .portable.arguments import RowNumbers, RowOptions, RowTensors
from .portable.form import Form, QueryTiles, launch_of, launch_on, processors, readable, rule_stride
from .tiles import (
    SHORT,
    backward_dkdv_tile,
    backward_dq_shape,
    short_shape,
    takes_hopper_forward,
    tall_shape,
)

attention_kernel = Kernel(__package__, ".portable.attention", "attention_kernel")
row_kernel = Kernel(__package__, ".portable.backward_rows", "row_kernel")

# a decode is split into WAVES programs per multiprocessor, each with at least LEAST_STEPS steps
WAVES = 4
LEAST_STEPS = 4
# rows per program of ``row_kernel``
ROWS = 32

# the arguments of a launch: grid, tensors, numbers
Arguments = tuple[int, tuple[Any, ...], tuple[Any, ...]]


class Plan:
    """The launches that all calls of one signature share.

    Args:
        x: tensors of a call, as ``readable`` returns them.
        pattern: the properties of its layout.
        options: its arguments that are not tensors.
        is_kept: whether later calls reuse this object.
    """

    def __init__(
        self, x: Tensors, pattern: Pattern, options: Options, is_kept: bool = False
    ) -> None:
        form = self._form = Form(x, pattern, options)
        if takes_hopper_forward(x, pattern, options):
            from .hopper.queries.launch import HopperForward

            self._tall: Any = HopperForward(form, x, is_kept)
        else:
            self._tall = TallForward(form, x)
        self._short = ShortForward(form, x)

    def fits(self, x: Tensors) -> bool:
        return self._form.fits(x)

    def forward(self, x: Tensors, walks: Walks, bounds: Bounds) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``; ``x`` is as ``readable`` returns it.

        All launches are called from this frame: each further frame costs host time.
        """
        form, q = self._form, x.q
        out = q.new_empty((*q.shape[:-1], form.head_dim_v))
        per_head = (form.heads_q, q.shape[-3])
        lse_shape = per_head if form.is_packed else (form.batch, *per_head)
        lse = q.new_empty(lse_shape, dtype=torch.float32)
        if form.batch == 0:  # all tokens of a packed call may be padding
            return out.zero_(), lse.fill_(-math.inf)
        if walks.tall:
            self._tall.launch(*self._tall.arguments(x, walks.tall, out, lse))
        if walks.short:
            short = self._short
            split = short.split(x, bounds)
            fills = form.is_packed and not walks.tall
            launch = short.launches[split.splits > 1]
            grid, *arguments = short.arguments(x, walks.short, out, lse, split, fills)
            launch(grid, *arguments)
            if split.splits > 1:
                short.merge(split.programs, *arguments)
        return out, lse

    @functools.cached_property
    def _backward(self) -> BackwardPlan:
        return BackwardPlan(self._form)

    def backward(self, x: Tensors, walks: BackwardWalks, *results: Any) -> Any:
        return self._backward(x, walks, *results)


class TallForward:
    """The portable launch for sequences of many queries."""

    def __init__(self, form: Form, x: Tensors) -> None:
        self._form = form
        self._queries = QueryTiles(form, tall_shape(*form.choice, form.pattern.rows_alike))
        self.launch = _forward_launch(form, x, self._queries)

    def arguments(self, x: Tensors, walk: Walk, out: Tensor, lse: Tensor) -> Arguments:
        queries, table = self._queries, dense(x.block_table)
        tiles = queries.count(x.q.shape[-3], x.k.shape[-3])
        tensors = _tensors_of(x, walk, out, lse_ptr=lse, block_table_ptr=table)
        return queries.programs(tiles), tensors, queries.numbers(x, tiles, table=table)


class Split:
    """The splits of the tiles of a few queries, and the buffers of their partial results."""

    def __init__(self, form: Form, queries: QueryTiles, x: Tensors, bounds: Bounds) -> None:
        # a tile may begin before the sequence's first query
        longest = min(bounds.max_seqlen_q, SHORT)
        self.tiles = cdiv(longest - 1, queries.shape.positions) + 1 if longest > 1 else 1
        self.programs = form.batch * self.tiles * queries.units
        self.splits = form.options.num_splits or self._wanted(form, queries, x, bounds)
        self.parts: tuple[Tensor | None, Tensor | None] = None, None
        if self.splits > 1:
            rows = self.programs * self.splits * queries.tile.block_m
            self.parts = (
                x.q.new_empty((rows, form.head_dim_v), dtype=torch.float32),
                x.q.new_empty((rows,), dtype=torch.float32),
            )

    def _wanted(self, form: Form, queries: QueryTiles, x: Tensors, bounds: Bounds) -> int:
        pattern, shape = form.pattern, queries.shape
        blocks = min(pattern.max_row * shape.pack, cdiv(bounds.max_seqlen_k, pattern.block_k))
        steps = cdiv(blocks * pattern.block_k, shape.tile.block_n)
        wanted = cdiv(WAVES * processors(x.q.device), max(self.programs, 1))
        return max(1, min(wanted, steps // LEAST_STEPS, 64))


class ShortForward:
    """The launches for sequences of a few queries, without splits and with them."""

    def __init__(self, form: Form, x: Tensors) -> None:
        self._form = form
        queries = self._queries = QueryTiles(form, short_shape(*form.choice))
        self.launches = tuple(_forward_launch(form, x, queries, is_short=True) for _ in range(2))
        merging = queries.constants._replace(MERGES=True, IS_SHORT=True, SHORT=SHORT)
        self.merge = launch_on(attention_kernel, queries.tile, merging)

    def split(self, x: Tensors, bounds: Bounds) -> Split:
        return Split(self._form, self._queries, x, bounds)

    def arguments(
        self,
        x: Tensors,
        walk: Walk,
        out: Tensor,
        lse: Tensor,
        split: Split,
        fills: bool,
    ) -> Arguments:
        """Return the arguments of the launch; ``fills``: it also writes the rows of padding."""
        table = dense(x.block_table)
        (part_out, part_lse), grid = split.parts, split.programs * split.splits
        tensors = _tensors_of(
            x,
            walk,
            out,
            lse_ptr=lse,
            part_out_ptr=part_out,
            part_lse_ptr=part_lse,
            block_table_ptr=table,
        )
        return grid, tensors, self._queries.numbers(x, split.tiles, split.splits, fills, table)


def _forward_launch(form: Form, x: Tensors, queries: QueryTiles, is_short: bool = False) -> Any:
    page = 0 if x.block_table is None else x.k.shape[1]
    folds = form.options.softmax_scale >= 0
    constants = queries.constants._replace(PAGE=page, IS_SHORT=is_short, SHORT=SHORT, FOLD=folds)
    return launch_on(attention_kernel, queries.tile, constants)


def _tensors_of(x: Tensors, walk: Walk, out: Tensor, **others: Tensor | None) -> arguments.Tensors:
    """Return the tensors of a launch of ``attention_kernel``; ``others`` are further fields."""
    begin, whole, items, members = walk
    return arguments.Tensors(
        q_ptr=x.q,
        k_ptr=x.k,
        v_ptr=x.v,
        out_ptr=out,
        begin_ptr=begin,
        whole_ptr=whole,
        items_ptr=items,
        members_ptr=members,
        cu_seqlens_q_ptr=x.cu_seqlens_q,
        cu_seqlens_k_ptr=x.cu_seqlens_k,
        rule_ptr=x.rule,
        **others,
    )


class BackwardPlan:
    """The backward launches that all calls of one signature share."""

    def __init__(self, form: Form) -> None:
        self._form = form
        constants = form.constants
        options = RowOptions(
            HEAD_DIM_V=constants.HEAD_DIM_V,
            BLOCK_DV=constants.BLOCK_DV,
            ROW_BYTES_V=constants.ROW_BYTES_V,
            BLOCK=ROWS,
        )
        # without a gradient of the LSE, and with one
        self._rows = tuple(
            launch_of(row_kernel, options, num_warps=4, num_stages=1) for _ in range(2)
        )
        sizes = form.widest, form.itemsize, form.pattern.block_q
        self._key_tile = backward_dkdv_tile(form.platform, *sizes)
        settle = form.platform.is_hopper and not interpreted()
        by_key = constants._replace(BY_KEY=True, SETTLE=settle)
        self._keys = launch_on(attention_kernel, self._key_tile, by_key)
        shape = backward_dq_shape(*form.choice, form.pattern.rows_alike)
        queries = self._queries = QueryTiles(form, shape)
        self._dq = launch_on(attention_kernel, queries.tile, queries.constants)
        # grid and numbers of the launches for rows and for keys
        self._work: Memory[tuple[int, tuple[float, ...], int, tuple[float, ...]]]
        self._work = Memory(MAX_COUNTS)

    @functools.cached_property
    def _hopper(self) -> Any:
        from .hopper.backward.launch import HopperBackward

        return HopperBackward(self._form)

    def __call__(
        self,
        x: Tensors,
        walks: BackwardWalks,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(dq, dk, dv)``; ``x`` has the signature of this object."""
        q, k, v = x.q, x.k, x.v
        dout, out, lse = aligned(dout), aligned(out.contiguous()), lse.contiguous()
        dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        if self._form.batch == 0 or q.numel() == 0 or k.numel() == 0:  # no query sees a key
            return dq.zero_(), dk.zero_(), dv.zero_()
        delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
        rows = RowTensors(
            out_ptr=out,
            dout_ptr=dout,
            lse_ptr=lse,
            dlse_ptr=dense(dlse),
            delta_ptr=delta,
            lse2_ptr=lse2,
        )
        if self._is_for_hopper(x, walks):
            self._hopper(x, rows, walks.pairs, dq, dk, dv)
        else:
            self._run(x, rows, walks, dq, dk, dv)
        return dq, dk, dv

    def _is_for_hopper(self, x: Tensors, walks: BackwardWalks) -> bool:
        if not walks.pairs:
            return False
        must_repeat = attention_tiles.repeats()
        if must_repeat and not (walks.repeat or walks.by_key):
            raise NotImplementedError(
                "gradients that repeat are asked for, but were not before the forward pass: call "
                "torch.use_deterministic_algorithms(True) ahead of it"
            )
        if must_repeat and not walks.repeat:
            return False
        return not walks.by_key or self._hopper.is_worth_it(x)

    def _run(
        self, x: Tensors, rows: RowTensors, walks: BackwardWalks, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> None:
        """Write the gradients with the portable kernels."""
        dout, queries = Strides(*token_strides(rows.dout_ptr)), self._queries
        tokens_q, tokens_k = x.q.shape[-3], x.k.shape[-3]
        counts = tokens_q, tokens_k, dout, rule_stride(x)
        work = self._work.get(counts) or self._work.keep(counts, self._count(*counts))
        row_grid, row_numbers, key_grid, key_numbers = work
        self._rows[rows.dlse_ptr is not None](row_grid, rows, row_numbers)
        read = {
            "dout_ptr": rows.dout_ptr,
            "lse2_ptr": rows.lse2_ptr,
            "delta_ptr": rows.delta_ptr,
        }
        self._keys(key_grid, _tensors_of(x, walks.by_key, dk, dv_ptr=dv, **read), key_numbers)
        tiles = queries.count(tokens_q, tokens_k)
        self._dq(
            queries.programs(tiles),
            _tensors_of(x, walks.by_query, dq, **read),
            queries.numbers(x, tiles, dout=dout),
        )

    def _count(
        self, tokens_q: int, tokens_k: int, dout: Strides, rule_stride: int
    ) -> tuple[int, tuple[float, ...], int, tuple[float, ...]]:
        """Return grid and numbers of the launch for rows, then those of the launch for keys."""
        form, tile = self._form, self._key_tile
        rows = form.grid_batch * form.heads_q * tokens_q
        tiles = form.tiles_k(tokens_k, tile.block_n)
        list_rows = cdiv(form.extent_k, max(tile.block_n, form.pattern.block_k))
        numbers = form.numbers(
            tokens_q,
            tokens_k,
            tiles=tiles,
            span=form.span_k(tokens_q),
            splits=1,
            fills=0,
            list_rows=list_rows,
            list_stride=form.lists_apart(form.heads_k * list_rows, list_rows),
            extent=form.extent_q,
            table_stride=0,
            rule_stride=rule_stride,
            dout=dout,
        )
        of_rows = RowNumbers(tokens_q=tokens_q, rows=rows, dout=dout, heads_q=form.heads_q)
        grid = tiles * form.heads_k * form.grid_batch
        return cdiv(rows, ROWS), flat(of_rows), grid, numbers


def launch_forward(call: ForwardCall) -> tuple[Tensor, Tensor]:
    """Run the forward operator on checked inputs."""
    x, common = readable(call.tensors), call.common
    plan = Plan(x, common.pattern, common.options)
    out, lse = plan.forward(x, call.walks, common.bounds)
    return first_columns(out, call.v.shape[-1]), lse


def launch_backward(call: BackwardCall) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward operator on checked inputs."""
    x, common = readable(call.tensors), call.common
    plan = BackwardPlan(Form(x, common.pattern, common.options))
    # ``readable`` may have widened v
    out, dout = (widened(t, x.v.shape[-1]) for t in (call.out, call.dout))
    grads = plan(x, call.walks, out, call.lse, dout, call.dlse)
    widths = (t.shape[-1] for t in (call.q, call.k, call.v))
    dq, dk, dv = map(first_columns, grads, widths)
    return dq, dk, dv
