"""The host side of ``hopper_query_kernel``: tensor maps (TMA), the order of tiles, the launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...._linked.hopper.tickets import kept_ticket, new_ticket
from ...._linked.hopper.tma import MapForm, MapLaunch, TensorMap
from ...._linked.host.forms import Memory
from ...._linked.launch.kernels import Kernel
from ...._linked.launch.runtime import MAX_COUNTS
from ...call import Tensors, Walk
from ...portable.form import Form, QueryTiles, launch_of, processors
from ...tiles import SHORT, HopperTile, has_halves, hopper_shape, hopper_tile, padded_head_dim
from ..arguments import QueryNumbers, QueryOptions, QueryTensors

hopper_query_kernel = Kernel(__package__, ".kernel", "hopper_query_kernel")

# columns per copy: a tile of wider heads is several panels
PANEL = 64


class PackedMap(TensorMap):
    """The map of packed tokens as one sequence: it ends where its tensor ends.

    No encoding is kept: the next tensor at the same address may have another length.
    """

    @property
    def shape(self) -> list[int]:
        return [*self.form.shape[:3], self.base.shape[1], self.form.shape[4]]

    def encoded(self, shipped: bool) -> None:
        """Know nothing."""

    def keep(self, encoded: list[Any], shipped: bool) -> None:
        """Remember nothing."""


class PackedForm(MapForm):
    """Maps packed tensors of one signature, which differ in their number of tokens."""

    kind = PackedMap

    def __init__(self, x: Tensor, rows: int, columns: int) -> None:
        super().__init__(x[None], rows, columns, ragged=False)

    def __call__(self, x: Tensor) -> TensorMap:
        return super().__call__(x[None])


class QueryWalk:
    """Base of the launches of ``hopper_query_kernel``."""

    def __init__(
        self, form: Form, x: Tensors, kernel: Any, tile: HopperTile, short: int, columns: int
    ) -> None:
        """Take a call of the signature; ``columns`` is the width of the tensor that is written.

        Another kernel serves sequences of up to ``short`` queries.
        """
        self._form, self._columns = form, columns
        # by numbers of tokens, in which packed calls of one signature differ
        self._work: Memory[tuple[int, QueryNumbers]] = Memory(MAX_COUNTS)
        pattern, constants = form.pattern, form.constants
        shape = hopper_shape(form.widest, pattern.block_q, form.group, pattern.is_shared)
        queries = self._queries = QueryTiles(form, shape)
        wide, wide_v = self._wide, self._wide_v = tuple(
            max(PANEL, padded_head_dim(t.shape[-1])) for t in (x.q, x.v)
        )
        self._rows = tile.rows
        rows = min(pattern.block_k, tile.block_n)
        self._map_q = self._map_rows(x.q, wide)
        self._map_k = MapForm(x.k, rows, PANEL, ragged=form.is_packed)
        self._map_v = MapForm(x.v, rows, PANEL, ragged=form.is_packed)
        options = QueryOptions(
            GROUP=constants.GROUP,
            HEADS=queries.constants.HEADS,
            SPAN=queries.constants.SPAN,
            ROW_MEMBERS=queries.constants.ROW_MEMBERS,
            BLOCK_Q=constants.BLOCK_Q,
            BLOCK_K=constants.BLOCK_K,
            IS_CAUSAL=constants.IS_CAUSAL,
            PER_HEAD=constants.PER_HEAD,
            SHORT=short,
            TOP_LEFT=constants.TOP_LEFT,
            HALVES=has_halves(shape, pattern, constants.IS_CAUSAL),
            ROWS=tile.rows,
            BLOCK_N=tile.block_n,
            HEAD_DIM=wide,
            HEAD_DIM_V=wide_v,
            STAGES_K=tile.stages_k,
            STAGES_V=tile.stages_v,
        )
        self.launch = launch_of(kernel, options, of=MapLaunch, num_warps=4, maxnreg=tile.registers)

    def _map_rows(self, x: Tensor, wide: int) -> MapForm:
        """Return the map of a tensor with a row per query."""
        if self._form.is_packed:
            return PackedForm(x, self._rows, wide)
        return MapForm(x, self._rows, wide, ragged=False)

    def _numbers(self, x: Tensors) -> tuple[int, QueryNumbers]:
        """Return the number of programs of a launch and its numbers."""
        counts = x.q.shape[-3], x.k.shape[-3]
        work = self._work.get(counts)
        if work is None:
            work = self._work.keep(counts, self._count_work(x.q, *counts))
        return work

    def _count_work(self, q: Tensor, tokens_q: int, tokens_k: int) -> tuple[int, QueryNumbers]:
        form, queries = self._form, self._queries
        tiles = queries.count(tokens_q, tokens_k)
        total = queries.programs(tiles)
        span = queries.span(tokens_k)
        numbers = QueryNumbers(
            scale=form.options.softmax_scale,
            batch=form.batch,
            heads_q=form.heads_q,
            tokens_q=tokens_q,
            tokens_k=tokens_k,
            width=self._columns,
            tiles=tiles,
            span=span,
            last=span + form.batch * queries.units % span,
            total=total,
            list_rows=queries.list_rows,
            list_stride=queries.list_stride,
            extent_k=form.extent_k,
        )
        return min(processors(q.device), total), numbers


class HopperForward(QueryWalk):
    """The launch for sequences of many queries, in calls that ``takes_hopper_forward`` accepts."""

    def __init__(self, form: Form, x: Tensors, is_kept: bool) -> None:
        """Take a call of the signature, and whether later calls reuse this object."""
        tile = hopper_tile(form.widest)
        super().__init__(form, x, hopper_query_kernel, tile, SHORT, form.head_dim_v)
        self._ticket = kept_ticket if is_kept else new_ticket
        out = torch.empty((*x.q.shape[:-1], form.head_dim_v), dtype=x.q.dtype, device="meta")
        self._map_out = MapForm(out, tile.rows, self._wide_v, ragged=form.is_packed)

    def arguments(
        self, x: Tensors, walk: Walk, out: Tensor, lse: Tensor
    ) -> tuple[int, tuple[Any, ...], tuple[Any, ...]]:
        """Return the arguments of the launch; an empty grid for tensors without tokens."""
        q, k = x.q, x.k
        # empty tensors have no tensor map
        if q.shape[-3] == 0:
            return 0, (), ()
        if k.shape[-3] == 0:
            out.zero_()
            lse.fill_(float("-inf"))
            return 0, (), ()
        grid, numbers = self._numbers(x)
        begin, whole, items, members = walk
        tensors = QueryTensors(
            q_desc=self._map_q(q),
            k_desc=self._map_k(k),
            v_desc=self._map_v(x.v),
            dout_desc=None,
            out_desc=self._map_out(out),
            out_ptr=out,
            ticket_ptr=self._ticket(q.device),
            begin_ptr=begin,
            whole_ptr=whole,
            items_ptr=items,
            members_ptr=members,
            lse_ptr=lse,
            cu_seqlens_q_ptr=x.cu_seqlens_q,
            cu_seqlens_k_ptr=x.cu_seqlens_k,
        )
        return grid, tensors, numbers
