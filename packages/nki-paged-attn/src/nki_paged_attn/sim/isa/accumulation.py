"""VectorE's accumulation registers, which several instructions share."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import Array
from ..errors import require
from ..memory.access import check_enum, check_vector
from ..memory.machine import machine
from ..memory.tensor import NkiTensor
from .enums import reduce_cmd as Command


def check_reduction(
    call: str, command: Command, result: NkiTensor | None, partitions: int
) -> Command:
    """Check a command to VectorE's registers, and the tile to which they are written."""
    command = check_enum(call, "reduce_cmd", command, Command)
    if result is None:
        return command
    check_vector(call, "reduce_res", result, partitions)
    require(
        command != Command.idle,
        call,
        "reduce_res",
        "must be left out with reduce_cmd.idle, after which registers hold anything",
        result.name,
        f"nki.isa.{call.removeprefix('nisa.')}, accumulator",
    )
    return command


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
        new: values to combine with the registers; None if nothing is computed.
        neutral: start value of reset_reduce; ``loaded``: that of load_reduce, if there is one.
    """
    state, page = machine(), f"nki.isa.{call.removeprefix('nisa.')}, accumulator"
    if command == Command.idle:
        # other instructions may change the registers
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
