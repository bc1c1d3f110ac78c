"""The cut of sequences over ranks, as arguments of operators.

Lengths of packed sequences are a tensor and everything else is numbers, so that a trace also serves
other lengths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .shards import SHARDS

RULES = ("balanced", *SHARDS)


class Cut(NamedTuple):
    """Lengths of packed sequences, int64 ``[batch]`` on the CPU, or None; and numbers.

    ``numbers``: group size, rank, index of the rule in ``RULES``, window (two numbers), and for
    fixed-length batches the number of sequences and their length.
    """

    lengths: Tensor | None
    numbers: list[int]


class Layout(NamedTuple):
    """How sequences are cut, and their window: all that a rank must know about the other ranks."""

    lengths: tuple[int, ...]
    group_size: int
    window: tuple[int, int]
    shard: str
    rank: int


def cut_alike(
    batch: int, seqlen: int, group_size: int, window: tuple[int, int], shard: str, rank: int
) -> Cut:
    """Return the cut of sequences of one length."""
    return Cut(None, [group_size, rank, RULES.index(shard), *window, batch, seqlen])


def cut_by_plan(plan: Any, rank: int) -> Cut:
    """Return the cut of a ``ShardPlan`` of this or another package."""
    rule = RULES.index(plan.shard_rule)
    return Cut(plan.host_lengths, [plan.group_size, rank, rule, *plan.window, 0, 0])


def layout_by(lengths: Tensor | None, numbers: list[int]) -> Layout:
    """Return the layout that a cut describes; reads its tensor."""
    group_size, rank, rule, left, right, batch, seqlen = numbers
    of_each = (seqlen,) * batch if lengths is None else tuple(lengths.tolist())
    return Layout(of_each, group_size, (left, right), RULES[rule], rank)
