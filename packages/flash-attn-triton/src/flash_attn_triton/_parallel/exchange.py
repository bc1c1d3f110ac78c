"""Exchanges of keys and values, or of their gradients, between the ranks of a group."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from .._linked.parallel.groups import group_named

# heads, width, and elements of a token
Side = tuple[int, int, int]


class Channel:
    """Sends messages between ranks: tokens of keys, then as many of values, in one dimension.

    A message that arrives is two contiguous tensors, without a copy.
    """

    def __init__(self, k: Tensor, v: Tensor, group_size: int, group: str) -> None:
        """Take keys and values of any number of tokens, ``[tokens, heads, d]``."""
        self._group_size, self._group = group_size, group
        (heads_k, d_k), (heads_v, d_v) = k.shape[1:], v.shape[1:]
        self._sides = (heads_k, d_k, heads_k * d_k), (heads_v, d_v, heads_v * d_v)

    def send(self, message: Tensor, target: int, source: int, tokens: int) -> Exchange:
        """Send a message to ``target``, and receive one of ``tokens`` tokens from ``source``."""
        sent, received = [0] * self._group_size, [0] * self._group_size
        sent[target] = message.numel()
        received[source] = size = tokens * sum(side[2] for side in self._sides)
        arriving = message.new_empty(size)
        group = group_named(self._group)
        work = dist.all_to_all_single(arriving, message, received, sent, group, async_op=True)
        return Exchange(arriving, work, tokens, self._sides)


class Exchange:
    """The message that arrives in one step."""

    def __init__(
        self, arriving: Tensor, work: dist.Work | None, tokens: int, sides: tuple[Side, Side]
    ) -> None:
        self._arriving, self._work, self._tokens, self._sides = arriving, work, tokens, sides

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values; a GPU's stream waits, the host does not."""
        if self._work is not None:
            self._work.wait()
        (heads_k, d_k, row_k), (heads_v, d_v, row_v) = self._sides
        n, x = self._tokens, self._arriving
        k = x.as_strided((n, heads_k, d_k), (row_k, d_k, 1), 0)
        return k, x.as_strided((n, heads_v, d_v), (row_v, d_v, 1), n * row_k)


def give_way(x: Tensor) -> None:
    """Let an exchange that was just issued begin before the next kernel on a GPU."""
    if x.is_cuda:
        from .kernels.launch import give_way

        give_way(x)
