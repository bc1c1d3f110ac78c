"""Errors of the simulator: a broken limit, unwritten memory, and calls that it does not model."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

import numpy as np

SIM = str(Path(__file__).parent)


def is_own(frame: FrameType) -> bool:
    """Return whether a frame is of the simulator, and not of a kernel."""
    return frame.f_code.co_filename.startswith(SIM)


def describe(frame: FrameType, line: int) -> str:
    """Return the file, the line, the function and the source of a place in a kernel."""
    file = frame.f_code.co_filename
    linecache.checkcache(file)
    source = linecache.getline(file, line, frame.f_globals).strip()
    return f"{Path(file).name}:{line} in {frame.f_code.co_name}: {source}".rstrip(": ")


def running_frame() -> FrameType:
    """Return the frame of the kernel that calls the simulator."""
    frame = sys._getframe(1)
    while is_own(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


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

    # the file and the line of the kernel, once they are known
    place: str | None = None


class UnwrittenError(NkiValidationError):
    """Memory was read that nothing has written; raised in strict mode."""


class NotModelledError(NotImplementedError):
    """A call or an option that the simulator does not model; it never guesses."""

    place: str | None = None


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
