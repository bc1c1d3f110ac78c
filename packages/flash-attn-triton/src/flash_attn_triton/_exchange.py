"""Keys and values, or their gradients, on their way from one rank of a group to another one."""

from __future__ import annotations

import math

import torch.distributed as dist
from torch import Tensor

from ._linked.parallel.groups import group_named


class Channel:
    """What two ranks exchange: tokens of keys, then as many of values, in one dimension.

    So what arrives is two contiguous tensors, without a copy.
    """

    def __init__(self, k: Tensor, v: Tensor, group_size: int, group: str) -> None:
        """Take keys and values of any number of tokens, ``[tokens, heads, d]``."""
        self._shapes = k.shape[1:], v.shape[1:]
        self._token = sum(map(math.prod, self._shapes))
        self._group_size, self._group = group_size, group

    def send(self, message: Tensor, target: int, source: int, tokens: int) -> Exchange:
        """Send a message to ``target``, while one of so many tokens comes from ``source``."""
        sent, received = [0] * self._group_size, [0] * self._group_size
        sent[target], received[source] = message.numel(), tokens * self._token
        arriving = message.new_empty(received[source])
        work = dist.all_to_all_single(
            arriving, message, received, sent, group=group_named(self._group), async_op=True
        )
        return Exchange(arriving, work, [(tokens, *shape) for shape in self._shapes])


class Exchange:
    """A message that was sent, and the one that comes in the same step."""

    def __init__(
        self, arriving: Tensor, work: dist.Work | None, shapes: list[tuple[int, ...]]
    ) -> None:
        self._arriving, self._work, self._shapes = arriving, work, shapes

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values; a GPU's stream waits, the host does not."""
        if self._work is not None:
            self._work.wait()
        of_k, of_v = self._shapes
        size = math.prod(of_k)
        return self._arriving[:size].view(of_k), self._arriving[size:].view(of_v)


def give_way(x: Tensor) -> None:
    """Let an exchange that was just asked for begin before the next kernel on a GPU."""
    if x.is_cuda:
        from ._kernels.sharded_plans import give_way

        give_way(x)
