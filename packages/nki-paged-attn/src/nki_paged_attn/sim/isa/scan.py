"""Scans, statistics and sorts along the free dimensions, and moves among partitions."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..calls import named
from ..dtypes import Array
from ..errors import require
from ..memory.access import check_same_size, check_tile, check_vector, read, read_raw, write
from ..memory.tensor import NkiTensor
from ..ops import binary, need_op
from .elementwise import apply
from .engines import both_in_psum, log

QUADRANT = 32


@named("nisa")
def tensor_tensor_scan(
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """``r[i] = (data0[i] op0 r[i - 1]) op1 data1[i]`` along the free dimension, in fp32."""
    call, page = "nisa.tensor_tensor_scan", "nki.isa.tensor_tensor_scan"
    for operand, x in (("dst", dst), ("data0", data0), ("data1", data1)):
        check_tile(call, operand, x)
    check_same_size(call, "data1", data1, data0)
    check_same_size(call, "dst", dst, data0)
    both_in_psum(call, data0, data1, "data0 and data1")
    binary(call, "op0", op0), binary(call, "op1", op1)
    reads = [data0, data1]
    state: Any
    if isinstance(initial, NkiTensor):
        check_vector(call, "initial", initial, data0.shape[0])
        found = read(call, "initial", initial)
        state = None if found is None else found.reshape(-1)
        reads.append(initial)
    else:
        is_number = isinstance(initial, (int, float, np.floating, np.integer))
        require(is_number, call, "initial", "must be a number or a tile", initial, page)
        state = np.full(data0.shape[0], initial, np.float32)
    a, b = read(call, "data0", data0), read(call, "data1", data1)
    result: Array | None = None
    if a is not None and b is not None:
        a, b = a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1)
        result = np.empty(a.shape, np.float32)
        for i in range(a.shape[1]):
            # reversed: the element is the right operand of op0, the left one of op1
            state = apply(call, "op0", op0, a[:, i], state, reverse0)
            state = apply(call, "op1", op1, state, b[:, i], reverse1)
            result[:, i] = state
    write(call, dst, result)
    log("tensor_tensor_scan", "vector", dst, tuple(reads), data0.free_size)


@named("nisa")
def bn_stats(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """Count, mean and variance times count: of even elements, then of odd ones."""
    call, page = "nisa.bn_stats", "nki.isa.bn_stats"
    check_tile(call, "dst", dst)
    check_tile(call, "data", data)
    size = data.free_size
    require(size <= 512, call, "data", "may have at most 512 elements a partition", size, page)
    require(
        (dst.shape[0], dst.free_size) == (data.shape[0], 6),
        call,
        "dst",
        f"must have {data.shape[0]} partitions of 6 elements",
        dst.shape,
        page,
    )
    x = read(call, "data", data)
    if x is not None:
        flat = x.reshape(x.shape[0], -1)
        columns = []
        for part in (flat[:, ::2], flat[:, 1::2]):
            count = part.shape[1]
            mean = part.mean(axis=1, dtype=np.float32) if count else np.zeros(len(part))
            columns += [np.full(len(part), count), mean, ((part.T - mean) ** 2).sum(axis=0)]
        x = np.stack(columns, axis=1).astype(np.float32)
    write(call, dst, x)
    log("bn_stats", "vector", dst, (data,), size)


@named("nisa")
def bn_aggr(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """Mean and variance from the results of one or more ``bn_stats``."""
    call, page = "nisa.bn_aggr", "nki.isa.bn_aggr"
    check_tile(call, "dst", dst)
    check_tile(call, "data", data)
    size = data.free_size
    require(size % 3 == 0, call, "data", "must have threes of elements", size, page)
    require(
        (dst.shape[0], dst.free_size) == (data.shape[0], 2),
        call,
        "dst",
        f"must have {data.shape[0]} partitions of 2 elements",
        dst.shape,
        page,
    )
    x = read(call, "data", data)
    if x is not None:
        count, mean, spread = np.moveaxis(x.reshape(x.shape[0], -1, 3), 2, 0)
        total = count.sum(axis=1)
        centre = (count * mean).sum(axis=1) / total
        apart = count * (mean - centre[:, None]) ** 2
        variance = (spread + apart).sum(axis=1) / total
        x = np.stack([centre, variance], axis=1).astype(np.float32)
    write(call, dst, x)
    log("bn_aggr", "vector", dst, (data,), size)


@named("nisa")
def max8(dst: NkiTensor, src: NkiTensor, name: str | None = None) -> None:
    """The eight largest elements of each partition, the largest first."""
    call, page = "nisa.max8", "nki.isa.max8"
    check_tile(call, "dst", dst)
    check_tile(call, "src", src)
    size = src.free_size
    require(8 <= size <= 16384, call, "src", "must have 8 to 16384 elements", size, page)
    require(
        (dst.shape[0], dst.free_size) == (src.shape[0], 8),
        call,
        "dst",
        f"must have {src.shape[0]} partitions of 8 elements",
        dst.shape,
        page,
    )
    x = read(call, "src", src)
    if x is not None:
        x = -np.sort(-x.reshape(x.shape[0], -1), axis=1)[:, :8]
    write(call, dst, x)
    log("max8", "vector", dst, (src,), size)


@named("nisa")
def nc_n_gather(
    dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None
) -> None:
    """Take elements of each partition by the partition's own indices, on GpSimd."""
    call, page = "nisa.nc_n_gather", "nki.isa.nc_n_gather"
    for operand, tile in (("dst", dst), ("data", data), ("indices", indices)):
        check_tile(call, operand, tile, psum=False)
    require(indices.dtype == "uint32", call, "indices", "must be uint32", indices.dtype, page)
    require(dst.dtype == data.dtype, call, "dst", f"must be {data.dtype}", dst.dtype, page)
    check_same_size(call, "dst", dst, indices)
    x, where = read_raw(call, "data", data), read_raw(call, "indices", indices)
    if x is not None and where is not None:
        flat, at = x.reshape(x.shape[0], -1), where.reshape(where.shape[0], -1).astype(np.int64)
        size = flat.shape[1]
        require(at.max() < size, call, "an index", f"must be below {size}", int(at.max()), page)
        x = np.take_along_axis(flat, at, axis=1)
    write(call, dst, x)
    log("nc_n_gather", "gpsimd", dst, (data, indices), indices.free_size)


