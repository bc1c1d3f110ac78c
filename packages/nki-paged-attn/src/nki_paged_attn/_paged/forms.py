"""Buckets and forms: which part of a call is compiled, and which is data.

A *bucket* is the largest batch, packed tokens and cached context that a form of the kernel serves.
A *form* is what a device compiles: shapes of tensors, options, and the loops over rows of a table.
The table holds lengths, block numbers, offsets, and how often each loop runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from attn_common import cdiv, round_up

from .checks import PARTITIONS, check_count

MAX_TOKENS = 8
# with at most this many rows of a sequence, keys lie on the partitions, not queries
MAX_PART_ROWS = 64
# tiles of a block, the largest first, and its most tokens
BLOCK_TILES = (64, 32, 16, 8, 4, 2, 1)
BLOCK_TOKENS = 1024
# (most tiles of a block, wide sections of an iteration): a form of a context of 32,768 stays below
# 20,000 instructions
BLOCK_SECTIONS = ((4, 4), (32, 2), (BLOCK_TILES[0], 1))
# chunks of 128 keys of an iteration, as in _kernels
CHUNKS = 4
# chunks of 128 keys of a part; all but the last part of a sequence have the most
PART_CHUNKS = (32, 16, 8, 4, 2, 1)
PART_KEYS = PARTITIONS * PART_CHUNKS[0]
# parts of one token that an iteration runs side by side
TOGETHER = 4
# parts, of sequences with one new token, that are merged side by side
MERGE_PARTS = 16
# kinds of loops, and numbers of their rows besides tiles and sections, as in _kernels
BLOCKS, PARTS, MERGES, TILES, WRITES = 0, 1, 2, 3, 4
BLOCK_FIELDS, PART_FIELDS, LAST_FIELDS, SECTION, WRITE_FIELDS = 9, 7, 3, 5, 3
# key of the tiles' slots (others: numbers of tokens); least wide sections of a tile that is split
OF_TILES, CUT_SECTIONS = 0, 4
# slots that stand for missing parts, one for each program
EMPTY_SLOTS = 2
# smallest powers of two: a bucket that is not full costs next to nothing
LEAST = {"batch": 8, "tokens": 512, "context": 4096}


class Bucket(NamedTuple):
    """The most that a form serves: sequences, packed new tokens, cached tokens of a sequence."""

    batch: int
    tokens: int
    context: int


@dataclass(frozen=True)
class Buckets:
    """The sizes that forms are compiled for.

    A call takes the smallest size of each kind that holds it, so at most ``len(batch) * len(tokens)
    * len(context)`` forms are compiled for a set of options.

    Args:
        batch: numbers of sequences.
        tokens: numbers of packed new tokens.
        context: numbers of cached tokens of the longest sequence.

    Each is an integer or several; None stands for powers of two, from 8, 512 and 4096 on.
    """

    batch: int | Sequence[int] | None = None
    tokens: int | Sequence[int] | None = None
    context: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in Bucket._fields:
            given = getattr(self, name)
            if given is None:
                continue
            several = isinstance(given, (Sequence, np.ndarray)) and not isinstance(given, str)
            sizes = list(given) if several else [given]
            if not sizes:
                raise ValueError(f"buckets.{name} must have a size, got none")
            for size in sizes:
                check_count(f"buckets.{name}", size)
            object.__setattr__(self, name, tuple(sorted(int(size) for size in sizes)))

    def find(self, batch: int, tokens: int, context: int) -> Bucket:
        """Return the smallest bucket that holds a call.

        Raises:
            TypeError: a size that is no integer.
            ValueError: no bucket holds the call (the message names one that would), or a size is
                negative.
        """
        needed = {"batch": batch, "tokens": tokens, "context": context}
        found, missing = {}, {}
        for name, size in needed.items():
            check_count(name, size, least=0)
            sizes: Any = getattr(self, name)
            if sizes is None:
                found[name] = max(LEAST[name], 1 << max(0, size - 1).bit_length())
                continue
            found[name] = next((s for s in sizes if s >= size), 0)
            if not found[name]:
                missing[name] = (size, sizes[-1])
                found[name] = 1 << max(0, size - 1).bit_length()
        if missing:
            name, (size, most) = next(iter(missing.items()))
            would = ", ".join(f"{n}={s}" for n, s in found.items())
            raise ValueError(
                f"buckets.{name} must hold the call's {size}, got at most {most}; "
                f"Bucket({would}) would hold it"
            )
        return Bucket(**found)


def check_buckets(buckets: Any) -> Buckets:
    """Return buckets, or powers of two for None."""
    if buckets is None:
        return Buckets()
    if not isinstance(buckets, Buckets):
        raise TypeError(f"buckets must be Buckets or None, got {type(buckets).__name__}")
    return buckets


class BlockSize(NamedTuple):
    """How a block of queries lies in tiles of 128 rows.

    Attributes:
        tiles: of the block.
        shared: tiles that hold the same tokens, each of one head; 1 if a tile has all heads of
            its tokens.
        tokens: of the block.
        together: wide sections of an iteration.
    """

    tiles: int
    shared: int
    tokens: int
    together: int

    @property
    def columns(self) -> int:
        """Groups of tiles with the same tokens, and loads of queries."""
        return self.tiles // self.shared


class Loop(NamedTuple):
    """A loop of the device over rows of the table.

    Attributes:
        spec: the kernel's constants of the loop.
        width: numbers of a row for each of 128 partitions.
        together: rows of an iteration.
    """

    spec: tuple[int, ...]
    width: int
    together: int


@dataclass(frozen=True)
class Form:
    """The shapes that a bucket fixes.

    Attributes:
        bucket: the most that is served.
        group: query heads of a KV head.
        programs: cores of the logical core.
        has_new: whether new tokens' keys are handed in; else they are in the cache.
        head_dim: of queries, keys and values.
        writes: whether new keys and values are written into the cache, too.
    """

    bucket: Bucket
    group: int
    kv_heads: int
    block_size: int
    programs: int
    has_new: bool = True
    head_dim: int = PARTITIONS
    writes: bool = False

    @property
    def wide(self) -> int:
        """Tokens of a partition of a wide section: 8, or fewer, a divisor of the block size."""
        return min(MAX_TOKENS, self.block_size & -self.block_size)

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile of 128 rows."""
        return PARTITIONS // self.group

    @property
    def block_sizes(self) -> tuple[BlockSize, ...]:
        """Sizes that blocks may have, the largest first.

        From 128 tokens on a tile has one head: a load brings 128 tokens of all heads.
        """
        # SBUF holds the queries and outputs in fp32
        most = BLOCK_TILES[0] * PARTITIONS // max(PARTITIONS, self.head_dim)
        group, few = self.group, self.tile_tokens
        found = []
        for count in BLOCK_TILES:
            if count * group <= most and count * PARTITIONS <= BLOCK_TOKENS:
                found.append((count * group, group, count * PARTITIONS))
        least = found[-1][2] if found else BLOCK_TOKENS + 1
        found += [(t, 1, t * few) for t in BLOCK_TILES if t <= most and t * few < least]
        return tuple(
            BlockSize(*x, next(n for most, n in BLOCK_SECTIONS if x[0] <= most)) for x in found
        )

    @property
    def part_tokens(self) -> tuple[int, ...]:
        """Tokens that parts may have: one, and as many as 64 rows hold."""
        most = MAX_PART_ROWS // self.group
        return tuple(sorted({1, most})) if most else ()

    @property
    def most_parts(self) -> int:
        """Parts of the longest sequence, as a power of two."""
        parts = 1 + self.bucket.context // PART_KEYS
        return 1 << max(0, parts - 1).bit_length()

    @property
    def places(self) -> int:
        """Places of new tokens; each sequence begins at a multiple of 8."""
        if not self.has_new:
            return MAX_TOKENS
        return round_up(self.bucket.tokens + (MAX_TOKENS - 1) * self.bucket.batch, MAX_TOKENS)

    def sections_of(self, chunks: int) -> tuple[int, int]:
        """Return the sections of a part, and the tokens of a partition of one."""
        tokens = min(self.wide, chunks)
        return chunks // tokens, tokens

    @property
    def loops(self) -> tuple[Loop, ...]:
        """All loops, in the order in which the kernel runs them."""
        found = [Loop((WRITES,), WRITE_FIELDS, 1)] if self.writes else []
        found += [
            Loop((BLOCKS, x.tiles, x.shared, x.together), 3 * x.columns + BLOCK_FIELDS, 1)
            for x in self.block_sizes
        ]
        for tokens in self.part_tokens:
            # SBUF holds the keys of all parts that run side by side
            together = TOGETHER * PARTITIONS // max(PARTITIONS, self.head_dim)
            counts = (together, 1) if tokens == 1 else (1,)
            for chunks in PART_CHUNKS:
                sections, _ = self.sections_of(chunks)
                width = sections + PART_FIELDS
                last = width + LAST_FIELDS + 2 * tokens
                for count in counts:
                    if chunks == PART_CHUNKS[0]:
                        found.append(Loop((PARTS, chunks, tokens, 0, count), width, count))
                    found.append(Loop((PARTS, chunks, tokens, 1, count), last, count))
        # merges read what parts wrote
        parts = 2
        while parts <= self.most_parts:
            for n in self.part_tokens:
                # as many as take next to nothing of SBUF
                several = max(1, MERGE_PARTS // parts) if n == 1 else 1
                counts = (several, 1) if several > 1 else (1,)
                found += [Loop((MERGES, parts, n, c), parts + 1, c) for c in counts]
            parts *= 2
        if self.is_cut:
            found.append(Loop((TILES, 2), 3, 1))
        return tuple(found)

    @property
    def is_cut(self) -> bool:
        """Whether a sequence of one block is cut in two, to balance two programs.

        It does not depend on the number of programs, so results do not either.
        """
        return self.kv_heads in (1, 3)

    @property
    def slots(self) -> tuple[tuple[int, int], ...]:
        """Places for results that are merged: of parts, by number of tokens, and of split tiles."""
        most = self.bucket.batch * self.most_parts * self.kv_heads
        most = EMPTY_SLOTS + (most if self.most_parts > 1 else 0)
        found = [(n, most) for n in self.part_tokens]
        if self.is_cut:
            found.append((OF_TILES, 2 * self.bucket.batch * self.kv_heads))
        return tuple(found)

    @property
    def table_size(self) -> int:
        """Numbers that the table has room for, whatever the lengths are."""
        batch, tokens, context = self.bucket
        section = PARTITIONS * SECTION
        # any sequence may have blocks: bound the tiles and blocks of all
        longs = min(batch, tokens)
        tiles = 2 * (tokens // self.tile_tokens + longs)
        sizes = self.block_sizes
        largest = sizes[0].tokens // self.tile_tokens
        # a sequence has one more block of each size, or one tile twice
        blocks = min(tiles + longs, tiles // largest + (len(sizes) + 1) * (longs + 1)) + 1
        wide_keys = PARTITIONS * self.wide
        own = cdiv(sizes[0].tokens + PARTITIONS - 1, PARTITIONS)
        chunks = 2 * (CHUNKS + round_up(self.wide, CHUNKS)) + own
        sections = longs * (context // wide_keys + 1) + tokens // wide_keys
        long_size = (
            sections * section
            + blocks * (chunks * section + PARTITIONS * BLOCK_FIELDS)
            + tiles * 3 * PARTITIONS
        )
        widths = [loop.width for loop in self.loops if loop.spec[0] == PARTS]
        # parts of each sequence, and their merge
        parts = (context // PART_KEYS + 1) * max(widths, default=0) + self.most_parts + 1
        short = batch * PARTITIONS * parts
        # a split tile: a diagonal without keys, and its merge
        short += longs * (cdiv(PARTITIONS - 1 + self.tile_tokens, PARTITIONS) * section)
        short += longs * 3 * PARTITIONS
        if self.writes:
            short += (cdiv(tokens, PARTITIONS) + 1) * PARTITIONS * WRITE_FIELDS
        rows = self.kv_heads * (long_size + short)
        return round_up(2 * self.programs * len(self.loops) + rows, MAX_TOKENS)
