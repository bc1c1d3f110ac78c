"""Registers of an engine: scalars that a kernel holds at run time."""

from __future__ import annotations

from typing import Any

from ..errors import NotModelledError, require
from .machine import machine

PAGE = "nki.isa.VirtualRegister"


class VirtualRegister:
    """A scalar that is known at run time only; ``nisa.register_alloc`` makes one.

    Attributes:
        value: the number; None if it is data and nothing is computed.
        is_frozen: whether it is a loop's counter, which may not be written.
    """

    __slots__ = ("is_frozen", "value")

    def __init__(self, value: int | None, *, is_frozen: bool = False) -> None:
        self.value = value
        self.is_frozen = is_frozen

    def read(self, call: str) -> int:
        """Return the number."""
        if self.value is None:
            raise NotModelledError(f"{call}: a register that is not known without execution")
        return self.value

    def write(self, call: str, value: int | None) -> None:
        """Set the number."""
        require(
            not self.is_frozen, call, "dst", "must not be the counter of a loop", self.value, PAGE
        )
        self.value = value

    def __bool__(self) -> bool:
        holds = self.read("while") != 0
        machine().branch(int(holds))
        return holds

    def _unknown(self, *_: object) -> Any:
        raise TypeError(
            "a register's value is not known while the kernel is traced: Python's range and "
            f"arithmetic cannot use it; nl.fori_loop and nl.dynamic_range can [{PAGE}]"
        )

    __int__ = __index__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _unknown

    def __repr__(self) -> str:
        return f"VirtualRegister({self.value})"


def number(call: str, x: int | VirtualRegister) -> int:
    """Return a number that may be in a register."""
    return x.read(call) if isinstance(x, VirtualRegister) else x
