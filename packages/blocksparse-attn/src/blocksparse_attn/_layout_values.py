"""A layout as a value: what two that are equal have in common, and its file."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from ._layout_checks import check_block_size, check_csr
from ._lists import Lists

# of a file, in the order in which a layout is made of them
NAMES = ("crow", "col", "block_size", "num_cols", "num_heads", "max_row", "rows_alike")


def canonical(lists: Lists) -> tuple[Tensor, Tensor]:
    """Return rows and columns on the host: sorted, each column once, without padding."""
    begin = lists.begin.cpu()
    return begin, lists.items[: int(begin[-1])].cpu()


def are_equal(mine: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    """Say whether two layouts keep the same blocks."""
    pairs = zip(mine, other, strict=True)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def order_sums(kept: tuple[Tensor, Tensor]) -> list[int]:
    """Return a number of each list, that depends on the order; equality has the last word."""
    return [int((x * (torch.arange(x.shape[0]) * 2 + 1)).sum()) for x in kept]


def write(path: str | os.PathLike[str], crow: Tensor, col: Tensor, *rest: Any) -> None:
    """Write what a layout is made of."""
    block_size, *numbers = rest
    values = crow.cpu(), col.cpu(), list(block_size), *numbers
    torch.save(dict(zip(NAMES, values, strict=True)), path)


def read(path: str | os.PathLike[str], device: torch.device | str) -> tuple[Any, ...]:
    """Read what :func:`write` wrote."""
    held = torch.load(path, map_location=device, weights_only=True)
    check_csr(held["crow"], held["col"])
    held["block_size"] = check_block_size(held["block_size"])
    return tuple(held[name] for name in NAMES)
