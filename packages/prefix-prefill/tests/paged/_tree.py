"""Helpers of tree tests that other tests use too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._numerics import Problem


def trees(problem: Problem, seed: int = 0) -> list[list[int]]:
    """Return the parents of each token: drafted trees, in which children follow their parents."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [int(torch.randint(-1, i, (), generator=generator)) if i else -1 for i in range(n)]
        for n in problem.queries
    ]


def rows_of(parents: list[list[int]], padding: int, device: Any) -> Tensor:
    """Return ``tree_mask``: a token sees itself and its ancestors."""
    rows: list[int] = []
    for one in parents:
        own: list[int] = []
        for i, parent in enumerate(one):
            own.append((own[parent] if parent >= 0 else 0) | 1 << i)
        rows += own
    rows = [row - (1 << 64) if row >> 63 else row for row in rows]
    return torch.tensor(rows + [0] * padding, dtype=torch.int64, device=device)
