"""VectorE and its neighbours: elementwise operators, reductions, copies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .access import (
    check_enum,
    check_same_size,
    check_tile,
    check_vector,
    read,
    read_raw,
    scalar_or_vector,
    write,
)
from .calls import named
from .dtypes import INTEGERS, NUMPY, Array, convert
from .enums import engine as Engine
from .enums import reduce_cmd as Command
from .errors import NotModelledError, require
from .machine import machine
from .ops import binary, need_op
from .tensor import NkiTensor
from .trace import Instruction

INT32 = {"int32", "uint32"}


def log(
    op: str,
    engine: str,
    dst: NkiTensor,
    reads: tuple[NkiTensor, ...],
    elements: int,
    *form: str,
    also: NkiTensor | None = None,
) -> None:
    """Log an instruction of one destination, and perhaps a reduction's result."""
    writes = (dst.region(),) if also is None else (dst.region(), also.region())
    machine().log(
        Instruction(
            op,
            engine,
            elements,
            form=frozenset(f for f in form if f),
            reads=tuple(r.region() for r in reads),
            writes=writes,
        )
    )


def pick(call: str, engine: Engine, default: str, *allowed: str) -> str:
    """Return the engine to run on, which must be one that the call allows."""
    page = f"nki.isa.{call.removeprefix('nisa.')}"
    check_enum(call, "engine", engine, Engine)
    if engine == Engine.unknown:
        return default
    require(
        engine.name in allowed, call, "engine", f"must be {' or '.join(allowed)}", engine.name, page
    )
    return engine.name


def keep_from_psum(call: str, engine: str, **tiles: NkiTensor) -> None:
    """GpSimd cannot reach PSUM."""
    if engine == "gpsimd":
        for operand, tile in tiles.items():
            require(
                tile.buffer != "psum",
                call,
                operand,
                "must be in SBUF for GpSimd",
                tile.buffer,
                "nki/guides/architecture, engines of a NeuronCore",
            )


def both_in_psum(call: str, first: NkiTensor, second: NkiTensor, what: str) -> None:
    """VectorE reads at most one of two inputs from PSUM."""
    require(
        not (first.buffer == "psum" and second.buffer == "psum"),
        call,
        what,
        "must not both be in PSUM",
        "psum and psum",
        f"nki.isa.{call.removeprefix('nisa.')}, memory types",
    )


@named("nisa")
def tensor_copy(
    dst: NkiTensor, src: NkiTensor, engine: Engine = Engine.unknown, name: str | None = None
) -> None:
    """Copy a tile; bit for bit where the dtype stays."""
    call = "nisa.tensor_copy"
    check_tile(call, "dst", dst)
    check_tile(call, "src", src)
    check_same_size(call, "dst", dst, src)
    chosen = pick(call, engine, "vector", "vector", "scalar", "gpsimd")
    target = machine().target
    require(
        chosen != "scalar" or target.has_scalar_copy,
        call,
        "engine",
        f"must not be scalar on {target.name}; use activation with nl.copy",
        "scalar",
        "nki.isa.tensor_copy",
    )
    keep_from_psum(call, chosen, dst=dst, src=src)
    x = read_raw(call, "src", src)
    write(call, dst, None if x is None else convert(x, NUMPY[dst.dtype]))
    log("tensor_copy", chosen, dst, (src,), src.free_size)


@named("nisa")
def memset(
    dst: NkiTensor, value: float, engine: Engine = Engine.unknown, name: str | None = None
) -> None:
    """Fill a tile with a constant: an int for integers, a float for floats."""
    call = "nisa.memset"
    check_tile(call, "dst", dst)
    chosen = pick(call, engine, "vector", "vector", "gpsimd")
    keep_from_psum(call, chosen, dst=dst)
    is_int = dst.dtype in INTEGERS
    family = (int, np.integer) if is_int else (float, np.floating)
    require(
        isinstance(value, family) and not isinstance(value, bool),
        call,
        "value",
        f"must be {'an int' if is_int else 'a float'} for {dst.dtype}",
        repr(value),
        "nki/migration, memset",
    )
    if is_int:
        info = np.iinfo(NUMPY[dst.dtype])
        require(
            info.min <= value <= info.max,
            call,
            "value",
            f"must be from {info.min} to {info.max} for {dst.dtype}",
            value,
            "nki.isa.memset",
        )
    filled: Array | None = None
    if dst.array() is not None:
        with np.errstate(over="ignore"):
            filled = np.full(dst.shape, value, NUMPY[dst.dtype])
    write(call, dst, filled)
    cheap = "cheap" if value == 0 and dst.dtype == "bfloat16" else ""
    log("memset", chosen, dst, (), dst.free_size, cheap)


