"""Functions of ``nki.language`` that no instruction computes by itself, made of several."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import isa
from ..calls import named
from ..errors import require
from ..memory.tensor import NkiTensor
from ..ops import OPS, PI
from . import values

# 2 pi as a number of few bits and the rest, so that multiples of the first are exact in fp32
TURN = (6.28125, 2 * math.pi - 6.28125)


def _sine(x: NkiTensor, dtype: str | None, shift: float) -> NkiTensor:
    """Return ``sin(x + shift)``, with the argument brought to the range of the activation."""
    values.need(f"nl.{'cos' if shift else 'sin'}", "x", x)
    turns, whole = values.new(x.shape, "int32"), values.new(x.shape, "float32")
    factor = 1 / (2 * math.pi)
    scaled = (OPS["multiply"], factor, False, OPS["add"], shift * factor)
    isa.tensor_scalar(turns, x, *scaled)
    isa.tensor_copy(whole, turns)
    rest = values.new(x.shape, "float32")
    isa.scalar_tensor_tensor(rest, whole, OPS["multiply"], -TURN[0], OPS["add"], x)
    isa.scalar_tensor_tensor(rest, whole, OPS["multiply"], -TURN[1], OPS["add"], rest)
    isa.tensor_scalar(rest, rest, OPS["add"], shift, False, OPS["minimum"], PI)
    isa.tensor_scalar(rest, rest, OPS["maximum"], -PI)
    out = values.new(x.shape, dtype or x.dtype)
    isa.activation(out, OPS["sin"], rest)
    return out


@named("nl")
def sin(x: NkiTensor, dtype: str | None = None) -> NkiTensor:
    """Return the sine of any argument."""
    return _sine(x, dtype, 0.0)


@named("nl")
def cos(x: NkiTensor, dtype: str | None = None) -> NkiTensor:
    """Return the cosine of any argument."""
    return _sine(x, dtype, math.pi / 2)


@named("nl")
def tan(x: NkiTensor, dtype: str | None = None) -> NkiTensor:
    """Return the tangent: the sine by the cosine."""
    return values.divide(sin(x, "float32"), cos(x, "float32"), dtype or x.dtype)


def _round(call: str, x: NkiTensor, beyond: str, change: str, dtype: str | None) -> NkiTensor:
    """Round to the nearest integer, and by one further where that is beyond x."""
    values.need(call, "x", x)
    found = x.array()
    if found is not None:
        large = np.abs(found.astype(np.float32)) >= 2.0**31
        limit = "must be below 2**31 in magnitude"
        require(
            not large.any(),
            call,
            "x",
            limit,
            found[large][:1],
            call.replace("nl.", "nki.language."),
        )
    whole, near = values.new(x.shape, "int32"), values.new(x.shape, "float32")
    isa.tensor_copy(whole, x)
    isa.tensor_copy(near, whole)
    off = values.new(x.shape, "float32")
    isa.tensor_tensor(off, near, x, OPS[beyond])
    out = values.new(x.shape, dtype or x.dtype)
    isa.tensor_tensor(out, near, off, OPS[change])
    return out


@named("nl")
def floor(x: NkiTensor, dtype: str | None = None) -> NkiTensor:
    """Return the largest integer that is not above x."""
    return _round("nl.floor", x, "greater", "subtract", dtype)


@named("nl")
def ceil(x: NkiTensor, dtype: str | None = None) -> NkiTensor:
    """Return the smallest integer that is not below x."""
    return _round("nl.ceil", x, "less", "add", dtype)


@named("nl")
def trunc(x: NkiTensor, dtype: str | None = None) -> NkiTensor:
    """Return x without its fraction."""
    values.need("nl.trunc", "x", x)
    whole = floor(values.TOKENS["abs"](x, dtype="float32"))
    return values.TOKENS["multiply"](whole, values.TOKENS["sign"](x, dtype="float32"), dtype)


@named("nl")
def logical_not(x: NkiTensor, dtype: str | None = None) -> NkiTensor:
    """Return 1 where x is 0, else 0."""
    return values.TOKENS["equal"](x, 0.0, dtype)


@named("nl")
def softmax(x: NkiTensor, axis: Any = -1, dtype: str | None = None) -> NkiTensor:
    """Return the softmax over the last dimensions, in fp32."""
    values.need("nl.softmax", "x", x)
    axes = [a % x.ndim for a in (axis if isinstance(axis, (tuple, list)) else (axis,))]

    def wide(tile: NkiTensor) -> NkiTensor:
        for a in axes:
            tile = tile.broadcast(a, x.shape[a])
        return tile

    part = values.new(x.shape, "float32")
    isa.tensor_tensor(part, x, wide(values.max(x, axes, "float32", True)), OPS["subtract"])
    isa.activation(part, OPS["exp"], part)
    total = values.sum(part, axes, "float32", True)
    isa.reciprocal(total, total)
    out = values.new(x.shape, dtype or x.dtype)
    isa.tensor_tensor(out, part, wide(total), OPS["multiply"])
    return out
