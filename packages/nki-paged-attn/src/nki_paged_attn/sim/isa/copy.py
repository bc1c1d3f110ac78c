"""Copies and constants on the chip."""

from __future__ import annotations

import numpy as np

from ..calls import named
from ..dtypes import INTEGERS, NUMPY, Array, convert
from ..errors import is_integer, is_number, require
from ..memory.access import check_same_size, check_tile, read_raw, write
from ..memory.machine import machine
from ..memory.tensor import NkiTensor
from .engines import keep_from_psum, log, pick
from .enums import engine as Engine


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
    """Fill a tile with a constant; integers take no float."""
    call = "nisa.memset"
    check_tile(call, "dst", dst)
    chosen = pick(call, engine, "vector", "vector", "gpsimd")
    keep_from_psum(call, chosen, dst=dst)
    is_int = dst.dtype in INTEGERS
    require(
        is_integer(value) if is_int else is_number(value) and not isinstance(value, bool),
        call,
        "value",
        f"must be {'an int' if is_int else 'a number'} for {dst.dtype}",
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
