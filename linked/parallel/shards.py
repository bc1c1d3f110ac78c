"""Shards: which tokens of a sequence each rank of a group holds.

A sequence is cut into parts whose lengths differ by at most one. ``"contiguous"`` gives each of n
ranks one of n parts; ``"zigzag"`` gives rank r the parts r and 2 n - 1 - r of 2 n, so that under a
causal mask all ranks have the same number of visible keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..host.arguments import check_count, check_tensor, kind

SHARDS = ("zigzag", "contiguous")


class Run(NamedTuple):
    """Tokens ``begin`` to ``end`` of a sequence, which are neighbours on a rank."""

    sequence: int
    begin: int
    end: int


def check_shard(shard: Any, names: Sequence[str] = SHARDS) -> None:
    """Check the name of a rule."""
    if not isinstance(shard, str):
        raise TypeError(f"shard must be a string, got {kind(shard)}")
    if shard not in names:
        raise ValueError(f"shard must be one of {', '.join(names)}, got {shard!r}")


def check_rank(rank: Any, group_size: int) -> None:
    """Check that a group has this rank."""
    check_count("rank", rank, 0)
    if rank >= group_size:
        raise ValueError(f"rank must be below group_size, {group_size}, got {rank}")


def part_sizes(seqlen: int, parts: int) -> list[int]:
    """Return the lengths of the parts: the first parts take the remainder."""
    # seqlen // parts + (p < seqlen % parts), without the comparison, on which a trace would guard
    return [(seqlen + parts - 1 - p) // parts for p in range(parts)]


def ranges(seqlen: int, group_size: int, rank: int, shard: str) -> list[tuple[int, int]]:
    """Return begin and end of each part of a rank, in order, including empty parts."""
    parts, own = parts_of(group_size, rank, shard)
    ends = [0, *accumulate(part_sizes(seqlen, parts))]
    return [(ends[p], ends[p + 1]) for p in own]


def parts_of(group_size: int, rank: int, shard: str) -> tuple[int, list[int]]:
    """Return the number of parts of a sequence, and the parts that a rank holds."""
    if shard == "contiguous":
        return group_size, [rank]
    return 2 * group_size, [rank, 2 * group_size - 1 - rank]


def shard_size(seqlen: int, group_size: int, rank: int, shard: str) -> int:
    """Return how many tokens of a sequence a rank holds."""
    parts, own = parts_of(group_size, rank, shard)
    sizes = part_sizes(seqlen, parts)
    return sum(sizes[p] for p in own)


def merged(runs: Iterable[Run]) -> list[Run]:
    """Return the runs with adjacent ones joined."""
    joined: list[Run] = []
    for run in runs:
        if joined and joined[-1].sequence == run.sequence and joined[-1].end == run.begin:
            joined[-1] = joined[-1]._replace(end=run.end)
        else:
            joined.append(run)
    return joined


def shard(x: Tensor, group_size: int, rank: int, *, dim: int = 1, shard: str = "zigzag") -> Tensor:
    """Return the tokens of a rank.

    Args:
        x: the whole sequences, the same on every rank; any shape and dtype.
        group_size: number of ranks.
        rank: the rank, from 0.
        dim: the dimension of tokens. Default: 1.
        shard: ``"zigzag"`` or ``"contiguous"``. Default: ``"zigzag"``.

    Returns:
        Zigzag: parts ``rank`` and ``2 * group_size - 1 - rank`` of ``2 * group_size``,
        concatenated. Contiguous: part ``rank`` of ``group_size``, as a view. Part p of m has
        ``seqlen // m + (p < seqlen % m)`` tokens.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if an argument is out of range.
    """
    check_tensor("x", x)
    check_count("group_size", group_size)
    check_rank(rank, group_size)
    check_shard(shard)
    check_dim(dim, x)
    parts = [
        x.narrow(dim, begin, end - begin)
        for begin, end in ranges(x.shape[dim], group_size, rank, shard)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def unshard(parts: Sequence[Tensor], *, dim: int = 1, shard: str = "zigzag") -> Tensor:
    """Return whole sequences from the shards of all ranks.

    Args:
        parts: the shard of each rank, in the order of ranks.
        dim: the dimension of tokens. Default: 1.
        shard: the rule by which they were cut. Default: ``"zigzag"``.

    Returns:
        The tokens in their order: ``unshard([shard(x, n, r) for r in range(n)])`` is ``x``.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if an argument is out of range, or a shard has a length that the rule does not
            give.
    """
    parts = list(parts)
    if not parts:
        raise ValueError("parts must have a tensor for each rank, got none")
    for rank, part in enumerate(parts):
        check_tensor(f"parts[{rank}]", part)
    check_shard(shard)
    check_dim(dim, parts[0])
    seqlen, group_size = sum(part.shape[dim] for part in parts), len(parts)
    pieces: list[tuple[int, Tensor]] = []
    for rank, part in enumerate(parts):
        expected = shard_size(seqlen, group_size, rank, shard)
        if part.shape[dim] != expected:
            raise ValueError(
                f"parts[{rank}] must have {expected} of {seqlen} tokens, got {part.shape[dim]}"
            )
        at = 0
        for begin, end in ranges(seqlen, group_size, rank, shard):
            pieces.append((begin, part.narrow(dim, at, end - begin)))
            at += end - begin
    # an empty part has the same begin as its successor: sort it first
    pieces.sort(key=lambda piece: (piece[0], piece[1].shape[dim]))
    return torch.cat([piece for _, piece in pieces], dim)


def check_dim(dim: Any, x: Tensor) -> None:
    """Check that a tensor has this dimension."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {kind(dim)}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be from {-x.ndim} to {x.ndim - 1}, got {dim}")
