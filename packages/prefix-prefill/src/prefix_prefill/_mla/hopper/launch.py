"""Launcher of multi-head latent attention on Hopper: tensor maps, numbers."""

from __future__ import annotations

from attn_common import cdiv
from torch import Tensor

from ..._cache.kernels.addressing import row_strides
from ..._cache.kernels.arguments import TableStrides
from ..._linked.hopper.tma import MapForm, MapLaunch
from ..._linked.host.forms import Memory
from ..._linked.launch.entries import flat
from ..._linked.launch.kernels import Kernel
from ..._linked.launch.runtime import MAX_COUNTS, Launch
from ..._paged.hopper.launch import WARP, WARPGROUP, as_rows
from ..._paged.tiles import copied_keys, rows_of_page
from ..call import MlaOptions, MlaTensors
from ..tiles import HOPPER_TILE
from .arguments import HALF, REST, Numbers, Tile

mla_fp8_kernel = Kernel(__package__, ".fp8", "mla_fp8_kernel")
mla_kernel = Kernel(__package__, ".kernel", "mla_kernel")


class HopperLaunch:
    """Launcher of the Hopper kernels, for calls that ``takes_hopper_mla`` accepts."""

    def __init__(self, x: MlaTensors, options: MlaOptions, is_single: bool) -> None:
        """Prepare calls like ``x`` for one schedule."""
        self.rows, self.block_n = HOPPER_TILE.rows, HOPPER_TILE.block_n
        heads, page = x.q.shape[1], x.kv_cache.shape[1]
        cache = x.kv_cache[:, :, None]
        self._is_fp8 = cache.element_size() == 1
        piece = copied_keys(page, -1, self.block_n)
        self._form = Numbers(
            scale=options.softmax_scale,
            batch=x.seqlens_k.shape[0],
            tokens=0,
            splits=0,
            q=row_strides(x.q),
            out=row_strides(x.out),
            page_rows=rows_of_page(cache),
            row=cache.stride(1),
            table=TableStrides(*x.block_table.stride()),
        )
        # by token count and splits
        self._numbers: Memory[tuple[float, ...]] = Memory(MAX_COUNTS)
        if not self._is_fp8:
            rows = as_rows(cache)
            self._halves = MapForm(rows, piece, HALF, ragged=True)
            self._rests = MapForm(rows, piece, REST, ragged=True)
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
        constants = {"TILE": tile, "num_warps": 4, "maxnreg": HOPPER_TILE.registers}

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
        counts = x.q.shape[0], splits
        numbers = self._numbers.get(counts) or self._count(*counts)
        if self._is_fp8:
            launch(grid, (*x, *parts), numbers)
        else:
            maps = self._halves(x.kv_cache), self._rests(x.kv_cache)
            launch(grid, (*maps, *x, *parts), numbers)

    def _count(self, tokens: int, splits: int) -> tuple[float, ...]:
        numbers = flat(self._form._replace(tokens=tokens, splits=splits))
        return self._numbers.keep((tokens, splits), numbers)
