"""The form of a call: everything its checks and its launch depend on, except the data.

Two calls of one form are checked alike and launched alike, so what was worked out for the first
serves the second. Imports torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .internals import is_watched
from .versions import asks_for_interpreter

T = TypeVar("T")
# the widest access to memory; tensors that are not aligned to it go through the operators
ACCESS_BYTES = 16
# read number by number: where they begin does not matter
INDICES = frozenset((torch.int32, torch.int64, torch.bool))
# forms kept; a program has a few, and one that never repeats a shape would fill memory
LIMIT = 2048


class Memory(Generic[T]):
    """What was worked out for a form, for as many forms as a program is likely to have."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._known: dict[Hashable, T] = {}
        self.get: Callable[[Hashable], T | None] = self._known.get

    def keep(self, form: Hashable, value: T) -> T:
        if len(self._known) >= self._limit:
            self._known.clear()
        self._known[form] = value
        return value

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()


@cache
def interpreted() -> bool:
    """Return whether this process interprets Triton kernels; Triton decides that at its import."""
    return asks_for_interpreter()


def form_of(
    tokens: Sequence[Tensor],
    others: Sequence[Tensor | None],
    options: tuple[Any, ...],
    packed: bool,
) -> Hashable | None:
    """Return the form of a call, or None where it has to go through the operators.

    Tensors that begin between two whole accesses to memory go that way too, but for indices.

    Args:
        tokens: tensors with a row per token. If ``packed``, the number of rows, their first size,
            is no part of the form.
        others: further tensors, or None for each that is not given.
        options: what is no tensor; numbers of different types are different options.
        packed: see ``tokens``.
    """
    if is_watched():
        return None
    types = tuple(map(type, options))
    form: list[Hashable] = [torch.is_grad_enabled(), options, types]
    if tuple in types:
        for option in options:
            if option.__class__ is tuple:
                form += map(type, option)
    try:
        hash(options)
    except TypeError:  # cannot be looked up; the checks have something to say
        return None
    try:
        for x in tokens:
            if x.__class__ is not Tensor or x.is_neg():
                return None
            shape: tuple[int, ...] = x.shape
            if packed:
                if not shape:  # the checks have something to say
                    return None
                # strides between tokens matter only where there are several
                shape = (shape[0] > 1, *shape[1:])
            dtype = x.dtype
            if x.data_ptr() % ACCESS_BYTES and dtype not in INDICES:
                return None
            form += shape, x.stride(), dtype, x.device, x.requires_grad
        for y in others:
            if y is None:
                form.append(None)
                continue
            if y.__class__ is not Tensor or y.is_neg():
                return None
            dtype = y.dtype
            if y.data_ptr() % ACCESS_BYTES and dtype not in INDICES:
                return None
            form += y.shape, y.stride(), dtype, y.device, y.requires_grad
    except RuntimeError:  # no strides or no address: sparse, nested, batched
        return None
    return tuple(form)
