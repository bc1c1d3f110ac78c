"""Searches within each partition: where values are, and which elements are not 0."""

from __future__ import annotations

import numpy as np

from ..calls import named
from ..dtypes import Array
from ..errors import is_integer, is_number, require
from ..memory.access import check_same_size, check_tile, read, write
from ..memory.machine import machine
from ..memory.tensor import NkiTensor
from .engines import log

EIGHT = 8
# partitions of each core of GpSimd
CORE = 16


def _check_search(call: str, data: NkiTensor, vals: NkiTensor) -> None:
    page = f"nki.isa.{call.removeprefix('nisa.')}"
    check_tile(call, "data", data)
    check_tile(call, "vals", vals)
    size = data.free_size
    require(8 <= size <= 16384, call, "data", "must have 8 to 16384 elements", size, page)
    _check_eight(call, "vals", vals, data)


def _check_eight(call: str, operand: str, x: NkiTensor, data: NkiTensor) -> None:
    fits = (x.shape[0], x.free_size) == (data.shape[0], EIGHT)
    limit = f"must have {data.shape[0]} partitions of 8 elements"
    require(fits, call, operand, limit, x.shape, f"nki.isa.{call.removeprefix('nisa.')}")


def _check_index(call: str, operand: str, x: NkiTensor) -> None:
    page = f"nki.isa.{call.removeprefix('nisa.')}"
    require(
        x.dtype in ("uint16", "uint32"), call, operand, "must be uint16 or uint32", x.dtype, page
    )


def _find(data: Array, vals: Array, columns: range) -> Array:
    """Return the place of each value, equal values one after the other; -1 if there is none."""
    found = np.full(vals.shape, -1, np.int64)
    for row, (elements, wanted) in enumerate(zip(data, vals, strict=True)):
        taken: dict[float, int] = {}
        for column in columns:
            value = wanted[column]
            after = np.flatnonzero(elements == value)[taken.get(value, 0) :]
            taken[value] = taken.get(value, 0) + 1
            if len(after):
                found[row, column] = after[0]
    return found


@named("nisa")
def nc_find_index8(
    dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None
) -> None:
    """Where each of eight values is in its partition; all bits set if it is nowhere."""
    call = "nisa.nc_find_index8"
    check_tile(call, "dst", dst)
    _check_search(call, data, vals)
    _check_eight(call, "dst", dst, data)
    _check_index(call, "dst", dst)
    x, wanted = read(call, "data", data), read(call, "vals", vals)
    result: Array | None = None
    if x is not None and wanted is not None:
        found = _find(x.reshape(len(x), -1), wanted.reshape(-1, EIGHT), range(EIGHT))
        result = found.astype(np.uint32 if dst.dtype == "uint32" else np.uint16)
    write(call, dst, result)
    log("nc_find_index8", "vector", dst, (data, vals), data.free_size)


@named("nisa")
def nc_match_replace8(
    dst: NkiTensor,
    data: NkiTensor,
    vals: NkiTensor,
    imm: float,
    dst_idx: NkiTensor | None = None,
    name: str | None = None,
) -> None:
    """Replace the first occurrence of each of eight values by ``imm``, and say where it was."""
    call, page = "nisa.nc_match_replace8", "nki.isa.nc_match_replace8"
    check_tile(call, "dst", dst)
    _check_search(call, data, vals)
    check_same_size(call, "dst", dst, data)
    require(is_number(imm), call, "imm", "must be a number", imm, page)
    if dst_idx is not None:
        check_tile(call, "dst_idx", dst_idx)
        _check_eight(call, "dst_idx", dst_idx, data)
        _check_index(call, "dst_idx", dst_idx)
    x, wanted = read(call, "data", data), read(call, "vals", vals)
    result: Array | None = None
    places: Array | None = None
    if x is not None and wanted is not None:
        result = x.reshape(len(x), -1).copy()
        # equal values from the last column to the first
        found = _find(result, wanted.reshape(-1, EIGHT), range(EIGHT - 1, -1, -1))
        rows, columns = np.nonzero(found >= 0)
        result[rows, found[rows, columns]] = imm
        places = found
    write(call, dst, result)
    if dst_idx is not None:
        kind = np.uint32 if dst_idx.dtype == "uint32" else np.uint16
        write(call, dst_idx, None if places is None else places.astype(kind))
    log("nc_match_replace8", "vector", dst, (data, vals), data.free_size, also=dst_idx)


@named("nisa")
def nonzero_with_count(
    dst: NkiTensor,
    src: NkiTensor,
    index_offset: int = 0,
    padding_val: int = -1,
    name: str | None = None,
) -> None:
    """Indices of elements other than 0, padding, and their count; of every 16th partition."""
    call, page = "nisa.nonzero_with_count", "nki.isa.nonzero_with_count"
    target = machine().target
    require(target.generation >= 3, call, "target", "must be trn2 or newer", target.name, page)
    check_tile(call, "dst", dst, psum=False)
    check_tile(call, "src", src, psum=False)
    require(
        src.dtype in ("float32", "int32"), call, "src", "must be float32 or int32", src.dtype, page
    )
    require(dst.dtype == "int32", call, "dst", "must be int32", dst.dtype, page)
    require(
        (dst.shape[0], dst.free_size) == (src.shape[0], src.free_size + 1),
        call,
        "dst",
        f"must have {src.shape[0]} partitions of {src.free_size + 1} elements",
        dst.shape,
        page,
    )
    for operand, x in (("index_offset", index_offset), ("padding_val", padding_val)):
        require(is_integer(x), call, operand, "must be an integer", x, page)
    for row in range(-src.start_partition % CORE, src.shape[0], CORE):
        # the other partitions are neither read nor written
        out, part = dst[row : row + 1], src[row : row + 1]
        elements = read(call, "src", part)
        result = None
        if elements is not None:
            found = np.flatnonzero(elements)
            result = np.full(dst.free_size, padding_val, np.int32)
            result[: len(found)] = found + index_offset
            result[-1] = len(found)
        write(call, out, result)
    log("nonzero_with_count", "gpsimd", dst, (src,), src.free_size)
