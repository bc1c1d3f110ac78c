"""What a launch passes to the walk on Hopper, besides the arguments of the portable walk."""

from __future__ import annotations

from typing import NamedTuple

from ..._linked.launch.entries import Constant, Map

# tokens of a chunk, and columns of a panel
SIDE = 64


class Maps(NamedTuple):
    """Tensor maps of panels; ``read`` and ``out`` are None without reads."""

    key: Map
    value: Map
    read: Map
    out: Map


class Tile(NamedTuple):
    """Panels of a program."""

    HALVES: Constant  # panels per row of keys
    WARPGROUPS: Constant
    STAGES: Constant
    TERMS: Constant  # numbers of 16 bits per value that is written to the state
