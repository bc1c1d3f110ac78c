"""The host side of the Hopper backward: tensor maps, sums, launches."""

from __future__ import annotations

from typing import Any

import torch
from attn_common import cdiv
from torch import Tensor

from ...._layout.lists import SIDE, Pairs, heads_at_once, piece_of
from ...._linked.hopper.tickets import new_ticket
from ...._linked.hopper.tma import MapForm, MapLaunch, TensorMap
from ...._linked.host.forms import interpreted
from ...._linked.launch.runtime import token_strides
from ...call import Tensors
from ...portable.backward_rows import row_kernel
from ...portable.form import Form, diagonal_of, launch_of
from ...portable.structures import RowNumbers, RowOptions, RowTensors
from ...tiles import BACKWARD_STAGES, hopper_dq_tile, is_covered, padded_head_dim
from ..queries.kernel import hopper_query_kernel
from ..queries.launch import PANEL, QueryWalk
from ..structures import BackwardNumbers, BackwardOptions, BackwardTensors, QueryTensors
from .kernel import hopper_backward_kernel

# registers per thread at the start of the backward
REGISTERS = 168
# the launch before the backward: rows per program, and elements that one store sets to 0
ROWS = 32
PIECE = 2048


class RowGradients(QueryWalk):
    """The launch that makes dq by tiles of queries."""

    def __init__(self, form: Form, x: Tensors, dout: Tensor) -> None:
        """Take a call of the signature; the dout of later calls has the strides of this one."""
        tile = hopper_dq_tile(max(x.q.shape[-1], form.head_dim_v))
        # short = 0: sequences of any number of queries
        super().__init__(form, x, hopper_query_kernel, tile, 0, x.q.shape[-1])
        self._map_dout = self._map_rows(dout, self._wide_v)
        dq = torch.empty_like(x.q, memory_format=torch.contiguous_format, device="meta")
        self._map_dq = MapForm(dq, tile.rows, self._wide, ragged=form.is_packed)

    def __call__(self, x: Tensors, rows: RowTensors, walk: tuple[Tensor, ...], dq: Tensor) -> None:
        """Fill ``dq``; ``walk`` is the forward's list."""
        grid, numbers = self._numbers(x)
        tensors = QueryTensors(
            self._map_q(x.q),
            self._map_k(x.k),
            self._map_v(x.v),
            self._map_dout(rows.dout_ptr),
            self._map_dq(dq),
            dq,
            None,
            rows.lse2_ptr,
            rows.delta_ptr,
            new_ticket(dq.device),
            *walk,
            x.cu_seqlens_q,
            x.cu_seqlens_k,
        )
        self.launch(grid, tensors, numbers)


