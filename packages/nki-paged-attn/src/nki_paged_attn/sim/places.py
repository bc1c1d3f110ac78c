"""Places in a kernel's source: of an error, and of the instruction that made the first NaN."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from .dtypes import FLOATS, NUMPY
from .errors import NkiValidationError, NotModelledError, describe, is_own, running_frame
from .memory.marks import UNWRITTEN
from .memory.storage import Storage
from .memory.tensor import NkiTensor
from .trace import Instruction


def name_of(tensor: NkiTensor, frame: FrameType) -> str | None:
    """Return the variable of a frame, or of its callers, that holds a tensor or its storage."""
    at: FrameType | None = frame
    while at is not None:
        for wanted in (tensor, tensor._storage):
            for name, x in at.f_locals.items():
                if x is wanted or (isinstance(x, NkiTensor) and x._storage is wanted):
                    return name
        at = at.f_back
        if at is not None and is_own(at):
            return None
    return None


def add_place(error: NkiValidationError | NotModelledError) -> None:
    """Add to an error's message the line of the kernel that caused it, and its variables."""
    steps = list(_steps(error.__traceback__))
    last = next((n for n in range(len(steps) - 1, -1, -1) if not is_own(steps[n][0])), None)
    if last is None or error.place:
        return
    frame, line = steps[last]
    error.place = f"{frame.f_code.co_filename}:{line}"
    lines = [str(error), f"  at {describe(frame, line)}"]
    operands = re.findall(r"\w+", getattr(error, "operand", ""))
    named: dict[str, str] = {}
    for inner, _ in steps[last + 1 :]:
        for operand in operands:
            x = inner.f_locals.get(operand)
            if operand not in named and isinstance(x, NkiTensor):
                named[operand] = name_of(x, frame) or x.name
    lines += [f"  {operand} is {name}" for operand, name in named.items() if name != operand]
    error.args = ("\n".join(lines),)


def _steps(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


class FirstBad:
    """Finds the first NaN and the first infinity of a run, and the line that wrote it.

    Attributes:
        found: ``nan`` and ``inf``, each with the place, once there is one.
    """

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        # by number: what an instruction's regions name
        self.storages: WeakValueDictionary[int, Storage] = WeakValueDictionary()

    def argument(self, storage: Storage) -> None:
        """Look at an argument of the kernel."""
        self.storages[storage.id] = storage
        if storage.dtype in FLOATS and storage.data is not None:
            self._note(storage.data.view(NUMPY[storage.dtype]), f"the argument {storage.name}")

    def __call__(self, instruction: Instruction) -> None:
        """Look at what an instruction wrote."""
        for number, start, end in instruction.writes:
            storage = self.storages.get(number)
            if storage is None or storage.dtype not in FLOATS or storage.data is None:
                continue
            size = storage.itemsize
            rows = storage.data.view(NUMPY[storage.dtype])
            rows = rows.reshape(-1, storage.partition)[:, start // size : -(-end // size)]
            if storage.state is not None:
                unit = storage.state.unit
                marks = storage.state.values.reshape(len(rows), -1, size // unit)
                seen = (marks != UNWRITTEN).all(axis=-1)[:, start // size : -(-end // size)]
                rows = np.where(seen, rows, np.zeros((), rows.dtype))
            self._note(rows, f"nisa.{instruction.op}", storage)

    def _note(self, x: Any, what: str, storage: Storage | None = None) -> None:
        values = x.astype(np.float32)
        for kind, test in (("nan", np.isnan), ("inf", np.isinf)):
            if kind not in self.found and test(values).any():
                self.found[kind] = what if storage is None else f"{what}, {_written(storage)}"


def _written(storage: Storage) -> str:
    """Return the line that runs, and what it calls the tensor that it writes."""
    frame = running_frame()
    name = name_of(NkiTensor.whole(storage), frame) or storage.name
    return f"to {name}, at {describe(frame, frame.f_lineno)}"