@named("nisa")
def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Any,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """``dst = op(data1, data2)``; integers of 32 bits exactly, on GpSimd."""
    call = "nisa.tensor_tensor"
    tiles = (dst, data1, data2)
    for operand, x in zip(("dst", "data1", "data2"), tiles, strict=True):
        check_tile(call, operand, x)
    check_same_size(call, "data2", data2, data1)
    check_same_size(call, "dst", dst, data1)
    both_in_psum(call, data1, data2, "data1 and data2")
    found = need_op(call, "op", op)
    exact = all(x.dtype in INT32 for x in tiles)
    in_psum = any(x.buffer == "psum" for x in tiles)
    default = "gpsimd" if exact and not in_psum and not found.is_bitwise else "vector"
    allowed = ("vector",) if found.is_bitwise else ("vector", "gpsimd")
    chosen = pick(call, engine, default, *allowed)
    keep_from_psum(call, chosen, dst=dst, data1=data1, data2=data2)
    if found.is_bitwise:
        integers = all(x.dtype in INTEGERS for x in tiles)
        require(
            integers,
            call,
            "data1, data2 and dst",
            f"must be integers for {found.name}",
            [x.dtype for x in tiles],
            "nki.isa.tensor_tensor",
        )
    else:
        binary(call, "op", op)
    native = found.is_bitwise or (chosen == "gpsimd" and exact)
    get = read_raw if native else read
    a, b = get(call, "data1", data1), get(call, "data2", data2)
    if a is not None and b is not None:
        with np.errstate(all="ignore"):
            result = found.binary(a, b.reshape(a.shape))  # type: ignore[misc]
        write(call, dst, result.astype(NUMPY[dst.dtype]) if native else result)
    else:
        write(call, dst, None)
    one_psum = (data1.buffer == "psum") != (data2.buffer == "psum")
    narrow = all(x.dtype == "bfloat16" and x.is_contiguous() for x in tiles)
    cheap = one_psum or (narrow and found.name in ("add", "multiply", "subtract"))
    log("tensor_tensor", chosen, dst, (data1, data2), data1.free_size, "cheap" if cheap else "")


def _apply(call: str, operand: str, op: Any, x: Array, y: Any, reverse: bool) -> Array:
    function = binary(call, operand, op)
    with np.errstate(all="ignore"):
        result: Array = function(y, x) if reverse else function(x, y)
    return result.astype(np.float32, copy=False)


@named("nisa")
def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """``(data op0 operand0) op1 operand1`` with constants or (partitions, 1) tiles."""
    call = "nisa.tensor_scalar"
    check_tile(call, "dst", dst)
    check_tile(call, "data", data)
    check_same_size(call, "dst", dst, data)
    chosen = pick(call, engine, "vector", "vector", "scalar", "gpsimd")
    names = [need_op(call, "op0", op0).name]
    if op1 is not None:
        names.append(need_op(call, "op1", op1).name)
    require(
        chosen != "gpsimd" or names == ["rsqrt"],
        call,
        "engine",
        "may be gpsimd for rsqrt alone",
        names,
        "nki.isa.tensor_scalar",
    )
    if "rsqrt" in names:
        raise NotModelledError(f"{call}: rsqrt")
    if op0.is_bitwise or (op1 is not None and op1.is_bitwise):
        raise NotModelledError(f"{call}: bitwise operators")
    if chosen == "scalar":
        allowed = [["multiply", "add"], ["multiply"], ["add"]]
        require(
            machine().target.has_scalar_arithmetic and names in allowed,
            call,
            "op0 and op1",
            "must be multiply and add, multiply, or add on ScalarE, from gen3 on",
            names,
            "nki.isa.tensor_scalar",
        )
    y0, read0 = scalar_or_vector(call, "operand0", operand0, data)
    y1, read1 = scalar_or_vector(call, "operand1", operand1, data) if op1 is not None else (0, ())
    x = read(call, "data", data)
    binary(call, "op0", op0)
    if op1 is not None:
        binary(call, "op1", op1)
    if x is not None:
        x = _apply(call, "op0", op0, x, y0, reverse0)
        if op1 is not None:
            x = _apply(call, "op1", op1, x, y1, reverse1)
    write(call, dst, x)
    log("tensor_scalar", chosen, dst, (data, *read0, *read1), data.free_size)


