"""A piece of memory: its bytes and their marks."""

from __future__ import annotations

import itertools
import math
from typing import Protocol

from ..dtypes import NUMPY, Array
from .marks import Marks

_ids = itertools.count()


class Memory(Protocol):
    """The owner of a piece's room."""

    def release(self, storage: Storage) -> None:
        """Free the room of a piece without references."""


class Iteration:
    """An iteration of a loop of the device, and whether it is over."""

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False


class Storage:
    """A piece of memory: bytes in row-major order, the partition first on the chip.

    Attributes:
        data: the bytes; None if nothing is computed.
        state: the writer of each element, if that matters.
        traffic: of shared HBM, which programs wrote and read each element.
        address: (first partition, byte), if the kernel chose one.
        lost: bytes that another tensor at an address overwrote: start, end, and that tensor.
        iteration: the iteration in which it was made, in a loop of the device.
        is_argument: whether it is an argument of the kernel.
        is_constant: whether it is an argument that may not be written.
        is_changed: whether it was written.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "data",
        "dtype",
        "id",
        "is_argument",
        "is_changed",
        "is_constant",
        "itemsize",
        "iteration",
        "lost",
        "memory",
        "name",
        "partition",
        "region",
        "shape",
        "size",
        "state",
        "traffic",
    )

    def __init__(self, memory: Memory, name: str, shape: tuple[int, ...], dtype: str, region: str):
        self.id = next(_ids)
        # allocation failed: there is nothing to release
        self.memory: Memory | None = None
        self.name = name or f"{region}_{self.id}"
        self.shape = shape
        self.dtype = dtype
        self.region = region
        self.itemsize = NUMPY[dtype].itemsize
        self.size = math.prod(shape)
        # elements of a partition; a whole tensor in HBM
        on_chip = region in ("sbuf", "psum")
        self.partition = self.size // shape[0] if on_chip and shape[0] else self.size
        self.data: Array | None = None
        self.state: Marks | None = None
        self.traffic: Marks | None = None
        self.address: tuple[int, int] | None = None
        self.lost: list[tuple[int, int, str]] = []
        self.iteration: Iteration | None = None
        self.is_argument = False
        self.is_constant = False
        self.is_changed = False
        self.memory = memory

    @property
    def nbytes(self) -> int:
        nbytes: int = self.size * self.itemsize
        return nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a partition."""
        nbytes: int = self.partition * self.itemsize
        return nbytes

    def overlaps(self, other: Storage, start: int, end: int) -> bool:
        """Return whether, by address, it overlaps bytes ``start`` to ``end`` of another."""
        if self.address is None or other.address is None or self.region != other.region:
            return False
        partition, at = self.address
        other_partition, low = other.address
        return (
            partition < other_partition + other.shape[0]
            and other_partition < partition + self.shape[0]
            and at < low + end
            and low + start < at + self.row_bytes
        )

    @property
    def on_chip(self) -> bool:
        return self.region in ("sbuf", "psum")

    def __del__(self) -> None:
        if self.memory is not None and self.on_chip:
            self.memory.release(self)
