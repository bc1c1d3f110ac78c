"""What a launch passes to the sum of states."""

from __future__ import annotations

from typing import NamedTuple

from ..._linked.launch.entries import Foreign, Number


class Tensors(NamedTuple):
    """The states of all ranks, and the sources of each row."""

    states_ptr: Foreign
    decay_ptr: Foreign
    base_ptr: Foreign  # or None
    out_ptr: Foreign
    offsets_ptr: Foreign
    entries_ptr: Foreign


class Numbers(NamedTuple):
    """Lengths."""

    heads: Number
    size: Number  # elements of a state