@named("nisa")
def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """``(data op0 operand0) op1 operand1``, where the second operand is a whole tile."""
    call = "nisa.scalar_tensor_tensor"
    for operand, x in (("dst", dst), ("data", data), ("operand1", operand1)):
        check_tile(call, operand, x)
    check_same_size(call, "operand1", operand1, data)
    check_same_size(call, "dst", dst, data)
    both_in_psum(call, data, operand1, "data and operand1")
    y0, read0 = scalar_or_vector(call, "operand0", operand0, data)
    binary(call, "op0", op0), binary(call, "op1", op1)
    a, b = read(call, "data", data), read(call, "operand1", operand1)
    if a is not None and b is not None:
        a = _apply(call, "op0", op0, a, y0, reverse0)
        a = _apply(call, "op1", op1, a, b.reshape(a.shape), reverse1)
    write(call, dst, a)
    narrow = all(x.dtype == "bfloat16" for x in (dst, data, operand1))
    even = data.free_size % 2 == 0
    cheap = narrow and even and (op0.name, op1.name) == ("subtract", "multiply")
    log(
        "scalar_tensor_tensor",
        "vector",
        dst,
        (data, operand1, *read0),
        data.free_size,
        "cheap" if cheap else "",
    )


@named("nisa")
def tensor_reduce(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    axis: Any,
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> None:
    """Reduce the last free dimensions in fp32."""
    call, page = "nisa.tensor_reduce", "nki.isa.tensor_reduce"
    check_tile(call, "dst", dst)
    check_tile(call, "data", data)
    require(
        isinstance(axis, int) or (isinstance(axis, (tuple, list)) and len(axis) > 0),
        call,
        "axis",
        "must be a number or a tuple of numbers",
        axis,
        page,
    )
    axes = [axis] if isinstance(axis, int) else list(axis)
    require(0 not in axes, call, "axis", "must not be 0, the partitions", axis, page)
    last = list(range(data.ndim - len(axes), data.ndim))
    require(
        sorted(axes) == last,
        call,
        "axis",
        f"must be the last dimensions of {data.ndim}",
        axis,
        page,
    )
    found = need_op(call, "op", op)
    require(
        found.reduces is not None,
        call,
        "op",
        "must be one that reduces",
        found.name,
        "nki.api.shared, supported math operators",
    )
    if found.is_bitwise:
        raise NotModelledError(f"{call}: bitwise operators")
    kept = math.prod(data.shape[1 : data.ndim - len(axes)])
    require(
        (dst.shape[0], dst.free_size) == (data.shape[0], kept),
        call,
        "dst",
        f"must have {data.shape[0]} partitions of {kept} elements",
        dst.shape,
        page,
    )
    x = read(call, "data", data)
    if x is not None:
        with np.errstate(all="ignore"):
            x = found.reduces(x, axis=tuple(axes))  # type: ignore[misc]
        x = (-x if negate else x).astype(np.float32, copy=False)
    write(call, dst, x)
    narrow = data.dtype == dst.dtype == "bfloat16" and found.name in ("add", "maximum")
    log("tensor_reduce", "vector", dst, (data,), data.free_size, "cheap" if narrow else "")


@named("nisa")
def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """``1 / data`` on VectorE."""
    call = "nisa.reciprocal"
    check_tile(call, "dst", dst)
    check_tile(call, "data", data)
    check_same_size(call, "dst", dst, data)
    x = read(call, "data", data)
    if x is not None:
        with np.errstate(all="ignore"):
            x = np.float32(1) / x
    write(call, dst, x)
    log("reciprocal", "vector", dst, (data,), data.free_size)


@named("nisa")
def tensor_scalar_reduce(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: NkiTensor,
    reverse0: bool = False,
    reduce_cmd: Command = Command.reset_reduce,
    reduce_init: Any = None,
    name: str | None = None,
) -> None:
    """``tensor_scalar`` of one operator, and a reduction of its result."""
    call, page = "nisa.tensor_scalar_reduce", "nki.isa.tensor_scalar_reduce"
    if reverse0 or reduce_cmd != Command.reset_reduce or reduce_init is not None:
        raise NotModelledError(f"{call}: reverse0, and commands other than reset_reduce")
    check_tile(call, "dst", dst)
    check_tile(call, "data", data)
    check_same_size(call, "dst", dst, data)
    check_vector(call, "reduce_res", reduce_res, data.shape[0])
    binary(call, "op0", op0)
    found = need_op(call, "reduce_op", reduce_op)
    require(
        found.name in ("add", "multiply", "maximum", "minimum"),
        call,
        "reduce_op",
        "must be add, multiply, maximum or minimum",
        found.name,
        page,
    )
    y, also = scalar_or_vector(call, "operand0", operand0, data)
    x = read(call, "data", data)
    result = None
    if x is not None:
        x = _apply(call, "op0", op0, x, y, False)
        result = found.reduces(x.reshape(x.shape[0], -1), axis=1)  # type: ignore[misc]
    write(call, dst, x)
    write(call, reduce_res, result)
    machine().vector_registers = None
    log("tensor_scalar_reduce", "vector", dst, (data, *also), data.free_size, also=reduce_res)


@named("nisa")
def exponential(
    dst: NkiTensor,
    src: NkiTensor,
    max_value: Any = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Command = Command.idle,
    reduce_init: float = 0.0,
    name: str | None = None,
) -> None:
    """``exp(src - max_value)`` on VectorE, and its sum; gen4 only."""
    call, page = "nisa.exponential", "nki.isa.exponential"
    target = machine().target
    require(target.has_exponential, call, "target", "must be trn3 or newer", target.name, page)
    check_tile(call, "dst", dst)
    check_tile(call, "src", src)
    check_same_size(call, "dst", dst, src)
    y, also = scalar_or_vector(call, "max_value", max_value, src)
    check_reduction(call, reduce_cmd, reduce_res, src.shape[0])
    x = read(call, "src", src)
    sums = None
    if x is not None:
        with np.errstate(all="ignore"):
            x = np.exp(x - y).astype(np.float32, copy=False)
        sums = x.reshape(x.shape[0], -1).sum(axis=1, dtype=np.float32)
    total = accumulate(call, reduce_cmd, sums, src.shape[0], np.add, 0.0, loaded=reduce_init)
    write(call, dst, x)
    if reduce_res is not None:
        write(call, reduce_res, total)
    log("exponential", "vector", dst, (src, *also), src.free_size, also=reduce_res)


def check_reduction(call: str, command: Command, result: NkiTensor | None, partitions: int) -> None:
    """Check a command to VectorE's registers, and the tile that they are read out to."""
    check_enum(call, "reduce_cmd", command, Command)
    if result is None:
        return
    check_vector(call, "reduce_res", result, partitions)
    require(
        command != Command.idle,
        call,
        "reduce_res",
        "must be left out with reduce_cmd.idle, after which registers hold anything",
        result.name,
        f"nki.isa.{call.removeprefix('nisa.')}, accumulator",
    )


def accumulate(
    call: str,
    command: Command,
    new: Array | None,
    partitions: int,
    function: Any,
    neutral: float,
    loaded: float | None = None,
) -> Array | None:
    """Combine with VectorE's shared accumulation registers, by a command.

    Args:
        new: what to combine them with; None where nothing is computed.
        neutral: what reset_reduce begins with, and ``loaded`` load_reduce, where there is one.
    """
    state, page = machine(), f"nki.isa.{call.removeprefix('nisa.')}, accumulator"
    if command == Command.idle:
        # which may disturb them
        state.vector_registers = None
        return None
    allowed = [Command.reset_reduce, Command.reduce]
    if loaded is not None:
        allowed.append(Command.load_reduce)
    require(
        command in allowed,
        call,
        "reduce_cmd",
        f"must be idle, {', '.join(c.name for c in allowed)}",
        command.name,
        page,
    )
    start = state.vector_registers
    if command == Command.reduce:
        require(
            start is not None and len(start) == partitions,
            call,
            "reduce_cmd",
            "may be reduce only in a chain that began with reset_reduce",
            "registers in an unknown state",
            page,
        )
    else:
        first = loaded if command == Command.load_reduce else neutral
        start = np.full(partitions, first, np.float32)
    if new is not None:
        with np.errstate(invalid="ignore"):
            start = function(start, new)
    state.vector_registers = start
    return None if new is None else start