class HopperBackward:
    """The backward launches of calls that ``takes_hopper_backward`` accepts."""

    def __init__(self, form: Form) -> None:
        self._form = form
        constants, pattern = form.constants, form.pattern
        piece = self._piece = piece_of((pattern.block_q, pattern.block_k))
        wide, wide_v = (
            max(PANEL, padded_head_dim(n)) for n in (constants.HEAD_DIM, constants.HEAD_DIM_V)
        )
        self._wide, self._wide_v = wide, wide_v
        # number of lists of the layout
        self._lists = form.heads_k if constants.PER_HEAD else 1
        options = RowOptions(
            constants.HEAD_DIM_V,
            constants.BLOCK_DV,
            constants.ROW_BYTES_V,
            ROWS,
            False,
            constants.HEAD_DIM,
            constants.PER_HEAD,
            constants.TOP_LEFT,
            piece,
            wide,
            wide_v,
            PIECE,
        )
        # [with sums of dq][with dlse]
        self._rows = tuple(
            [launch_of(row_kernel, options, num_warps=4, num_stages=1) for _ in range(2)]
            for _ in range(2)
        )
        # sums of dq are rounded as soon as they are complete, while programs add to other sums
        early = {} if interpreted() else {"launch_pdl": True}
        self._round = tuple(
            [
                launch_of(
                    row_kernel,
                    options._replace(ROUNDS=True, IS_EARLY=bool(compiler)),
                    num_warps=4,
                    **compiler,
                )
                for _ in range(2)
            ]
            for compiler in ({}, early)
        )
        flags = constants.GROUP, constants.IS_CAUSAL, constants.PER_HEAD, constants.TOP_LEFT
        sizes = piece, wide, wide_v, BACKWARD_STAGES
        # [makes dq]
        self._launches = tuple(
            launch_of(
                hopper_backward_kernel,
                BackwardOptions(*flags, *sizes, makes_dq),
                of=MapLaunch,
                num_warps=4,
                maxnreg=REGISTERS,
            )
            for makes_dq in (False, True)
        )
        # each with the strides of the dout that it was made for: tensor maps, and dq's own launch
        self._maps: tuple[Any, list[MapForm]] = (None, [])
        self._dq: tuple[Any, RowGradients | None] = (None, None)

    def is_worth_it(self, x: Tensors) -> bool:
        """Say whether a packed call has one list of offsets and long enough sequences.

        With two lists a sequence's first query may stand inside a block, whose copy would begin
        before the sequence: tensor maps clip only at the sequence's end.
        """
        form = self._form
        return x.cu_seqlens_q.data_ptr() == x.cu_seqlens_k.data_ptr() and is_covered(
            form.pattern, x.k.shape[-3], form.batch
        )

    def _mapped(self, tensors: tuple[Tensor, ...], strides: tuple[int, ...]) -> list[TensorMap]:
        """Return the tensor maps of q, k, v, dout (of any strides), dk and dv."""
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

    def _rows_of(self, x: Tensors, dout: Tensor) -> RowGradients:
        """Return dq's own launch for a dout with these strides."""
        strides, launch = self._dq
        if launch is None or strides != dout.stride():
            launch = RowGradients(self._form, x, dout)
            self._dq = dout.stride(), launch
        return launch

    def __call__(
        self,
        x: Tensors,
        rows: RowTensors,
        walk: tuple[Tensor, ...],
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        """Fill ``dq``, ``dk`` and ``dv``; ``walk`` is ``Pairs``, then ``Lists`` of dq's launch."""
        form, wide, wide_v = self._form, self._wide, self._wide_v
        pairs, by_row = Pairs(*walk[: len(Pairs._fields)]), walk[len(Pairs._fields) :]
        q, dout, lse = x.q, rows.dout_ptr, rows.lse_ptr
        tokens_q, tokens_k = q.shape[-3], x.k.shape[-3]
        if form.is_packed:
            tiles_q = tokens_q // SIDE + 2 * form.batch + 4
        else:
            diagonal = diagonal_of(form.options, tokens_q, tokens_k)
            tiles_q = cdiv(diagonal + tokens_q, SIDE) - diagonal // SIDE
        tiles_k = form.tiles_k(tokens_k, SIDE)
        # dq's own launch needs no sums
        makes_dq = not by_row
        slots_q = tiles_q * form.heads_q * form.grid_batch if makes_dq else 0
        slots_k = tiles_k * form.heads_k * form.grid_batch
        dq_sums, dk_sums, dv_sums = (
            q.new_empty(SIDE * slots * width, dtype=torch.float32)
            for slots, width in ((slots_q, wide), (slots_k, wide), (slots_k, wide_v))
        )
        heads = form.batch * form.heads_k  # key heads of all sequences
        if makes_dq:
            counters = pairs.real.new_empty(heads)
        else:
            counters = pairs.real.new_zeros(1 + slots_k * (SIDE // self._piece))
        list_pieces = pairs.parts.shape[0] // self._lists
        blocks_q = cdiv(form.extent_q, SIDE)
        scale, offsets = form.options.softmax_scale, x.cu_seqlens_q
        grid = max(cdiv(lse.numel(), ROWS), slots_k, heads)
        pieces = dq_sums.numel() // PIECE
        has_dlse = rows.dlse_ptr is not None
        summed = dq_sums, dk_sums, dv_sums, dq, dk, dv
        known = pairs.parts, pairs.owners, pairs.real, offsets, counters if makes_dq else None
        around = RowTensors(*rows[:6], *known, *summed)
        numbers = RowNumbers(
            lse.shape[-1],
            lse.numel(),
            *token_strides(dout),
            form.heads_q,
            scale,
            form.batch,
            form.heads_k,
            tokens_k,
            tiles_q,
            tiles_k,
            list_pieces,
            slots_q,
            slots_k,
            cdiv(pieces, grid),
            pieces,
        )
        self._rows[makes_dq][has_dlse](grid, around, numbers)
        self._launches[makes_dq](
            # an upper bound of the number of programs
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
                counters,
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
        if by_row:
            self._rows_of(x, dout)(x, rows, by_row, dq)
        self._round[makes_dq][has_dlse](slots_q + slots_k, around, numbers)
