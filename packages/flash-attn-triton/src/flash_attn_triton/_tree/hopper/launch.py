"""The host side of the tree kernels on Hopper: tensor maps, launches."""

from __future__ import annotations

import torch
from attn_common import cdiv
from torch import Tensor

from ..._dense.call import Tensors
from ..._dense.hopper.backward import arguments as backward
from ..._dense.hopper.backward.cut import PACKED_SHARES, least_shares
from ..._dense.hopper.backward.launch import REGISTERS
from ..._dense.hopper.backward.maps import BackwardMaps
from ..._dense.hopper.backward.sums.launch import Sums, count_sums, round_launches
from ..._dense.hopper.forward import arguments as forward
from ..._dense.hopper.forward.launch import multiprocessors
from ..._dense.hopper_tiles import (
    HopperBackwardTile,
    HopperTile,
    hopper_backward_tile,
    hopper_tile,
    panels_of,
)
from ..._dense.portable.arguments import Inputs
from ..._dense.portable.form import Form
from ..._linked.hopper.tickets import MAX_TICKETS, new_ticket
from ..._linked.hopper.tma import MapForm, MappingLaunch
from ..._linked.host.forms import Memory
from ..._linked.host.tiles import padded_head_dim
from ..._linked.launch.kernels import Kernel
from ..._linked.launch.runtime import MAX_COUNTS, Launch, dense
from ..portable.arguments import CountTensors
from ..portable.links import LINKS, Links
from .arguments import BackwardNumbers, BackwardTensors, ForwardNumbers

count_below_kernel = Kernel(__package__, "..portable.walk", "count_below_kernel")
tree_backward_kernel = Kernel(__package__, ".backward", "tree_backward_kernel")
tree_forward_kernel = Kernel(__package__, ".forward", "tree_forward_kernel")


