"""The host side of the Hopper kernels: tensor maps (TMA), the order of tiles, the launches."""

from __future__ import annotations

from typing import Any

import torch
from attn_common import cdiv
from torch import Tensor

from ..._call import Tensors
from ..._configs import (
    SHORT,
    hopper_backward_tile,
    hopper_shape,
    hopper_tile,
    is_covered,
    padded_head_dim,
)
from ..._pairs import Pairs, heads_at_once
from ..._pieces import SIDE, piece_of
from ..form import Form, QueryTiles, diagonal_of, launch_of, processors
from ..launch.runtime import token_strides
from ..structures import RowTensors
from ._linked.tickets import kept_ticket, new_ticket
from ._linked.tma import MapForm, MapLaunch, TensorMap
from .backward import hopper_backward_kernel
from .backward_round import PIECE, prepare_kernel, round_kernel
from .forward import hopper_forward_kernel
from .structures import (
    BackwardNumbers,
    BackwardOptions,
    BackwardTensors,
    BackwardTile,
    ForwardNumbers,
    ForwardOptions,
    ForwardTile,
    PrepareNumbers,
    PrepareOptions,
    PrepareTensors,
    RoundNumbers,
    RoundOptions,
    RoundTensors,
)

# columns that one copy takes: of wider heads a tile is several panels
PANEL = 64
# registers a thread at the start of the backward
REGISTERS = 168
# rows per program of the launch ahead of the backward
ROWS = 32

# pairs of token counts whose work a plan keeps
MAX_COUNTS = 256


class PackedMap(TensorMap):
    """The map of packed tokens as one sequence: it ends where its tensor ends.

    What was encoded for a place may end elsewhere, so nothing is remembered.
    """

    def __init__(self, base: Tensor, form: MapForm) -> None:
        super().__init__(base, form)
        self.encoded = None

    @property
    def shape(self) -> list[int]:
        return [*self.form.shape[:3], self.base.shape[1], self.form.shape[4]]

    def keep(self, encoded: list[Any]) -> None:
        """Remember nothing."""


class PackedForm(MapForm):
    """How packed tensors of one form, which differ in their number of tokens, are mapped."""

    kind = PackedMap

    def __init__(self, x: Tensor, rows: int, columns: int) -> None:
        super().__init__(x[None], rows, columns, ragged=False)

    def __call__(self, x: Tensor) -> TensorMap:
        """Map a tensor of the form, as ``MapForm`` does."""
        return super().__call__(x[None])


