"""Operators element by element: of two tiles, of a tile and a number for each row."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..calls import named
from ..dtypes import INTEGERS, NUMPY, Array
from ..errors import require
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
from ..memory.tensor import NkiTensor
from ..ops import binary, need_op
from .engines import both_in_psum, keep_from_psum, log, pick
from .enums import engine as Engine

INT32 = {"int32", "uint32"}


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
    if found.name == "power":
        default, allowed = "gpsimd", ("gpsimd",)
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


# operators of VectorE that have no second operand: nki.api.shared, supported math operators
UNARY = frozenset({"abs", "square", "relu", "rsqrt", "reciprocal"})


def check_operator(call: str, operand: str, op: Any, y: Any) -> Any:
    """Check an operator and its second operand, which is None or 0 for one that has none."""
    if need_op(call, operand, op).name not in UNARY:
        binary(call, operand, op)
        return y
    number = operand.replace("op", "operand")
    given = isinstance(y, NkiTensor) or y not in (None, 0)
    # a root took one before the documents said so
    limit = f"must be None or 0 for {op.name}"
    page = "nki.isa.tensor_scalar"
    require(not given or op.name == "rsqrt", call, number, limit, y, page)
    return 0.0


def apply(call: str, operand: str, op: Any, x: Array, y: Any, reverse: bool) -> Array:
    with np.errstate(all="ignore"):
        if op.name in UNARY:
            return op.unary(x).astype(np.float32, copy=False)  # type: ignore[no-any-return]
        function = binary(call, operand, op)
        result: Array = function(y, x) if reverse else function(x, y)
    return result.astype(np.float32, copy=False)


def _bits(
    call: str,
    dst: NkiTensor,
    data: NkiTensor,
    steps: tuple[tuple[Any, Any, bool], ...],
    engine: str,
) -> None:
    """``tensor_scalar`` on the bits of integers."""
    page = "nki.isa.tensor_scalar, bitvec operators"
    dtypes = [dst.dtype, data.dtype]
    require(
        all(d in INTEGERS for d in dtypes), call, "data and dst", "must be integers", dtypes, page
    )
    require(engine == "vector", call, "engine", "must be vector for bits", engine, page)
    names = [op.name for op, _, _ in steps if op is not None]
    both = all(op.is_bitwise for op, _, _ in steps if op is not None)
    require(both, call, "op0 and op1", "must both be bitwise, or neither", names, page)
    x, reads = read_raw(call, "data", data), [data]
    for number, (op, y, reverse) in enumerate(steps):
        if op is None:
            continue
        if isinstance(y, NkiTensor):
            check_vector(call, f"operand{number}", y, data.shape[0])
            reads.append(y)
            kind, found = y.dtype, read_raw(call, f"operand{number}", y)
            y = None if found is None else found.reshape((-1,) + (1,) * (data.ndim - 1))
        else:
            kind = "int32" if isinstance(y, (int, np.integer)) else type(y).__name__
        require(
            kind in INTEGERS, call, f"operand{number}", "must be of integers for bits", kind, page
        )
        if x is not None and y is not None:
            # in 64 bits, so that no sign and no constant is lost
            pair = (np.asarray(y).astype(np.int64), x.astype(np.int64))
            x = op.binary(*pair) if reverse else op.binary(*pair[::-1])
    write(call, dst, None if x is None else x.astype(NUMPY[dst.dtype]))
    log("tensor_scalar", engine, dst, tuple(reads), data.free_size)


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
    if op0.is_bitwise or (op1 is not None and op1.is_bitwise):
        _bits(call, dst, data, ((op0, operand0, reverse0), (op1, operand1, reverse1)), chosen)
        return
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
    operand0 = check_operator(call, "op0", op0, operand0)
    y0, read0 = scalar_or_vector(call, "operand0", operand0, data)
    y1: Any = None
    read1: tuple[NkiTensor, ...] = ()
    if op1 is not None:
        operand1 = check_operator(call, "op1", op1, operand1)
        y1, read1 = scalar_or_vector(call, "operand1", operand1, data)
    x = read(call, "data", data)
    if x is not None:
        x = apply(call, "op0", op0, x, y0, reverse0)
        if op1 is not None:
            x = apply(call, "op1", op1, x, y1, reverse1)
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
        a = apply(call, "op0", op0, a, y0, reverse0)
        a = apply(call, "op1", op1, a, b.reshape(a.shape), reverse1)
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