class HopperTreeForward:
    """The forward launcher of a signature."""

    def __init__(self, form: Form, x: Tensors, tile: HopperTile | None = None) -> None:
        self._form = form
        # no panels here
        wide, wide_v = padded_head_dim(form.head_dim), padded_head_dim(form.head_dim_v)
        tile = tile or hopper_tile(form.widest_head, True)
        self._block = tile.block_m
        out = torch.empty((*x.q.shape[:-1], form.head_dim_v), dtype=x.q.dtype, device="meta")
        maps = forward.PanelMaps(
            q=MapForm(x.q, tile.rows, wide, ragged=True),
            k=MapForm(x.k, tile.block_n, wide, ragged=True),
            v=MapForm(x.v, tile.block_n, wide_v, ragged=True),
            out=MapForm(out, tile.rows, wide_v, ragged=True),
        )
        # causal within the own segment
        options = forward.Options(
            GROUP=form.group,
            HAS_LEFT=False,
            HAS_RIGHT=True,
            HAS_SOFTCAP=form.constants.HAS_SOFTCAP,
            RAGGED=True,
        )
        shape = forward.Tile(
            WARPGROUPS=tile.warpgroups,
            ROWS=tile.rows,
            BLOCK_N=tile.block_n,
            HEAD_DIM=wide,
            NARROW=0,
            HEAD_DIM_V=wide_v,
            NARROW_V=0,
            BUFFERS_Q=tile.buffers_q,
            STAGES_K=tile.stages_k,
            STAGES_V=tile.stages_v,
            STAGES_B=0,
            SHARE=tile.share and wide == wide_v,
            PIPELINE=tile.pipeline,
            LAG=tile.lag,
            ORDERED=tile.ordered,
        )
        kind = {"num_warps": 4, "maxnreg": tile.registers}
        self._launch = MappingLaunch(
            tree_forward_kernel, {"OPTIONS": options, "TILE": shape, **kind}, maps
        )

    def takes(self, tokens: int) -> bool:
        """Tell whether the 32-bit tile counter can count the blocks of so many tokens."""
        return self._total(tokens) <= MAX_TICKETS

    def __call__(self, x: Tensors, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)``; the tensors have passed ``readable``, and have a token."""
        form, q = self._form, x.q
        tokens = q.shape[0]
        out = q.new_empty((*q.shape[:-1], form.head_dim_v))
        lse = q.new_empty((form.heads_q, tokens), dtype=torch.float32)
        total = self._total(tokens)
        self._launch(
            min(multiprocessors(q.device), total),
            (
                *forward.PanelMaps(q=q, k=x.k, v=x.v, out=out),
                *forward.Tensors(
                    lse_ptr=lse,
                    ticket_ptr=new_ticket(q.device),
                    sinks_ptr=dense(x.sinks),
                    cu_seqlens_q_ptr=dense(x.cu_seqlens_q),
                ),
                dense(parents),
            ),
            ForwardNumbers(
                scale=form.scalars.scale,
                softcap=form.scalars.softcap,
                segments=form.batch,
                heads_q=form.heads_q,
                tokens=tokens,
                total=total,
            ),
        )
        return out, lse

    def _total(self, tokens: int) -> int:
        return self._form.tiles(tokens, self._block) * self._form.heads_q


class HopperTreeBackward:
    """The launcher of dq, dk and dv for a signature."""

    def __init__(
        self,
        form: Form,
        tile: HopperBackwardTile | None = None,
    ) -> None:
        self._form = form
        # by the heads alone, so that new trees do not recompile
        self._shares = shares = least_shares(form, PACKED_SHARES)
        self._tile = tile = tile or hopper_backward_tile(
            form.widest_head, form.constants.HAS_SOFTCAP
        )
        (wide, narrow), (wide_v, narrow_v) = panels_of(form.head_dim), panels_of(form.head_dim_v)
        options = backward.Options(
            GROUP=form.group // shares,
            HAS_LEFT=False,
            HAS_RIGHT=True,
            HAS_SOFTCAP=form.constants.HAS_SOFTCAP,
            RAGGED=True,
            SHARES=shares,
        )
        shape = backward.Tile(
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            HEAD_DIM=wide,
            NARROW=narrow,
            HEAD_DIM_V=wide_v,
            NARROW_V=narrow_v,
            STAGES_Q=tile.stages_q,
            STAGES_O=tile.stages_o,
            STAGES_B=0,
            MAKES_DK=True,
            MAKES_DV=True,
        )
        kind = {"num_warps": 4, "maxnreg": REGISTERS}
        self._constants = {"OPTIONS": options, "TILE": shape, **kind}
        self._sums: Memory[Sums] = Memory(MAX_COUNTS)
        # by strides of the output's gradient, which the signature does not fix
        self._launches: Memory[MappingLaunch] = Memory(MAX_COUNTS)
        self._link = Links()
        self._count = Launch(
            count_below_kernel, {"BLOCK": LINKS, "BLOCK_M": tile.block_m, "num_warps": 4}
        )
        # no row comes before all keys
        self._round = round_launches(form, tile, has_left=False, has_right=False)
        self._maps = BackwardMaps(form, tile, ragged=True)

    def new_sums(self, q: Tensor) -> Tensor:
        """Allocate the sums of dq, dk and dv; the caller sets them to 0."""
        return q.new_empty(*self._sums_of(q.shape[0]).shape, dtype=torch.float32)

    def _sums_of(self, tokens: int) -> Sums:
        return self._sums.get(tokens) or self._sums.keep(
            tokens, count_sums(self._form, self._tile, (tokens, tokens), int(self._shares > 1))
        )

    def __call__(
        self, x: Tensors, inputs: Inputs, parents: Tensor, grads: tuple[Tensor, ...], sums: Tensor
    ) -> None:
        """Fill the gradients of q, k and v; ``sums`` are ``new_sums``, set to 0."""
        form, scalars = self._form, self._form.scalars
        q, k, v, dout = inputs[:4]
        dq, dk, dv = grads
        tokens = q.shape[0]
        shares, places = self._shares, self._sums_of(tokens)
        cu_seqlens, parents = dense(x.cu_seqlens_q), dense(parents)
        below = parents.new_zeros(form.batch)
        self._count(
            cdiv(form.batch, LINKS), CountTensors(cu_seqlens, parents, below), (form.batch,)
        )
        mapped = q, k, v, dout, dk, dv
        launch = self._launches.get(dout.stride()) or self._launches.keep(
            dout.stride(),
            MappingLaunch(tree_backward_kernel, self._constants, self._maps.forms(mapped)),
        )
        tensors = BackwardTensors(
            lse2_ptr=inputs.lse2_ptr,
            delta_ptr=inputs.delta_ptr,
            cu_seqlens_ptr=cu_seqlens,
            parents_ptr=parents,
            links_ptr=self._link(parents),
            below_ptr=below,
            dk_sums_ptr=sums[places.dk_at :] if shares > 1 else None,
            dv_sums_ptr=sums[places.dv_at :] if shares > 1 else None,
        )
        numbers = BackwardNumbers(
            scale=scalars.scale,
            softcap=scalars.softcap,
            segments=form.batch,
            heads_k=form.heads_k * shares,
            tokens=tokens,
            tiles_q=form.tiles(tokens, self._tile.block_m),
            tiles_k=form.tiles(tokens, self._tile.block_n),
        )
        launch(places.key_slots * shares, (*self._maps(mapped, sums), *tensors), numbers)
        # the fields of RoundingTensors
        lengths = cu_seqlens, cu_seqlens, None
        self._round.dq(places.slots, (sums, dq, *lengths), places.of_queries)
        if shares > 1:
            of_dk, of_dv = (sums[places.dk_at :], dk), (sums[places.dv_at :], dv)
            self._round.dk(places.key_slots, (*of_dk, *lengths), places.of_keys)
            self._round.dv(places.key_slots, (*of_dv, *lengths), places.of_keys)
