"""Reading and writing operands: where they lie, whether they were written, and how they round."""

from __future__ import annotations

import warnings
from enum import Enum
from typing import Any, TypeVar

import numpy as np

from ..dtypes import NUMPY, Array, from_fp32, to_fp32
from ..errors import NkiValidationError, UnwrittenError, is_integer, require
from ..lnc import LNC
from .machine import machine
from .marks import BY_OTHERS, READ, UNWRITTEN, WROTE, WROTE_BOTH
from .tensor import AP_PAGE, MAX_COUNT, MAX_DIMS, MAX_FREE_DIMS, NkiTensor
from .views import PAGE

ARCH = "nki/guides/architecture"
E = TypeVar("E", bound=Enum)
# patterns of tiles that passed the checks: a kernel has few, and runs each many times
MOST_KNOWN = 2**14
_FOUND_RIGHT: set[tuple[tuple[int, ...], tuple[int, ...], int, int]] = set()


def check_tensor(operation: str, operand: str, x: object, *buffers: str) -> NkiTensor:
    """Check that an operand is a tensor in one of some memories."""
    require(isinstance(x, NkiTensor), operation, operand, "must be a tensor", x, "nki.tensor")
    tensor: NkiTensor = x  # type: ignore[assignment]
    storage, state = tensor._storage, machine()
    # each program has its own tiles; the logical core shares HBM
    owner: Any = storage.memory
    if (owner is not state) if storage.on_chip else (owner.core is not state.core):
        raise NkiValidationError(
            operation,
            operand,
            f"{tensor.name} must be a tensor of this program and run",
            "one of another",
            LNC,
        )
    made = storage.iteration
    if made is not None and made.is_over:
        # the body is traced once: the tile is not there in the next iteration or after the loop
        raise NkiValidationError(
            operation,
            operand,
            f"{tensor.name} must not outlive its iteration; carry state in a tensor from before",
            "a tensor that an earlier iteration of a loop of the device made",
            "nki.language.fori_loop",
        )
    if tensor.buffer not in buffers:
        raise NkiValidationError(
            operation,
            operand,
            f"must be in {' or '.join(b.upper() for b in buffers)}",
            tensor.buffer,
            f"nki.isa.{operation.removeprefix('nisa.')}, memory types",
        )
    return tensor


def check_enum(operation: str, operand: str, x: object, kind: type[E]) -> E:
    """Return an option as a member of its enumeration; it may be the number of one."""
    if isinstance(x, kind):
        return x
    found = {m.value: m for m in kind}.get(x) if is_integer(x) else None
    require(
        found is not None,
        operation,
        operand,
        f"must be one of nisa.{kind.__name__}",
        repr(x),
        f"nki.isa.{kind.__name__}",
    )
    return found  # type: ignore[return-value]


def check_tile(
    operation: str,
    operand: str,
    x: object,
    *,
    psum: bool = True,
    sbuf: bool = True,
    free_dims: int = MAX_FREE_DIMS,
) -> NkiTensor:
    """Check that an operand is a tile that an engine can reach, by the rules of partitions."""
    buffers = (["sbuf"] if sbuf else []) + (["psum"] if psum else [])
    tile = check_tensor(operation, operand, x, *buffers)
    require(
        not tile.is_indirect(),
        operation,
        operand,
        "must not be indirect",
        "indirect",
        "nki.isa.dma_copy, indirect addressing",
    )
    start = tile.start_partition
    known = (tile.shape, tile._strides, start, tile.partition_step)
    if known in _FOUND_RIGHT:
        return tile
    check_pattern(operation, operand, tile)
    dims = len(_free_sizes(tile))
    require(
        dims <= free_dims,
        operation,
        operand,
        f"may have at most {free_dims} free dimensions",
        dims,
        f"{AP_PAGE}, hardware capability",
    )
    count = tile.shape[0]
    if start:
        step = 128 if count > 64 else 64 if count > 32 else 32
        require(
            start % step == 0,
            operation,
            operand,
            f"of {count} partitions must start at a multiple of {step}",
            start,
            f"{ARCH}, start partition",
        )
    if len(_FOUND_RIGHT) >= MOST_KNOWN:
        _FOUND_RIGHT.clear()
    if dims <= MAX_FREE_DIMS:
        _FOUND_RIGHT.add(known)
    return tile


