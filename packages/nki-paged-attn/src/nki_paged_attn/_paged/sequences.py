"""Sequences of a batch, and how each is cut into keys and queries, by its own lengths alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from attn_common import cdiv, round_up

from .checks import PARTITIONS
from .forms import MAX_TOKENS

Ints = np.ndarray[Any, np.dtype[np.int64]]
CACHE, NEW = 0, 1
# an index that no tensor has: the row is skipped
NOWHERE = 2**30
# positions are compared as fp32 numbers
MAX_POSITION = 2**24


@dataclass(frozen=True)
class Sequence:
    """Tokens and keys of one sequence, and which keys each token sees.

    Keys are counted from the sequence's first cached one; new ones follow the cached ones.

    Attributes:
        first, count: its tokens in the packed batch.
        ranges: first and end key that each token sees, ``[count, 2]``; 0 and 0 for none.
        position: where its first token lies among its keys.
        cached: keys in the cache, in the order of ``blocks``.
        blocks: block numbers.
        place, new: place of its first new key, and number of its new keys.
    """

    first: int
    count: int
    ranges: Ints
    position: int
    cached: int
    blocks: Ints
    place: int = 0
    new: int = 0

    @property
    def sees(self) -> bool:
        """Whether some token sees a key."""
        return bool((self.ranges[:, 0] < self.ranges[:, 1]).any())

    @property
    def is_causal(self) -> bool:
        """Whether tokens have keys of their own, and none sees a key after its own."""
        last = self.position + 1 + np.arange(self.count)
        has_own = self.new > 0 or self.cached > self.position
        return has_own and bool((self.ranges[:, 1] <= last).all())

    @cached_property
    def lows(self) -> Ints:
        """The first keys that tokens see, of those that see any."""
        found: Ints = self.ranges[self.ranges[:, 0] < self.ranges[:, 1], 0]
        return found

    @property
    def low(self) -> int:
        """The first cached key that some token sees."""
        return min(self.cached, int(self.lows.min(initial=self.cached)))

    def bounds(self, tokens: Ints) -> tuple[Ints, Ints]:
        """Return the first and end key that tokens see, 0 and 0 for tokens past its last."""
        own = self.ranges[np.minimum(tokens, self.count - 1)]
        real = (tokens < self.count)[..., None]
        low, high = np.moveaxis(np.where(real, own, 0), -1, 0)
        return low, high


@dataclass(frozen=True)
class Segment:
    """Keys of a sequence that lie in one source, from ``start`` to ``end``, as it counts them.

    Wide sections begin at a multiple of ``tokens``, the tokens of a partition; keys before the
    first and after the last wide section are cut into chunks.
    """

    source: int
    start: int
    end: int
    tokens: int

    @property
    def aligned(self) -> int:
        return min(round_up(self.start, self.tokens), self.end)

    def wide(self, limit: int) -> range:
        """Return the starts of the wide sections that end at or before a limit."""
        keys = PARTITIONS * self.tokens
        return range(self.aligned, limit - keys + 1, keys)

    def chunks(self, limit: int) -> list[tuple[int, int]]:
        """Return the first and end key of each chunk: keys before a limit in no wide section."""
        head = min(self.aligned, limit)
        rest = max(head, self.aligned + len(self.wide(limit)) * PARTITIONS * self.tokens)
        found = [(self.start, head)] if self.start < head else []
        return found + [(a, min(a + PARTITIONS, limit)) for a in range(rest, limit, PARTITIONS)]


@dataclass(frozen=True)
class Packed:
    """A batch of sequences, as a form runs it.

    Attributes:
        sequences: those with tokens. Tokens of no sequence are the last one, which sees nothing.
        new: token at each place of new keys, -1 for none. A sequence's places begin at a multiple
            of 8, so that its keys lie on the same partitions in any batch.
        tokens: rows of the packed queries.
        needed: sequences, packed tokens, and most cached keys of a sequence, for the bucket.
        has_new: whether new tokens' keys are handed in; else they are in the cache.
        writes: whether the call writes them into the cache.
    """

    sequences: tuple[Sequence, ...]
    new: Ints
    tokens: int
    needed: tuple[int, int, int]
    has_new: bool = True
    writes: bool = False


def pack_lengths(
    query_lens: Ints,
    context_lens: Ints,
    table: Ints,
    block_size: int,
    tokens: int,
    window: int | None,
    *,
    is_cached: bool = False,
    writes: bool = False,
) -> Packed:
    """Pack sequences whose tokens see their context and, causally, each other.

    Args:
        table: block numbers, ``[batch, max_blocks]``.
        tokens: rows of the packed queries; those after the last sequence see nothing.
        window: keys that a token sees at most.
        is_cached: whether new tokens' keys are in the cache already; contexts count what was there
            before.
        writes: whether the call writes them into the cache.
    """
    found, order = [], []
    first = place = 0
    for number, (count, context) in enumerate(
        zip(query_lens.tolist(), context_lens.tolist(), strict=True)
    ):
        if context + count > MAX_POSITION:
            raise NotImplementedError(f"a sequence may have at most {MAX_POSITION} keys")
        if not count:
            continue
        keys = context + (count if is_cached or writes else 0)
        end = context + 1 + np.arange(count)
        ranges = np.stack([np.maximum(end - (window or MAX_POSITION), 0), end], axis=1)
        blocks = table[number, : cdiv(keys, block_size)]
        if is_cached:
            found.append(Sequence(first, count, ranges, context, context + count, blocks))
        else:
            found.append(Sequence(first, count, ranges, context, context, blocks, place, count))
            order.append(places_of(first, count))
            place += len(order[-1])
        first += count
    if tokens > first:
        found.append(nobody(first, tokens - first))
    keys = context_lens + (query_lens if is_cached else 0)
    needed = len(query_lens), tokens, int(keys.max(initial=0))
    new = np.concatenate([*order, np.zeros(0, np.int64)])
    return Packed(tuple(found), new, tokens, needed, not is_cached, writes)


def nobody(first: int, count: int) -> Sequence:
    """Return a sequence of tokens that see nothing."""
    return Sequence(first, count, np.zeros((count, 2), np.int64), 0, 0, np.zeros(0, np.int64))


def places_of(first: int, count: int) -> Ints:
    """Return the tokens at the places of a sequence's new keys, -1 for places of padding."""
    found = np.full(round_up(count, MAX_TOKENS), -1, np.int64)
    found[:count] = first + np.arange(count)
    return found


def cover(count: int, sizes: tuple[int, ...]) -> list[int]:
    """Return the sizes of the blocks of ``count`` tokens; up to a fifth of a block may be empty.

    ``sizes`` are those of blocks, the largest first; ``count`` is a multiple of the least.
    """
    found = []
    while count > 0:
        own = next(c for c in sizes if 5 * c <= 6 * count or c == sizes[-1])
        found.append(own)
        count -= own
    return found


def cut_blocks(count: int, sizes: tuple[int, ...], is_cut: bool) -> list[int]:
    """Return a sequence's blocks; with ``is_cut`` none holds most of a short sequence."""
    found = cover(count, sizes)
    if is_cut and sizes[-1] < count <= sizes[0] and 2 * found[0] > count:
        return cover(count, tuple(s for s in sizes if 2 * s <= count))
    return found
