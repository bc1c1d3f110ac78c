"""Launcher of multi-head latent attention on Hopper: tensor maps, numbers."""

from __future__ import annotations

from attn_common import cdiv
from torch import Tensor

from ..._cache.kernels.addressing import row_strides
from ..._linked.hopper.tma import MapForm, MapLaunch
from ..._linked.launch.runtime import Launch
from ..._paged.hopper.launch import WARP, WARPGROUP, as_rows
from ..._paged.tiles import copied_keys, rows_of_page
from ..call import MlaOptions, MlaTensors
from ..tiles import HOPPER_TILE
from .fp8 import mla_fp8_kernel
from .kernel import HALF, REST, mla_kernel
from .structures import Arguments, Strides, Tile, WideStrides


class HopperLaunch:
    """Launcher of the Hopper kernels, for calls that ``takes_hopper_mla`` accepts."""

    def __init__(self, x: MlaTensors, options: MlaOptions, is_single: bool) -> None:
        """Prepare calls like ``x`` for one schedule."""
        self.rows, self.block_n = HOPPER_TILE.rows, HOPPER_TILE.block_n
        self._scale, self._batch = options.softmax_scale, x.seqlens_k.shape[0]
        heads, page = x.q.shape[1], x.kv_cache.shape[1]
        cache = x.kv_cache[:, :, None]
        self._is_fp8 = cache.element_size() == 1
        piece = copied_keys(page, -1, self.block_n)
        strides = *row_strides(x.q), *row_strides(x.out), rows_of_page(cache)
        self._strides: Strides | WideStrides
        if self._is_fp8:
            self._strides = WideStrides(*strides, cache.stride(1), *x.block_table.stride())
        else:
            self._strides = Strides(*strides, *x.block_table.stride())
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
            # the warps that bring keys, and one MMA warpgroup
            PARTIES=(WARPGROUP if self._is_fp8 else WARP) + WARPGROUP,
            # descales may be negative
            FOLD=not self._is_fp8,
        )
        constants = {**tile._asdict(), "num_warps": 4, "maxnreg": HOPPER_TILE.registers}

        def launch() -> Launch:
            if self._is_fp8:
                return Launch(mla_fp8_kernel, constants)
            return MapLaunch(mla_kernel, constants)

        self._whole, self._split = launch(), launch()

    def __call__(
        self, grid: int, x: MlaTensors, parts: tuple[Tensor | None, ...], splits: int
    ) -> None:
        """Launch ``grid`` programs; ``parts`` are the partial results of splits, or None."""
        launch = self._whole if parts[0] is None else self._split
        # the fields of Counts, and of Strides or WideStrides
        numbers = (self._scale, self._batch, x.q.shape[0], splits, *self._strides)
        if self._is_fp8:
            # the fields of WideArguments
            launch(grid, (*x, *parts), numbers)
            return
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
        launch(grid, arguments, numbers)
