"""The signature of a call (``form`` in code): all that its checks and launch depend on but data.

Calls of one form share their checks and their launcher. This module imports only torch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .internals import is_watched
from .versions import asks_for_interpreter

T = TypeVar("T")
# the widest access to memory; calls with tensors not aligned to it go through the operators
ACCESS_BYTES = 16
# dtypes that are read one number at a time, so their alignment does not matter
INDICES = frozenset((torch.int32, torch.int64, torch.bool))
# GPU calls also check the values of their tensors, and then always go through the operators
VALIDATES = os.environ.get("ATTN_VALIDATE") == "1"
# forms kept: a program has a few, but one that never repeats a shape would fill memory
LIMIT = 2048


class Memory(Generic[T]):
    """A cache by form; it is emptied when it holds ``limit`` entries."""

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
    """Return whether this process interprets Triton kernels; Triton decides this at import."""
    return asks_for_interpreter()


_thread = threading.local()


@contextmanager
def noting() -> Iterator[list[Any]]:
    """Note this thread's launches, of calls on meta tensors, instead of launching."""
    launches: list[Any] = []
    _thread.noted = launches
    try:
        yield launches
    finally:
        del _thread.noted


def noted() -> list[Any] | None:
    """Return the launches that this thread notes; None if it does not note them."""
    return getattr(_thread, "noted", None)


def is_noting() -> bool:
    """Return whether this thread notes launches."""
    return noted() is not None


def checks_values(x: Tensor) -> bool:
    """Return whether calls check the values of tensors that are where ``x`` is.

    They do on the CPU, and on a GPU with ``ATTN_VALIDATE=1``, but not while a stream captures.
    """
    if x.is_cpu:
        return True
    return VALIDATES and x.is_cuda and not torch.cuda.is_current_stream_capturing()


def form_of(
    tokens: Sequence[Tensor],
    others: Sequence[Tensor | None],
    options: tuple[Any, ...],
    packed: bool,
) -> Hashable | None:
    """Return the form of a call, or None if the call has to go through the operators.

    That includes calls with tensors, other than indices, not aligned to ``ACCESS_BYTES``.

    Args:
        tokens: tensors with a row per token.
        others: further tensors; None for each that is not given.
        options: arguments that are no tensors; equal numbers of different types differ.
        packed: leave the number of rows of ``tokens`` out of the form.
    """
    if VALIDATES or is_watched():
        return None
    types = tuple(map(type, options))
    form: list[Hashable] = [torch.is_grad_enabled(), options, types]
    if tuple in types:
        for option in options:
            if option.__class__ is tuple:
                form += map(type, option)
    try:
        hash(options)
    except TypeError:  # cannot be looked up; the checks will raise
        return None
    try:
        for x in tokens:
            if x.__class__ is not Tensor or x.is_neg():
                return None
            shape: tuple[int, ...] = x.shape
            if packed:
                if not shape:  # the checks will raise
                    return None
                # strides between tokens matter only if there are several tokens
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