class HopperForward:
    """The launch for sequences of many queries, of calls that ``takes_hopper_forward`` takes."""

    def __init__(self, form: Form, x: Tensors, is_kept: bool) -> None:
        """Take a call of the form, and whether the plan serves others after it."""
        self._form = form
        self._ticket = kept_ticket if is_kept else new_ticket
        # by numbers of tokens, in which packed calls of one form differ
        self._work: dict[tuple[int, int], tuple[int, ForwardNumbers]] = {}
        pattern, constants, q, k, v = form.pattern, form.constants, x.q, x.k, x.v
        widest = max(q.shape[-1], form.head_dim_v)
        tile = hopper_tile(widest)
        shape = hopper_shape(widest, pattern.block_q, form.group, pattern.is_shared)
        queries = self._queries = QueryTiles(form, shape)
        wide, wide_v = (max(PANEL, padded_head_dim(t.shape[-1])) for t in (q, v))
        out = torch.empty((*q.shape[:-1], form.head_dim_v), dtype=q.dtype, device="meta")
        rows = min(pattern.block_k, tile.block_n)
        if form.is_packed:
            self._map_q: MapForm = PackedForm(q, tile.rows, wide)
        else:
            self._map_q = MapForm(q, tile.rows, wide, ragged=False)
        self._map_k = MapForm(k, rows, PANEL, ragged=form.is_packed)
        self._map_v = MapForm(v, rows, PANEL, ragged=form.is_packed)
        self._map_out = MapForm(out, tile.rows, wide_v, ragged=form.is_packed)
        options = ForwardOptions(
            GROUP=constants.GROUP,
            HEADS=queries.constants.HEADS,
            SPAN=queries.constants.SPAN,
            ROW_MEMBERS=queries.constants.ROW_MEMBERS,
            BLOCK_Q=constants.BLOCK_Q,
            BLOCK_K=constants.BLOCK_K,
            IS_CAUSAL=constants.IS_CAUSAL,
            PER_HEAD=constants.PER_HEAD,
            SHORT=SHORT,
            TOP_LEFT=constants.TOP_LEFT,
        )
        sizes = ForwardTile(tile.rows, tile.block_n, wide, wide_v, tile.stages_k, tile.stages_v)
        self.launch = launch_of(
            hopper_forward_kernel,
            options,
            sizes,
            of=MapLaunch,
            num_warps=4,
            maxnreg=tile.registers,
        )

    def arguments(
        self, x: Tensors, walk: tuple[Tensor, ...], out: Tensor, lse: Tensor
    ) -> tuple[int, tuple[Any, ...], tuple[Any, ...]]:
        """Return what the launch is called with; an empty grid for tensors without tokens."""
        q, k = x.q, x.k
        tokens_q, tokens_k = q.shape[-3], k.shape[-3]
        # empty tensors have no map
        if tokens_q == 0:
            return 0, (), ()
        if tokens_k == 0:
            out.zero_()
            lse.fill_(float("-inf"))
            return 0, (), ()
        counts = tokens_q, tokens_k
        work = self._work.get(counts)
        if work is None:
            work = self._count_work(q, *counts)
            if len(self._work) < MAX_COUNTS:
                self._work[counts] = work
        grid, numbers = work
        # the fields of ForwardTensors
        tensors = (
            self._map_q(q),
            self._map_k(k),
            self._map_v(x.v),
            self._map_out(out),
            out,
            lse,
            self._ticket(q.device),
            *walk,
            x.cu_seqlens_q,
            x.cu_seqlens_k,
        )
        return grid, tensors, numbers

    def _count_work(self, q: Tensor, tokens_q: int, tokens_k: int) -> tuple[int, ForwardNumbers]:
        """Return the programs of a launch and its numbers."""
        form, queries = self._form, self._queries
        tiles = queries.count(tokens_q, tokens_k)
        total = queries.programs(tiles)
        span = queries.span(tokens_k)
        numbers = ForwardNumbers(
            scale=form.options.softmax_scale,
            batch=form.batch,
            heads_q=form.heads_q,
            tokens_q=tokens_q,
            tokens_k=tokens_k,
            head_dim_v=form.head_dim_v,
            tiles=tiles,
            span=span,
            last=span + form.batch * queries.units % span,
            total=total,
            list_rows=queries.list_rows,
            list_stride=queries.list_stride,
            extent_k=form.extent_k,
        )
        return min(processors(q.device), total), numbers


