"""The host side of multi-head latent attention on Hopper: tensor maps, the launch."""

from __future__ import annotations

from attn_common import cdiv
from torch import Tensor

from ..._configs import copied_keys, rows_of_page
from ..._mla_call import MlaOptions, MlaTensors
from ..._mla_configs import HOPPER_TILE
from ..addressing import row_strides
from ._linked.tma import MapForm, MapLaunch
from .mla import HALF, REST, mla_kernel
from .mla_structures import Arguments, Strides, Tile
from .plans import as_rows


class HopperLaunch:
    """The launches of the kernel for Hopper, of calls that ``takes_hopper_mla`` takes."""

    def __init__(self, x: MlaTensors, options: MlaOptions, is_single: bool) -> None:
        """Plan for one way to give tiles to programs."""
        self.rows, self.block_n = HOPPER_TILE.rows, HOPPER_TILE.block_n
        self._scale, self._batch = options.softmax_scale, x.seqlens_k.shape[0]
        heads, page = x.q.shape[1], x.kv_cache.shape[1]
        cache = x.kv_cache[:, :, None]
        piece = copied_keys(page, -1, self.block_n)
        rows = as_rows(cache)
        self._halves = MapForm(rows, piece, HALF.value, ragged=True)
        self._rests = MapForm(rows, piece, REST.value, ragged=True)
        tile = Tile(
            CAUSAL=options.causal,
            GROUP=heads,
            TILES=cdiv(heads, self.rows) * is_single,
            PAGE=page,
            PIECE=piece,
            ROWS=self.rows,
            BLOCK_N=self.block_n,
            STAGES=HOPPER_TILE.stages,
        )
        self._strides = Strides(
            *row_strides(x.q), *row_strides(x.out), rows_of_page(cache), *x.block_table.stride()
        )
        constants = {**tile._asdict(), "num_warps": 4, "maxnreg": HOPPER_TILE.registers}
        self._whole, self._split = (MapLaunch(mla_kernel, constants) for _ in range(2))

    def __call__(
        self, grid: int, x: MlaTensors, parts: tuple[Tensor | None, ...], splits: int
    ) -> None:
        """Launch for so many programs; ``parts`` are what splits come to."""
        launch = self._whole if parts[0] is None else self._split
        arguments = Arguments(
            self._halves(x.kv_cache),
            self._rests(x.kv_cache),
            x.q,
            x.block_table,
            x.cu_seqlens_q,
            x.seqlens_k,
            x.out,
            x.lse,
            *parts,
        )
        # the fields of Counts and Strides
        launch(grid, arguments, (self._scale, self._batch, x.q.shape[0], splits, *self._strides))
