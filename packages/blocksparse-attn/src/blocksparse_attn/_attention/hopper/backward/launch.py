"""The host side of the Hopper backward: tensor maps, sums, launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from attn_common import cdiv
from torch import Tensor

from ...._layout.lists import SIDE, Pairs, heads_at_once, piece_of
from ...._linked.hopper.tickets import new_ticket
from ...._linked.hopper.tma import MapForm, MapLaunch, TensorMap
from ...._linked.host.forms import Memory, interpreted
from ...._linked.launch.entries import flat
from ...._linked.launch.kernels import Kernel
from ...._linked.launch.runtime import MAX_COUNTS, token_strides
from ...._linked.portable.strides import Strides
from ...call import Tensors
from ...portable.arguments import RowNumbers, RowOptions, RowTensors
from ...portable.form import Form, diagonal_of, launch_of
from ...tiles import BACKWARD_STAGES, hopper_dq_tile, is_covered, padded_head_dim
from ..arguments import BackwardNumbers, BackwardOptions, BackwardTensors, QueryTensors
from ..queries.launch import PANEL, QueryWalk

row_kernel = Kernel(__package__, "...portable.backward_rows", "row_kernel")
hopper_query_kernel = Kernel(__package__, "..queries.kernel", "hopper_query_kernel")
hopper_backward_kernel = Kernel(__package__, ".kernel", "hopper_backward_kernel")

# registers per thread at the start of the backward
REGISTERS = 168
# the launch before the backward: rows per program, and elements that one store sets to 0
ROWS = 32
PIECE = 2048


class Work(NamedTuple):
    """What the launches of calls with the same numbers of tokens share."""

    slots_q: int  # tiles of dq's sums
    slots_k: int  # tiles of dk's and dv's sums
    grid: int  # of the launch before the backward
    around: tuple[float, ...]  # numbers of the launches before and after the backward
    numbers: tuple[float, ...]


class RowGradients(QueryWalk):
    """The launch that makes dq by tiles of queries."""

    def __init__(self, form: Form, x: Tensors, dout: Tensor) -> None:
        """Take a call of the signature; the dout of later calls has the strides of this one."""
        tile = hopper_dq_tile(form.widest)
        # short = 0: sequences of any number of queries
        super().__init__(form, x, hopper_query_kernel, tile, 0, x.q.shape[-1])
        self._map_dout = self._map_rows(dout, self._wide_v)
        dq = torch.empty_like(x.q, memory_format=torch.contiguous_format, device="meta")
        self._map_dq = MapForm(dq, tile.rows, self._wide, ragged=form.is_packed)

    def __call__(self, x: Tensors, rows: RowTensors, walk: Sequence[Tensor], dq: Tensor) -> None:
        """Fill ``dq``; ``walk`` is the forward's list."""
        grid, numbers = self._numbers(x)
        begin, whole, items, members = walk
        tensors = QueryTensors(
            q_desc=self._map_q(x.q),
            k_desc=self._map_k(x.k),
            v_desc=self._map_v(x.v),
            dout_desc=self._map_dout(rows.dout_ptr),
            out_desc=self._map_dq(dq),
            out_ptr=dq,
            ticket_ptr=new_ticket(dq.device),
            begin_ptr=begin,
            whole_ptr=whole,
            items_ptr=items,
            members_ptr=members,
            lse2_ptr=rows.lse2_ptr,
            delta_ptr=rows.delta_ptr,
            cu_seqlens_q_ptr=x.cu_seqlens_q,
            cu_seqlens_k_ptr=x.cu_seqlens_k,
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
            HEAD_DIM=constants.HEAD_DIM,
            HEAD_DIM_V=constants.HEAD_DIM_V,
            BLOCK_DV=constants.BLOCK_DV,
            ROW_BYTES_V=constants.ROW_BYTES_V,
            BLOCK=ROWS,
            PER_HEAD=constants.PER_HEAD,
            TOP_LEFT=constants.TOP_LEFT,
            TOKENS=piece,
            WIDTH=wide,
            WIDTH_V=wide_v,
            PIECE=PIECE,
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
        merged = BackwardOptions(
            GROUP=constants.GROUP,
            IS_CAUSAL=constants.IS_CAUSAL,
            PER_HEAD=constants.PER_HEAD,
            TOP_LEFT=constants.TOP_LEFT,
            PIECE=piece,
            HEAD_DIM=wide,
            HEAD_DIM_V=wide_v,
            STAGES=BACKWARD_STAGES,
            MAKES_DQ=True,
        )
        # [makes dq]
        self._launches = tuple(
            launch_of(hopper_backward_kernel, made, of=MapLaunch, num_warps=4, maxnreg=REGISTERS)
            for made in (merged._replace(MAKES_DQ=False), merged)
        )
        self._work: Memory[Work] = Memory(MAX_COUNTS)
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
        walk: Sequence[Tensor],
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        """Fill ``dq``, ``dk`` and ``dv``; ``walk`` is ``Pairs``, then ``Lists`` of dq's launch."""
        form, wide, wide_v = self._form, self._wide, self._wide_v
        pairs, by_row = Pairs(*walk[: len(Pairs._fields)]), walk[len(Pairs._fields) :]
        q, dout, offsets = x.q, rows.dout_ptr, x.cu_seqlens_q
        makes_dq = not by_row  # dq's own launch needs no sums
        list_pieces = pairs.parts.shape[0] // self._lists
        counts = q.shape[-3], x.k.shape[-3], makes_dq, list_pieces, Strides(*token_strides(dout))
        work = self._work.get(counts) or self._work.keep(counts, self._count(*counts))
        slots_q, slots_k = work.slots_q, work.slots_k
        dq_sums, dk_sums, dv_sums = (
            q.new_empty(SIDE * slots * width, dtype=torch.float32)
            for slots, width in ((slots_q, wide), (slots_k, wide), (slots_k, wide_v))
        )
        if makes_dq:
            counters = pairs.real.new_empty(form.batch * form.heads_k)
        else:
            counters = pairs.real.new_zeros(1 + slots_k * (SIDE // self._piece))
        has_dlse = rows.dlse_ptr is not None
        around = rows._replace(
            parts_ptr=pairs.parts,
            owners_ptr=pairs.owners,
            real_ptr=pairs.real,
            cu_seqlens_ptr=offsets,
            counters_ptr=counters if makes_dq else None,
            dq_sums_ptr=dq_sums,
            dk_sums_ptr=dk_sums,
            dv_sums_ptr=dv_sums,
            dq_ptr=dq,
            dk_ptr=dk,
            dv_ptr=dv,
        )
        self._rows[makes_dq][has_dlse](work.grid, around, work.around)
        of_q, of_k, of_v, of_dout, of_dk, of_dv = self._mapped(
            (q, x.k, x.v, dout, dk, dv), dout.stride()
        )
        self._launches[makes_dq](
            # an upper bound of the number of programs
            pairs.owners.shape[0] * (form.heads_k // self._lists) * form.batch,
            BackwardTensors(
                q_desc=of_q,
                k_desc=of_k,
                v_desc=of_v,
                dout_desc=of_dout,
                dk_desc=of_dk,
                dv_desc=of_dv,
                dq_ptr=dq_sums,
                dk_ptr=dk_sums,
                dv_ptr=dv_sums,
                lse2_ptr=rows.lse2_ptr,
                delta_ptr=rows.delta_ptr,
                begin_ptr=pairs.begin,
                parts_ptr=pairs.parts,
                items_ptr=pairs.items,
                owners_ptr=pairs.owners,
                real_ptr=pairs.real,
                bits_ptr=pairs.bits,
                cu_seqlens_ptr=offsets,
                counters_ptr=counters,
            ),
            work.numbers,
        )
        if by_row:
            self._rows_of(x, dout)(x, rows, by_row, dq)
        self._round[makes_dq][has_dlse](slots_q + slots_k, around, work.around)

    def _count(
        self, tokens_q: int, tokens_k: int, makes_dq: bool, list_pieces: int, dout: Strides
    ) -> Work:
        form = self._form
        if form.is_packed:
            tiles_q = tokens_q // SIDE + 2 * form.batch + 4
        else:
            diagonal = diagonal_of(form.options, tokens_q, tokens_k)
            tiles_q = cdiv(diagonal + tokens_q, SIDE) - diagonal // SIDE
        tiles_k = form.tiles_k(tokens_k, SIDE)
        slots_q = tiles_q * form.heads_q * form.grid_batch if makes_dq else 0
        slots_k = tiles_k * form.heads_k * form.grid_batch
        rows = form.grid_batch * form.heads_q * tokens_q
        grid = max(cdiv(rows, ROWS), slots_k, form.batch * form.heads_k)
        pieces = SIDE * slots_q * self._wide // PIECE
        blocks_q = cdiv(form.extent_q, SIDE)
        around = RowNumbers(
            tokens_q=tokens_q,
            rows=rows,
            dout=dout,
            heads_q=form.heads_q,
            scale=form.options.softmax_scale,
            batch=form.batch,
            heads_k=form.heads_k,
            tokens_k=tokens_k,
            tiles_q=tiles_q,
            tiles_k=tiles_k,
            list_pieces=list_pieces,
            slots_q=slots_q,
            slots_k=slots_k,
            share=cdiv(pieces, grid),
            pieces=pieces,
        )
        numbers = BackwardNumbers(
            scale=form.options.softmax_scale,
            batch=form.batch,
            heads_k=form.heads_k,
            span=heads_at_once(blocks_q),
            tokens_q=tokens_q,
            tokens_k=tokens_k,
            tiles_q=tiles_q,
            tiles_k=tiles_k,
            rows=blocks_q,
            list_pieces=list_pieces,
        )
        return Work(slots_q, slots_k, grid, flat(around), numbers)
