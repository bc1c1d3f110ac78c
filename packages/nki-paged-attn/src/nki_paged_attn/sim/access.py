"""Reading and writing operands: where they lie, whether they were written, and how they round."""

from __future__ import annotations

from typing import Any

import numpy as np

from .dtypes import NUMPY, Array, from_fp32, to_fp32
from .errors import NkiValidationError, UnwrittenError, require
from .machine import BY_OTHERS, UNWRITTEN, machine
from .tensor import MAX_COUNT, MAX_DIMS, NkiTensor

ARCH = "nki/guides/architecture"


def check_tensor(operation: str, operand: str, x: object, *buffers: str) -> NkiTensor:
    """Check that an operand is a tensor in one of some memories."""
    require(isinstance(x, NkiTensor), operation, operand, "must be a tensor", x, "nki.tensor")
    tensor: NkiTensor = x  # type: ignore[assignment]
    if tensor.buffer not in buffers:
        raise NkiValidationError(
            operation, operand, f"must be in {' or '.join(b.upper() for b in buffers)}",
            tensor.buffer, f"nki.isa.{operation.removeprefix('nisa.')}, memory types",
        )  # fmt: skip
    return tensor


def check_tile(
    operation: str, operand: str, x: object, *, psum: bool = True, sbuf: bool = True
) -> NkiTensor:
    """Check that an operand is a tile that an engine can reach, by the rules of partitions."""
    buffers = (["sbuf"] if sbuf else []) + (["psum"] if psum else [])
    tile = check_tensor(operation, operand, x, *buffers)
    target = machine().target
    require(
        not tile.is_indirect(), operation, operand, "must not be indirect", "indirect",
        "nki.isa.dma_copy, indirect addressing",
    )  # fmt: skip
    require(
        2 <= tile.ndim <= MAX_DIMS, operation, operand,
        f"must have 2 to {MAX_DIMS} dimensions, the partition first", tile.shape, ARCH,
    )  # fmt: skip
    require(
        tile.shape[0] <= target.partitions, operation, operand,
        f"may have at most {target.partitions} partitions", tile.shape[0], ARCH,
    )  # fmt: skip
    require(
        tile.free_size <= MAX_COUNT, operation, operand,
        f"may have at most {MAX_COUNT} elements per partition", tile.free_size,
        "access patterns have 16-bit counts",
    )  # fmt: skip
    start, count = tile.start_partition, tile.shape[0]
    if start:
        step = 128 if count > 64 else 64 if count > 32 else 32
        require(
            start % step == 0, operation, operand,
            f"of {count} partitions must start at a multiple of {step}", start,
            f"{ARCH}, start partition",
        )  # fmt: skip
    return tile


def check_same_size(operation: str, operand: str, x: NkiTensor, like: NkiTensor) -> None:
    """Check that two tiles have the same partitions and elements per partition."""
    require(
        (x.shape[0], x.free_size) == (like.shape[0], like.free_size), operation, operand,
        f"must have {like.shape[0]} partitions of {like.free_size} elements",
        f"{x.shape[0]} of {x.free_size}", f"nki.isa.{operation.removeprefix('nisa.')}, tile size",
    )  # fmt: skip


def check_vector(operation: str, operand: str, x: object, partitions: int) -> NkiTensor:
    """Check a tile with one element per partition."""
    tile = check_tile(operation, operand, x)
    require(
        (tile.shape[0], tile.free_size) == (partitions, 1), operation, operand,
        f"must be ({partitions}, 1)", tile.shape, f"nki.isa.{operation.removeprefix('nisa.')}",
    )  # fmt: skip
    return tile


def check_written(operation: str, operand: str, x: NkiTensor) -> None:
    """In strict mode, check that something wrote all that is about to be read."""
    state = x._storage.state
    if state is None or not machine().strict:
        return
    marks = x.mask_of(state)
    if (marks == UNWRITTEN).any():
        raise UnwrittenError(
            operation, operand, f"{x.name} must be written before it is read",
            f"{int((marks == UNWRITTEN).sum())} unwritten elements",
            "nki.language.ndarray: contents are undefined",
        )  # fmt: skip


def read_raw(operation: str, operand: str, x: NkiTensor) -> Array | None:
    """Return the elements of an operand; None where nothing is computed."""
    if not machine().execute:
        return None
    check_written(operation, operand, x)
    return x.array()


def read(operation: str, operand: str, x: NkiTensor) -> Array | None:
    """Return the elements of an operand in fp32."""
    raw = read_raw(operation, operand, x)
    return None if raw is None else to_fp32(raw)


def mark(operation: str, x: NkiTensor, by: int = BY_OTHERS) -> None:
    """Note who wrote a tensor."""
    storage = x._storage
    if storage.state is not None:
        x.mask_of(storage.state)[...] = by
    if storage.owner is not None:
        owners = x.mask_of(storage.owner)
        program = machine().program
        other = (owners >= 0) & (owners != program)
        require(
            not other.any(), operation, "dst",
            f"{x.name}: programs of a logical core must write apart",
            "an element that the other program wrote", "nki/get-started/about/lnc",
        )  # fmt: skip
        owners[...] = program


def write(operation: str, x: NkiTensor, value: Array | None) -> None:
    """Round a result to its destination, in the destination's shape."""
    mark(operation, x)
    if value is None:
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
        isinstance(x, (int, float, np.floating, np.integer)), operation, operand,
        "must be a number or a (partitions, 1) tile", type(x).__name__, page,
    )  # fmt: skip
    return np.float32(x), ()
