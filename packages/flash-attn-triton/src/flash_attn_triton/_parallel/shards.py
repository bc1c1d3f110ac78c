"""The products that each rank computes, and the keys that ranks exchange for them.

A rank holds *runs*: consecutive tokens of a sequence. It multiplies its queries first with its own
keys, then with the keys of one other rank per *step*: the keys of rank r - t arrive at rank r, for
t from 1 on. Of a run, only the keys that some query of the receiver sees are sent. Exchanges with
different t are batched into one step if every rank then has at most one peer to send to and one to
receive from.

A *product* is one call of the kernels. The mask between two runs is either a rectangle without
holes, or a window along the diagonal. The kernels align windows to the bottom right of a rectangle,
so a window is shifted by the rectangle's corner. All of this follows from lengths, the mask and the
rule of the shards, so every rank knows what the other ranks send and expect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .._linked.parallel.cut import Layout
from .._linked.parallel.layout import layout_of
from .._linked.parallel.shards import Run, merged
from .pieces import MERGED, Raster

NO_WINDOW = (-1, -1)


class Rectangle(NamedTuple):
    """Queries and keys of one product: rows of the rank's queries, rows of the present keys."""

    window: tuple[int, int]
    q_begin: int
    q_end: int
    k_begin: int
    k_end: int


class Product:
    """One call of the kernels: rectangles of one window that share neither queries nor keys.

    Attributes:
        window: ``(left, right)``, aligned to the bottom right of each rectangle.
        rows: the range of rows of queries, ``(begin, end)``.
        keys: the range of rows of keys.
        batch: the number of rectangles, if they are equally large and equally far apart; else 0.
        q_step: rows of queries from one rectangle to the next, if ``batch`` is not 0.
        k_step: rows of keys from one rectangle to the next.
        row_raster: the raster of the queries; see ``Piece``. If ``batch`` is 0 it is one group,
            from the first query to the last.
        key_raster: the raster of the keys.
    """

    def __init__(self, rectangles: Sequence[Rectangle]) -> None:
        first, last = rectangles[0], rectangles[-1]
        self.window = first.window
        self.rows = first.q_begin, last.q_end
        self.keys = first.k_begin, last.k_end
        self.size = first.q_end - first.q_begin, first.k_end - first.k_begin
        self.batch, self.q_step, self.k_step = _raster(rectangles)
        self.row_raster = self._raster_of(self.rows, self.size[0], self.q_step)
        self.key_raster = self._raster_of(self.keys, self.size[1], self.k_step)
        self._lengths = _lengths(rectangles)
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def _raster_of(self, ends: tuple[int, int], size: int, step: int) -> Raster:
        if self.batch:
            return ends[0], size, step, self.batch
        return ends[0], ends[1] - ends[0], ends[1] - ends[0], 1

    @property
    def longest(self) -> tuple[int, int]:
        """The most queries, and the most keys, of a rectangle."""
        return max(q for q, _ in self._lengths), max(k for _, k in self._lengths)

    def cu_seqlens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the offsets of the rectangles, int32.

        Rows between rectangles are separate sequences without keys; keys between rectangles are
        separate sequences without queries.
        """
        found = self._on.get(device)
        if found is None:
            sides = ([0, *lengths] for lengths in zip(*self._lengths, strict=True))
            q, k = (
                torch.tensor(side, dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
                for side in sides
            )
            found = self._on[device] = q.to(device), k.to(device)
        return found


class Rows:
    """Some rows of a rank.

    Attributes:
        count: the number of rows.
        rasters: the rows as a few rasters, in order; see ``Piece``. None if there are more rasters
            than one pass can add.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        joined: list[tuple[int, int]] = []
        for begin, end in ranges:
            if joined and joined[-1][1] == begin:
                joined[-1] = joined[-1][0], end
            elif begin < end:
                joined.append((begin, end))
        self.count = sum(end - begin for begin, end in joined)
        self.rasters = _rasters(joined)
        self._ranges = joined
        self._on: dict[torch.device, Tensor] = {}

    def message(self, k: Tensor, v: Tensor) -> Tensor:
        """Return the rows of keys, then the rows of values, in one dimension."""
        if not self.count:
            return k.new_empty(0)
        if len(self._ranges) < MERGED:
            parts = [x[begin:end] for x in (k, v) for begin, end in self._ranges]
            if k.shape[1:] != v.shape[1:]:
                parts = [part.flatten() for part in parts]
            return torch.cat(parts).flatten()
        widths = [x.shape[1:].numel() for x in (k, v)]
        message = k.new_empty(self.count * sum(widths))
        middle = self.count * widths[0]
        for x, part in zip((k, v), (message[:middle], message[middle:]), strict=True):
            out = part.view(self.count, *x.shape[1:])
            torch.index_select(x, 0, self._index(x.device), out=out)
        return message

    def spread(self, rows: Tensor, tokens: int) -> Tensor:
        """Return ``tokens`` rows: these rows at their places, and 0 elsewhere."""
        spread = rows.new_zeros(tokens, *rows.shape[1:])
        return spread.index_copy_(0, self._index(rows.device), rows)

    def _index(self, device: torch.device) -> Tensor:
        found = self._on.get(device)
        if found is None:
            made = [torch.arange(*ends, device="cpu") for ends in self._ranges]
            found = self._on[device] = torch.cat(made).to(device)
        return found