@named("nisa")
def nc_stream_shuffle(
    dst: NkiTensor, src: NkiTensor, shuffle_mask: Any, name: str | None = None
) -> None:
    """Move rows within quadrants of 32 partitions; 255 leaves a row of ``dst`` as it was."""
    call, page = "nisa.nc_stream_shuffle", "nki.isa.nc_stream_shuffle"
    check_tile(call, "dst", dst)
    check_tile(call, "src", src)
    size = dst.free_size
    limit = f"must have {src.free_size} elements a partition, as src"
    require(size == src.free_size, call, "dst", limit, size, page)
    active = -(-max(dst.shape[0], src.shape[0]) // QUADRANT) * QUADRANT
    step = {32: 32, 64: 64}.get(active, 128)
    for operand, tile in (("dst", dst), ("src", src)):
        start = tile.start_partition
        limit = f"must start at a multiple of {step}, where {active} partitions are active"
        require(start % step == 0, call, operand, limit, start, page)
    mask = list(shuffle_mask)
    require(
        len(mask) == QUADRANT and all(m == 255 or 0 <= m < QUADRANT for m in mask),
        call,
        "shuffle_mask",
        f"must be {QUADRANT} numbers below {QUADRANT}, or 255",
        mask,
        page,
    )
    require(dst.dtype == src.dtype, call, "dst", f"must be {src.dtype}", dst.dtype, page)
    old, x = dst.array(), read_raw(call, "src", src)
    if x is not None and old is not None:
        rows = old.copy().reshape(old.shape[0], -1)
        flat = x.reshape(x.shape[0], -1)
        for row in range(len(rows)):
            source = mask[row % QUADRANT]
            at = row - row % QUADRANT + source
            require(
                source == 255 or at < len(flat),
                call,
                "shuffle_mask",
                f"must name one of {len(flat)} partitions",
                at,
                page,
            )
            if source != 255:
                rows[row] = flat[at]
        x = rows
    write(call, dst, x)
    log("nc_stream_shuffle", "vector", dst, (src,), src.free_size)


@named("nisa")
def tensor_partition_reduce(
    dst: NkiTensor, op: Any, data: NkiTensor, name: str | None = None
) -> None:
    """Reduce over the partitions, to one partition; on GpSimd."""
    call, page = "nisa.tensor_partition_reduce", "nki.isa.tensor_partition_reduce"
    check_tile(call, "dst", dst, psum=False)
    check_tile(call, "data", data, psum=False)
    found = need_op(call, "op", op)
    allowed = ("add", "maximum", "bitwise_or", "bitwise_and")
    require(
        found.name in allowed, call, "op", f"must be one of {', '.join(allowed)}", found.name, page
    )
    require(
        (dst.shape[0], dst.free_size) == (1, data.free_size),
        call,
        "dst",
        f"must have 1 partition of {data.free_size} elements",
        dst.shape,
        page,
    )
    x = (read_raw if found.is_bitwise else read)(call, "data", data)
    write(call, dst, None if x is None else found.reduces(x, axis=0))  # type: ignore[misc]
    log("tensor_partition_reduce", "gpsimd", dst, (data,), data.free_size)