class HopperBackward:
    """The launches of the backward of calls that ``takes_hopper_backward`` takes."""

    def __init__(self, form: Form) -> None:
        self._form = form
        constants, pattern = form.constants, form.pattern
        piece = self._piece = piece_of((pattern.block_q, pattern.block_k))
        wide, wide_v = (
            max(PANEL, padded_head_dim(n)) for n in (constants.HEAD_DIM, constants.HEAD_DIM_V)
        )
        self._wide, self._wide_v = wide, wide_v
        # lists of the layout
        self._lists = form.heads_k if constants.PER_HEAD else 1
        options = PrepareOptions(
            PER_HEAD=constants.PER_HEAD,
            TOKENS=piece,
            HEAD_DIM_V=constants.HEAD_DIM_V,
            BLOCK_DV=constants.BLOCK_DV,
            WIDTH=wide,
            WIDTH_V=wide_v,
            ROW_BYTES_V=constants.ROW_BYTES_V,
            BLOCK=ROWS,
            PIECE=PIECE,
        )
        # without a gradient of the LSE, and with one
        self._prepare = tuple(
            launch_of(prepare_kernel, options, num_warps=4, num_stages=1) for _ in range(2)
        )
        tile = BackwardTile(piece, wide, wide_v, hopper_backward_tile(max(wide, wide_v)).stages)
        self._launch = launch_of(
            hopper_backward_kernel,
            BackwardOptions(
                constants.GROUP, constants.IS_CAUSAL, constants.PER_HEAD, constants.TOP_LEFT
            ),
            tile,
            of=MapLaunch,
            num_warps=4,
            maxnreg=REGISTERS,
        )
        rounding = RoundOptions(
            constants.PER_HEAD,
            piece,
            constants.HEAD_DIM,
            constants.HEAD_DIM_V,
            wide,
            wide_v,
            constants.TOP_LEFT,
        )
        self._round = launch_of(round_kernel, rounding, num_warps=4)
        # how the output's gradient lies, and the tensor maps
        self._maps: tuple[Any, list[MapForm]] = (None, [])

    def is_worth_it(self, x: Tensors) -> bool:
        """Say whether a packed call has one list of offsets, and sequences as long as the layout's.

        With two a sequence's first query may stand within a block, whose copy would begin ahead of
        the sequence: maps clip at its end alone.
        """
        form = self._form
        return x.cu_seqlens_q.data_ptr() == x.cu_seqlens_k.data_ptr() and is_covered(
            form.pattern, x.k.shape[-3], form.batch
        )

    def _mapped(self, tensors: tuple[Tensor, ...], strides: tuple[int, ...]) -> list[TensorMap]:
        """Map queries, keys, values, the output's gradient, which has any strides, dk and dv."""
        known, maps = self._maps
        if known != strides:
            wide, wide_v, piece = self._wide, self._wide_v, self._piece
            columns = wide, wide, wide_v, wide_v, wide, wide_v
            # pieces are copied panel by panel
            maps = [
                MapForm(t, piece, n if piece == SIDE else PANEL, ragged=self._form.is_packed)
                for t, n in zip(tensors, columns, strict=True)
            ]
            self._maps = strides, maps
        return [form(t) for form, t in zip(maps, tensors, strict=True)]

    def __call__(
        self,
        x: Tensors,
        rows: RowTensors,
        walk: tuple[Tensor, ...],
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        """Fill ``dq``, ``dk`` and ``dv``."""
        form, wide, wide_v, pairs = self._form, self._wide, self._wide_v, Pairs(*walk)
        q, dout, lse = x.q, rows.dout_ptr, rows.lse_ptr
        tokens_q, tokens_k = q.shape[-3], x.k.shape[-3]
        if form.is_packed:
            tiles_q = tokens_q // SIDE + 2 * form.batch + 4
        else:
            diagonal = diagonal_of(form.options, tokens_q, tokens_k)
            tiles_q = cdiv(diagonal + tokens_q, SIDE) - diagonal // SIDE
        tiles_k = form.tiles_k(tokens_k, SIDE)
        slots_q = tiles_q * form.heads_q * form.grid_batch
        slots_k = tiles_k * form.heads_k * form.grid_batch
        dq_sums, dk_sums, dv_sums = (
            q.new_empty(SIDE * slots * width, dtype=torch.float32)
            for slots, width in ((slots_q, wide), (slots_k, wide), (slots_k, wide_v))
        )
        list_pieces = pairs.parts.shape[0] // self._lists
        blocks_q = cdiv(form.extent_q, SIDE)
        scale, offsets = form.options.softmax_scale, x.cu_seqlens_q
        grid, pieces = max(cdiv(lse.numel(), ROWS), slots_k), dq_sums.numel() // PIECE
        self._prepare[rows.dlse_ptr is not None](
            grid,
            PrepareTensors(*rows, dq_sums, dk_sums, dv_sums, pairs.parts, offsets),
            PrepareNumbers(
                lse.shape[-1],
                lse.numel(),
                *token_strides(dout),
                form.heads_q,
                form.batch,
                form.heads_k,
                tokens_k,
                tiles_k,
                list_pieces,
                slots_k,
                cdiv(pieces, grid),
                pieces,
            ),
        )
        self._launch(
            # as many as there might be
            pairs.owners.shape[0] * (form.heads_k // self._lists) * form.batch,
            BackwardTensors(
                *self._mapped((q, x.k, x.v, dout, dk, dv), dout.stride()),
                dq_sums,
                dk_sums,
                dv_sums,
                rows.lse2_ptr,
                rows.delta_ptr,
                *pairs,
                offsets,
            ),
            BackwardNumbers(
                scale,
                form.batch,
                form.heads_k,
                heads_at_once(blocks_q),
                tokens_q,
                tokens_k,
                tiles_q,
                tiles_k,
                blocks_q,
                list_pieces,
            ),
        )
        self._round(
            slots_q + slots_k,
            RoundTensors(dq_sums, dk_sums, dv_sums, dq, dk, dv, pairs.parts, offsets),
            RoundNumbers(
                scale,
                slots_q,
                form.batch,
                form.heads_q,
                form.heads_k,
                tokens_q,
                tokens_k,
                tiles_q,
                tiles_k,
                list_pieces,
            ),
        )
