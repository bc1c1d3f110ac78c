"""Launches of the walk on Hopper, with tensor maps of panels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._linked.hopper.tma import MapForm, MapLaunch
from ..._linked.launch.kernels import Kernel
from ..portable.arguments import Options
from ..tiles import Tile, hopper_tile, padded_head_dim
from . import arguments
from .arguments import SIDE

hopper_walk_kernel = Kernel(__package__, ".walk", "hopper_walk_kernel")


class HopperWalk:
    """Launches and tensor maps for calls of one form on Hopper; it holds no tensor."""

    def __init__(self, d: int, e: int, reverse: bool, is_packed: bool) -> None:
        self._d, self._e, self._reverse, self._is_packed = d, e, reverse, is_packed
        self._forms: dict[int, MapForm] = {}

    def launch(self, tile: Tile, segmented: bool, skip: bool, is_exact: bool) -> MapLaunch:
        """Return a launch of the walk; ``skip``: last segments write no state."""
        hopper = hopper_tile(tile.block_e)
        packed = self._is_packed
        options = Options(self._d, self._e, self._reverse, segmented, RAGGED=packed, SKIP=skip)
        halves = padded_head_dim(self._d) // SIDE
        terms = 2 if is_exact else 1
        constants = {
            "OPTIONS": options,
            "TILE": arguments.Tile(halves, hopper.warpgroups, hopper.stages, terms),
            "num_warps": 4,
            "maxnreg": hopper.registers,
        }
        return MapLaunch(hopper_walk_kernel, constants)

    def maps(
        self, key: Tensor, value: Tensor, read: Tensor | None, out: Tensor | None
    ) -> arguments.Maps:
        """Return the maps of a launch."""
        return arguments.Maps(
            *[self._map(role, x) for role, x in enumerate((key, value, read, out))]
        )

    def _map(self, role: int, x: Tensor | None) -> Any:
        if x is None:
            return None
        form = self._forms.get(role)
        if form is None:
            form = self._forms[role] = MapForm(x, SIDE, SIDE, ragged=self._is_packed)
        return form(x)
