"""The tensor maps of the Hopper backward, and the memory in which dq is summed."""

from __future__ import annotations

from torch import Tensor

from ...._linked.hopper.sizes import ROWS
from ...._linked.hopper.tma import MapForm
from ...._linked.launch.entries import flat
from ...hopper_tiles import HopperBackwardTile, panels_of
from ...portable.form import Form
from ..bias_launch import MOST_ROWS
from ..forward.launch import narrow_panels
from .arguments import Maps, PanelMaps, has_panel_each

# q, k, v, the output's gradient, dk and dv
Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
# head dimensions in one panel
NO_PANELS = (None,) * 6


class SumsForm(MapForm):
    """The tensor map of the sums of dq: rows of 32 numbers, boxes of ``rows`` rows."""

    def __init__(self, rows: int) -> None:
        # replaces the base class's __init__: the rows are not tokens, and all calls have as many
        self._copies = False
        self.shape = [MOST_ROWS, 32]
        self.strides = [32, 1]
        self.block_shape = [rows, 32]
        self.encoded = {}, {}


class BackwardMaps:
    """The maps of the calls of one signature, for the panels of each tensor; see ``panels.py``."""

    def __init__(self, form: Form, tile: HopperBackwardTile, *, ragged: bool) -> None:
        self._ragged = ragged
        # rows of a box: 64 keys, or all queries of a step
        keys, queries = ROWS, tile.block_m
        self._rows = queries, keys, keys, queries, keys, keys
        (wide, narrow), (wide_v, narrow_v) = panels_of(form.head_dim), panels_of(form.head_dim_v)
        self._wide = wide, wide, wide_v, wide_v, wide, wide_v
        self._narrow = narrow, narrow, narrow_v, narrow_v, narrow, narrow_v
        self._is_cut = any(self._narrow)
        # TMA adds a warpgroup's half of a tile to the sums through these maps, unless threads add
        self._sums = self._sums_narrow = None
        if tile.block_n > keys and not tile.is_apart:
            # rows of a warpgroup's part of each panel
            shared = 1 if has_panel_each(wide, narrow, queries, tile.block_n) else 2
            self._sums = SumsForm(queries * wide // 32 // shared)
            self._sums_narrow = SumsForm(queries * narrow // 32 // shared) if narrow else None

    def forms(
        self, tensors: Six, bias: MapForm | None = None, ds: MapForm | None = None
    ) -> tuple[MapForm | None, ...]:
        """Return a map for each tensor that ``__call__`` returns."""
        wide, narrow = (
            PanelMaps(
                *(
                    MapForm(t, rows, width, ragged=self._ragged) if width else None
                    for t, rows, width in zip(tensors, self._rows, widths, strict=True)
                )
            )
            for widths in (self._wide, self._narrow)
        )
        return flat(Maps(wide, narrow, bias, ds, self._sums, self._sums_narrow))

    def __call__(
        self,
        tensors: Six,
        sums: Tensor,
        bias: Tensor | None = None,
        ds: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Return the tensors of the fields of ``Maps``; a tensor with two panels comes twice."""
        narrow = narrow_panels(tensors, self._narrow) if self._is_cut else NO_PANELS
        return *tensors, *narrow, bias, ds, sums, sums if self._sums_narrow else None
