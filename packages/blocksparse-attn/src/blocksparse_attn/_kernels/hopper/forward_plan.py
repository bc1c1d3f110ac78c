"""The host side of the Hopper forward: tensor maps, the order of tiles, the launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._call import Options, Pattern, Tensors
from ..._configs import SHORT, hopper_shape, hopper_tile, padded_head_dim
from ..common import QueryTiles, processors
from ..forward import ForwardPlan
from ._linked.tickets import kept_ticket, new_ticket
from ._linked.tma import MapForm, MapLaunch, TensorMap
from .forward import hopper_forward_kernel

# columns that one copy takes: of wider heads a tile is several panels
PANEL = 64


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


class HopperForwardPlan(ForwardPlan):
    """The forward pass of the calls of one form that ``takes_hopper_forward`` takes."""

    def __init__(
        self, x: Tensors, pattern: Pattern, options: Options, is_kept: bool = False
    ) -> None:
        """Take a call, and whether the plan serves others after it."""
        super().__init__(x, pattern, options)  # type: ignore[no-untyped-call]
        self._ticket = kept_ticket if is_kept else new_ticket
        q, k, v = x.q, x.k, x.v
        widest = max(q.shape[-1], self.head_dim_v)
        tile = hopper_tile(widest)
        self._hopper_tiles = QueryTiles(
            self, hopper_shape(widest, pattern.block_q, self.group, pattern.is_shared)
        )
        wide, wide_v = (max(PANEL, padded_head_dim(t.shape[-1])) for t in (q, v))
        out = torch.empty((*q.shape[:-1], self.head_dim_v), dtype=q.dtype, device="meta")
        rows = min(pattern.block_k, tile.block_n)
        self._map_q = (
            PackedForm(q, tile.rows, wide) if self.is_packed
            else MapForm(q, tile.rows, wide, ragged=False)
        )  # fmt: skip
        self._map_k = MapForm(k, rows, PANEL, ragged=self.is_packed)
        self._map_v = MapForm(v, rows, PANEL, ragged=self.is_packed)
        self._map_out = MapForm(out, tile.rows, wide_v, ragged=self.is_packed)
        constants = self._hopper_tiles.constants
        names = (
            "GROUP", "HEADS", "SPAN", "ROW_MEMBERS", "BLOCK_Q", "BLOCK_K", "IS_CAUSAL", "PER_HEAD",
        )  # fmt: skip
        self._hopper_launch = self.launch(
            hopper_forward_kernel, None, constants, names, None, MapLaunch,
            SHORT=SHORT,
            ROWS=tile.rows,
            BLOCK_N=tile.block_n,
            HEAD_DIM=wide,
            HEAD_DIM_V=wide_v,
            STAGES_K=tile.stages_k,
            STAGES_V=tile.stages_v,
            num_warps=4,
            maxnreg=tile.registers,
        )  # fmt: skip

    def run_tall(self, x: Tensors, walk: tuple[Tensor, ...], out: Tensor, lse: Tensor) -> None:
        """Compute the sequences of many queries."""
        q, k, v = x.q, x.k, x.v
        queries = self._hopper_tiles
        tokens_q, tokens_k = q.shape[-3], k.shape[-3]
        # empty tensors have no map
        if tokens_q == 0:
            return
        if tokens_k == 0:
            out.zero_()
            lse.fill_(float("-inf"))
            return
        tiles = queries.count(tokens_q, tokens_k)
        total = queries.programs(tiles)
        span = queries.span(tokens_k)
        last = span + self.batch * queries.units % span
        self._hopper_launch(
            min(processors(q.device), total),
            (
                self._map_q(q), self._map_k(k), self._map_v(v), self._map_out(out),
                out, lse, self._ticket(q.device), *walk,
                x.cu_seqlens_q, x.cu_seqlens_k,
            ),
            (
                self.options.softmax_scale, self.batch, self.heads_q, tokens_q, tokens_k,
                self.head_dim_v, tiles, span, last, total, queries.list_rows, self.extent_k,
            ),
        )  # fmt: skip
