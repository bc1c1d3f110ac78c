"""Reductions along the free dimensions, alone or after an operator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..calls import named
from ..dtypes import INTEGERS
from ..errors import NotModelledError, is_integer, require
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
from ..ops import need_op
from .accumulation import accumulate, check_reduction
from .elementwise import apply, check_operator
from .engines import log
from .enums import reduce_cmd as Command


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
    # the only instruction that reads four, to reduce windows
    check_tile(call, "data", data, free_dims=4)
    require(
        is_integer(axis)
        or (isinstance(axis, (tuple, list)) and len(axis) > 0 and all(map(is_integer, axis))),
        call,
        "axis",
        "must be a number or a tuple of numbers",
        axis,
        page,
    )
    axes = list(axis) if isinstance(axis, (tuple, list)) else [axis]
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
        kinds = [dst.dtype, data.dtype]
        integers = all(k in INTEGERS for k in kinds) and not negate
        require(integers, call, "data and dst", "must be integers, not negated", kinds, page)
    kept = math.prod(data.shape[1 : data.ndim - len(axes)])
    require(
        (dst.shape[0], dst.free_size) == (data.shape[0], kept),
        call,
        "dst",
        f"must have {data.shape[0]} partitions of {kept} elements",
        dst.shape,
        page,
    )
    x = (read_raw if found.is_bitwise else read)(call, "data", data)
    if x is not None:
        with np.errstate(all="ignore"):
            # dimension by dimension, because some NumPy reductions take one only
            for d in sorted(axes, reverse=True):
                x = found.reduces(x, axis=d)  # type: ignore[misc]
        if not found.is_bitwise:
            x = (-x if negate else x).astype(np.float32, copy=False)
    write(call, dst, x)
    narrow = data.dtype == dst.dtype == "bfloat16" and found.name in ("add", "maximum")
    log("tensor_reduce", "vector", dst, (data,), data.free_size, "cheap" if narrow else "")


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
    if reduce_cmd != Command.reset_reduce or reduce_init is not None:
        raise NotModelledError(f"{call}: commands other than reset_reduce [{page}]")
    check_tile(call, "dst", dst)
    check_tile(call, "data", data)
    check_same_size(call, "dst", dst, data)
    check_vector(call, "reduce_res", reduce_res, data.shape[0])
    operand0 = check_operator(call, "op0", op0, operand0)
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
        x = apply(call, "op0", op0, x, y, reverse0)
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
    reduce_cmd = check_reduction(call, reduce_cmd, reduce_res, src.shape[0])
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
