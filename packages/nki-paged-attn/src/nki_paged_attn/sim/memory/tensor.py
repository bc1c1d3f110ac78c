"""Tensors of a kernel: views with the explicit hardware access pattern, and with contents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from ..dtypes import NUMPY, Array, name_of
from ..errors import NotModelledError, is_integer, require
from ..trace import Region
from .machine import machine
from .views import PAGE, DynamicSlice, Indirection, View, row_major
from .virtual import VirtualRegister

AP_PAGE = "nki/deep-dives/nki-aps"
MAX_DIMS = 5
# bytes that a partition transfers at a time: nki/guides/architecture, SBUF
STRIDE_BYTES = 16
# dimensions that an engine reads or writes, besides the partition
MAX_FREE_DIMS = 3
# counts of an access pattern are 16-bit numbers
MAX_COUNT = 65535


def pairs(
    call: str, operand: str, pattern: Any, page: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the strides and the counts of a pattern, ``[[stride, count], ...]``."""
    known = isinstance(pattern, (list, tuple)) and all(
        isinstance(p, (list, tuple)) and [*map(is_integer, p)] == [True] * 2 for p in pattern
    )
    require(known, call, operand, "must be of pairs of integers, stride and count", pattern, page)
    return tuple(int(s) for s, _ in pattern), tuple(int(n) for _, n in pattern)