class Step(NamedTuple):
    """An exchange: ``receives`` rows arrive from ``source``, and ``sends`` go to ``target``."""

    source: int
    target: int
    sends: Rows
    receives: int
    products: tuple[Product, ...]


class Table:
    """The products and exchanges of one rank."""

    def __init__(self, layout: Layout) -> None:
        lengths, group_size, self._window, shard, rank = layout
        cut = layout_of(lengths, group_size, *self._window, shard)
        self._runs = [_by_sequence(merged(runs)) for runs in cut.runs]
        self.tokens = cut.tokens(rank)
        diagonal, others = self._own(rank)
        # the first product has every row, so it gets the sinks
        self.local = _products(diagonal) + _products(others)
        self.steps = tuple(self._step(rank, asked) for asked in self._exchanges(group_size))

    def _exchanges(self, group_size: int) -> list[dict[int, _Needed]]:
        """Return, for each exchange, what each receiving rank needs."""
        found: list[dict[int, _Needed]] = []
        for t in range(1, group_size):
            asked = {}
            for r in range(group_size):
                source = (r - t) % group_size
                needed = _Needed(source, self._runs[r], self._runs[source], self._window)
                if needed.count:
                    asked[r] = needed
            # one exchange for several t, if no rank sends twice or receives twice
            for others in found:
                if others.keys().isdisjoint(asked) and _sources(others).isdisjoint(_sources(asked)):
                    others.update(asked)
                    break
            else:
                if asked:
                    found.append(asked)
        return found

    def _step(self, rank: int, asked: dict[int, _Needed]) -> Step:
        """Return one rank's part of an exchange."""
        own = asked.get(rank)
        target = next((r for r, needed in asked.items() if needed.source == rank), None)
        sends = Rows(() if target is None else asked[target].ranges)
        # a rank that sends nothing sends an empty message to itself
        target = rank if target is None else target
        if own is None:
            return Step(rank, target, sends, 0, ())
        return Step(own.source, target, sends, own.count, _products(own.rectangles))

    def _own(self, rank: int) -> tuple[list[Rectangle], list[Rectangle]]:
        """Return the rectangles within this rank: of runs with themselves, and with other runs."""
        left, right = self._window
        diagonal, others = [], []
        for runs in self._runs[rank].values():
            if left < 0 and right <= 0:
                # only the order of tokens matters, and a rank keeps the order of the sequence
                begin, end = runs[0].row, runs[-1].row + runs[-1].length
                diagonal.append(Rectangle(self._window, begin, end, begin, end))
                continue
            for q in runs:
                begin, end = q.row, q.row + q.length
                diagonal.append(Rectangle(self._window, begin, end, begin, end))
                met = (_meeting(q, k, self._window) for k in runs if k != q)
                others += [one for one in met if one]
        return diagonal, others


class _Placed(NamedTuple):
    """A run, and its first row on its rank."""

    begin: int
    end: int
    row: int

    @property
    def length(self) -> int:
        return self.end - self.begin


class _Needed:
    """The keys that a rank needs of another rank, and the rectangles that it computes with them."""

    def __init__(
        self,
        source: int,
        queries: dict[int, list[_Placed]],
        keys: dict[int, list[_Placed]],
        window: tuple[int, int],
    ) -> None:
        self.source = source
        self.ranges: list[tuple[int, int]] = []
        self.rectangles: list[Rectangle] = []
        self.count = 0
        for b, of_keys in keys.items():
            found: list[Rectangle] = []
            for k in of_keys:
                met = [one for q in queries.get(b, ()) if (one := _meeting(q, k, window))]
                if not met:
                    continue
                begin, end = min(one.k_begin for one in met), max(one.k_end for one in met)
                shift = self.count - begin
                found += [
                    one._replace(k_begin=one.k_begin + shift, k_end=one.k_end + shift)
                    for one in met
                ]
                self.ranges.append((begin, end))
                self.count += end - begin
            self.rectangles += _joined(found)


def _sources(asked: dict[int, _Needed]) -> set[int]:
    """Return the sending ranks."""
    return {needed.source for needed in asked.values()}


