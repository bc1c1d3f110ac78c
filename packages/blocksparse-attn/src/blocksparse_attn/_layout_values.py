"""A layout as a value: what two that are equal have in common, and its file."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from ._layout_checks import check_block_size, check_csr
from ._lists import query_lists
from .token_rule import END

# of a file, in the order in which a layout is made of them
NAMES = (
    "crow",
    "col",
    "block_size",
    "num_cols",
    "num_heads",
    "max_row",
    "rows_alike",
    "batch",
    "rule",
)


def of_heads(x: Tensor, heads: int, batch: int) -> Tensor:
    """Write out what is held once for all heads, of each of ``batch`` sequences."""
    sequences = max(batch, 1)
    x = x.view(sequences, len(x) // sequences, *x.shape[1:])
    return x.expand(x.shape[0], heads, *x.shape[2:]).flatten(0, 1)


def joined(states: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return what a layout of a batch is made of, from what the layouts of its sequences are."""
    crows, cols, sizes, num_cols, num_heads, max_rows, alike, _, rules = zip(*states, strict=True)
    heads = max(crow.shape[0] for crow in crows)
    nnz = max(col.shape[1] for col in cols)
    padded = [torch.nn.functional.pad(col, (0, nnz - col.shape[1]), value=-1) for col in cols]
    crow, col = (
        torch.cat([of_heads(x, heads, 0) if x.shape[0] < heads else x for x in parts])
        for parts in (crows, padded)
    )
    rest = sizes[0], num_cols[0], num_heads[0], max(max_rows), all(alike), len(states)
    return crow, col, *rest, _joined_rules(rules, (crow.shape[1] - 1) * sizes[0][0], crow.device)


def _joined_rules(
    rules: tuple[Tensor | None, ...], positions: int, device: torch.device
) -> Tensor | None:
    """Return the bounds of all sequences; without a rule a position sees every key."""
    if all(rule is None for rule in rules):
        return None
    all_keys = torch.tensor([0, END], dtype=torch.int32, device=device).expand(1, positions, 2)
    return torch.cat([all_keys if rule is None else rule for rule in rules])


def _canonical(crow: Tensor, col: Tensor, state: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return rows and columns on the host: sorted, each column once, without padding."""
    block_size, cols, *_ = state[2:]
    lists = query_lists(crow, col, cols, block_size, block_size[0], 1, 1, False)
    begin = lists.begin.cpu()
    return begin, lists.items[: int(begin[-1])].cpu()


def are_equal(mine: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Say whether two layouts of one form keep the same blocks."""
    if not _has_same_rule(mine[8], other[8]):
        return False
    kept = []
    for state in (mine, other):
        crow, col = state[:2]
        if mine[0].shape[0] != other[0].shape[0]:  # one holds once what the other writes out
            crow, col = (of_heads(x, state[4], state[7]) for x in (crow, col))
        kept.append(_canonical(crow, col, state))
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(*kept, strict=True))


def _has_same_rule(mine: Tensor | None, other: Tensor | None) -> bool:
    if mine is None or other is None:
        return mine is other
    return mine.shape == other.shape and torch.equal(mine.cpu(), other.cpu())


def order_sums(state: tuple[Any, ...]) -> list[int]:
    """Return numbers that depend on the order of the first head's blocks.

    A pattern that is held once for all heads has the same first head as one that is written out.
    Equality has the last word.
    """
    kept = _canonical(state[0][:1], state[1][:1], state)
    place = (torch.arange(x.shape[0], device="cpu") * 2 + 1 for x in kept)
    return [int((x * weight).sum()) for x, weight in zip(kept, place, strict=True)]


def write(path: str | os.PathLike[str], crow: Tensor, col: Tensor, *rest: Any) -> None:
    """Write what a layout is made of."""
    block_size, *numbers, rule = rest
    rule = None if rule is None else rule.cpu()
    values = crow.cpu(), col.cpu(), list(block_size), *numbers, rule
    torch.save(dict(zip(NAMES, values, strict=True)), path)


def read(path: str | os.PathLike[str], device: torch.device | str) -> tuple[Any, ...]:
    """Read what :func:`write` wrote."""
    held = torch.load(path, map_location=device, weights_only=True)
    check_csr(held["crow"], held["col"])
    held["block_size"] = check_block_size(held["block_size"])
    # files of version 1.0.0
    held.setdefault("batch", 0)
    held.setdefault("rule", None)
    return tuple(held[name] for name in NAMES)
