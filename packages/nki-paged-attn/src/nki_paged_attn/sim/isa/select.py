"""Choosing between values, and patterns of indices: masks without index tiles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..calls import named
from ..dtypes import FLOATS, NUMPY, Array, convert, from_fp32
from ..errors import is_integer, is_number, require
from ..memory.access import (
    check_same_size,
    check_tile,
    check_vector,
    read,
    read_raw,
    scalar_or_vector,
    write,
)
from ..memory.machine import machine
from ..memory.tensor import NkiTensor, pairs
from ..ops import OPS, need_op
from .accumulation import accumulate, check_reduction
from .engines import both_in_psum, log
from .enums import reduce_cmd as Command

FP32_MIN = -3.4028234663852886e38
COMPARISONS = ("equal", "less", "less_equal", "greater", "greater_equal")


@named("nisa")
def range_select(
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Any,
    comp_op1: Any,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: Command = Command.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Any = OPS["maximum"],
    range_start: int = 0,
    on_false_value: float = FP32_MIN,
    name: str | None = None,
) -> None:
    """Keep elements whose index is within their row's bounds; may return the row's maximum."""
    call, page = "nisa.range_select", "nki.isa.range_select"
    target = machine().target
    require(target.has_range_select, call, "target", "must be trn2 or newer", target.name, page)
    check_tile(call, "dst", dst)
    check_tile(call, "on_true_tile", on_true_tile)
    check_same_size(call, "dst", dst, on_true_tile)
    parts = on_true_tile.shape[0]
    require(
        "float" in on_true_tile.dtype,
        call,
        "on_true_tile",
        "must be of floats",
        on_true_tile.dtype,
        page,
    )
    for operand, bound in (("bound0", bound0), ("bound1", bound1)):
        check_vector(call, operand, bound, parts)
        require(bound.dtype == "float32", call, operand, "must be float32", bound.dtype, page)
    for operand, op in (("comp_op0", comp_op0), ("comp_op1", comp_op1)):
        found = need_op(call, operand, op)
        require(
            found.name in COMPARISONS,
            call,
            operand,
            f"must be one of {', '.join(COMPARISONS)}",
            found.name,
            page,
        )
    require(
        np.float32(on_false_value) == np.float32(FP32_MIN),
        call,
        "on_false_value",
        f"must be {FP32_MIN:.8g}",
        on_false_value,
        page,
    )
    require(
        need_op(call, "reduce_op", reduce_op).name == "maximum",
        call,
        "reduce_op",
        "must be nl.maximum",
        reduce_op.name,
        page,
    )
    require(
        is_integer(range_start) and 0 <= range_start <= 2**24 - on_true_tile.free_size,
        call,
        "range_start",
        "must be from 0, and plus the free size stay within 2**24",
        range_start,
        page,
    )
    reduce_cmd = check_reduction(call, reduce_cmd, reduce_res, parts)
    x = read(call, "on_true_tile", on_true_tile)
    b0, b1 = read(call, "bound0", bound0), read(call, "bound1", bound1)
    value: Array | None = None
    row: Array | None = None
    if x is not None and b0 is not None and b1 is not None:
        flat = x.reshape(parts, -1)
        index = np.arange(range_start, range_start + flat.shape[1], dtype=np.float32)
        seen = comp_op0.binary(index, b0.reshape(parts, 1)) != 0
        seen &= comp_op1.binary(index, b1.reshape(parts, 1)) != 0
        value = np.where(seen, flat, np.float32(FP32_MIN))
        row = value.max(axis=1)
    top = accumulate(call, reduce_cmd, row, parts, np.maximum, -np.inf)
    with np.errstate(over="ignore"):
        write(call, dst, value)
    if reduce_res is not None:
        write(call, reduce_res, top)
    log(
        "range_select",
        "vector",
        dst,
        (on_true_tile, bound0, bound1),
        on_true_tile.free_size,
        also=reduce_res,
    )


@named("nisa")
def select_reduce(
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: Any,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Command = Command.idle,
    reduce_op: Any = OPS["maximum"],
    reverse_pred: bool = False,
    name: str | None = None,
) -> None:
    """Choose by a predicate of small integers; may return the row's maximum."""
    call, page = "nisa.select_reduce", "nki.isa.select_reduce"
    for operand, tile in (("dst", dst), ("predicate", predicate), ("on_true", on_true)):
        check_tile(call, operand, tile)
    check_same_size(call, "dst", dst, on_true)
    check_same_size(call, "predicate", predicate, on_true)
    both_in_psum(call, on_true, predicate, "on_true and predicate")
    require(on_true.dtype in FLOATS, call, "on_true", "must be of floats", on_true.dtype, page)
    require(
        predicate.dtype in ("int8", "uint8", "int16", "uint16"),
        call,
        "predicate",
        "must be int8, uint8, int16 or uint16",
        predicate.dtype,
        page,
    )
    require(
        need_op(call, "reduce_op", reduce_op).name == "maximum",
        call,
        "reduce_op",
        "must be nl.maximum",
        reduce_op.name,
        page,
    )
    other: Any
    other, also = scalar_or_vector(call, "on_false", on_false, on_true)
    reduce_cmd = check_reduction(call, reduce_cmd, reduce_res, on_true.shape[0])
    if reduce_res is not None:
        require(
            "float" in reduce_res.dtype,
            call,
            "reduce_res",
            "must be of floats",
            reduce_res.dtype,
            page,
        )
    x, p = read(call, "on_true", on_true), read_raw(call, "predicate", predicate)
    value: Array | None = None
    row: Array | None = None
    if x is not None and p is not None:
        chosen = (p.reshape(x.shape) != 0) != reverse_pred
        value = np.where(chosen, x, other).astype(np.float32, copy=False)
        row = value.reshape(x.shape[0], -1).max(axis=1)
    top = accumulate(call, reduce_cmd, row, on_true.shape[0], np.maximum, -np.inf)
    write(call, dst, value)
    if reduce_res is not None:
        write(call, reduce_res, top)
    log(
        "select_reduce",
        "vector",
        dst,
        (predicate, on_true, *also),
        on_true.free_size,
        also=reduce_res,
    )