def _meeting(q: _Placed, k: _Placed, window: tuple[int, int]) -> Rectangle | None:
    """Return the queries that see keys of a run, and these keys; None if no query sees one."""
    left, right = window
    q_begin, q_end, k_begin, k_end = q.begin, q.end, k.begin, k.end
    if left >= 0:
        k_begin = max(k_begin, q_begin - left)
    if right >= 0:
        k_end = min(k_end, q_end + right)
        q_begin = max(q_begin, k_begin - right)
    if left >= 0:
        q_end = min(q_end, k_end + left)
    if k_begin >= k_end or q_begin >= q_end:
        return None
    # the kernels align the last query to the last key
    shift = k_end - q_end
    sees_first = left < 0 or q_end - 1 - left <= k_begin
    sees_last = right < 0 or q_begin + right >= k_end - 1
    moved = -1 if sees_first else left + shift, -1 if sees_last else right - shift
    return Rectangle(
        moved,
        q_begin - q.begin + q.row,
        q_end - q.begin + q.row,
        k_begin - k.begin + k.row,
        k_end - k.begin + k.row,
    )


def _joined(found: list[Rectangle]) -> list[Rectangle]:
    """Join rectangles without a mask along queries, then along keys."""
    masked = [one for one in found if one.window != NO_WINDOW]
    for q_first in (True, False):
        joined: list[Rectangle] = []
        of_whole = [one for one in found if one.window == NO_WINDOW]
        of_whole.sort(key=lambda one: one[3:] + one[1:3] if q_first else one[1:])
        for one in of_whole:
            last = joined[-1] if joined else None
            if last and q_first and last[3:] == one[3:] and last.q_end == one.q_begin:
                joined[-1] = last._replace(q_end=one.q_end)
            elif last and not q_first and last[1:3] == one[1:3] and last.k_end == one.k_begin:
                joined[-1] = last._replace(k_end=one.k_end)
            else:
                joined.append(one)
        found = joined
    return found + masked


def _products(rectangles: list[Rectangle]) -> tuple[Product, ...]:
    """Put rectangles into as few calls as possible, in the order of their begins."""
    order: dict[tuple[int, int], list[list[Rectangle]]] = {}
    for one in sorted(rectangles, key=lambda one: one[1:]):
        calls = order.setdefault(one.window, [])
        for call in calls:
            if call[-1].q_end <= one.q_begin and call[-1].k_end <= one.k_begin:
                call.append(one)
                break
        else:
            calls.append([one])
    return tuple(Product(call) for calls in order.values() for call in calls)


def _by_sequence(runs: Iterable[Run]) -> dict[int, list[_Placed]]:
    placed: dict[int, list[_Placed]] = {}
    row = 0
    for run in runs:
        placed.setdefault(run.sequence, []).append(_Placed(run.begin, run.end, row))
        row += run.end - run.begin
    return placed


def _raster(rectangles: Sequence[Rectangle]) -> tuple[int, int, int]:
    """Return the number of rectangles and their distances; zeros if sizes or distances differ."""
    first = rectangles[0]
    if len(rectangles) == 1:
        return 1, first.q_end - first.q_begin, first.k_end - first.k_begin
    q_step = rectangles[1].q_begin - first.q_begin
    k_step = rectangles[1].k_begin - first.k_begin
    for i, one in enumerate(rectangles):
        q, k = i * q_step, i * k_step
        expected = Rectangle(
            first.window, first.q_begin + q, first.q_end + q, first.k_begin + k, first.k_end + k
        )
        if one != expected:
            return 0, 0, 0
    return len(rectangles), q_step, k_step


def _rasters(ranges: list[tuple[int, int]]) -> list[Raster] | None:
    """Return ranges as one raster, if equally long and far apart, or as a few, or None."""
    if not ranges:
        return []
    begin, end = ranges[0]
    step = ranges[1][0] - begin if len(ranges) > 1 else end - begin
    if ranges == [(begin + i * step, end + i * step) for i in range(len(ranges))]:
        return [(begin, end - begin, step, len(ranges))]
    if len(ranges) < MERGED:
        return [(begin, end - begin, end - begin, 1) for begin, end in ranges]
    return None


def _lengths(rectangles: Sequence[Rectangle]) -> list[tuple[int, int]]:
    """Return the queries and keys of each sequence, including rows between rectangles."""
    lengths = []
    q_last, k_last = rectangles[0].q_begin, rectangles[0].k_begin
    for _, q_begin, q_end, k_begin, k_end in rectangles:
        if q_last < q_begin:
            lengths.append((q_begin - q_last, 0))
        if k_last < k_begin:
            lengths.append((0, k_begin - k_last))
        lengths.append((q_end - q_begin, k_end - k_begin))
        q_last, k_last = q_end, k_end
    return lengths


@lru_cache(maxsize=256)
def table_of(layout: Layout) -> Table:
    """Return the table of a layout."""
    return Table(layout)
