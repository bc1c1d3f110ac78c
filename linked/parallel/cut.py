"""How sequences are cut, as operators take it.

Lengths of packed sequences are a tensor and all else is numbers, so that a trace serves other
lengths than those that it was made with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .shards import SHARDS

RULES = ("balanced", *SHARDS)


class Cut(NamedTuple):
    """The lengths of packed sequences, int64 ``[batch]`` on the CPU, or None; and numbers.

    These are the number of ranks, this rank, the rule's place in ``RULES``, the window, and the
    number of sequences of one length, and that length.
    """

    lengths: Tensor | None
    numbers: list[int]


class Layout(NamedTuple):
    """How sequences are cut, and their mask: all that a rank has to know of the others."""

    lengths: tuple[int, ...]
    group_size: int
    window: tuple[int, int]
    shard: str
    rank: int


def cut_alike(
    batch: int, seqlen: int, group_size: int, window: tuple[int, int], shard: str, rank: int
) -> Cut:
    """Return how sequences of one length are cut."""
    return Cut(None, [group_size, rank, RULES.index(shard), *window, batch, seqlen])


def cut_by_plan(plan: Any, rank: int) -> Cut:
    """Return how a ``ShardPlan`` cuts sequences, of this package or of another one."""
    rule = RULES.index(plan.shard_rule)
    return Cut(plan.host_lengths, [plan.group_size, rank, rule, *plan.window, 0, 0])


def layout_by(lengths: Tensor | None, numbers: list[int]) -> Layout:
    """Return what a cut says, read from its tensor."""
    group_size, rank, rule, left, right, batch, seqlen = numbers
    of_each = (seqlen,) * batch if lengths is None else tuple(lengths.tolist())
    return Layout(of_each, group_size, (left, right), RULES[rule], rank)