def _free_sizes(tile: NkiTensor) -> list[int]:
    """Return the free dimensions of an access pattern: contiguous ones are one."""
    sizes: list[int] = []
    step = None
    for stride, size in zip(tile._strides[:0:-1], tile.shape[:0:-1], strict=True):
        if size == 1:
            continue
        if step == stride:
            sizes[-1] *= size
        else:
            sizes.append(size)
        step = stride * size
    return sizes


def check_pattern(operation: str, operand: str, tile: NkiTensor) -> None:
    """Check the access pattern of a tile; its limits also apply to DMA."""
    require(
        2 <= tile.ndim <= MAX_DIMS,
        operation,
        operand,
        f"must have 2 to {MAX_DIMS} dimensions, the partition first",
        tile.shape,
        ARCH,
    )
    most = max(tile.shape[1:])
    require(
        most <= MAX_COUNT,
        operation,
        operand,
        f"may have at most {MAX_COUNT} elements in a free dimension",
        most,
        f"{ARCH}, 16-bit sizes of access patterns",
    )
    per = tile.partition_step
    require(
        tile.shape[0] == 1 or tile._strides[0] == per,
        operation,
        operand,
        "must take partitions one after the other, without holes",
        f"every {tile._strides[0] // per if per else 0}",
        PAGE,
    )


def check_bank(operation: str, dst: NkiTensor) -> None:
    """Check where TensorE writes: one bank of PSUM, from an aligned byte on."""
    target = machine().target
    _, start, end = dst.region()
    page = f"nki.isa.{operation.removeprefix('nisa.')}"
    align, bank = target.psum_align, target.psum_bank_bytes
    require(
        start % align == 0,
        operation,
        "dst",
        f"must start at a multiple of {align} bytes of PSUM",
        start,
        "nki.language.tile_size, psum_min_align",
    )
    require(
        start // bank == (end - 1) // bank or target.has_wide_matmul,
        operation,
        "dst",
        f"must lie in a single PSUM bank of {bank} bytes",
        f"bytes {start} to {end}",
        f"{page}, memory types",
    )


def check_same_size(operation: str, operand: str, x: NkiTensor, like: NkiTensor) -> None:
    """Check that two tiles have the same partitions and elements per partition."""
    if x.shape == like.shape:
        return
    require(
        (x.shape[0], x.free_size) == (like.shape[0], like.free_size),
        operation,
        operand,
        f"must have {like.shape[0]} partitions of {like.free_size} elements",
        f"{x.shape[0]} of {x.free_size}",
        f"nki.isa.{operation.removeprefix('nisa.')}, tile size",
    )


def check_vector(operation: str, operand: str, x: object, partitions: int) -> NkiTensor:
    """Check a tile with one element per partition."""
    tile = check_tile(operation, operand, x)
    require(
        (tile.shape[0], tile.free_size) == (partitions, 1),
        operation,
        operand,
        f"must be ({partitions}, 1)",
        tile.shape,
        f"nki.isa.{operation.removeprefix('nisa.')}",
    )
    return tile


def note_read(operation: str, operand: str, x: NkiTensor, places: Array | None = None) -> None:
    """Check, before a read, that the memory was written, and by no other program.

    Args:
        places: elements of the storage, if other than the view's.
    """
    state, traffic, found = x._storage.state, x._storage.traffic, machine()
    if x._storage.lost:
        _, start, end = x.region()
        lost = [by for a, b, by in x._storage.lost if a < end and start < b]
        require(
            not lost,
            operation,
            operand,
            f"{x.name} must still hold what was written to its address",
            f"what {lost[0]} wrote there" if lost else "",
            "nki.language.ndarray, address",
        )
    if state is not None and found.strict:
        marks = state.of(x) if places is None else state.at(x, places)
        missing = (marks == UNWRITTEN).any(axis=-1)
        if missing.any():
            raise UnwrittenError(
                operation,
                operand,
                f"{x.name} must be written before it is read",
                f"{int(missing.sum())} unwritten elements",
                "nki.language.ndarray: contents are undefined",
            )
    if traffic is not None:
        marks = traffic.of(x) if places is None else traffic.at(x, places)
        require(
            not ((marks & WROTE_BOTH) == WROTE[1 - found.program]).any(),
            operation,
            operand,
            f"{x.name}: programs of a logical core must not read what the other writes",
            "an element that the other program wrote",
            LNC,
        )
        traffic.put(x, places, READ[found.program], keep=True)


