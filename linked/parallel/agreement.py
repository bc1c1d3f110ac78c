"""Check with one collective that all ranks of a group call with the same arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..host.arguments import kind

_OK, _REFUSED = 0, 1


def check_group(name: str, group: Any) -> None:
    """Check that the group exists and holds this rank."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(f"{name} must be a process group, but torch.distributed has none yet")
    if group is None:
        return
    if group is dist.GroupMember.NON_GROUP_MEMBER or (
        isinstance(group, dist.ProcessGroup) and dist.get_rank(group) < 0
    ):
        raise ValueError(f"{name} must hold this rank, {dist.get_rank()}, which is not in it")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{name} must be a torch.distributed.ProcessGroup, got {kind(group)}")


def agree(
    named: Mapping[str, Any], group: Any, device: torch.device, error: Exception | None = None
) -> None:
    """Compare arguments over the ranks of a group, and raise on every rank if they differ.

    Args:
        named: arguments in the same order and number on every rank, compared by ``repr``.
        group: the process group.
        device: device of the messages.
        error: the exception of this rank's own checks, if any. This rank raises it here, the other
            ranks raise a ValueError with its text, and ``named`` is not compared.

    Raises:
        Exception: ``error``.
        ValueError: an argument differs (the message has the value of each rank), another rank has
            an ``error``, or the group's backend does not serve ``device``.
    """
    ranks = dist.get_world_size(group)
    served = str(dist.get_backend_config(group))
    if f"{device.type}:" not in served:
        raise ValueError(f"q must be on a device that the group serves, {served}, got {device}")
    digests = [_digest(repr(value)) for value in named.values()]
    row = [_REFUSED if error is not None else _OK, *digests]
    every = _gather(torch.tensor(row, dtype=torch.int64), group, device)
    refused = [rank for rank in range(ranks) if every[rank][0] == _REFUSED]
    if refused:
        texts = _gather_texts("" if error is None else str(error), group, device)
        if error is not None:
            raise error
        raise ValueError(f"rank {refused[0]} of the group refused: {texts[refused[0]]}")
    for i, (name, value) in enumerate(named.items(), 1):
        if any(row[i] != every[0][i] for row in every):
            texts = _gather_texts(repr(value), group, device)
            shown = "; ".join(f"{text} on rank {rank}" for rank, text in enumerate(texts))
            raise ValueError(f"{name} must be the same on every rank, got {shown}")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def _gather(own: Tensor, group: Any, device: torch.device) -> list[list[int]]:
    own = own.to(device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    return torch.stack(every).tolist()


def _gather_texts(text: str, group: Any, device: torch.device) -> list[str]:
    """Return the texts of all ranks, each cut to 512 bytes."""
    raw = text.encode()[:512]
    row = torch.zeros(513, dtype=torch.int64)
    row[0] = len(raw)
    row[1 : len(raw) + 1] = torch.tensor(list(raw), dtype=torch.int64)
    every = _gather(row, group, device)
    return [bytes(one[1 : one[0] + 1]).decode(errors="replace") for one in every]
