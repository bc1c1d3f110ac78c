"""Whether tensors share memory: exact for all strides, from sizes, strides and addresses alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# steps of a search, far more than any layout of attention takes; a longer one finds nothing
MOST_STEPS = 10_000
# layouts whose answers are kept
LAYOUTS = 4096


def check_apart(names: Sequence[str], values: Sequence[Any], written: Sequence[int]) -> None:
    """Check that tensors to be written overlap neither themselves nor another tensor.

    Args:
        names: names of the arguments.
        values: tensors, and other values, which are ignored.
        written: positions of the tensors to be written.
    """
    places = []  # where the memory of each begins and ends; (0, 0) if it has none
    for x in values:
        if isinstance(x, Tensor):
            memory = x.untyped_storage()
            begin = memory.data_ptr()
            places.append((begin, begin + memory.nbytes()))
        else:
            places.append((0, 0))
    for i in written:
        begin, end = places[i]
        if begin == 0:  # not given, without elements, or a tensor of a trace
            continue
        check_no_overlap(names[i], values[i])
        for j, (begin_other, end_other) in enumerate(places):
            # each pair of written tensors once
            if begin_other < end and begin < end_other and (j > i or j not in written) and j != i:
                _check_pair(names[i], values[i], names[j], values[j])


def check_no_overlap(name: str, x: Tensor) -> None:
    """Check that no two elements of a tensor to be written share memory.

    A trace, whose strides may be symbols, only looks for expanded dimensions.
    """
    if torch.compiler.is_compiling():
        is_wrong = _is_expanded(x)
    else:
        is_wrong = not x.is_contiguous() and _overlaps(tuple(x.shape), x.stride())
    if not is_wrong:
        return
    if _is_expanded(x):
        raise ValueError(f"{name} must not be expanded, for it is written, got a stride of 0")
    raise ValueError(
        f"{name} must not overlap itself, for it is written, got {list(x.shape)} with strides "
        f"{list(x.stride())}"
    )


def _is_expanded(x: Tensor) -> bool:
    return any(stride == 0 and n > 1 for n, stride in zip(x.shape, x.stride(), strict=True))


def _check_pair(name: str, x: Tensor, other: str, y: Tensor) -> None:
    sizes = x.element_size(), y.element_size()
    layouts = tuple(x.shape), x.stride(), tuple(y.shape), y.stride()
    if _share(y.data_ptr() - x.data_ptr(), *sizes, *layouts):
        raise ValueError(
            f"{name} must not share memory with {other}, for it is written; got tensors that "
            "overlap"
        )


@lru_cache(LAYOUTS)
def _overlaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether two elements of a tensor have one address."""
    if 0 in shape:
        return False
    below: list[tuple[int, int]] = []
    reach = 0  # the largest sum of the smaller strides
    for stride, most in sorted((s, n - 1) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride == 0:
            return True
        # two elements that are alike in larger strides, and from 1 to ``apart`` steps of this one
        # apart, which the smaller strides make up for
        apart = min(most, reach // stride)
        doubled = [(s, 2 * m) for s, m in below]
        if apart and _is_sum(apart * stride + reach, [*doubled, (stride, apart - 1)]):
            return True
        below.append((stride, most))
        reach += stride * most
    return False


@lru_cache(LAYOUTS)
def _share(
    distance: int,
    size_x: int,
    size_y: int,
    shape_x: tuple[int, ...],
    strides_x: tuple[int, ...],
    shape_y: tuple[int, ...],
    strides_y: tuple[int, ...],
) -> bool:
    """Return whether two tensors, which begin ``distance`` bytes apart, share a byte."""
    if 0 in shape_x or 0 in shape_y:
        return False
    steps = [(1, size_x - 1), (1, size_y - 1)]
    steps += [(s * size_x, n - 1) for s, n in zip(strides_x, shape_x, strict=True)]
    of_y = [(s * size_y, n - 1) for s, n in zip(strides_y, shape_y, strict=True)]
    # bytes of y are counted from its last one backwards, so that all terms are positive
    last = size_y - 1 + sum(stride * most for stride, most in of_y)
    return _is_sum(distance + last, steps + of_y)


def _is_sum(total: int, terms: list[tuple[int, int]]) -> bool:
    """Return whether ``total`` is a sum of strides, each taken from 0 to ``most`` times."""
    joined: list[tuple[int, int]] = []
    for stride, most in sorted(terms):
        if stride == 0 or most == 0:
            continue
        if joined:
            least, times = joined[-1]
            # together they reach every multiple of the smaller stride
            if stride % least == 0 and stride // least <= times + 1:
                joined[-1] = least, times + stride // least * most
                continue
        joined.append((stride, most))
    # by number of smallest strides: the largest sum, and what divides all sums
    reach, divisor = [0], [0]
    for stride, most in joined:
        reach.append(reach[-1] + stride * most)
        divisor.append(math.gcd(divisor[-1], stride))
    open_sums, left = [(total, len(joined))], MOST_STEPS
    while open_sums and left > 0:
        rest, count = open_sums.pop()
        if rest == 0:
            return True
        if not 0 < rest <= reach[count] or rest % divisor[count]:
            continue
        stride, most = joined[count - 1]
        first = max(0, -((reach[count - 1] - rest) // stride))
        last = min(most, rest // stride, first + left)
        left -= last - first + 1
        open_sums += ((rest - n * stride, count - 1) for n in range(first, last + 1))
    return False