def read_raw(operation: str, operand: str, x: NkiTensor) -> Array | None:
    """Return the elements of an operand; None if nothing is computed."""
    if not machine().execute:
        return None
    note_read(operation, operand, x)
    return x.array()


def read(operation: str, operand: str, x: NkiTensor) -> Array | None:
    """Return the elements of an operand in fp32."""
    raw = read_raw(operation, operand, x)
    return None if raw is None else to_fp32(raw)


def mark(
    operation: str,
    x: NkiTensor,
    by: int = BY_OTHERS,
    places: Array | None = None,
    operand: str = "dst",
    value: Array | None = None,
) -> None:
    """Note the writer of a tensor, or of elements of its storage, and check that it may write.

    Args:
        value: what is written; the programs of a logical core may both write the same.
    """
    storage, program = x._storage, machine().program
    first = 1 if x.is_indirect() else 0
    repeated = 0 in x._strides[first:] and any(
        n != 1 for s, n in zip(x._strides[first:], x.shape[first:], strict=True) if not s
    )
    require(
        not repeated,
        operation,
        operand,
        "must not write an element twice",
        x.get_pattern() if repeated else "",
        PAGE,
    )
    require(
        not storage.is_constant,
        operation,
        operand,
        f"{x.name} must be an array that may be written",
        "a read-only one",
        "nki.simulate",
    )
    storage.is_changed = True
    if storage.address is not None:
        machine().overwrite(storage, *x.region()[1:])
    if storage.state is not None:
        storage.state.put(x, places, by, keep=False)
    if storage.traffic is not None:
        traffic = storage.traffic
        marks = traffic.of(x) if places is None else traffic.at(x, places)
        other = 1 - program
        wrote = (marks & WROTE[other]).any(axis=-1)
        if wrote.any() and (value is not None or not machine().execute):
            same = wrote & np.logical_not(_differs(x.array(), value))
            marks = np.where(same[..., None], 0, marks)
            if value is not None and same.any():
                warnings.warn(
                    f"{operation}: {operand} {x.name}: both programs of a logical core write the "
                    f"same values there [{LNC}]",
                    stacklevel=2,
                )
        for bit, what in ((WROTE[other], "wrote"), (READ[other], "read")):
            require(
                not (marks & bit).any(),
                operation,
                operand,
                f"{x.name}: programs of a logical core must write apart",
                f"an element that the other program {what}",
                LNC,
            )
        traffic.put(x, places, WROTE[program], keep=True)


def _differs(old: Array | None, new: Array | None) -> Any:
    """Return which elements a write changes; none if they are not known."""
    if old is None or new is None:
        return False
    bits = f"u{old.dtype.itemsize}"
    return np.ascontiguousarray(old).view(bits) != np.ascontiguousarray(new).view(bits)


def write(operation: str, x: NkiTensor, value: Array | None) -> None:
    """Round a result to its destination, in the destination's shape."""
    mark(operation, x)
    if value is None:
        # integers are kept without execution; this one is unknown from here on
        x._storage.data = None
        return
    destination = x.array()
    if destination is not None:
        rounded = from_fp32(value, NUMPY[x.dtype]) if value.dtype == np.float32 else value
        destination[...] = rounded.reshape(x.shape)


def scalar_or_vector(
    operation: str, operand: str, x: Any, data: NkiTensor
) -> tuple[Array | np.float32 | None, tuple[NkiTensor, ...]]:
    """Return a constant or a (partitions, 1) fp32 tile in a form that broadcasts over ``data``."""
    page = f"nki.isa.{operation.removeprefix('nisa.')}, data types"
    if isinstance(x, NkiTensor):
        check_vector(operation, operand, x, data.shape[0])
        require(x.dtype == "float32", operation, operand, "must be float32", x.dtype, page)
        value = read(operation, operand, x)
        if value is not None:
            value = value.reshape((data.shape[0],) + (1,) * (data.ndim - 1))
        return value, (x,)
    require(
        isinstance(x, (int, float, np.floating, np.integer)),
        operation,
        operand,
        "must be a number or a (partitions, 1) tile",
        type(x).__name__,
        page,
    )
    return np.float32(x), ()