@named("nisa")
def tensor_copy_predicated(
    dst: NkiTensor,
    src: Any,
    predicate: NkiTensor,
    reverse_pred: bool = False,
    name: str | None = None,
) -> None:
    """Copy where a predicate holds; elsewhere ``dst`` is unchanged."""
    call, page = "nisa.tensor_copy_predicated", "nki.isa.tensor_copy_predicated"
    check_tile(call, "dst", dst)
    check_tile(call, "predicate", predicate)
    check_same_size(call, "predicate", predicate, dst)
    require(
        predicate.dtype in ("uint8", "uint16", "uint32"),
        call,
        "predicate",
        "must be uint8, uint16 or uint32",
        predicate.dtype,
        page,
    )
    reads = [predicate, dst]
    if isinstance(src, NkiTensor):
        check_tile(call, "src", src)
        check_same_size(call, "src", src, dst)
        require(
            src.dtype == dst.dtype,
            call,
            "src",
            f"must have dst's dtype, {dst.dtype}",
            src.dtype,
            page,
        )
        both_in_psum(call, src, predicate, "src and predicate")
        reads.append(src)
        new = read_raw(call, "src", src)
    else:
        require(is_number(src), call, "src", "must be a number or a tile", type(src).__name__, page)
        new = np.full(dst.shape, src, np.float32).astype(NUMPY[dst.dtype])
    old, p = read_raw(call, "dst", dst), read_raw(call, "predicate", predicate)
    value: Array | None = None
    if old is not None and p is not None and new is not None:
        value = np.where((p.reshape(old.shape) != 0) != reverse_pred, new.reshape(old.shape), old)
    write(call, dst, value)
    in_sbuf = dst.buffer == "sbuf" and (not isinstance(src, NkiTensor) or src.buffer == "sbuf")
    log(
        "tensor_copy_predicated",
        "vector",
        dst,
        tuple(reads),
        dst.free_size,
        "both_sbuf" if in_sbuf else "",
    )


