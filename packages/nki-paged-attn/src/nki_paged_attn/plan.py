"""The host's plan of a batch: the rows that each loop of a form runs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._paged.call import Batch, Options
from ._paged.checks import (
    PARTITIONS,
    check_block_size,
    check_flag,
    check_heads,
    check_lengths,
    check_table,
    check_window,
)
from ._paged.forms import PARTS, Buckets, Form
from ._paged.launch import find_form, form_tables
from ._paged.sequences import Ints, Packed
from ._paged.tables import Tables

# attributes of the plans that were compiled for the lengths of a batch
OLD = {
    "structure",
    "sections",
    "kv_index",
    "kv_valid",
    "q_index",
    "bounds",
    "bounds_tokens",
    "rows",
    "pairs",
}


@dataclass(frozen=True)
class Plan:
    """The kernel's input for a batch.

    Attributes:
        batch: the sequences.
        form: the form that is compiled.
        tables: the rows that its loops run, and the numbers to which they point.
    """

    batch: Packed
    form: Form
    tables: Tables

    def __getattr__(self, name: str) -> Any:
        if name in OLD:
            raise AttributeError(
                f"Plan.{name} went with the kernel that was compiled for the lengths of a batch; "
                "Plan.form, Plan.tables and Plan.batch are what a form is told"
            )
        raise AttributeError(f"Plan has no attribute {name!r}")

    @property
    def tokens(self) -> int:
        """Rows of the packed queries."""
        return self.batch.tokens

    @property
    def new_tokens(self) -> Ints:
        """Token of the batch at each place of the new keys, -1 for none."""
        return self.batch.new

    @property
    def block_size(self) -> int:
        return self.form.block_size

    @property
    def group(self) -> int:
        return self.form.group

    @property
    def kv_heads(self) -> int:
        return self.form.kv_heads

    @property
    def counts(self) -> dict[tuple[int, ...], int]:
        """Rows of each loop that runs, for all KV heads, by the loop's constants in the kernel."""
        loops = self.form.loops
        bounds = self.tables.table[: 2 * self.form.programs * len(loops)]
        sizes = np.diff(bounds.reshape(self.form.programs, len(loops), 2)).sum(axis=(0, 2))
        rows = (
            (loop, int(size) // (PARTITIONS * loop.width))
            for loop, size in zip(loops, sizes, strict=True)
        )
        return {loop.spec: count for loop, count in rows if count}

    def __str__(self) -> str:
        ends = (n for spec, n in self.counts.items() if spec[0] == PARTS and spec[3])
        few = sum(ends) // self.kv_heads
        return (
            f"{self.tokens} tokens: {few} sequences with keys on the partitions, "
            f"{len(self.batch.sequences) - few} with queries; {self.form.bucket}, "
            f"a table of {self.tables.used} numbers"
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
    joint: bool | None = None,
) -> Plan:
    """Plan a packed batch of sequences, prefill, chunks and decode in any mixture.

    Args:
        query_lens: new tokens of each sequence, ``[batch]``; 0 is legal.
        context_lens: cached tokens of each sequence, ``[batch]``.
        block_table: block numbers, ``[batch, max_blocks]``; entries past a context are not read.
        block_size: tokens of a block.
        heads, kv_heads: of the queries, and of the cache; at most 128 query heads for a KV head.
        tokens: rows of the packed queries; those after the last sequence give 0. Default: the sum.
        window: the most keys that a token sees, its own included. Default: all.
        joint: deprecated, and without effect: one softmax covers cached and new keys.

    Raises:
        TypeError: a length, a block number or a count that is no integer.
        ValueError: lengths that disagree, or a number out of range.
    """
    check_block_size(block_size)
    check_heads(heads, kv_heads)
    if joint is not None:
        check_flag("joint", joint)
        warnings.warn(
            "joint has no effect: one softmax covers cached and new keys",
            DeprecationWarning,
            stacklevel=2,
        )
    queries, contexts = check_lengths(query_lens, context_lens, tokens)
    table = check_table(block_table, contexts, block_size)
    rows = max(int(queries.sum()), tokens or 0)
    batch = Batch(queries, contexts, table, rows, check_window(window)).pack(block_size)
    form = find_form(batch, Buckets(), heads, kv_heads, block_size, PARTITIONS, programs=1)
    tables, _ = form_tables(batch, form, Options.plain(1.0, kv_heads, "float32"))
    return Plan(batch, form, tables)
