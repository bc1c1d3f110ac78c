"""Views of a storage: shape, strides and offset, and methods that derive further views.

The methods are those of page ``nki.tensor`` (NkiTensor).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

from ..dtypes import NUMPY, name_of
from ..errors import NotModelledError, is_integer, require
from .storage import Storage
from .virtual import VirtualRegister

PAGE = "nki.tensor"
INDEXING = "nki/get-started/nki-language-guide, tensor indexing"
T = TypeVar("T", bound="View")
ITEMSIZES: dict[str, int] = {name: dtype.itemsize for name, dtype in NUMPY.items()}


@dataclass(frozen=True)
class DynamicSlice:
    """``nl.ds(start, size)``: a slice by start and length."""

    start: int
    size: int


@dataclass(frozen=True)
class Indirection:
    """An offset that is known at run time only: one for each partition, or one for all."""

    index: Any
    stride: int
    limit: int
    per_partition: bool


class View:
    """A view of a storage: shape, strides and offset in elements."""

    __slots__ = ("_offset", "_storage", "_strides", "dtype", "indirection", "shape")

    def __init__(
        self,
        storage: Storage,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        dtype: str,
        indirection: Indirection | None = None,
    ) -> None:
        self._storage = storage
        self.shape = shape
        self._strides = strides
        self._offset = offset
        self.dtype = dtype
        self.indirection = indirection

    @classmethod
    def whole(cls: type[T], storage: Storage) -> T:
        """Return the view of all of a storage."""
        return cls(storage, storage.shape, row_major(storage.shape), 0, storage.dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotModelledError(f"NkiTensor.{name} is not modelled [nki.language.NkiTensor]")

    def _value_style(self, *_: object) -> Any:
        raise NotModelledError(
            f"{self.name}: operators on tensors are of neuronxcc.nki; use nki.isa [nki/migration]"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _value_style
    __truediv__ = __rtruediv__ = __matmul__ = __neg__ = _value_style

    def __repr__(self) -> str:
        return f"{self.name}: {self.dtype} {self.shape} in {self.buffer}"

    @property
    def name(self) -> str:
        return self._storage.name

    @property
    def buffer(self) -> str:
        return self._storage.region

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        size: int = math.prod(self.shape)
        return size

    @property
    def itemsize(self) -> int:
        itemsize: int = ITEMSIZES[self.dtype]
        return itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        return self._strides

    @property
    def offset(self) -> int:
        return self._offset

    def _view(self: T, shape: Any, strides: Any, offset: int | None = None) -> T:
        start = self._offset if offset is None else offset
        return type(self)(
            self._storage, tuple(shape), tuple(strides), start, self.dtype, self.indirection
        )

    def _need_dimension(
        self, call: str, operand: str, dim: Any, page: str = PAGE, least: int = 0
    ) -> None:
        known = is_integer(dim) and least <= dim < self.ndim
        limit = f"must be an integer from {least} to {self.ndim - 1}"
        require(known, call, operand, limit, dim, page)

    def _dimension(self, call: str, dim: int, *, free: bool = True) -> int:
        self._need_dimension(call, "dim", dim)
        if free and (self._storage.on_chip or self.is_indirect()):
            require(dim > 0, call, "dim", "must not be the partition dimension", dim, PAGE)
        return dim

    # views

    def __getitem__(self: T, index: Any) -> T:
        items = list(index) if isinstance(index, tuple) else [index]
        at = next((n for n, item in enumerate(items) if item is Ellipsis), None)
        if at is not None:
            items[at : at + 1] = [slice(None)] * (self.ndim - len(items) + 1)
        require(
            len(items) <= self.ndim,
            "NkiTensor[]",
            self.name,
            f"takes at most {self.ndim} indices",
            len(items),
            PAGE,
        )
        items += [slice(None)] * (self.ndim - len(items))
        if self._storage.on_chip:
            self._keep_two(items)
        view, dim = self, 0
        for item in items:
            if isinstance(item, slice):
                # the common case of a whole dimension
                if item.start is not None or item.stop is not None or item.step is not None:
                    size = view.shape[dim]
                    stop = size if item.stop is None else _from_end(item.stop, size)
                    start = 0 if item.start is None else _from_end(item.start, size)
                    step = 1 if item.step is None else item.step
                    view = view.slice(dim, start, stop, step)
                dim += 1
            elif isinstance(item, DynamicSlice):
                view = view._dynamic_slice(dim, item)
                dim += 1
            elif is_integer(item):
                view = view.select(dim, _from_end(int(item), view.shape[dim]))
            elif isinstance(item, (View, VirtualRegister)):
                view = view.select(dim, item)
            else:
                raise NotModelledError(
                    f"NkiTensor[]: an index of type {type(item).__name__} [{INDEXING}]"
                )
        return view

    def _keep_two(self, items: list[Any]) -> None:
        """Turn integers among the indices into slices, so that a tile keeps two dimensions.

        The partition dimension stays, and so does the last dimension that would be removed.
        """
        places = [d for d, item in enumerate(items) if is_integer(item)]
        kept = {0} & set(places)
        if places and self.ndim - len(set(places) - {0}) < 2:
            kept.add(places[-1])
        for d in kept:
            start = _from_end(int(items[d]), self.shape[d])
            items[d] = slice(start, start + 1)

    def _dynamic_slice(self: T, dim: int, index: DynamicSlice) -> T:
        known = is_integer(index.start) and is_integer(index.size)
        require(known, "nl.ds", "start and size", "must be integers", index, "nki.language.ds")
        return self.slice(dim, index.start, index.start + index.size)

    def slice(self: T, dim: int, start: int, end: int, step: int = 1) -> T:
        """Return elements ``start`` to ``end`` of a dimension; both must be within it."""
        self._dimension("slice", dim, free=self.is_indirect())
        size = self.shape[dim]
        known = is_integer(start) and is_integer(end) and is_integer(step)
        require(known, "slice", "its bounds", "must be integers", (start, end, step), PAGE)
        require(
            0 <= start < end <= size and step >= 1,
            "slice",
            self.name,
            f"needs 0 <= start < end <= {size} and step >= 1 in dimension {dim}",
            (start, end, step),
            PAGE,
        )
        shape, strides = list(self.shape), list(self._strides)
        shape[dim] = -(-(end - start) // step)
        strides[dim] *= step
        return self._view(shape, strides, self._offset + start * self._strides[dim])

    def select(self: T, dim: int, index: Any) -> T:
        """Return one element of a dimension, without the dimension."""
        self._dimension("select", dim)
        require(
            is_integer(index) and 0 <= index < self.shape[dim],
            "select",
            self.name,
            f"needs an integer from 0 to {self.shape[dim] - 1} in dimension {dim}",
            index,
            PAGE,
        )
        shape, strides = list(self.shape), list(self._strides)
        offset = self._offset + index * strides.pop(dim)
        del shape[dim]
        return self._view(shape, strides, offset)

    def permute(self: T, dims: Any) -> T:
        """Return the dimensions in another order."""
        require(
            sorted(dims) == list(range(self.ndim)),
            "permute",
            "dims",
            f"must be a permutation of {self.ndim} dimensions",
            dims,
            PAGE,
        )
        if self._storage.on_chip or self.is_indirect():
            require(dims[0] == 0, "permute", "dims", "must keep the partition first", dims, PAGE)
        return self._view((self.shape[d] for d in dims), (self._strides[d] for d in dims))

    def broadcast(self: T, dim: int, size: int) -> T:
        """Repeat the one element of a dimension."""
        self._dimension("broadcast", dim)
        require(
            self.shape[dim] == 1,
            "broadcast",
            self.name,
            f"must have one element in dimension {dim}",
            self.shape[dim],
            PAGE,
        )
        known = is_integer(size) and size >= 1
        require(known, "broadcast", "size", "must be an integer from 1", size, PAGE)
        shape, strides = list(self.shape), list(self._strides)
        shape[dim], strides[dim] = size, 0
        return self._view(shape, strides)

    def expand_dim(self: T, dim: int) -> T:
        """Insert a dimension of one element."""
        if self._storage.on_chip or self.is_indirect():
            require(dim > 0, "expand_dim", "dim", "must not be the partition dimension", dim, PAGE)
        shape, strides = list(self.shape), list(self._strides)
        shape.insert(dim, 1)
        strides.insert(dim, 0)
        return self._view(shape, strides)

    def squeeze_dim(self: T, dim: int) -> T:
        """Remove a dimension of one element."""
        self._dimension("squeeze_dim", dim)
        require(
            self.shape[dim] == 1,
            "squeeze_dim",
            self.name,
            f"must have one element in dimension {dim}",
            self.shape[dim],
            PAGE,
        )
        return self.select(dim, 0)

    def flatten_dims(self: T, start_dim: int, end_dim: int) -> T:
        """Merge dimensions that are contiguous in memory."""
        self._dimension("flatten_dims", start_dim)
        self._need_dimension("flatten_dims", "end_dim", end_dim, least=start_dim)
        shape, strides = list(self.shape), list(self._strides)
        size = shape[end_dim]
        for d in range(end_dim - 1, start_dim - 1, -1):
            require(
                strides[d] == strides[d + 1] * shape[d + 1],
                "flatten_dims",
                self.name,
                "must be contiguous over these dimensions",
                self.get_pattern(),
                PAGE,
            )
            size *= shape[d]
        shape[start_dim : end_dim + 1] = [size]
        strides[start_dim : end_dim + 1] = [strides[end_dim]]
        return self._view(shape, strides)

    def reshape_dim(self: T, dim: int, shape: Any) -> T:
        """Split a dimension; one of the new sizes may be -1."""
        self._dimension("reshape_dim", dim)
        known = isinstance(shape, (tuple, list))
        known = known and all(is_integer(s) and (s >= 1 or s == -1) for s in shape)
        limit = "must be a tuple of integers from 1, or -1"
        require(known, "reshape_dim", "shape", limit, shape, PAGE)
        sizes = list(shape)
        if -1 in sizes:
            rest = math.prod([s for s in sizes if s != -1])
            sizes[sizes.index(-1)] = self.shape[dim] // rest
        require(
            math.prod(sizes) == self.shape[dim],
            "reshape_dim",
            "shape",
            f"must have {self.shape[dim]} elements",
            shape,
            PAGE,
        )
        inner = [s * self._strides[dim] for s in row_major(tuple(sizes))]
        new_shape, strides = list(self.shape), list(self._strides)
        new_shape[dim : dim + 1] = sizes
        strides[dim : dim + 1] = inner
        return self._view(new_shape, strides)

    def reshape(self: T, shape: Any) -> T:
        """Return a contiguous tensor in another shape; on the chip the partitions stay."""
        known = isinstance(shape, (tuple, list)) and all(is_integer(n) and n >= 1 for n in shape)
        require(known, "reshape", "shape", "must be a tuple of integers from 1", shape, PAGE)
        shape = tuple(shape)
        require(
            math.prod(shape) == self.size,
            "reshape",
            self.name,
            f"must keep its {self.size} elements",
            shape,
            PAGE,
        )
        require(
            self.is_contiguous(),
            "reshape",
            self.name,
            "must be contiguous",
            self.get_pattern(),
            PAGE,
        )
        strides = row_major(shape)
        if self._storage.on_chip or self.is_indirect():
            require(
                shape[0] == self.shape[0],
                "reshape",
                self.name,
                f"must keep its {self.shape[0]} partitions",
                shape,
                PAGE,
            )
            strides = (self._strides[0], *strides[1:])
        return self._view(shape, strides)

    def view(self: T, dtype: Any) -> T:
        """Read the same bits as another dtype."""
        new = name_of(dtype)
        old_size, new_size = self.itemsize, NUMPY[new].itemsize
        require(
            self.ndim > 0 and self._strides[-1] == 1 and not self.is_indirect(),
            "view",
            self.name,
            "must be direct, with a contiguous last dimension",
            self.get_pattern(),
            PAGE,
        )
        last = self.shape[-1] * old_size
        places = [*self._strides[:-1], self._offset]
        require(
            last % new_size == 0 and all(s * old_size % new_size == 0 for s in places),
            "view",
            self.name,
            f"must divide into elements of {new_size} bytes",
            self.shape,
            PAGE,
        )
        strides = [s * old_size // new_size for s in self._strides[:-1]] + [1]
        shape = (*self.shape[:-1], last // new_size)
        offset = self._offset * old_size // new_size
        return type(self)(self._storage, shape, tuple(strides), offset, new)

    def reinterpret_cast(self: T, dtype: Any) -> T:
        """Read the same bits as another dtype: ``view``."""
        return self.view(dtype)

    def rearrange(self: T, src_pattern: Any, dst_pattern: Any, fixed_sizes: Any = None) -> T:
        """Split, reorder and merge dimensions by name; a tuple of names is one dimension."""
        sizes, view = dict(fixed_sizes or {}), self
        names: list[str] = []
        groups = [(g,) if isinstance(g, str) else tuple(g) for g in src_pattern]
        require(
            len(groups) == self.ndim,
            "rearrange",
            "src_pattern",
            f"must have {self.ndim} dimensions",
            src_pattern,
            PAGE,
        )
        for group in groups:
            if len(group) > 1:
                view = view.reshape_dim(len(names), [sizes.get(n, -1) for n in group])
            names += group
        wanted = [(g,) if isinstance(g, str) else tuple(g) for g in dst_pattern]
        order = [n for group in wanted for n in group]
        require(
            sorted(order) == sorted(names),
            "rearrange",
            "dst_pattern",
            f"must have the names {', '.join(names)}",
            dst_pattern,
            PAGE,
        )
        view = view.permute([names.index(n) for n in order])
        for dim, group in enumerate(wanted):
            if len(group) > 1:
                view = view.flatten_dims(dim, dim + len(group) - 1)
        return view

    # questions

    def get_pattern(self) -> list[list[int]]:
        """Return the access pattern, ``[[stride, count], ...]``."""
        return [[s, n] for s, n in zip(self._strides, self.shape, strict=True)]

    def is_indirect(self) -> bool:
        """Return whether a run-time offset is part of the view."""
        return self.indirection is not None

    def is_contiguous(self) -> bool:
        """Return whether the elements lie in row-major order; on the chip within a partition."""
        expected = 1
        first = 1 if self._storage.on_chip or self.is_indirect() else 0
        for d in range(self.ndim - 1, first - 1, -1):
            if self.shape[d] != 1 and self._strides[d] != expected:
                return False
            expected *= self.shape[d]
        return True

    @property
    def free_size(self) -> int:
        """Elements per partition."""
        return math.prod(self.shape[1:]) if self.shape[0] else 0

    @property
    def partition_step(self) -> int:
        """Elements of the view's dtype from a partition to the next."""
        step: int = self._storage.partition * self._storage.itemsize // self.itemsize
        return step

    @property
    def start_partition(self) -> int:
        """The first partition of a view on the chip."""
        per = self.partition_step
        base = self._storage.address[0] if self._storage.address is not None else 0
        return base + (self._offset // per if per else 0)


def _from_end(index: Any, size: int) -> Any:
    """Return an index counted from the start; negative ones count from the end."""
    return index + size if is_integer(index) and index < 0 else index


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
