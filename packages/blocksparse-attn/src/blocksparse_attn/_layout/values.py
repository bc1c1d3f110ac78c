"""A layout as a value: its state, equality, hash, batches and files."""

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
    """The state of a layout; its file has the same names."""

    crow: Tensor  # int32 [sequences * heads, rows + 1], or [sequences, rows + 1] if heads share
    col: Tensor  # int32, [..., nnz] with the leading dimension of crow
    block_size: tuple[int, int]
    num_cols: int
    num_heads: int
    max_row: int | None = None
    rows_alike: bool = False
    batch: int = 0  # number of sequences if each has its own layout, else 0
    rule: Tensor | None = None  # see ``TokenRule.bounds``
    causal: bool | None = None  # see ``BlockSparseLayout.causal``


def of_heads(x: Tensor, heads: int, batch: int) -> Tensor:
    """Expand a tensor that is held once for all heads, for each of ``batch`` sequences."""
    sequences = max(batch, 1)
    x = x.view(sequences, len(x) // sequences, *x.shape[1:])
    return x.expand(x.shape[0], heads, *x.shape[2:]).flatten(0, 1)


def joined(states: list[State]) -> State:
    """Return the state of a batch's layout, from the states of the layouts of its sequences."""
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
        causal=next((one.causal for one in states if one.causal is not None), None),
        rule=_joined_rules([one.rule for one in states], crow, first.block_size[0]),
    )


def _joined_rules(rules: list[Tensor | None], crow: Tensor, block_q: int) -> Tensor | None:
    """Return the token rules' bounds of all sequences; without a rule every key is seen."""
    if all(rule is None for rule in rules):
        return None
    positions = (crow.shape[1] - 1) * block_q
    all_keys = crow.new_tensor([0, END], dtype=torch.int32).expand(1, positions, 2)
    return torch.cat([all_keys if rule is None else rule for rule in rules])


def _canonical(crow: Tensor, col: Tensor, cols: int) -> tuple[Tensor, Tensor]:
    """Return row ends and columns on the host: sorted, each column once, without padding."""
    kept = dense_of(crow, col, cols)
    return kept.sum(-1).flatten().cumsum(0).cpu(), kept.nonzero()[:, 2].cpu()


def are_equal(mine: State, other: State) -> bool:
    """Say whether two layouts of the same shape keep the same blocks."""
    if not _has_same_rule(mine.rule, other.rule):
        return False
    if mine.causal is not None and other.causal is not None and mine.causal != other.causal:
        return False
    kept = []
    for state in (mine, other):
        crow, col = state.crow, state.col
        if len(mine.crow) != len(other.crow):  # one is shared by all heads, one is per head
            crow, col = (of_heads(x, state.num_heads, state.batch) for x in (crow, col))
        kept.append(_canonical(crow, col, state.num_cols))
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(*kept, strict=True))


def _has_same_rule(mine: Tensor | None, other: Tensor | None) -> bool:
    if mine is None or other is None:
        return mine is other
    return mine.shape == other.shape and torch.equal(mine.cpu(), other.cpu())


def order_sums(state: State) -> list[int]:
    """Return numbers for a hash, from the blocks of the first head.

    The first head is the same whether a pattern is held once for all heads or once per head.
    """
    kept = _canonical(state.crow[:1], state.col[:1], state.num_cols)
    place = (torch.arange(x.shape[0], device="cpu") * 2 + 1 for x in kept)
    return [int((x * weight).sum()) for x, weight in zip(kept, place, strict=True)]


def write(path: str | os.PathLike[str], state: State) -> None:
    held = {k: x.cpu() if isinstance(x, Tensor) else x for k, x in state._asdict().items()}
    torch.save({**held, "block_size": list(state.block_size)}, path)


def read(path: str | os.PathLike[str], device: torch.device | str) -> State:
    held = torch.load(path, map_location=device, weights_only=True)
    found = set(held) if isinstance(held, dict) else {type(held).__name__}
    # files of version 1.0.0 have only the fields without a default, and the first two with one
    if found | {"batch", "rule", "causal"} != set(State._fields):
        raise ValueError(
            f"path must be a file of BlockSparseLayout.save, with {', '.join(State._fields)}, "
            f"got one with {', '.join(sorted(map(str, found)))}"
        )
    check_csr(held["crow"], held["col"])
    held["block_size"] = check_block_size(held["block_size"])
    return State(**held)
