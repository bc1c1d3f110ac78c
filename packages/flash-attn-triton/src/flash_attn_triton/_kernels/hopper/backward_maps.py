"""The tensor maps of the backward for Hopper, and the memory in which dq is summed."""

from __future__ import annotations

import math
from typing import Any

import torch
from attn_common import cdiv
from torch import Tensor

from ..._call import Tensors
from ..._hopper_configs import HopperBackwardTile, panels_of
from ..form import Form
from ..structures import PIECE
from . import backward_structures
from ._linked.compat import gl
from ._linked.gradients import ROWS
from ._linked.tma import MapForm
from .bias_plans import MOST_ROWS
from .plans import narrow_maps


class SumsForm(MapForm):
    """How sums of dq are mapped: rows of 32, of which so many are added to at once."""

    def __init__(self, rows: int) -> None:
        # in place of the base class's: these are no tokens, and no call has more or less of them
        self._copies = False
        self.shape = [MOST_ROWS, 32]
        self.strides = [32, 1]
        self.block_shape = [rows, 32]
        self.layout = gl.NVMMASharedLayout.get_default_for(self.block_shape, gl.float32)
        self.encoded = {}


class BackwardMaps:
    """The maps of the calls of one form, and of the panels of each tensor; see ``panels.py``."""

    def __init__(self, form: Form, x: Tensors, tile: HopperBackwardTile, *, ragged: bool) -> None:
        self._block_m, self._ragged = tile.block_m, ragged
        dims = panels_of(form.head_dim), panels_of(form.head_dim_v)
        (wide, narrow), (self._wide_v, self._narrow_v) = dims
        # rows of 64 keys at a time, and all queries of a step
        keys = ROWS.value
        dk, dv = (torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (x.k, x.v))
        self._q = MapForm(x.q, tile.block_m, wide, ragged=ragged)
        self._k = MapForm(x.k, keys, wide, ragged=ragged)
        self._v = MapForm(x.v, keys, self._wide_v, ragged=ragged)
        self._dk = MapForm(dk, keys, wide, ragged=ragged)
        self._dv = MapForm(dv, keys, self._wide_v, ragged=ragged)
        # None if nothing is cut; the output's gradient comes in ``__call__``
        self._narrow: tuple[MapForm | None, ...] | None = None
        if narrow or self._narrow_v:
            self._narrow = (
                MapForm(x.q, tile.block_m, narrow, ragged=ragged) if narrow else None,
                MapForm(x.k, keys, narrow, ragged=ragged) if narrow else None,
                MapForm(x.v, keys, self._narrow_v, ragged=ragged) if self._narrow_v else None,
                None,
                MapForm(dk, keys, narrow, ragged=ragged) if narrow else None,
                MapForm(dv, keys, self._narrow_v, ragged=ragged) if self._narrow_v else None,
            )
        # with the strides that it goes with, which are those of the last call's
        self._dout: tuple[Any, Any] = (None, None)
        # numbers in a tile of dq
        self.numbers = tile.block_m * (wide + narrow)
        # the threads add to the sums, or TMA does, what a warpgroup has of a tile
        self._sums = self._sums_narrow = None
        if tile.block_n > keys and not tile.is_apart:
            self._sums = SumsForm(tile.block_m * wide // 64)
            self._sums_narrow = SumsForm(tile.block_m * narrow // 64) if narrow else None

    def new_sums(self, q: Tensor, slots: int) -> Tensor:
        """Return memory for so many tiles of dq, or a few more: it is set to 0 in whole pieces."""
        unit = PIECE // math.gcd(PIECE, self.numbers)
        return q.new_empty((cdiv(slots, unit) * unit, self.numbers), dtype=torch.float32)

    def __call__(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        sums: Tensor,
        bias: Any = None,
        ds: Any = None,
    ) -> backward_structures.Maps:
        """Map q, k, v, the output's gradient, dk, dv and the sums; ``bias`` and ``ds`` are maps."""
        q, k, v, dout, dk, dv = tensors
        if self._dout[0] != dout.stride():
            self._map_dout(dout)
        maps = self._q(q), self._k(k), self._v(v), self._dout[1](dout), self._dk(dk), self._dv(dv)
        narrow = narrow_maps(maps, self._narrow) if self._narrow else (None,) * 6
        if self._sums is None:
            return backward_structures.Maps(*maps, *narrow, bias, ds, sums, None)
        less = self._sums_narrow(sums) if self._sums_narrow else None
        return backward_structures.Maps(*maps, *narrow, bias, ds, self._sums(sums), less)

    def _map_dout(self, dout: Tensor) -> None:
        """Take the strides of the output's gradient."""
        rows, ragged = self._block_m, self._ragged
        self._dout = dout.stride(), MapForm(dout, rows, self._wide_v, ragged=ragged)
        if self._narrow and self._narrow_v:
            form = MapForm(dout, rows, self._narrow_v, ragged=ragged)
            self._narrow = (*self._narrow[:3], form, *self._narrow[4:])
