"""Registers: allocation, and moves between them and tiles."""

from __future__ import annotations

import numpy as np

from ..calls import named
from ..dtypes import NUMPY
from ..errors import require
from ..memory.access import check_tensor, read_raw, write
from ..memory.tensor import NkiTensor
from ..memory.virtual import VirtualRegister


def _check(call: str, operand: str, x: object) -> None:
    page = f"nki.isa.{call.removeprefix('nisa.')}"
    is_register = isinstance(x, VirtualRegister)
    require(is_register, call, operand, "must be a register", type(x).__name__, page)


def _check_scalar(call: str, operand: str, x: object) -> NkiTensor:
    tile = check_tensor(call, operand, x, "sbuf")
    page = f"nki.isa.{call.removeprefix('nisa.')}"
    require(tile.shape == (1, 1), call, operand, "must be (1, 1)", tile.shape, page)
    return tile


@named("nisa")
def register_alloc(x: int | NkiTensor | None = None) -> VirtualRegister:
    """Return a register with a number, or with the element of a (1, 1) tile; 0 by default."""
    found = VirtualRegister(0)
    if isinstance(x, NkiTensor):
        register_load(found, x)
    elif x is not None:
        register_move(found, x)
    return found


@named("nisa")
def register_move(dst: VirtualRegister, imm: int | VirtualRegister) -> None:
    """Set a register to a number, or to another register's."""
    call = "nisa.register_move"
    _check(call, "dst", dst)
    if isinstance(imm, VirtualRegister):
        imm = imm.read(call)
    fits = isinstance(imm, (int, np.integer)) and not isinstance(imm, bool)
    require(
        fits and -(2**31) <= imm < 2**32,
        call,
        "imm",
        "must be an integer of 32 bits",
        repr(imm),
        "nki.isa.register_move",
    )
    dst.write(call, int(imm))


@named("nisa")
def register_load(dst: VirtualRegister, src: NkiTensor) -> None:
    """Set a register to the element of a (1, 1) tile."""
    call = "nisa.register_load"
    _check(call, "dst", dst)
    tile = _check_scalar(call, "src", src)
    is_integer = tile.dtype in ("int32", "uint32")
    page = "nki.isa.register_load"
    require(is_integer, call, "src", "must be int32 or uint32", tile.dtype, page)
    x = read_raw(call, "src", tile) if tile._storage.state is not None else tile.array()
    dst.write(call, None if x is None else int(x.reshape(-1)[0]))


@named("nisa")
def register_store(dst: NkiTensor, src: VirtualRegister) -> None:
    """Write a register's number to a (1, 1) tile."""
    call = "nisa.register_store"
    tile = _check_scalar(call, "dst", dst)
    _check(call, "src", src)
    write(call, tile, np.full((1, 1), src.read(call), np.int64).astype(NUMPY[tile.dtype]))
