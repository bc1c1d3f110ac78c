"""Launches of the walk on Hopper, with tensor maps of panels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._linked.hopper.tma import MapForm, MapLaunch
from ..tiles import Tile, hopper_tile, padded_head_dim
from . import structures
from .primitives import SIDE
from .walk import hopper_walk_kernel


class HopperWalk:
    """Launches and tensor maps for calls of one form on Hopper; it holds no tensor."""

    def __init__(self, d: int, e: int, reverse: bool, is_packed: bool) -> None:
        self._d, self._e, self._reverse, self._is_packed = d, e, reverse, is_packed
        self._forms: dict[int, MapForm] = {}

    def launch(self, tile: Tile, segmented: bool, skip: bool, is_exact: bool) -> MapLaunch:
        """Return a launch of the walk; ``skip``: last segments write no state."""
        hopper = hopper_tile(tile.block_e)
        options = structures.Options(
            self._d, self._e, self._reverse, segmented, skip, self._is_packed, 2 if is_exact else 1
        )
        halves = padded_head_dim(self._d) // SIDE.value
        constants = structures.Tile(halves, hopper.warpgroups, hopper.stages)
        return MapLaunch(
            hopper_walk_kernel,
            {
                **options._asdict(),
                **constants._asdict(),
                "num_warps": 4,
                "maxnreg": hopper.registers,
            },
        )

    def maps(self, key: Tensor, *others: Tensor | None) -> list[Any]:
        """Return the maps of keys, values, reads and output."""
        return [self._map(role, x) for role, x in enumerate((key, *others))]

    def _map(self, role: int, x: Tensor | None) -> Any:
        if x is None:
            return None
        form = self._forms.get(role)
        if form is None:
            form = self._forms[role] = MapForm(x, SIDE.value, SIDE.value, ragged=self._is_packed)
        return form(x)
