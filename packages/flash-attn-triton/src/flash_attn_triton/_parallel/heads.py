"""Heads over the ranks of a second group: an all-to-all before attention, and one after it.

Each rank of that group holds some of the tokens with all heads, and computes attention for all of
the group's tokens with some of the heads (DeepSpeed-Ulysses: Jacobs et al., 2023).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._dense import ops
from .._linked.host.operators import register
from .._linked.parallel.groups import Where, group_named
from .._linked.parallel.shards import part_sizes


class Heads:
    """The exchange of tokens for heads between the ranks of a group.

    Args:
        at: this rank in the group.
        tokens: tokens that its ranks hold together, of each sequence of the batch.
        batch: number of sequences of that length; 1 if packed.
    """

    def __init__(self, at: Where, tokens: int, batch: int) -> None:
        self.at, self._batch = at, batch
        self.sizes = part_sizes(tokens, at.group_size)

    @property
    def own(self) -> int:
        """The number of tokens that this rank holds."""
        return self.sizes[self.at.rank]

    def part_of(self, sinks: Tensor | None) -> Tensor | None:
        """Return the sinks of this rank's heads."""
        if sinks is None:
            return None
        count = sinks.shape[0] // self.at.group_size
        return sinks.narrow(0, self.at.rank * count, count)

    def gather(self, q: Tensor, k: Tensor, v: Tensor, compared: Tensor | None) -> list[Tensor]:
        """Turn ``[batch * own tokens, heads, d]`` into ``[batch * tokens, own heads, d]``."""
        several = q, k, v
        ranks = self.at.group_size
        shapes = [(x.shape[1] // ranks, x.shape[2]) for x in several]
        # a rank may have no tokens, from which no size can be inferred
        widths = [heads * d for heads, d in shapes]
        by_rank = [x.reshape(x.shape[0], ranks, n) for x, n in zip(several, widths, strict=True)]
        message = torch.cat(by_rank, -1)
        counts = [self._batch * size for size in self.sizes]
        arrived: Tensor = gather_tokens(message, counts, self.at.group, compared)
        if self._batch > 1:
            parts = torch.split(arrived, counts)
            size = self._batch, arrived.shape[1]
            parts_of = [part.view(size[0], len(part) // size[0], size[1]) for part in parts]
            arrived = torch.cat(parts_of, 1).flatten(0, 1)
        found = torch.split(arrived, widths, -1)
        return [x.reshape(len(x), *shape) for x, shape in zip(found, shapes, strict=True)]

    def scatter(self, x: Tensor) -> Tensor:
        """Turn ``[batch * tokens, own heads, d]`` into ``[batch * own tokens, heads, d]``."""
        rows = x.flatten(1)
        if self._batch > 1:
            by_sequence = rows.view(self._batch, len(rows) // self._batch, rows.shape[1])
            parts = torch.split(by_sequence, self.sizes, 1)
            rows = torch.cat([part.flatten(0, 1) for part in parts])
        counts = [self._batch * size for size in self.sizes]
        arrived: Tensor = scatter_tokens(rows, counts, self.at.rank, self.at.group)
        return arrived.view(arrived.shape[0], arrived.shape[1] * x.shape[1], x.shape[2])


def _exchange(message: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
    arrived = message.new_empty((sum(received), *message.shape[1:]))
    message = message.contiguous()
    dist.all_to_all_single(arrived, message, received, sent, group=group_named(group))
    return arrived


def _gather(message: Tensor, counts: list[int], group: str, compared: Tensor | None) -> Tensor:
    rows, ranks, width = message.shape
    by_rank = message.transpose(0, 1).reshape(rows * ranks, width)
    return _exchange(by_rank, counts, [rows] * ranks, group)


def _scatter(rows: Tensor, counts: list[int], rank: int, group: str) -> Tensor:
    own, ranks = counts[rank], len(counts)
    arrived = _exchange(rows, [own] * ranks, counts, group)
    return arrived.view(ranks, own, rows.shape[1]).transpose(0, 1).contiguous()


def _gather_fake(message: Tensor, counts: list[int], *rest: Any) -> Tensor:
    return message.new_empty((sum(counts), message.shape[2]))


def _scatter_fake(rows: Tensor, counts: list[int], rank: int, group: str) -> Tensor:
    return rows.new_empty((counts[rank], len(counts), rows.shape[1]))


gather_tokens = register(
    f"{ops.NAMESPACE}::gather_tokens",
    "(Tensor message, SymInt[] counts, str group, Tensor? compared) -> Tensor",
    fake=_gather_fake,
    kernels=_gather,
    eager=_gather,
)
scatter_tokens = register(
    f"{ops.NAMESPACE}::scatter_tokens",
    "(Tensor rows, SymInt[] counts, int rank, str group) -> Tensor",
    fake=_scatter_fake,
    kernels=_scatter,
    eager=_scatter,
)


def _keep_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    message, counts, group, _ = inputs
    ctx.counts, ctx.group, ctx.own = counts, group, message.shape[0]


def _keep_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.counts, _, ctx.group = inputs


def _differentiate_gather(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rank = dist.get_rank(group_named(ctx.group))
    return scatter_tokens(grad, ctx.counts, rank, ctx.group), None, None, None


def _differentiate_scatter(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return gather_tokens(grad, ctx.counts, ctx.group, None), None, None, None


torch.library.register_autograd(
    gather_tokens.name(), _differentiate_gather, setup_context=_keep_gather
)
torch.library.register_autograd(
    scatter_tokens.name(), _differentiate_scatter, setup_context=_keep_scatter
)
