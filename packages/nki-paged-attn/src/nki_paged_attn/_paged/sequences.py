"""Sequences of a batch, and how their keys and queries are cut: by their own lengths alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from attn_common import round_up

from .checks import PARTITIONS

Ints = np.ndarray[Any, np.dtype[np.int64]]
CACHE, NEW = 0, 1
# an index that no tensor has: the row is skipped
NOWHERE = 2**30
# positions are compared as fp32 numbers
MAX_POSITION = 2**24


@dataclass(frozen=True)
class Sequence:
    """A sequence of the batch.

    Attributes:
        first: its first token in the packed batch.
        place: where its keys begin among the new ones.
        count: new tokens.
        context: cached tokens, and ``low``, the first of them that its first token sees.
        window: keys that a token sees at most.
        blocks: its block numbers in order.
        sees: whether its tokens see anything; those of no sequence do not.
        is_cached: whether the new tokens' keys are in the cache already, and not among the new.
    """

    first: int
    place: int
    count: int
    context: int
    window: int
    blocks: Ints
    sees: bool = True
    is_cached: bool = False

    @property
    def low(self) -> int:
        return min(self.context, max(0, self.context - self.window + 1))

    @property
    def end(self) -> int:
        """Keys of it that are in the cache."""
        return self.context + (self.count if self.is_cached else 0)

    def bounds(self, tokens: Ints) -> tuple[Ints, Ints]:
        """Return the first and end position that tokens see, 0 and 0 for those it does not have."""
        real = (tokens < self.count) & self.sees
        end = np.where(real, self.context + tokens + 1, 0)
        return np.where(real, np.maximum(end - self.window, 0), 0), end


@dataclass(frozen=True)
class Segment:
    """Keys of a sequence that lie in one source, from ``start`` to ``end``, as it counts them.

    Wide sections begin where the ``tokens`` of a partition do; what is before the first and behind
    the last is cut into chunks.
    """

    source: int
    start: int
    end: int
    tokens: int

    @classmethod
    def of_own(cls, sequence: Sequence, tokens: int) -> Segment:
        """Return the segment in which the sequence's new tokens are."""
        if sequence.is_cached:
            return cls(CACHE, sequence.low, sequence.end, tokens)
        return cls(NEW, 0, sequence.count if sequence.sees else 0, tokens)

    def base(self, sequence: Sequence) -> int:
        """Return where the new tokens begin in it."""
        return sequence.context if sequence.is_cached else 0

    @property
    def aligned(self) -> int:
        return min(round_up(self.start, self.tokens), self.end)

    def wide(self, limit: int) -> range:
        """Return where wide sections begin that end by a limit."""
        keys = PARTITIONS * self.tokens
        return range(self.aligned, limit - keys + 1, keys)

    def chunks(self, limit: int) -> list[tuple[int, int]]:
        """Return the first and end key of chunks of what is before a limit and in none of these."""
        head = min(self.aligned, limit)
        rest = max(head, self.aligned + len(self.wide(limit)) * PARTITIONS * self.tokens)
        found = [(self.start, head)] if self.start < head else []
        return found + [(a, min(a + PARTITIONS, limit)) for a in range(rest, limit, PARTITIONS)]


def cover(count: int, sizes: tuple[int, ...]) -> list[int]:
    """Return the blocks of so many tokens: a fifth may be empty, rather than one block more.

    ``sizes`` are those of blocks, the largest first, and ``count`` a multiple of the least.
    """
    found = []
    while count > 0:
        own = next(c for c in sizes if 5 * c <= 6 * count or c == sizes[-1])
        found.append(own)
        count -= own
    return found


def cut_blocks(count: int, sizes: tuple[int, ...], is_cut: bool) -> list[int]:
    """Return the blocks of a sequence's tokens; where one would be most of it, halves or so."""
    found = cover(count, sizes)
    if is_cut and sizes[-1] < count <= sizes[0] and 2 * found[0] > count:
        return cover(count, tuple(s for s in sizes if 2 * s <= count))
    return found
