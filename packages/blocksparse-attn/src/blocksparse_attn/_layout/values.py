"""A layout as a value: what two that are equal have in common, and its file."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..token_rule import END
from .checks import check_block_size, check_csr
from .lists import dense_of


class State(NamedTuple):
    """What a layout is made of; the names are also those of its file."""

    crow: Tensor  # int32 [heads of all sequences, or one for each, rows + 1]
    col: Tensor  # int32 [heads alike, nnz]
    block_size: tuple[int, int]
    num_cols: int
    num_heads: int
    max_row: int | None = None
    rows_alike: bool = False
    batch: int = 0  # sequences that each have a layout, or 0
    rule: Tensor | None = None  # see ``TokenRule.bounds``


def of_heads(x: Tensor, heads: int, batch: int) -> Tensor:
    """Write out what is held once for all heads, of each of ``batch`` sequences."""
    sequences = max(batch, 1)
    x = x.view(sequences, len(x) // sequences, *x.shape[1:])
    return x.expand(x.shape[0], heads, *x.shape[2:]).flatten(0, 1)


def joined(states: list[State]) -> State:
    """Return what a layout of a batch is made of, from what the layouts of its sequences are."""
    first = states[0]
    heads = max(len(one.crow) for one in states)
    nnz = max(one.col.shape[1] for one in states)
    crow, col = (
        torch.cat([of_heads(x, heads, 0) if len(x) < heads else x for x in parts])
        for parts in (
            [one.crow for one in states],
            [pad(one.col, (0, nnz - one.col.shape[1]), value=-1) for one in states],
        )
    )
    return first._replace(
        crow=crow,
        col=col,
        max_row=max(one.max_row or 0 for one in states),
        rows_alike=all(one.rows_alike for one in states),
        batch=len(states),
        rule=_joined_rules([one.rule for one in states], crow, first.block_size[0]),
    )


def _joined_rules(rules: list[Tensor | None], crow: Tensor, block_q: int) -> Tensor | None:
    """Return the bounds of all sequences; without a rule a position sees every key."""
    if all(rule is None for rule in rules):
        return None
    positions = (crow.shape[1] - 1) * block_q
    all_keys = crow.new_tensor([0, END], dtype=torch.int32).expand(1, positions, 2)
    return torch.cat([all_keys if rule is None else rule for rule in rules])


def _canonical(crow: Tensor, col: Tensor, cols: int) -> tuple[Tensor, Tensor]:
    """Return ends of rows and columns on the host: sorted, each column once, without padding."""
    kept = dense_of(crow, col, cols)
    return kept.sum(-1).flatten().cumsum(0).cpu(), kept.nonzero()[:, 2].cpu()


def are_equal(mine: State, other: State) -> bool:
    """Say whether two layouts of one form keep the same blocks."""
    if not _has_same_rule(mine.rule, other.rule):
        return False
    kept = []
    for state in (mine, other):
        crow, col = state.crow, state.col
        if len(mine.crow) != len(other.crow):  # one holds once what the other writes out
            crow, col = (of_heads(x, state.num_heads, state.batch) for x in (crow, col))
        kept.append(_canonical(crow, col, state.num_cols))
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(*kept, strict=True))


def _has_same_rule(mine: Tensor | None, other: Tensor | None) -> bool:
    if mine is None or other is None:
        return mine is other
    return mine.shape == other.shape and torch.equal(mine.cpu(), other.cpu())


def order_sums(state: State) -> list[int]:
    """Return numbers that depend on the order of the first head's blocks.

    A pattern that is held once for all heads has the same first head as one that is written out.
    Equality has the last word.
    """
    kept = _canonical(state.crow[:1], state.col[:1], state.num_cols)
    place = (torch.arange(x.shape[0], device="cpu") * 2 + 1 for x in kept)
    return [int((x * weight).sum()) for x, weight in zip(kept, place, strict=True)]


def write(path: str | os.PathLike[str], state: State) -> None:
    """Write what a layout is made of."""
    held = {k: x.cpu() if isinstance(x, Tensor) else x for k, x in state._asdict().items()}
    torch.save({**held, "block_size": list(state.block_size)}, path)


def read(path: str | os.PathLike[str], device: torch.device | str) -> State:
    """Read what :func:`write` wrote."""
    held = torch.load(path, map_location=device, weights_only=True)
    found = set(held) if isinstance(held, dict) else {type(held).__name__}
    # files of version 1.0.0 have neither a batch nor a rule
    if found | {"batch", "rule"} != set(State._fields):
        raise ValueError(
            f"path must be a file of BlockSparseLayout.save, with {', '.join(State._fields)}, "
            f"got one with {', '.join(sorted(map(str, found)))}"
        )
    check_csr(held["crow"], held["col"])
    held["block_size"] = check_block_size(held["block_size"])
    return State(**held)
