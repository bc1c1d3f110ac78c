"""TensorE: matrix products and transposes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..calls import named
from ..dtypes import NUMPY, from_fp32
from ..errors import NotModelledError, require
from ..memory.access import (
    MOST_KNOWN,
    check_bank,
    check_enum,
    check_tile,
    mark,
    read,
    read_raw,
    write,
)
from ..memory.machine import machine
from ..memory.marks import BY_MATMUL, BY_OTHERS, UNWRITTEN
from ..memory.tensor import NkiTensor
from ..trace import Instruction
from .engines import strided
from .enums import engine as Engine
from .enums import matmul_perf_mode

MATMUL = "nki.isa.nc_matmul"
TRANSPOSE = "nki.isa.nc_transpose"
# products that passed the checks, by dtypes and shapes
_FOUND_RIGHT: set[tuple[Any, ...]] = set()


@named("nisa")
def nc_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple[int, ...] = (),
    tile_size: tuple[int, ...] = (),
    perf_mode: matmul_perf_mode = matmul_perf_mode.none,
    name: str | None = None,
) -> None:
    """``dst[M, N] = stationary[K, M].T @ moving[K, N]``, accumulated in fp32."""
    call = "nisa.nc_matmul"
    perf_mode = check_enum(call, "perf_mode", perf_mode, matmul_perf_mode)
    require(
        accumulate is None or isinstance(accumulate, bool),
        call,
        "accumulate",
        "must be True, False or None",
        repr(accumulate),
        MATMUL,
    )
    check_tile(call, "dst", dst, sbuf=False)
    check_tile(call, "stationary", stationary, psum=False)
    check_tile(call, "moving", moving, psum=False)
    if is_transpose:
        _check_transpose_mode(call, dst, stationary, moving)
        _turn(call, dst, stationary, by_tensor=True)
        return
    rows = _rows(call, stationary, moving, perf_mode)
    _check_matmul(call, dst, stationary, moving, rows)
    check_bank(call, dst)
    if tile_position or tile_size:
        _check_tiling(call, stationary, rows, tile_position, tile_size)
    overwrites = _accumulation(call, dst, accumulate)
    a, b = read(call, "stationary", stationary), read(call, "moving", moving)
    out = dst.array()
    if a is not None and b is not None and out is not None:
        depth = a.shape[0] * rows
        product = a.reshape(depth, -1).T @ b.reshape(depth, -1)
        product = product.reshape(dst.shape)
        if overwrites is True:
            out[...] = from_fp32(product, out.dtype)
        elif overwrites is False:
            out[...] = from_fp32(out.astype(np.float32) + product, out.dtype)
        else:
            old = np.where(overwrites, np.float32(0), out.astype(np.float32))
            out[...] = from_fp32(old + product, out.dtype)
    mark(call, dst, BY_MATMUL)
    machine().log(
        Instruction(
            "nc_matmul",
            "tensor",
            moving.free_size // rows,
            stationary.free_size // rows,
            (frozenset({"fp32"}) if moving.dtype == "float32" else frozenset())
            | strided(moving, dst),
            reads=(stationary.region(), moving.region()),
            writes=(dst.region(),),
        )
    )


def _check_transpose_mode(
    call: str, dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor
) -> None:
    """Check a transpose by a product with the identity, as which TensorE moves bits."""
    page = f"{MATMUL}, transpose mode"
    if stationary.itemsize == 1:
        raise NotModelledError(f"{call}: is_transpose of {stationary.dtype} [{page}]")
    parts, free = stationary.shape[0], stationary.free_size
    square = (moving.shape[0], moving.free_size) == (parts, parts)
    require(square, call, "moving", f"must be the identity, ({parts}, {parts})", moving.shape, page)
    x = read(call, "moving", moving)
    if x is not None:
        same = np.array_equal(x.reshape(parts, parts), np.eye(parts))
        require(same, call, "moving", "must be the identity", "another matrix", page)
    kind = stationary.dtype if machine().target.has_exact_transpose else "float32"
    require(dst.dtype == kind, call, "dst", f"must be {kind}", dst.dtype, page)
    require(
        (dst.shape[0], dst.free_size) == (free, parts),
        call,
        "dst",
        f"must be ({free}, {parts})",
        dst.shape,
        page,
    )
    check_bank(call, dst)


def _rows(call: str, stationary: NkiTensor, moving: NkiTensor, perf_mode: matmul_perf_mode) -> int:
    """Return how many rows of the contraction a partition holds: two in double_row."""
    if perf_mode == matmul_perf_mode.none:
        return 1
    target, page = machine().target, f"{MATMUL}, performance mode"
    require(target.generation >= 3, call, "perf_mode", "needs trn2 or newer", target.name, page)
    for operand, x in (("stationary", stationary), ("moving", moving)):
        require(
            x.dtype.startswith("float8") and x.ndim == 3 and x.shape[1] == 2,
            call,
            operand,
            "must be [partitions, 2, free] in FP8 for double_row",
            f"{x.dtype} {x.shape}",
            page,
        )
    return 2


def _check_matmul(
    call: str, dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor, rows: int
) -> None:
    target = machine().target
    known = (
        target.name,
        rows,
        *((x.dtype, x.shape) for x in (dst, stationary, moving)),
    )
    if known in _FOUND_RIGHT:
        return
    wide, tall = moving.free_size // rows, stationary.free_size // rows
    for operand, x in (("stationary", stationary), ("moving", moving)):
        require(
            x.dtype in target.matmul_dtypes,
            call,
            operand,
            f"must be one of {', '.join(sorted(target.matmul_dtypes))} on {target.name}",
            x.dtype,
            f"{MATMUL}, data types",
        )
    pair = {stationary.dtype, moving.dtype}
    require(
        pair == {"float32"} or "float32" not in pair,
        call,
        "stationary and moving",
        "must both be float32 if one is",
        f"{stationary.dtype} and {moving.dtype}",
        f"{MATMUL}, data types",
    )
    require(
        not pair >= {"float8_e4m3", "float8_e4m3fn"},
        call,
        "stationary and moving",
        "must not mix the two forms of e4m3",
        f"{stationary.dtype} and {moving.dtype}",
        f"{MATMUL}, data types",
    )
    require(
        dst.dtype in target.moving_free,
        call,
        "dst",
        f"must be {' or '.join(target.moving_free)} on {target.name}",
        dst.dtype,
        f"{MATMUL}, data types",
    )
    require(
        stationary.shape[0] == moving.shape[0],
        call,
        "stationary and moving",
        "must have the same partitions, the contraction",
        f"{stationary.shape[0]} and {moving.shape[0]}",
        f"{MATMUL}, layout",
    )
    require(
        tall <= target.stationary_free,
        call,
        "stationary",
        f"may have a free size of at most {target.stationary_free}",
        tall,
        f"{MATMUL}, tile size",
    )
    most = target.moving_free[dst.dtype]
    require(
        wide <= most,
        call,
        "moving",
        f"may have a free size of at most {most} on {target.name}",
        wide,
        f"{MATMUL}, tile size",
    )
    require(
        (dst.shape[0], dst.free_size) == (tall, wide),
        call,
        "dst",
        f"must be ({tall}, {wide})",
        dst.shape,
        f"{MATMUL}, layout",
    )
    if len(_FOUND_RIGHT) >= MOST_KNOWN:
        _FOUND_RIGHT.clear()
    _FOUND_RIGHT.add(known)


def _check_tiling(
    call: str,
    stationary: NkiTensor,
    rows: int,
    position: tuple[int, ...],
    size: tuple[int, ...],
) -> None:
    """Check the part of the array of 128 x 128 that a product runs on."""
    target = machine().target
    sides = (128, *target.row_tiles)
    page = f"{MATMUL}, tiling mode"
    require(
        all(isinstance(x, (tuple, list)) and len(x) == 2 for x in (position, size)),
        call,
        "tile_position and tile_size",
        "must both be set, to two numbers each",
        (position, size),
        page,
    )
    require(
        size[0] in sides and size[1] in sides,
        call,
        "tile_size",
        f"must be two of {', '.join(map(str, sides))} on {target.name}",
        size,
        page,
    )
    require(
        all(p in range(0, 128, s) for p, s in zip(position, size, strict=True)),
        call,
        "tile_position",
        f"must be multiples of {size[0]} and {size[1]} below 128",
        position,
        page,
    )
    require(
        rows == 1 or size[1] == 128,
        call,
        "tile_size",
        "must have 128 columns with double_row",
        size,
        page,
    )
    require(
        stationary.free_size // rows <= size[1],
        call,
        "stationary",
        f"may have a free size of at most {size[1]} in this tile",
        stationary.free_size // rows,
        page,
    )
    require(
        stationary.shape[0] <= size[0],
        call,
        "stationary",
        f"may have at most {size[0]} partitions in this tile",
        stationary.shape[0],
        page,
    )


def _accumulation(call: str, dst: NkiTensor, accumulate: bool | None) -> Any:
    """Return True to overwrite, False to add, or a mask of elements to overwrite."""
    if accumulate is False:
        return True
    state = dst._storage.state
    marks = state.of(dst) if state is not None else np.full((1, 1), BY_MATMUL)
    if accumulate is None:
        first = (marks != BY_MATMUL).any(axis=-1)
        return True if first.all() else first if first.any() else False
    page = f"{MATMUL}, accumulation mode"
    require(
        not (marks == UNWRITTEN).any(),
        call,
        "dst",
        "must hold what a matmul wrote before accumulate=True adds to it",
        "unwritten PSUM",
        page,
    )
    require(
        machine().target.accumulates_on_memset or not (marks == BY_OTHERS).any(),
        call,
        "dst",
        "must hold what a matmul wrote before accumulate=True adds to it",
        "PSUM that another engine wrote",
        page,
    )
    return False


@named("nisa")
def nc_transpose(
    dst: NkiTensor, data: NkiTensor, engine: Engine = Engine.unknown, name: str | None = None
) -> None:
    """Exchange partitions and free elements; free dimensions count as one."""
    call = "nisa.nc_transpose"
    engine = check_enum(call, "engine", engine, Engine)
    check_tile(call, "dst", dst)
    check_tile(call, "data", data)
    require(
        dst.dtype == data.dtype,
        call,
        "dst",
        f"must have data's dtype, {data.dtype}",
        dst.dtype,
        f"{TRANSPOSE}, data types",
    )
    parts, free = data.shape[0], data.free_size
    by_tensor = engine == Engine.tensor or (
        engine == Engine.unknown and not (parts <= 32 and free <= 32)
    )
    require(
        engine in (Engine.tensor, Engine.vector, Engine.unknown),
        call,
        "engine",
        "must be tensor or vector",
        engine.name,
        TRANSPOSE,
    )
    side = 128 if by_tensor else 32
    require(
        parts <= side and free <= side,
        call,
        "data",
        f"may be at most {side} x {side}",
        (parts, free),
        f"{TRANSPOSE}, tile size",
    )
    if by_tensor:
        check_tile(call, "data", data, psum=False)
        check_tile(call, "dst", dst, sbuf=False)
    require(
        (dst.shape[0], dst.free_size) == (free, parts),
        call,
        "dst",
        f"must be ({free}, {parts})",
        dst.shape,
        f"{TRANSPOSE}, layout",
    )
    if by_tensor:
        check_bank(call, dst)
    _turn(call, dst, data, by_tensor=by_tensor)


def _turn(call: str, dst: NkiTensor, data: NkiTensor, *, by_tensor: bool) -> None:
    """Write a tile with its partitions and free elements exchanged, and log it."""
    parts, free = data.shape[0], data.free_size
    x = read_raw(call, "data", data)
    if x is not None:
        x = x.reshape(parts, free)
        if by_tensor and not machine().target.has_exact_transpose:
            # a product with the identity, in which NaN and Inf spread to their neighbours
            wide = x.astype(np.float32)
            if not np.isfinite(wide).all():
                x = from_fp32(np.eye(parts, dtype=np.float32).T @ wide, NUMPY[dst.dtype])
        x = x.T
    write(call, dst, x)
    machine().log(
        Instruction(
            "nc_transpose",
            "tensor" if by_tensor else "vector",
            free,
            parts,
            (frozenset({"fp32"}) if data.itemsize == 4 else frozenset()) | strided(data, dst),
            reads=(data.region(),),
            writes=(dst.region(),),
        )
    )
