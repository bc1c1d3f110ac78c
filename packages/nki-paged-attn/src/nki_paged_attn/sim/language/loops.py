"""Loops of the device, whose bounds may be in registers.

Pages ``nki.language.dynamic_range``, ``nki.language.fori_loop`` and ``nki/deep-dives/nki-loops``. A
device traces a loop's body once; here it runs for each number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..calls import named
from ..errors import require
from ..memory.machine import machine
from ..memory.virtual import VirtualRegister, number

Bound = int | VirtualRegister


@named("nl")
def dynamic_range(start: Bound, stop: Bound | None = None, step: int = 1) -> Iterator[Any]:
    """Count on the device: bounds may be registers, and the counter is one."""
    bounds = {"start": 0, "stop": start} if stop is None else {"start": start, "stop": stop}
    return _count("nl.dynamic_range", bounds, step)


@named("nl")
def fori_loop(
    lower: Bound, upper: Bound, body_fun: Callable[[VirtualRegister], Any], step: int = 1
) -> None:
    """Call ``body_fun`` with a register for each number from ``lower`` up to, not, ``upper``.

    Changes of memory by the body persist. Changes of Python numbers do not on a device, which
    traces the body once. A run that does not compute may trace a few iterations, each of which then
    stands for several: see ``Simulation.samples``.
    """
    call, page = "nl.fori_loop", "nki.language.fori_loop"
    require(callable(body_fun), call, "body_fun", "must be a function", body_fun, page)
    for i in _count(call, {"lower": lower, "upper": upper}, step):
        body_fun(i)


@named("nl")
def while_loop(
    init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]
) -> None:
    """Call ``body_fun`` with a register while that is not 0; it returns the next one."""
    call, page = "nl.while_loop", "nki.language.while_loop"
    require(callable(body_fun), call, "body_fun", "must be a function", body_fun, page)
    state = machine()
    _check_order(call)
    condition, is_compiled = init, state.samples == 0
    while True:
        known = isinstance(condition, VirtualRegister)
        require(known, call, "the condition", "must be a register", condition, page)
        if not is_compiled and not condition:
            return
        with state.loop(1.0):
            condition = body_fun(VirtualRegister(condition.value))
        if is_compiled:
            # once for any condition, like a compiler
            return


@contextmanager
def no_reorder() -> Iterator[None]:
    """Keep instructions in program order, in which the simulator runs them anyway."""
    state = machine()
    outer, state.is_ordered = state.is_ordered, True
    try:
        yield
    finally:
        state.is_ordered = outer


def _check_order(call: str) -> None:
    inside, page = machine().is_ordered, "nki.language.no_reorder"
    require(not inside, call, "a loop", "must not be within nl.no_reorder", "one", page)


def _count(call: str, bounds: dict[str, Bound], step: int) -> Iterator[VirtualRegister]:
    """Check the arguments of a loop, and return an iterator over its counter."""
    page = f"nki.language.{call.removeprefix('nl.')}"
    is_step = isinstance(step, (int, np.integer)) and step >= 1
    require(is_step, call, "step", "must be an integer from 1", step, page)
    for name, x in bounds.items():
        known = isinstance(x, (int, np.integer, VirtualRegister))
        require(known, call, name, "must be an integer or a register", x, page)
    _check_order(call)
    first, end = (int(number(call, x)) for x in bounds.values())
    numbers = range(first, end, int(step))
    if any(isinstance(x, VirtualRegister) for x in bounds.values()):
        machine().branch(len(numbers))
    return _iterate(numbers)


def _iterate(numbers: range) -> Iterator[VirtualRegister]:
    state = machine()
    for i, weight in _sampled(numbers, state.samples):
        with state.loop(weight):
            yield VirtualRegister(i, is_frozen=True)


def _sampled(numbers: range, samples: int | None) -> list[tuple[int, float]]:
    """Return the iterations to run, and how many each stands for."""
    if samples is None:
        return [(i, 1.0) for i in numbers]
    if samples == 0:
        # once for any bounds, like a compiler
        return [(numbers.start, float(len(numbers)))]
    count = min(samples, len(numbers))
    return [(numbers[i], len(numbers) / count) for i in _middles(len(numbers), count)]


def _middles(size: int, count: int) -> Sequence[int]:
    """Return ``count`` numbers below ``size``, evenly spread, with their mean in the middle."""
    first = [(2 * i + 1) * size // (2 * count) for i in range(count // 2)]
    middle = [size // 2] if count % 2 else []
    return [*first, *middle, *(size - 1 - i for i in reversed(first))]