def _affine(call: str, dst: NkiTensor, pattern: Any, offset: int, channel_multiplier: int) -> Array:
    """Return ``offset + channel * channel_multiplier + sum of steps`` in int32."""
    page = f"nki.isa.{call.removeprefix('nisa.')}"
    steps, sizes = pairs(call, "pattern", pattern, page)
    require(1 <= len(sizes) <= 4, call, "pattern", "must have 1 to 4 dimensions", pattern, page)
    numbers = {"offset": offset, "channel_multiplier": channel_multiplier}
    for operand, x in numbers.items():
        require(is_integer(x), call, operand, "must be an integer", x, page)
    require(min(sizes) >= 1, call, "pattern", "must have counts of at least 1", pattern, page)
    count, free = math.prod(sizes), dst.free_size
    require(count == free, call, "pattern", f"must have {free} elements", count, page)
    ends = [
        s * (n - 1)
        for s, n in zip((*steps, channel_multiplier), (*sizes, dst.shape[0]), strict=True)
    ]
    low, high = offset + sum(min(e, 0) for e in ends), offset + sum(max(e, 0) for e in ends)
    fits = low >= -(2**31) and high < 2**31
    require(fits, call, "its numbers", "must fit int32", f"{low} to {high}", page)
    value = np.asarray(offset, np.int64)
    for step, size in zip(steps, sizes, strict=True):
        value = value[..., None] + step * np.arange(size, dtype=np.int64)
    channels = channel_multiplier * np.arange(dst.shape[0], dtype=np.int64)
    result: Array = (channels[:, None] + value.reshape(1, -1)).astype(np.int32)
    return result


@named("nisa")
def iota(
    dst: NkiTensor,
    pattern: Any,
    offset: int = 0,
    channel_multiplier: int = 0,
    name: str | None = None,
) -> None:
    """Write an affine pattern of indices, computed in int32."""
    call = "nisa.iota"
    check_tile(call, "dst", dst, psum=False)
    value = _affine(call, dst, pattern, offset, channel_multiplier)
    write(call, dst, from_fp32(value, NUMPY[dst.dtype]) if dst.array() is not None else None)
    log("iota", "gpsimd", dst, (), dst.free_size)


@named("nisa")
def affine_select(
    dst: NkiTensor,
    pattern: Any,
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Any = OPS["equal"],
    offset: int = 0,
    name: str | None = None,
) -> None:
    """Keep elements where the comparison of an affine pattern with 0 holds."""
    call, page = "nisa.affine_select", "nki.isa.affine_select"
    check_tile(call, "dst", dst, psum=False)
    check_tile(call, "on_true_tile", on_true_tile, psum=False)
    check_same_size(call, "dst", dst, on_true_tile)
    found = need_op(call, "cmp_op", cmp_op)
    require(
        found.name in (*COMPARISONS, "not_equal"),
        call,
        "cmp_op",
        "must be a comparison",
        found.name,
        page,
    )
    value = _affine(call, dst, pattern, offset, channel_multiplier)
    x = read_raw(call, "on_true_tile", on_true_tile)
    if x is not None:
        seen = found.binary(value, 0) != 0  # type: ignore[misc]
        kept = convert(x, NUMPY[dst.dtype]).reshape(seen.shape)
        other = from_fp32(np.full(1, on_false_value, np.float32), NUMPY[dst.dtype])
        x = np.where(seen, kept, other)
    write(call, dst, x)
    log("affine_select", "gpsimd", dst, (on_true_tile,), dst.free_size)
