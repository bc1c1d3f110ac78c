"""The table of a form: rows for the loops of the kernel, made from a batch's lengths and blocks.

Positions count a sequence's keys from its first cached one, the new tokens after the context.
Rows depend on their own sequence alone; only their order, and which program runs them, depend on
the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from attn_common import cdiv, round_up

from .checks import PARTITIONS
from .forms import (
    BLOCK_FIELDS,
    BLOCKS,
    CHUNKS,
    CUT_SECTIONS,
    EMPTY_SLOTS,
    LAST_FIELDS,
    MERGES,
    PART_CHUNKS,
    PART_FIELDS,
    PART_KEYS,
    PARTS,
    SECTION,
    TILES,
    WRITE_FIELDS,
    WRITES,
    BlockSize,
    Form,
    Loop,
)
from .sequences import CACHE, NEW, NOWHERE, Ints, Packed, Segment, Sequence, cut_blocks

# a position after all others
BEHIND = 2**25
ROWS = np.arange(PARTITIONS)


@dataclass
class Tables:
    """Rows for each loop and program, and what they point at.

    Attributes:
        table: int32, the first and end element of each loop, and rows.
        used: how many of its first numbers are in use.
        numbers: fp32, sinks and factors.
    """

    table: np.ndarray[Any, Any]
    used: int
    numbers: np.ndarray[Any, Any]


@dataclass
class Scales:
    """Places of sinks and factors among the numbers.

    Attributes:
        sinks: place of the first KV head's 128 rows; the next heads' rows follow.
        nothing: place of 128 rows without a sink.
        factors: place of the first KV head's factors of the cache; -1 if they are compiled in.
        inverse: place of the factors of new keys and values that are written.
    """

    sinks: int
    nothing: int
    factors: int
    inverse: int = 0


@dataclass
class _Builder:
    form: Form
    scales: Scales
    # rows after the bounds of the loops: sections and chunks, in whole rows
    keys: list[Ints] = field(default_factory=list)
    at: int = 0
    # (cost, loop, row): work for one program
    jobs: list[tuple[int, int, Ints]] = field(default_factory=list)
    # (loop, row): merges, after both programs are done
    merges: list[tuple[int, Ints]] = field(default_factory=list)
    tile_slots: int = 0
    # [2, tokens]: places of new tokens, and the first KV head's row of each in the cache
    written: list[Ints] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loops = {loop.spec: n for n, loop in enumerate(self.form.loops)}
        self.at = 2 * self.form.programs * len(self.loops)
        self.heads = np.arange(self.form.kv_heads)[:, None]
        self.slots = dict.fromkeys(self.form.part_tokens, EMPTY_SLOTS)

    # where keys lie

    def places(self, sequence: Sequence, source: int, start: int, end: int, tokens: int) -> Ints:
        """Return the rows of 128 partitions from position ``start`` of a source, ``[heads, 128]``.

        Partitions that begin at or after ``end`` have no row.
        """
        positions = start + tokens * ROWS
        real = positions < end
        if source == NEW:
            rows = (sequence.place + positions) // tokens
            step = self.form.places // tokens
        else:
            size = self.form.block_size
            per_block = size // tokens
            number = np.where(real, positions // size, 0)
            rows = sequence.blocks[number] if len(sequence.blocks) else np.zeros_like(number)
            rows = rows * self.form.kv_heads * per_block + positions % size // tokens
            step = per_block
        found = np.where(real, rows + self.heads * step, NOWHERE)
        if np.where(real, found, 0).max(initial=0) >= NOWHERE:
            raise NotImplementedError(
                f"the cache may have at most {NOWHERE} rows of {tokens} tokens"
            )
        return found

    def section(self, sequence: Sequence, source: int, start: int, end: int, tokens: int) -> Ints:
        """Return the row of a section, ``[heads, 128, 5]``; keys after its end are masked."""
        row = np.full((len(self.heads), PARTITIONS, SECTION), NOWHERE, np.int64)
        row[:, :, source] = self.places(sequence, source, start, end, tokens)
        row[:, :, 2:4] = np.array([start, end]) + (sequence.cached if source == NEW else 0)
        head = source * len(self.heads) + self.heads
        row[:, :, 4] = max(self.scales.factors, 0) + head * 4 * PARTITIONS
        return row

    def put(self, sections: list[Ints]) -> tuple[Ints, int]:
        """Append sections for each head; return the heads' first places and a section's size."""
        size = PARTITIONS * SECTION
        heads = len(self.heads)
        first = self.at + np.arange(heads) * len(sections) * size
        if sections:
            self.keys.append(np.stack(sections, axis=1).reshape(-1))
            self.at += heads * len(sections) * size
        return first, size

    # queries on the partitions

    def add_blocks(self, sequence: Sequence) -> None:
        """Add a sequence whose queries lie on the partitions."""
        form = self.form
        tokens = form.wide
        keys = PARTITIONS * tokens
        segments = [Segment(CACHE, sequence.low, sequence.cached, tokens)]
        if sequence.new:
            segments.append(Segment(NEW, 0, sequence.new, tokens))
        # the segment with the tokens' own keys, and where these begin
        own = segments[-1]
        base = 0 if sequence.new else sequence.position
        wide = [(x.source, at) for x in segments for at in x.wide(x.end)]
        sections = [self.section(sequence, s, a, a + keys, tokens) for s, a in wide]
        begins, size = self.put(sections)
        sizes = {x.tokens: x for x in form.block_sizes}
        count = round_up(sequence.count, form.tile_tokens)
        blocks = cut_blocks(count, tuple(sizes), form.is_cut and sequence.sees)
        first = 0
        for tokens_of in blocks:
            if first >= sequence.count:
                # only padding is left
                break
            block = sizes[tokens_of]
            columns = block.columns
            # only causal sequences have a diagonal
            before, last = own.end, 0
            if sequence.is_causal:
                before = min(max((base + first) // PARTITIONS * PARTITIONS, own.start), own.end)
                last = min(base + min(sequence.count, first + block.tokens), own.end)
            limits = [x.end for x in segments[:-1]] + [before]
            low, high = sequence.bounds(first + np.arange(block.tokens))
            lowest = int(low[low < high].min(initial=BEHIND))

            def is_seen(source: int, end: int, lowest: int = lowest) -> bool:
                return end + (sequence.cached if source == NEW else 0) > lowest

            among = {
                (x.source, a)
                for x, limit in zip(segments, limits, strict=True)
                for a in x.wide(limit)
                if is_seen(x.source, a + keys)
            }
            seen = [n for n, place in enumerate(wide) if place in among]
            cut = [
                (x.source, *run)
                for x, limit in zip(segments, limits, strict=True)
                for run in _runs([c for c in x.chunks(limit) if is_seen(x.source, c[1])])
            ]
            chunks = [
                self.section(sequence, source, a + PARTITIONS * n, end, 1)
                for source, a, end in cut
                for n in range(CHUNKS)
            ]
            width = cdiv(PARTITIONS - 1 + block.tokens, PARTITIONS)
            diagonal = [
                self.section(sequence, own.source, before + PARTITIONS * n, last, 1)
                for n in range(width)
            ]
            places, _ = self.put([*chunks, *diagonal])
            row = np.zeros((len(self.heads), PARTITIONS, 3 * columns + BLOCK_FIELDS), np.int64)
            row[:, :, :columns], token = self._block_rows(sequence, first, block)
            row[:, :, columns : 2 * columns], row[:, :, 2 * columns : 3 * columns] = (
                np.where(row[0, :, :columns] != NOWHERE, x, 0) for x in sequence.bounds(token)
            )
            lower = seen[0] if seen else 0
            upper = seen[-1] + 1 if seen else 0
            cuts = [(lower, upper)]
            if form.is_cut and count == form.tile_tokens and upper - lower >= CUT_SECTIONS:
                # the second half also has the chunks
                middle = lower + (upper - lower) // 2 + cdiv(len(chunks), 2 * tokens)
                cuts = [(lower, min(middle, upper)), (min(middle, upper), upper)]
            slots = self._tile_slots(row) if len(cuts) > 1 else None
            loop = self.loops[(BLOCKS, block.tiles, block.shared, block.together)]
            for number, (lower, upper) in enumerate(cuts):
                is_last = number == len(cuts) - 1
                part, chunk_count = row.copy(), len(chunks)
                part[:, :, -1] = row[:, :, 0]
                sinks: Any = self.scales.sinks + self.heads[:, 0] * PARTITIONS
                slot: Any = NOWHERE
                ends = places
                if slots is not None:
                    part[:, :, -1] = NOWHERE
                    slot = slots[:, number]
                if not is_last:
                    # the second half has the sections after the wide ones, and the sink
                    nothing = self.section(sequence, own.source, 0, 0, 1)
                    ends, _ = self.put([nothing] * width)
                    chunk_count, sinks = 0, self.scales.nothing
                many = 0
                if block.together > 1:
                    many = (upper - lower) // block.together * block.together
                fields = (
                    begins + lower * size,
                    begins + (lower + many) * size,
                    begins + upper * size,
                    ends,
                    ends + chunk_count * size,
                    ends + chunk_count * size,
                    sinks,
                    slot,
                )
                part[:, :, 3 * columns : -1] = np.stack(np.broadcast_arrays(*fields), axis=-1)[
                    :, None, :
                ]
                cost = block.tiles * ((upper - lower) * tokens + chunk_count + width) + 8
                self.jobs += [(cost, loop, r) for r in part]
            first += block.tokens

    def _block_rows(self, sequence: Sequence, first: int, block: BlockSize) -> tuple[Ints, Ints]:
        """Return where the queries of a block's tiles lie, ``[heads, 128, columns]``, and tokens.

        Rows of a token and a head, or of a token and all heads of a group.
        """
        group, own = self.form.group, np.arange(block.columns)
        if block.shared > 1:
            token = first + own * PARTITIONS + ROWS[:, None]
            place = (sequence.first + token) * len(self.heads) + self.heads[:, :, None]
            return np.where(token < sequence.count, place, NOWHERE), token
        per = self.form.tile_tokens
        token = first + own * per + (ROWS // group)[:, None]
        real = (token < sequence.count) & (per * group > ROWS)[:, None]
        place = (sequence.first + token) * group * len(self.heads) + (ROWS % group)[:, None]
        return np.where(real, place + self.heads[:, :, None] * group, NOWHERE), token

    def _tile_slots(self, row: Ints) -> Ints:
        """Return the slots of a tile that is split, ``[heads, 2]``, and note its merge."""
        heads = len(self.heads)
        slots = self.tile_slots + np.arange(2 * heads).reshape(heads, 2)
        self.tile_slots += 2 * heads
        merge = np.zeros((heads, PARTITIONS, 3), np.int64)
        merge[:, :, :2] = slots[:, None, :]
        merge[:, :, 2] = row[:, :, 0]
        self.merges += [(self.loops[(TILES, 2)], r) for r in merge]
        return slots

    # keys on the partitions

    def add_parts(self, sequence: Sequence) -> bool:
        """Add a sequence as parts, if it has few rows; return whether it was added."""
        form = self.form
        tokens = next((n for n in form.part_tokens if n >= sequence.count), 0)
        if not tokens or not sequence.sees:
            return False
        # keys that some rows do not see go to the last part, which masks
        shared = int(sequence.lows.max())
        common = min(sequence.cached, int(sequence.ranges[:, 1].min()))
        wide = form.wide
        end, new = sequence.cached, sequence.new
        start = min(round_up(min(shared, end), wide), end)
        # the last part has at least one key
        full = max(0, common - start - 1) // PART_KEYS
        tail = start + full * PART_KEYS
        left = end - tail
        # cached new tokens that do not fit a whole part are in the chunk after it
        enough = (c for c in reversed(PART_CHUNKS) if PARTITIONS * c + wide > left)
        chunks = next(enough, PART_CHUNKS[0])
        sections, per = form.sections_of(chunks)
        whole = min(left // per, PARTITIONS * sections) * per
        rest = np.r_[sequence.low : start, tail + whole : end]
        if new + len(rest) > PARTITIONS:
            return False
        parts = full + 1
        slots = self._slots(tokens, parts)
        loop = self.loops[(PARTS, PART_CHUNKS[0], tokens, 0, 1)]
        for number in range(full):
            at = start + number * PART_KEYS
            own = self._row(sequence, tokens, at, at + PART_KEYS, PART_CHUNKS[0], False)
            own[:, :, form.sections_of(PART_CHUNKS[0])[0] + 4] = slots[:, number, None]
            self.jobs += [(3 * PART_CHUNKS[0] // 2 + 8, loop, r) for r in own]
        own = self._last(sequence, tokens, tail, whole, chunks, rest)
        if parts > 1:
            own[:, :, sections + 3] = NOWHERE
            own[:, :, sections + 4] = slots[:, full, None]
        loop = self.loops[(PARTS, chunks, tokens, 1, 1)]
        self.jobs += [(3 * (chunks + 1) // 2 + 8, loop, r) for r in own]
        if parts > 1:
            count = 1 << (parts - 1).bit_length()
            merge = np.zeros((len(self.heads), PARTITIONS, count + 1), np.int64)
            merge[:, :, :parts] = slots[:, None, :]
            merge[:, :, count] = self._queries(sequence, tokens)
            self.merges += [(self.loops[(MERGES, count, tokens, 1)], r) for r in merge]
        return True

    def _slots(self, tokens: int, parts: int) -> Ints:
        """Return the slots of a sequence's parts, ``[heads, parts]``."""
        heads = len(self.heads)
        if parts == 1:
            return np.full((heads, 1), NOWHERE, np.int64)
        first = self.slots[tokens]
        self.slots[tokens] += heads * parts
        return first + np.arange(heads * parts).reshape(heads, parts)

    def _queries(self, sequence: Sequence, tokens: int) -> Ints:
        """Return the rows of the queries, ``[heads, 128]``."""
        group = self.form.group
        real = sequence.count * group > ROWS
        row = (sequence.first + ROWS // group) * group * len(self.heads) + ROWS % group
        return np.where(real, row + self.heads * group, NOWHERE)

    def _row(
        self, sequence: Sequence, tokens: int, start: int, end: int, chunks: int, is_last: bool
    ) -> Ints:
        sections, per = self.form.sections_of(chunks)
        width = sections + PART_FIELDS + ((LAST_FIELDS + 2 * tokens) if is_last else 0)
        row = np.full((len(self.heads), PARTITIONS, width), NOWHERE, np.int64)
        for number in range(sections):
            at = start + number * PARTITIONS * per
            row[:, :, number] = self.places(sequence, CACHE, at, end, per)
        row[:, :, sections + 2] = row[:, :, sections + 3] = self._queries(sequence, tokens)
        row[:, :, sections + 5] = self.scales.sinks + self.heads * PARTITIONS
        place = max(self.scales.factors, 0)
        row[:, :, sections + 6] = place + self.heads * 4 * PARTITIONS
        return row

    def _last(
        self, sequence: Sequence, tokens: int, start: int, whole: int, chunks: int, rest: Ints
    ) -> Ints:
        """Return the row of a sequence's last part, which masks."""
        sections, _ = self.form.sections_of(chunks)
        row = self._row(sequence, tokens, start, start + whole, chunks, True)
        first = sections + PART_FIELDS
        row[:, :, first : first + 2] = start, start + whole
        # new tokens, then the cached ones that fill no partition
        new, found = sequence.new, len(rest)
        places = np.full((len(self.heads), PARTITIONS), NOWHERE, np.int64)
        positions = np.full(PARTITIONS, BEHIND)
        positions[:new] = sequence.cached + np.arange(new)
        if found:
            size = self.form.block_size
            own = sequence.blocks[rest // size] * len(self.heads) * size + rest % size
            places[:, new : new + found] = own + self.heads * size
            positions[new : new + found] = rest
        row[:, :, sections] = places
        places = self.places(sequence, NEW, 0, new, 1)
        row[:, :, sections + 1] = places
        row[:, :, first + 2] = positions
        row[:, :, first + LAST_FIELDS :] = np.concatenate(sequence.bounds(np.arange(tokens)))
        if self.scales.factors >= 0:
            # factors are laid out by the number of new tokens
            heads = len(self.heads)
            row[:, :, sections + 6] = (
                self.scales.factors
                + 2 * heads * 4 * PARTITIONS
                + (new * heads + self.heads) * 6 * PARTITIONS
            )
        return row

    # new keys and values

    def note_writes(self, sequence: Sequence) -> None:
        """Note where a sequence's new tokens go: to their positions in its blocks."""
        size = self.form.block_size
        position = sequence.position + np.arange(sequence.count)
        row = sequence.blocks[position // size] * len(self.heads) * size + position % size
        if row.max() + len(self.heads) * size >= NOWHERE:
            raise NotImplementedError(f"the cache may have at most {NOWHERE} rows of 1 tokens")
        self.written.append(np.stack([sequence.place + np.arange(sequence.count), row]))

    def add_writes(self) -> None:
        """Add rows of writes: 128 tokens of one KV head, from any sequences."""
        if not self.written:
            return
        heads = len(self.heads)
        source, target = np.concatenate(self.written, axis=1)
        count = round_up(len(source), PARTITIONS)
        rows = np.full((heads, count, WRITE_FIELDS), NOWHERE, np.int64)
        rows[:, : len(source), 0] = source + self.heads * self.form.places
        rows[:, : len(source), 1] = target + self.heads * self.form.block_size
        rows[:, :, 2] = self.scales.inverse + self.heads * 2 * PARTITIONS
        loop = self.loops[(WRITES,)]
        self.jobs += [(4, loop, r) for r in rows.reshape(-1, PARTITIONS, WRITE_FIELDS)]

    def finish(self, numbers: np.ndarray[Any, Any]) -> Tables:
        """Share the jobs between the programs, and build the table."""
        form = self.form
        loops = form.loops
        programs = form.programs
        mine: list[list[list[Ints]]] = [[[] for _ in loops] for _ in range(programs)]
        loads = [0] * programs
        for cost, loop, row in sorted(self.jobs, key=lambda job: -job[0]):
            program = loads.index(min(loads))
            loads[program] += cost
            mine[program][loop].append(row)
        for number, (loop, row) in enumerate(self.merges):
            mine[number % programs][loop].append(row)
        header = np.zeros((programs, len(loops), 2), np.int64)
        parts = [*self.keys]
        at = self.at
        for program in range(programs):
            self._gather(loops, mine[program])
            for number, own in enumerate(mine[program]):
                size = sum(r.size for r in own)
                header[program, number] = at, at + size
                parts += [r.reshape(-1) for r in own]
                at += size
        table = np.zeros(max(form.table_size, at), np.int32)
        table[: header.size] = header.reshape(-1)
        if parts:
            table[header.size : at] = np.concatenate(parts)
        if at > form.table_size:
            raise RuntimeError(f"a table of {form.table_size} numbers cannot hold {at}")
        return Tables(table, at, numbers)

    def _gather(self, loops: tuple[Loop, ...], mine: list[list[Ints]]) -> None:
        """Move rows to the loops that run several at once, as far as they fill iterations."""
        for number, loop in enumerate(loops):
            if loop.together == 1:
                continue
            spec = (*loop.spec[:-1], 1)
            single = self.loops[spec]
            count = len(mine[single]) // loop.together * loop.together
            mine[number], mine[single] = mine[single][:count], mine[single][count:]


def _runs(chunks: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the first and end key of runs of up to ``CHUNKS`` consecutive chunks."""
    found: list[tuple[int, int]] = []
    for start, end in chunks:
        first, last = found[-1] if found else (start, -1)
        size = start - first
        if last == start and size % PARTITIONS == 0 and size < CHUNKS * PARTITIONS:
            found[-1] = first, end
        else:
            found.append((start, end))
    return found


def build_tables(
    form: Form, batch: Packed, scales: Scales, numbers: np.ndarray[Any, Any]
) -> Tables:
    """Return the table of a batch."""
    builder = _Builder(form, scales)
    for own in batch.sequences:
        if not builder.add_parts(own):
            builder.add_blocks(own)
        if form.writes and own.sees:
            builder.note_writes(own)
    builder.add_writes()
    return builder.finish(numbers)