class NkiTensor(View):
    """A tensor in HBM, SBUF or PSUM, or a part of one."""

    __slots__ = ()
    # set by nki.language: instructions are made of tensors, so that tensors cannot import them
    assign: ClassVar[Callable[[NkiTensor, Any], None]]

    def __setitem__(self, index: Any, value: Any) -> None:
        type(self).assign(self[index], value)

    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        """Let each partition read the row that its own index names."""
        require(dim == 0, "vector_select", "dim", "must be 0", dim, PAGE)
        require(
            isinstance(vector_offset, NkiTensor),
            "vector_select",
            "vector_offset",
            "must be a tensor",
            vector_offset,
            PAGE,
        )
        pattern = [
            [self._strides[0], vector_offset.shape[0]],
            *([s, n] for s, n in zip(self._strides[1:], self.shape[1:], strict=True)),
        ]
        return self.ap(pattern, vector_offset=vector_offset, indirect_dim=0)

    def ap(
        self,
        pattern: Any,
        offset: int | None = None,
        scalar_offset: NkiTensor | VirtualRegister | None = None,
        vector_offset: NkiTensor | None = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> NkiTensor:
        """Return an explicit access pattern, ``[[stride, count], ...]``, over the storage.

        A run-time index is scaled by the stride of ``indirect_dim`` in this tensor's own shape, not
        by the first stride of the pattern.

        Args:
            offset: of the first element, from the start of the storage. Default: this view's own.
            dtype: to read the same bits as; strides and the offset count its elements.
        """
        if dtype is not None and name_of(dtype) != self.dtype:
            other = self.view(dtype)
            return other.ap(pattern, offset, scalar_offset, vector_offset, indirect_dim)
        call, name = "ap", self.name
        strides, shape = pairs(call, "pattern", pattern, PAGE)
        start = self._offset if offset is None else offset
        require(is_integer(start), call, "offset", "must be an integer", offset, PAGE)
        require(
            not self.is_indirect(),
            call,
            name,
            "must not be indirect already, because a pattern is over the storage itself",
            "an indirect view",
            AP_PAGE,
        )
        require(
            1 <= len(shape) <= MAX_DIMS,
            call,
            "pattern",
            f"may have 1 to {MAX_DIMS} dimensions",
            len(shape),
            PAGE,
        )
        require(min(shape) >= 1, call, "pattern", "needs counts from 1", shape, PAGE)
        indirection = None
        if scalar_offset is not None or vector_offset is not None:
            indirection = self._indirect(scalar_offset, vector_offset, indirect_dim, shape)
            if indirection.per_partition:
                # the index takes the place of the partition's own stride
                strides = (0, *strides[1:])
        if self._storage.on_chip:
            self._check_partitions(strides, shape, start)
        # strides may be negative
        steps = [s * (n - 1) for s, n in zip(strides, shape, strict=True)]
        first, last = start + sum(min(s, 0) for s in steps), start + sum(max(s, 0) for s in steps)
        size = self._storage.nbytes // self.itemsize
        require(
            first >= 0 and last < size,
            call,
            name,
            f"must stay within its {size} elements",
            f"{first} to {last}",
            PAGE,
        )
        return NkiTensor(self._storage, shape, strides, start, self.dtype, indirection)

    def select(self, dim: int, index: Any) -> NkiTensor:
        """Return one element of a dimension; its index may be in a register or a (1, 1) tile.

        On the chip the index is read here, so that the view is direct.
        """
        if not isinstance(index, (NkiTensor, VirtualRegister)):
            return super().select(dim, index)
        view = self._moved("select", dim, index, 1)
        return view._squeeze(dim)

    def _dynamic_slice(self, dim: int, index: DynamicSlice) -> NkiTensor:
        if not isinstance(index.start, (NkiTensor, VirtualRegister)):
            return super()._dynamic_slice(dim, index)
        return self._moved("nl.ds", dim, index.start, index.size)

    def _moved(self, call: str, dim: int, index: Any, size: int) -> NkiTensor:
        """Return ``size`` elements of a dimension, from an index that is known at run time."""
        self._dimension(call, dim)
        require(
            not self.is_indirect(),
            call,
            self.name,
            "must not be indirect already",
            "an indirect view",
            PAGE,
        )
        if isinstance(index, NkiTensor):
            self._check_index(index)
            require(index.shape == (1, 1), call, "the index", "must be (1, 1)", index.shape, PAGE)
        if self._storage.on_chip:
            found = index.array() if isinstance(index, NkiTensor) else index.read(call)
            if found is None:
                raise NotModelledError(f"{call}: an index that is not there without execution")
            start = int(np.asarray(found).reshape(-1)[0])
            return self.slice(dim, start, start + size)
        limit = self.shape[dim] - size + 1
        way = Indirection(index, self._strides[dim], limit, per_partition=False)
        view = self.slice(dim, 0, size)
        return NkiTensor(self._storage, view.shape, view._strides, self._offset, self.dtype, way)

    def _squeeze(self, dim: int) -> NkiTensor:
        """Remove a dimension of one element, of an indirect view too."""
        shape, strides = list(self.shape), list(self._strides)
        del shape[dim], strides[dim]
        return self._view(shape, strides)

    @staticmethod
    def _check_index(index: NkiTensor) -> None:
        page = "nki.isa.dma_copy, indirect addressing"
        require(
            index.dtype in ("int32", "uint32"),
            "ap",
            "the offset",
            "must be int32 or uint32",
            index.dtype,
            page,
        )
        require(index.buffer == "sbuf", "ap", "the offset", "must be in SBUF", index.buffer, page)

    def _indirect(
        self,
        scalar: Any,
        vector: Any,
        dim: int,
        shape: tuple[int, ...],
    ) -> Indirection:
        page = "nki.isa.dma_copy, indirect addressing"
        require(
            scalar is None or vector is None,
            "ap",
            "scalar_offset and vector_offset",
            "are mutually exclusive",
            "both",
            page,
        )
        index = vector if vector is not None else scalar
        is_register = isinstance(index, VirtualRegister)
        require(
            isinstance(index, NkiTensor) or (is_register and vector is None),
            "ap",
            "the offset",
            "must be a tile, or for scalar_offset a register",
            type(index).__name__,
            page,
        )
        if isinstance(index, NkiTensor):
            self._check_index(index)
        self._need_dimension("ap", "indirect_dim", dim, page)
        if vector is not None:
            target = machine().target
            require(
                target.has_vector_offset,
                "ap",
                "vector_offset",
                "needs trn2 or newer",
                target.name,
                "nki/deep-dives/nki-dge, mode selection summary",
            )
            require(
                not self._storage.on_chip,
                "ap",
                self.name,
                "must be in HBM for a vector_offset",
                self.buffer,
                page,
            )
            require(
                index.shape == (shape[0], 1),
                "ap",
                "vector_offset",
                f"must be ({shape[0]}, 1), an index for each partition",
                index.shape,
                page,
            )
        elif isinstance(index, NkiTensor):
            require(
                index.shape == (1, 1), "ap", "scalar_offset", "must be (1, 1)", index.shape, page
            )
        return Indirection(index, self._strides[dim], self.shape[dim], vector is not None)

    def _check_partitions(
        self, strides: tuple[int, ...], shape: tuple[int, ...], start: int
    ) -> None:
        per = self.partition_step
        require(
            shape[0] == 1 or strides[0] == per,
            "ap",
            self.name,
            f"must step over partitions by {per} elements, without holes",
            strides[0],
            PAGE,
        )
        steps = [s * (n - 1) for s, n in zip(strides[1:], shape[1:], strict=True)]
        low = start % per + sum(min(s, 0) for s in steps)
        high = start % per + sum(max(s, 0) for s in steps)
        require(
            low >= 0 and high < per,
            "ap",
            self.name,
            f"must stay within the {per} elements of a partition",
            high if low >= 0 else low,
            PAGE,
        )

    # contents

    def array(self) -> Array | None:
        """Return the elements as a NumPy view; None if nothing is computed."""
        data = self._storage.data
        if data is None:
            return None
        item = NUMPY[self.dtype].itemsize
        view: Array = np.ndarray(
            self.shape,
            dtype=NUMPY[self.dtype],
            buffer=data,
            offset=self._offset * item,
            strides=[s * item for s in self._strides],
        )
        return view

    def is_strided(self) -> bool:
        """Say whether neighbours along the innermost dimension lie more than 16 bytes apart."""
        for stride, size in zip(reversed(self._strides[1:]), reversed(self.shape[1:]), strict=True):
            if size > 1:
                return stride * self.itemsize > STRIDE_BYTES
        return False

    def _span(self) -> tuple[int, int]:
        last = sum(s * (n - 1) for s, n in zip(self._strides, self.shape, strict=True))
        return self._offset * self.itemsize, (self._offset + last + 1) * self.itemsize

    def region(self) -> Region:
        """Return the bytes that a view spans, within a partition on the chip."""
        storage = self._storage
        if not storage.on_chip:
            return storage.id, *self._span()
        per = storage.partition * storage.itemsize
        free = zip(self._strides[1:], self.shape[1:], strict=True)
        start = self._offset * self.itemsize % per if per else 0
        return storage.id, start, start + (1 + sum(s * (n - 1) for s, n in free)) * self.itemsize


__all__ = ["DynamicSlice", "Indirection", "NkiTensor", "row_major"]
