"""Errors of the simulator: a broken limit, unwritten memory, and calls that it does not model."""

from __future__ import annotations

from typing import NoReturn

import numpy as np


class NkiValidationError(ValueError):
    """A documented limit of the hardware or of the language was broken.

    Args:
        operation: name of the call, such as ``nisa.nc_matmul``.
        operand: the argument at fault.
        limit: the documented limit.
        value: the value that broke it.
        page: the documentation page, and its section, that states the limit.
    """

    def __init__(self, operation: str, operand: str, limit: str, value: object, page: str) -> None:
        super().__init__(f"{operation}: {operand} {limit}, got {value} [{page}]")
        self.operation = operation
        self.operand = operand
        self.limit = limit
        self.value = value
        self.page = page


class UnwrittenError(NkiValidationError):
    """Memory was read that nothing has written; raised in strict mode."""


class NotModelledError(NotImplementedError):
    """A call or an option that the simulator does not model; it never guesses."""


class Missing:
    """A name that AWS's stubs have and the simulator does not model: its use raises.

    A module may mention it, in a table of activation functions for example.
    """

    def __init__(self, name: str, page: str) -> None:
        self.name = name
        self.page = page

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise NotModelledError(f"{self.name} is not modelled [{self.page}]")


def is_integer(x: object) -> bool:
    """Return whether an object is an integer of Python or NumPy, and not a boolean."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def is_number(x: object) -> bool:
    """Return whether an object is a number of Python or NumPy."""
    return isinstance(x, (int, float, np.integer, np.floating))


def require(
    holds: bool, operation: str, operand: str, limit: str, value: object, page: str
) -> None:
    """Raise ``NkiValidationError`` unless a limit holds."""
    if not holds:
        raise NkiValidationError(operation, operand, limit, value, page)
