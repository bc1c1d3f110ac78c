"""The host's plan: which tiles of queries meet which sections of keys, and where those lie.

A plan has two halves. The **structure** is nested tuples of small numbers; it shapes the kernel's
loops and is part of what the kernel is compiled for. The **tables** are tensors that the kernel
reads at run time: row numbers for the gathers, and the range of keys that each row sees.

A *section* is up to 1024 keys, 128 partitions of ``tokens`` (1, 2, 4 or 8) consecutive tokens each,
from one of two sources: the paged cache, or the new tokens. A *tile* is up to 128 rows of the
queries of one KV head: ``group`` query heads of some tokens, token by token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from attn_common import cdiv, round_up

from ._paged.checks import (
    PARTITIONS,
    check_block_size,
    check_flag,
    check_heads,
    check_lengths,
    check_table,
    check_window,
)
from ._paged.forms import MAX_TOKENS
from ._paged.sequences import CACHE, MAX_POSITION, NEW, NOWHERE, Ints

# rows of a sequence up to which keys, and not queries, lie on the partitions
MAX_DECODE_ROWS = 64
# keys that stay in SBUF together, in sections, and tiles of queries with their accumulators
RESIDENT_SECTIONS = 8
RESIDENT_TILES = 64
# partitions of keys behind a diagonal are left out in steps of so many
REACH_STEP = 16
# columns of scores that decode keeps in one bank of PSUM, and chunks of 128 keys of one softmax
DECODE_COLUMNS = 512
DECODE_CHUNKS = 40

# kinds of steps of a prefill unit
LOAD_SECTIONS, MULTIPLY, EMPTY = 0, 1, 2
PREFILL, DECODE = 0, 1


@dataclass(frozen=True)
class Rows:
    """Tokens of one sequence, and the keys that each of them sees in each source.

    Attributes:
        tokens: numbers of the tokens in the packed batch.
        cache: first and end position seen in the cache, ``[tokens, 2]``, of this sequence.
        new: first and end token seen among the new tokens, ``[tokens, 2]``, of the whole batch.
        blocks: block numbers of the sequence in order.
    """

    tokens: Ints
    cache: Ints
    new: Ints
    blocks: Ints


@dataclass(frozen=True)
class Plan:
    """What the kernel is told.

    Attributes:
        structure: units of work, each ``(kind, ...)``; see ``_kernels``.
        sections: for each section ``(source, tokens, clean, start, mask column)``; ``clean`` is 1
            if partitions of it hold nothing, 2 if tokens in it are seen by nobody; ``start`` is its
            first position, counted from the first section of its source.
        new_tokens: token of the batch at each place of the new keys and values that the kernel
            reads, -1 for none; of at least 8 places. A sequence's begin at a multiple of 8,
            wherever it lies in the batch, so that its keys lie on the same partitions in any batch.
        kv_index: row of each partition of each section, int32 ``[128, sections]``.
        kv_valid: whether somebody sees a token, uint8 ``[128, columns]``, for ``clean`` sections.
        q_index: row of each partition of each tile, int32 ``[128, tiles]``.
        bounds: first and end key seen, of the cache and of the new, by row, fp32
            ``[128, tiles * 4]``.
        bounds_tokens: the same by token, ``[tiles, 128 // group, 4]``.
        rows: of each tile that are in use.
    """

    structure: tuple[Any, ...]
    sections: tuple[tuple[int, int, int, int, int], ...]
    new_tokens: Ints
    kv_index: np.ndarray[Any, Any]
    kv_valid: np.ndarray[Any, Any]
    q_index: np.ndarray[Any, Any]
    bounds: np.ndarray[Any, Any]
    bounds_tokens: np.ndarray[Any, Any]
    rows: tuple[int, ...]
    block_size: int
    group: int
    kv_heads: int
    tokens: int

    @property
    def pairs(self) -> int:
        """Pairs of a tile and a section that are multiplied, for each KV head."""
        count = 0
        for unit in self.structure:
            if unit[0] == DECODE:
                count += sum(len(s) for s in unit[2])
            else:
                count += sum(len(step[1]) for step in unit[1] if step[0] == MULTIPLY)
        return count

    def __str__(self) -> str:
        kinds = [unit[0] for unit in self.structure]
        return (
            f"{self.tokens} tokens: {kinds.count(DECODE)} sequences with keys on the partitions, "
            f"{kinds.count(PREFILL)} with queries; {len(self.rows)} tiles, {len(self.sections)} "
            f"sections, {self.pairs} pairs for each KV head"
        )


def build_plan(
    query_lens: Sequence[int] | Ints,
    context_lens: Sequence[int] | Ints,
    block_table: Any,
    block_size: int,
    *,
    heads: int,
    kv_heads: int,
    tokens: int | None = None,
    window: int | None = None,
    joint: bool = True,
) -> Plan:
    """Plan a packed batch of sequences, prefill, chunks and decode in any mixture.

    Args:
        query_lens: new tokens of each sequence, ``[batch]``; 0 is legal.
        context_lens: tokens of each that the cache holds already, ``[batch]``.
        block_table: block numbers, ``[batch, max_blocks]``; entries past a context are not read.
        block_size: tokens of a block.
        heads, kv_heads: of the queries, and of the cache; at most 128 query heads for a KV head.
        tokens: rows of the packed queries; those behind the last sequence give 0. Default: the sum.
        window: keys that a token sees at most, itself included. Default: all.
        joint: whether one softmax may cover cached and new keys, which then have the same scales.

    Raises:
        TypeError: a length, a block number or a count that is no integer.
        ValueError: lengths that disagree, or a number out of range.
    """
    check_block_size(block_size)
    check_heads(heads, kv_heads)
    check_flag("joint", joint)
    queries, contexts = check_lengths(query_lens, context_lens, tokens)
    table = check_table(block_table, contexts, block_size)
    window = check_window(window)
    total = int(queries.sum())
    sequences = []
    first = 0
    for i, (count, context) in enumerate(zip(queries, contexts, strict=True)):
        own = np.arange(count)
        low = np.maximum(context + own - (window or MAX_POSITION) + 1, 0)
        cache = np.stack([np.minimum(low, context), np.full(count, context)], axis=1)
        new = first + np.stack([np.maximum(low - context, 0), own + 1], axis=1)
        blocks = table[i, : cdiv(int(context), block_size)]
        sequences.append(Rows(first + own, cache, new, blocks))
        first += int(count)
    extra = np.arange(total, total if tokens is None else tokens)
    if len(extra):
        # tokens of no sequence see nothing
        nothing = np.zeros((len(extra), 2), np.int64)
        sequences.append(Rows(extra, nothing, nothing, np.zeros(0, np.int64)))
    return plan_rows(sequences, block_size, heads, kv_heads, max(total, tokens or 0), joint)


def plan_rows(
    sequences: Iterable[Rows],
    block_size: int,
    heads: int,
    kv_heads: int,
    tokens: int,
    joint: bool = True,
) -> Plan:
    """Plan rows whose ranges of visible keys are known."""
    check_heads(heads, kv_heads)
    builder = _Builder(block_size, heads // kv_heads, kv_heads, joint)
    found = [rows for rows in sequences if len(rows.tokens)]
    builder.lay_out(found)
    for rows in found:
        builder.add(rows)
    return builder.finish(tokens)


def _extent(seen: Ints) -> tuple[int, int]:
    """Return the first and the end of what some of the ranges hold; 0 and 0 of none."""
    some = seen[seen[:, 0] < seen[:, 1]]
    return (int(some[:, 0].min()), int(some[:, 1].max())) if len(some) else (0, 0)


@dataclass
class _Builder:
    block_size: int
    group: int
    kv_heads: int
    joint: bool
    structure: list[Any] = field(default_factory=list)
    sections: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    # by a sequence's first new token, where that lies in what the kernel reads
    places: dict[int, int] = field(default_factory=dict)
    new_tokens: list[Ints] = field(default_factory=list)
    indices: list[Ints] = field(default_factory=list)
    valid: list[np.ndarray[Any, Any]] = field(default_factory=list)
    tiles: list[Ints] = field(default_factory=list)
    bounds: list[np.ndarray[Any, Any]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def lay_out(self, sequences: Sequence[Rows]) -> None:
        """Give the new tokens that each sequence sees their places, from a multiple of 8 on."""
        ends: dict[int, int] = {}
        for rows in sequences:
            low, high = _extent(rows.new)
            if low < high:
                ends[low] = max(ends.get(low, 0), high)
        at = 0
        for low, high in ends.items():
            own = np.full(round_up(high - low, MAX_TOKENS), -1, np.int64)
            own[: high - low] = np.arange(low, high)
            self.places[low] = at
            self.new_tokens.append(own)
            at += len(own)

    def add(self, rows: Rows) -> None:
        """Add a sequence: its sections, its tiles, and the work between them."""
        low, _ = _extent(rows.new)
        place = self.places.get(low, 0)
        ranges = (rows.cache, rows.new - low)
        starts = [0, 0]
        found: list[list[int]] = [[], []]
        for source in (CACHE, NEW):
            starts[source], found[source] = self._cut(source, ranges[source], rows.blocks, place)
        relative = [np.maximum(r - s, 0) for r, s in zip(ranges, starts, strict=True)]
        empty = [r[:, 0] >= r[:, 1] for r in ranges]
        for source in (CACHE, NEW):
            relative[source][empty[source]] = 0
        per_tile = PARTITIONS // self.group
        own = range(0, len(rows.tokens), per_tile)
        tiles = [
            self._tile(rows.tokens[a : a + per_tile], [r[a : a + per_tile] for r in relative])
            for a in own
        ]
        numbers = found[CACHE] + found[NEW]
        seen = [
            [self._sees([r[a : a + per_tile] for r in relative], s) for a in own] for s in numbers
        ]
        everywhere = not (empty[CACHE] & empty[NEW]).any()
        if len(tiles) == 1 and self.rows[tiles[0]] <= MAX_DECODE_ROWS and everywhere:
            self._decode(tiles[0], numbers, [s[0] for s in seen])
        else:
            self._prefill(tiles, numbers, seen)

    def _cut(self, source: int, seen: Ints, blocks: Ints, place: int) -> tuple[int, list[int]]:
        """Cut the keys that a sequence sees of a source into sections."""
        low, high = _extent(seen)
        if low == high:
            return 0, []
        some = seen[seen[:, 0] < seen[:, 1]]
        block = self.block_size if source == CACHE else MAX_TOKENS
        widest = min(MAX_TOKENS, block & -block)
        # how many rows see each token
        steps = np.zeros(round_up(high, block) + PARTITIONS * MAX_TOKENS + 1, np.int64)
        np.add.at(steps, some[:, 0], 1)
        np.add.at(steps, some[:, 1], -1)
        visible = np.cumsum(steps) > 0
        first = low // block * block
        at, numbers = first, []
        while at < high:
            tokens = widest
            while tokens > 1 and PARTITIONS * tokens // 2 >= high - at:
                tokens //= 2
            numbers.append(len(self.sections))
            self._section(source, tokens, at, first, visible, blocks, place)
            at += PARTITIONS * tokens
        return first, numbers

    def _section(
        self, source: int, tokens: int, at: int, first: int, visible: Any, blocks: Ints, place: int
    ) -> None:
        positions = at + tokens * np.arange(PARTITIONS)
        inside: Any = np.zeros(PARTITIONS * tokens, bool)
        part = visible[at : at + PARTITIONS * tokens]
        inside[: len(part)] = part
        inside = inside.reshape(PARTITIONS, tokens)
        loaded = inside.any(axis=1)
        if source == CACHE:
            per_block = self.block_size // tokens
            number = np.where(loaded, positions // self.block_size, 0)
            # of the first KV head; the kernel adds the others' distance
            row = blocks[number] * self.kv_heads * per_block
            row = row + positions % self.block_size // tokens
        else:
            row = (place + positions) // tokens
        row = np.where(loaded, row, NOWHERE)
        if row[loaded].max(initial=0) >= NOWHERE:
            raise NotImplementedError(
                f"the cache may have at most {NOWHERE} rows of {tokens} tokens"
            )
        self.indices.append(row)
        clean = 0 if inside.all() else 1 if (inside.all(axis=1) | ~loaded).all() else 2
        column = sum(v.shape[1] for v in self.valid) if clean == 2 else 0
        if clean == 2:
            self.valid.append(inside.astype(np.uint8))
        self.sections.append((source, tokens, clean, at - first, column))

    def _tile(self, tokens: Ints, ranges: list[Ints]) -> int:
        count = len(tokens) * self.group
        rows: Ints = np.full(PARTITIONS, NOWHERE, np.int64)
        heads = self.group * self.kv_heads
        rows[:count] = (tokens[:, None] * heads + np.arange(self.group)).reshape(-1)
        bounds = np.zeros((4, PARTITIONS), np.float32)
        for source in (CACHE, NEW):
            if len(ranges[source]) and ranges[source].max() >= MAX_POSITION:
                raise NotImplementedError(f"a sequence may have at most {MAX_POSITION} keys")
            bounds[2 * source : 2 * source + 2, :count] = np.repeat(
                ranges[source], self.group, axis=0
            ).T
        self.tiles.append(rows)
        self.bounds.append(bounds)
        self.rows.append(count)
        return len(self.tiles) - 1

    def _sees(self, ranges: list[Ints], section: int) -> int:
        """Return 0 if no row of a tile sees a section, 1 if some see some of it, 2 if all all."""
        source, tokens, clean, start, _ = self.sections[section]
        low, high = ranges[source][:, 0], ranges[source][:, 1]
        end = start + PARTITIONS * tokens
        if not ((np.maximum(low, start) < np.minimum(high, end)).any()):
            return 0
        return 2 if not clean and bool(((low <= start) & (high >= end)).all()) else 1

    def _reach(self, tile: int, section: int) -> int:
        """Return how many partitions of a section a tile has to be multiplied with."""
        source, tokens, _, start, _ = self.sections[section]
        high = int(self.bounds[tile][2 * source + 1].max())
        # in steps, for fewer forms of the kernel
        return min(PARTITIONS, round_up(cdiv(high - start, tokens), REACH_STEP))

    def _decode(self, tile: int, numbers: list[int], seen: list[int]) -> None:
        """One softmax for as many sections as fit a bank of scores."""
        rounds: list[list[tuple[int, int]]] = []
        chunks, last = 0, -1
        for number, sees in zip(numbers, seen, strict=True):
            if not sees:
                continue
            source, tokens = self.sections[number][:2]
            full = chunks + tokens > min(DECODE_CHUNKS, DECODE_COLUMNS // self.rows[tile])
            if full or last < 0 or (source != last and not self.joint):
                rounds.append([])
                chunks = 0
            rounds[-1].append((number, int(sees == 1)))
            chunks, last = chunks + tokens, source
        self.structure.append((DECODE, tile, tuple(map(tuple, rounds))))

    def _prefill(self, tiles: list[int], numbers: list[int], seen: list[list[int]]) -> None:
        steps: list[Any] = []
        empty = [t for i, t in enumerate(tiles) if not any(s[i] for s in seen)]
        if empty:
            steps.append((EMPTY, tuple(empty)))
        if len(numbers) <= RESIDENT_SECTIONS:
            # all keys stay; queries pass by
            blocks = [range(len(tiles))]
        else:
            blocks = [
                range(a, min(a + RESIDENT_TILES, len(tiles)))
                for a in range(0, len(tiles), RESIDENT_TILES)
            ]
        for block in blocks:
            needed = [s for s in range(len(numbers)) if any(seen[s][t] for t in block)]
            steps += self._block(block, needed, tiles, numbers, seen)
        self.structure.append((PREFILL, tuple(steps)))

    def _block(
        self,
        block: range,
        needed: list[int],
        tiles: list[int],
        numbers: list[int],
        seen: list[list[int]],
    ) -> list[Any]:
        """Return the steps for some tiles, whose accumulators stay while keys pass by."""
        steps: list[Any] = []
        first = {t: next((s for s in needed if seen[s][t]), -1) for t in block}
        last = {t: next((s for s in reversed(needed) if seen[s][t]), -1) for t in block}
        for a in range(0, len(needed), RESIDENT_SECTIONS):
            loaded = needed[a : a + RESIDENT_SECTIONS]
            steps.append((LOAD_SECTIONS, tuple(numbers[s] for s in loaded)))
            pairs = [
                (
                    k,
                    numbers[s],
                    int(seen[s][t] == 1),
                    tiles[t],
                    int(s == first[t]),
                    int(s == last[t]),
                    self._reach(tiles[t], numbers[s]),
                )
                for t in block
                for k, s in enumerate(loaded)
                if seen[s][t]
            ]
            steps.append((MULTIPLY, tuple(pairs)))
        return steps

    def finish(self, tokens: int) -> Plan:
        """Put the tables together."""
        nothing = [np.full(PARTITIONS, NOWHERE, np.int64)]
        index = np.stack(self.indices or nothing, axis=-1)
        valid = self.valid or [np.zeros((PARTITIONS, 1), np.uint8)]
        tiles = np.stack(self.tiles or nothing, axis=-1)
        bounds = np.stack(self.bounds or [np.zeros((4, PARTITIONS), np.float32)])
        whole = PARTITIONS // self.group * self.group
        by_token = bounds[:, :, : whole : self.group].transpose(0, 2, 1)
        return Plan(
            structure=tuple(self.structure),
            sections=tuple(self.sections),
            new_tokens=np.concatenate(self.new_tokens or [np.full(MAX_TOKENS, -1)]),
            kv_index=index.astype(np.int32),
            kv_valid=np.concatenate(valid, axis=1),
            q_index=tiles.astype(np.int32),
            bounds=np.ascontiguousarray(bounds.reshape(-1, PARTITIONS).T),
            bounds_tokens=np.ascontiguousarray(by_token),
            rows=tuple(self.rows),
            block_size=self.block_size,
            group=self.group,
            kv_heads=self.kv_heads,
            tokens=tokens,
        )
