"""Operators and activation functions: the tokens ``nl.add``, ``nl.exp`` and their like.

The tables are those of page ``nki.api.shared``: which operators are bitwise, which may reduce, and
the inputs for which an activation function is valid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .dtypes import Array
from .errors import Missing, require

PAGE = "nki.api.shared, supported math operators"
ACTIVATION_PAGE = "nki.api.shared, supported activation functions"
PI = 3.14159274  # as fp32


@dataclass(frozen=True)
class Op:
    """An operator token.

    Attributes:
        binary: its function of two arrays, if it has two operands.
        unary: its function of one array, if ScalarE has it as an activation.
        is_bitwise: whether it works on bits, of integers only.
        reduces: the NumPy reduction, if it may reduce.
        valid: the inputs for which the activation is valid; if ``is_even``, their magnitudes.
    """

    name: str
    binary: Callable[..., Any] | None = None
    unary: Callable[..., Any] | None = None
    is_bitwise: bool = False
    reduces: Callable[..., Any] | None = None
    valid: tuple[float, float] | None = None
    is_even: bool = False


def _flag(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: function(a, b).astype(np.float32)


def _logical(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: function(a != 0, b != 0).astype(np.float32)


def _sigmoid(x: Array) -> Any:
    return 1 / (1 + np.exp(-x))


_erf = np.vectorize(math.erf, otypes=[np.float32])


def _gelu_dx(x: Array) -> Any:
    density = np.exp(-x * x / 2) / np.float32(np.sqrt(2 * np.pi))
    return (1 + _erf(x / np.float32(np.sqrt(2)))) / 2 + x * density


def _silu_dx(x: Array, slope: float = 1.0) -> Any:
    part = _sigmoid(slope * x)
    return part + slope * x * part * (1 - part)


def _gelu_tanh(x: Array) -> Any:
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


_BITWISE: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]] = {
    "bitwise_and": (np.bitwise_and, np.bitwise_and.reduce),
    "bitwise_or": (np.bitwise_or, np.bitwise_or.reduce),
    "bitwise_xor": (np.bitwise_xor, np.bitwise_xor.reduce),
    "left_shift": (np.left_shift, None),
    "right_shift": (np.right_shift, None),
}
_ARITHMETIC: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]] = {
    "add": (np.add, np.add.reduce),
    "subtract": (np.subtract, None),
    "multiply": (np.multiply, np.multiply.reduce),
    "maximum": (np.maximum, np.maximum.reduce),
    "minimum": (np.minimum, np.minimum.reduce),
    "power": (np.power, None),
    "equal": (_flag(np.equal), None),
    "not_equal": (_flag(np.not_equal), None),
    "greater_equal": (_flag(np.greater_equal), None),
    "greater": (_flag(np.greater), None),
    "less_equal": (_flag(np.less_equal), None),
    "less": (_flag(np.less), None),
    "logical_and": (_logical(np.logical_and), None),
    "logical_or": (_logical(np.logical_or), None),
    "logical_xor": (_logical(np.logical_xor), None),
}
OPS: dict[str, Op] = {
    **{n: Op(n, binary=f, is_bitwise=True, reduces=r) for n, (f, r) in _BITWISE.items()},
    **{n: Op(n, binary=f, reduces=r) for n, (f, r) in _ARITHMETIC.items()},
    "copy": Op("copy", unary=lambda x: x),
    "square": Op("square", unary=np.square),
    "exp": Op("exp", unary=np.exp),
    "tanh": Op("tanh", unary=np.tanh),
    "relu": Op("relu", unary=lambda x: np.maximum(x, 0)),
    "sigmoid": Op("sigmoid", unary=_sigmoid),
    "silu": Op("silu", unary=lambda x: x * _sigmoid(x)),
    "sign": Op("sign", unary=np.sign),
    "abs": Op("abs", unary=np.abs),
    "log": Op("log", unary=np.log, valid=(2.0**-64, 2.0**64)),
    "sqrt": Op("sqrt", unary=np.sqrt, valid=(2.0**-116, 2.0**118)),
    "rsqrt": Op("rsqrt", unary=lambda x: 1 / np.sqrt(x), valid=(2.0**-87, 2.0**97)),
    "reciprocal": Op("reciprocal", unary=np.reciprocal, valid=(2.0**-42, 2.0**42), is_even=True),
    "erf": Op("erf", unary=_erf),
    "erf_dx": Op("erf_dx", unary=lambda x: np.float32(2 / np.sqrt(np.pi)) * np.exp(-x * x)),
    "gelu_dx": Op("gelu_dx", unary=_gelu_dx),
    "gelu_apprx_sigmoid_dx": Op("gelu_apprx_sigmoid_dx", unary=lambda x: _silu_dx(x, 1.702)),
    "silu_dx": Op("silu_dx", unary=_silu_dx),
    "gelu": Op("gelu", unary=lambda x: x * (1 + _erf(x / np.float32(np.sqrt(2)))) / 2),
    "gelu_apprx_tanh": Op("gelu_apprx_tanh", unary=_gelu_tanh),
    "gelu_apprx_sigmoid": Op("gelu_apprx_sigmoid", unary=lambda x: x * _sigmoid(1.702 * x)),
    "softplus": Op("softplus", unary=lambda x: np.logaddexp(x, np.float32(0))),
    "mish": Op("mish", unary=lambda x: x * np.tanh(np.logaddexp(x, np.float32(0)))),
    "arctan": Op("arctan", unary=np.arctan),
    "sin": Op("sin", unary=np.sin, valid=(0.0, PI), is_even=True),
}


def need_op(operation: str, operand: str, op: object) -> Op:
    """Return an operator token, or raise an error that names the value."""
    if isinstance(op, Missing):
        op()
    require(isinstance(op, Op), operation, operand, "must be an operator of nl", op, PAGE)
    return op  # type: ignore[return-value]


def binary(operation: str, operand: str, op: object) -> Callable[..., Any]:
    """Return the function of an arithmetic operator of two operands."""
    found = need_op(operation, operand, op)
    require(
        found.binary is not None and not found.is_bitwise,
        operation,
        operand,
        "must be an arithmetic operator of two operands",
        found.name,
        PAGE,
    )
    return found.binary  # type: ignore[return-value]


def activate(operation: str, op: object, x: Array) -> Array:
    """Apply an activation function to fp32 values, which must be valid for it."""
    found = need_op(operation, "op", op)
    if found.valid is not None:
        low, high = found.valid
        size = np.abs(x) if found.is_even else x
        # NaN is accepted: the function does not cause it
        wrong = (size < low) | (size > high)
        require(
            not wrong.any(),
            operation,
            "data",
            f"must lie in [{low:g}, {high:g}] for {found.name}",
            x[wrong][:1],
            ACTIVATION_PAGE,
        )
    result: Array = found.unary(x)  # type: ignore[misc]
    return result.astype(np.float32, copy=False)
