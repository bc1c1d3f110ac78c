"""The host side of the walk on Hopper: tensor maps of panels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..._configs import Tile, hopper_tile, padded_head_dim
from ._linked.tma import MapForm, MapLaunch
from .walk import SIDE, hopper_walk_kernel

if TYPE_CHECKING:
    from ..schedule import Walk


class HopperWalk:
    """What a walk launches on Hopper. It holds no tensor."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._forms: dict[int, MapForm] = {}

    def launch(self, tile: Tile, segmented: bool, skip: bool, is_exact: bool) -> MapLaunch:
        """Return one launch of the walk; ``skip``: last segments write nothing."""
        walk = self._walk
        hopper = hopper_tile(tile.block_e)
        return MapLaunch(
            hopper_walk_kernel,
            {
                "D": walk.d,
                "E": walk.e,
                "HALVES": padded_head_dim(walk.d) // SIDE.value,
                "REVERSE": walk.reverse,
                "SEGMENTED": segmented,
                "SKIP": skip,
                "RAGGED": walk.is_packed,
                "TERMS": 2 if is_exact else 1,
                "WARPGROUPS": hopper.warpgroups,
                "STAGES": hopper.stages,
                "num_warps": 4,
                "maxnreg": hopper.registers,
            },
        )

    def maps(self, key: Tensor, *others: Tensor | None) -> list[Any]:
        """Return keys, and values, reads and output, as the copy engine finds them."""
        return [self._map(role, x) for role, x in enumerate((key, *others))]

    def _map(self, role: int, x: Tensor | None) -> Any:
        if x is None:
            return None
        form = self._forms.get(role)
        if form is None:
            form = self._forms[role] = MapForm(
                x, SIDE.value, SIDE.value, ragged=self._walk.is_packed
            )
        return form(x)
