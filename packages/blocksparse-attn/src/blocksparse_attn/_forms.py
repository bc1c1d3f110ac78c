"""The form of a call: all that its checks and its launch depend on, but not on any data.

Two calls of one form are checked alike and launched alike, so that what was worked out for the
first serves the second. Imports torch alone; the same file in every package that has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._C import (
    _get_tracing_state,
    _has_storage,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

T = TypeVar("T")
# widest access to memory, in bytes; a tensor that begins between two has a form of its own
ACCESS = 16
# read number by number: where they begin does not matter
INDICES = frozenset((torch.int32, torch.int64, torch.bool))
# forms kept; a program has a few, and one that never repeats a shape would fill memory
LIMIT = 2048


class Memory(Generic[T]):
    """What was worked out for a form, for as many forms as a program is likely to have."""

    def __init__(self) -> None:
        self._known: dict[Hashable, T] = {}
        self.get: Callable[[Hashable], T | None] = self._known.get

    def keep(self, form: Hashable, value: T) -> T:
        if len(self._known) >= LIMIT:
            self._known.clear()
        self._known[form] = value
        return value


@cache
def interpreted() -> bool:
    """Return whether this process interprets Triton kernels; Triton decides at its import."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on")


def is_watched() -> bool:
    """Say whether something traces, transforms or intercepts calls of PyTorch at this moment.

    It has to see operators then. If nothing does, an operator's boundary is time alone, but for
    profilers, which see kernels and no operator.
    """
    return bool(
        torch.compiler.is_compiling()
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or _get_tracing_state() is not None
    )


def is_plain(x: Any) -> bool:
    """Say whether an argument is a tensor that its address describes: no subclass, no lazy sign.

    Tensors of the older vmap, which differentiates in batches, have no storage.
    """
    return bool(
        x.__class__ is Tensor and x.layout is torch.strided and _has_storage(x) and not x.is_neg()
    )


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
    form: list[Hashable] = [torch.is_grad_enabled(), options, *map(type, options)]
    for option in options:
        if option.__class__ is tuple:
            form += map(type, option)
    try:
        hash(options)
    except TypeError:  # cannot be looked up; the checks have something to say
        return None
    for x in tokens:
        if not is_plain(x):
            return None
        shape: tuple[int, ...] = x.shape
        if packed:
            if not shape:  # the checks have something to say
                return None
            # strides between tokens matter only where there are several
            shape = (shape[0] > 1, *shape[1:])
        dtype = x.dtype
        if x.data_ptr() % ACCESS and dtype not in INDICES:
            return None
        form += shape, x.stride(), dtype, x.device, x.requires_grad
    for y in others:
        if y is None:
            form.append(None)
            continue
        if not is_plain(y):
            return None
        dtype = y.dtype
        if y.data_ptr() % ACCESS and dtype not in INDICES:
            return None
        form += y.shape, y.stride(), dtype, y.device, y.requires_grad
    return tuple(form)
