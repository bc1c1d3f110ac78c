"""Which states travel between ranks, and over which distance each of them decays.

A rank holds *runs*: consecutive tokens of a sequence. A sequence that is cut has several runs, on
several ranks. All numbers here follow from the lengths of the sequences and the shard rule, so
every rank knows the numbers of all ranks, and copies its own to a GPU once.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._linked.parallel.cut import Layout
from .._linked.parallel.layout import layout_of
from .._linked.parallel.shards import Run, merged


class Sources(NamedTuple):
    """The source states of each row, and the number of tokens over which each of them decays."""

    offsets: Tensor  # int32 [rows + 1]
    entries: Tensor  # int32 [entries, 2]: slot, distance


class OnDevice(NamedTuple):
    """The numbers of one rank, on a device."""

    cu_seqlens: Tensor  # int32 [runs + 1]
    # forward: a row per run, then per sequence if final states are returned
    earlier: Sources
    # backward: a row per run
    later: Sources
    # the run in each row of the message, and for each run its row, or -1 if it is not sent
    sent: Tensor
    slots: Tensor
    # the rows that start from an initial state, and their sequences
    first_rows: Tensor
    first_sequences: Tensor
    # sequences without tokens, whose final states are their initial states
    tokenless: Tensor


class Table:
    """What one rank sends and receives."""

    def __init__(self, layout: Layout, has_final: bool) -> None:
        lengths, self.group_size, (left, right), shard, self.rank = layout
        self.has_final = has_final
        whole = layout_of(lengths, self.group_size, left, right, shard)
        every = [merged(runs) for runs in whole.runs]
        parts: list[list[tuple[Run, int]]] = [[] for _ in lengths]
        for rank, runs in enumerate(every):
            for run in runs:
                parts[run.sequence].append((run, rank))
        for of_sequence in parts:
            of_sequence.sort(key=lambda part: part[0].begin)
        # the state of a whole sequence travels only if final states are returned
        sent = [
            [i for i, run in enumerate(runs) if self.has_final or len(parts[run.sequence]) > 1]
            for runs in every
        ]
        self.runs = every[self.rank]
        self.batch = len(lengths)
        self.tokens = sum(run.end - run.begin for run in self.runs)
        # states per message of the forward; the backward adds the gradients of final states
        self.sends = max(map(len, sent))
        self.finals = self.batch if self.has_final else 0
        self.rows = len(self.runs) + self.finals
        self.sends_all = len(sent[self.rank]) == len(self.runs)
        # row i of the message is run i: all sent runs come before the others
        self.sends_first = sent[self.rank] == list(range(len(sent[self.rank])))

        slots: dict[Run, tuple[int, int]] = {}
        for rank, rows in enumerate(sent):
            for row, i in enumerate(rows):
                slots[every[rank][i]] = rank, row
        message = self.sends + self.finals
        earlier, later = [], []
        for run in self.runs:
            others = [part for part, _ in parts[run.sequence]]
            earlier.append(
                [
                    (_slot(slots[part], self.sends), run.begin - part.end)
                    for part in reversed(others)
                    if part.end <= run.begin
                ]
            )
            of_finals = [
                (rank * message + self.sends + run.sequence, lengths[run.sequence] - run.end)
                for rank in range(self.group_size if self.has_final else 0)
            ]
            later.append(
                [
                    (_slot(slots[part], message), part.begin - run.end)
                    for part in others
                    if part.begin >= run.end
                ]
                + of_finals
            )
        self.arrives_earlier = any(earlier)
        for b in range(self.finals):
            earlier.append(
                [
                    (_slot(slots[part], self.sends), lengths[b] - part.end)
                    for part, _ in reversed(parts[b])
                ]
            )
        self.arrives_later = any(later)
        starts = [(i, run.sequence) for i, run in enumerate(self.runs) if run.begin == 0]
        self.starts = len(starts)
        empty = [b for b, length in enumerate(lengths) if length == 0]
        of_empty = [(len(self.runs) + b, b) for b in empty if self.has_final]
        self._sources = earlier, later
        self._host = {
            "cu_seqlens": [0, *itertools.accumulate(run.end - run.begin for run in self.runs)],
            "sent": [*sent[self.rank], *[0] * self.sends][: self.sends],
            "slots": [i if i in sent[self.rank] else -1 for i in range(len(self.runs))],
            "first_rows": [row for row, _ in starts + of_empty],
            "first_sequences": [b for _, b in starts + of_empty],
            "tokenless": empty,
        }
        self._on: dict[torch.device, OnDevice] = {}

    def on(self, device: torch.device) -> OnDevice:
        """Return the numbers on a device; one copy serves all calls of a layout."""
        found = self._on.get(device)
        if found is None:
            earlier, later = (_sources(rows, device) for rows in self._sources)
            made: dict[str, Any] = {"earlier": earlier, "later": later}
            for name, values in self._host.items():
                # kernels take 32 bits, PyTorch's indexing 64
                for_kernels = name in ("cu_seqlens", "slots")
                dtype = torch.int32 if for_kernels else torch.int64
                made[name] = torch.tensor(values, dtype=dtype, device="cpu").to(device)
            found = self._on[device] = OnDevice(**made)
        return found


@lru_cache(maxsize=256)
def table_of(layout: Layout, has_final: bool) -> Table:
    """Return the table of a layout, with or without final states."""
    return Table(layout, has_final)


def _slot(place: tuple[int, int], message: int) -> int:
    rank, row = place
    return rank * message + row


def _sources(rows: list[list[tuple[int, int]]], device: torch.device) -> Sources:
    offsets = [0, *itertools.accumulate(map(len, rows))]
    entries = [entry for row in rows for entry in row]
    made = torch.tensor(entries, dtype=torch.int32, device="cpu").reshape(-1, 2)
    return Sources(
        torch.tensor(offsets, dtype=torch.int32, device="cpu").to(device), made.to(device)
    )
