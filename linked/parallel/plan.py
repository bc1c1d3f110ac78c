"""``ShardPlan``: the public description of a packed batch over ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..host.arguments import check_count, check_tensor, check_window, kind
from .layout import Layout, layout_of
from .shards import SHARDS, Run, check_rank, check_shard, merged

_RULES = ("balanced", *SHARDS)


class ShardPlan:
    """Which tokens of packed sequences each rank holds.

    Every rank makes the same plan from numbers on the host, without communication. Layouts are
    cached by lengths.

    Args:
        cu_seqlens: starts of the sequences in the packed batch, and its end: ints, or an integer
            tensor on the CPU, ``[batch + 1]``.
        group_size: number of ranks.
        causal: whether the mask is causal. Default: False.
        window_size: window of the mask, ``(left, right)``. Default: ``(-1, -1)``.
        shard: ``"balanced"`` cuts long sequences over several ranks and keeps short ones whole, so
            that all ranks have about as many visible pairs; ``"zigzag"`` and ``"contiguous"`` cut
            every sequence over all ranks by that rule. Default: ``"balanced"``.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        cu_seqlens: Sequence[int] | Tensor,
        group_size: int,
        *,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        shard: str = "balanced",
    ) -> None:
        self.cu_seqlens = _offsets(cu_seqlens)
        check_count("group_size", group_size)
        if not isinstance(causal, bool):
            raise TypeError(f"causal must be a bool, got {kind(causal)}")
        left, right = check_window(window_size)
        check_shard(shard, _RULES)
        self.group_size, self.shard_rule = group_size, shard
        self.window = left, 0 if causal else right
        self.lengths = tuple(
            end - begin
            for begin, end in zip(self.cu_seqlens[:-1], self.cu_seqlens[1:], strict=True)
        )
        self.layout: Layout = layout_of(self.lengths, group_size, *self.window, shard)
        # read by traces: numbers that may become symbols, and a tensor
        self.counts = tuple(map(self.layout.tokens, range(group_size)))
        self.run_counts = tuple(len(merged(runs)) for runs in self.layout.runs)
        self.host_lengths = torch.tensor(self.lengths, dtype=torch.int64, device="cpu")
        self._indices: dict[tuple[int, torch.device], Tensor] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy what the plan is made from."""
        return _remade, (self.cu_seqlens, self.group_size, self.window, self.shard_rule)

    @property
    def key(self) -> tuple[Any, ...]:
        """All that the plan depends on; equal plans have equal keys on every rank."""
        return self.lengths, self.group_size, self.window, self.shard_rule

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens on a rank."""
        return max(self.counts)

    def tokens(self, rank: int) -> int:
        """Return how many tokens a rank holds."""
        check_rank(rank, self.group_size)
        return self.counts[rank]

    def runs(self, rank: int) -> tuple[Run, ...]:
        """Return the runs of a rank in its storage order."""
        check_rank(rank, self.group_size)
        return self.layout.runs[rank]

    def indices(self, rank: int) -> Tensor:
        """Return a rank's token indices in the batch, int64 ``[tokens]`` on the CPU, ascending."""
        check_rank(rank, self.group_size)
        return self._on(torch.device("cpu"), rank)

    def positions(self, rank: int) -> Tensor:
        """Return the positions of a rank's tokens in their sequences, for rotary embeddings.

        Returns:
            int64 ``[tokens]`` on the CPU.
        """
        runs = [torch.arange(run.begin, run.end) for run in self.runs(rank)]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)

    def shard(self, x: Tensor, rank: int) -> Tensor:
        """Return a rank's tokens of a packed batch, ``[tokens, ...]``."""
        check_tensor("x", x)
        check_rank(rank, self.group_size)
        if x.ndim < 1 or x.shape[0] < self.cu_seqlens[-1]:
            raise ValueError(
                f"x must be [tokens, ...] with {self.cu_seqlens[-1]} tokens, got {list(x.shape)}"
            )
        return x.index_select(0, self._on(x.device, rank))

    def unshard(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the packed batch from the tokens of all ranks, given in the order of ranks."""
        parts = list(parts)
        if len(parts) != self.group_size:
            raise ValueError(f"parts must have {self.group_size} tensors, got {len(parts)}")
        for rank, part in enumerate(parts):
            check_tensor(f"parts[{rank}]", part)
            expected = self.counts[rank]
            if part.ndim < 1 or part.shape[0] != expected:
                raise ValueError(
                    f"parts[{rank}] must be [tokens, ...] with {expected} tokens, "
                    f"got {list(part.shape)}"
                )
        device = parts[0].device
        every = torch.cat([self._on(device, rank) for rank in range(self.group_size)])
        whole = parts[0].new_zeros((self.cu_seqlens[-1], *parts[0].shape[1:]))
        return whole.index_copy(0, every, torch.cat(parts))

    def _on(self, device: torch.device, rank: int) -> Tensor:
        found = self._indices.get((rank, device))
        if found is None:
            if device.type != "cpu":
                found = self._on(torch.device("cpu"), rank).to(device)
            else:
                runs = [
                    torch.arange(run.begin, run.end) + self.cu_seqlens[run.sequence]
                    for run in self.layout.runs[rank]
                ]
                found = torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)
            self._indices[rank, device] = found
        return found


def _offsets(cu_seqlens: Any) -> tuple[int, ...]:
    """Check the offsets of sequences; return them as ints."""
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"cu_seqlens must be ints or an int32 tensor, got {cu_seqlens.dtype}")
        if cu_seqlens.device.type != "cpu":
            raise ValueError(f"cu_seqlens must be on the CPU, got {cu_seqlens.device}")
        if cu_seqlens.ndim != 1:
            raise ValueError(f"cu_seqlens must be [batch + 1], got {list(cu_seqlens.shape)}")
        cu_seqlens = cu_seqlens.tolist()
    if not isinstance(cu_seqlens, Sequence) or isinstance(cu_seqlens, str):
        raise TypeError(f"cu_seqlens must be a list of ints, got {kind(cu_seqlens)}")
    for b, offset in enumerate(cu_seqlens):
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise TypeError(f"cu_seqlens[{b}] must be an int, got {kind(offset)}")
    if not cu_seqlens or cu_seqlens[0] != 0:
        raise ValueError(f"cu_seqlens must be [batch + 1] from 0 on, got {list(cu_seqlens)[:1]}")
    for b, (begin, end) in enumerate(itertools.pairwise(cu_seqlens), 1):
        if end < begin:
            raise ValueError(f"cu_seqlens[{b}] must be at least {begin}, got {end}")
    return tuple(cu_seqlens)


def _remade(
    cu_seqlens: tuple[int, ...], group_size: int, window_size: tuple[int, int], shard: str
) -> ShardPlan:
    return ShardPlan(cu_seqlens, group_size, window_size=window_size, shard=shard)


# torch.load makes plans
torch.serialization.add_safe_globals([_remade])
