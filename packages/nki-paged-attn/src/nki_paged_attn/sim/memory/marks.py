"""Marks of each unit of a memory: who wrote it, and who read it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ..dtypes import Array

# writer of an element: none, TensorE, or another engine
UNWRITTEN, BY_MATMUL, BY_OTHERS = 0, 1, 2
# bits of shared HBM: which program of a logical core wrote and read it
WROTE, READ = (1, 2), (4, 8)
WROTE_BOTH = 3


class Strided(Protocol):
    """A view as marks need it: its place in the memory, counted in its elements."""

    shape: tuple[int, ...]
    _offset: int
    _strides: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element."""


class Marks:
    """A small number for each unit of a memory's bytes; the unit is as fine as views ask for.

    Args:
        nbytes: of the memory.
        unit: bytes of an element at the start.
    """

    __slots__ = ("unit", "values")

    def __init__(self, nbytes: int, unit: int, value: int = 0) -> None:
        self.unit = unit
        self.values: Array = np.full(nbytes // unit, value, np.uint8)

    def clear(self) -> None:
        """Forget all marks."""
        self.values[:] = 0

    def _units(self, view: Strided) -> int:
        """Return how many units an element of a view has."""
        if view.itemsize < self.unit:
            self.values = np.repeat(self.values, self.unit // view.itemsize)
            self.unit = view.itemsize
        return view.itemsize // self.unit

    def of(self, view: Strided) -> Array:
        """Return the marks of a view: its shape, and the units of an element."""
        units = self._units(view)
        strides = [s * units for s in view._strides]
        found: Array = np.ndarray(
            (*view.shape, units), np.uint8, self.values, view._offset * units, (*strides, 1)
        )
        return found

    def at(self, view: Strided, places: Any) -> Array:
        """Return the marks of elements of the storage, counted in the view's dtype: a copy."""
        units = self._units(view)
        found: Array = self.values[places[..., None] * units + np.arange(units)]
        return found

    def put(self, view: Strided, places: Any, bits: int, *, keep: bool) -> None:
        """Set the marks of such elements, or of the view where there are none; or add to them."""
        units = self._units(view)
        if places is not None:
            where = places[..., None] * units + np.arange(units)
            self.values[where] = self.values[where] | bits if keep else bits
        elif keep:
            self.of(view)[...] |= np.uint8(bits)
        else:
            self.of(view)[...] = bits
