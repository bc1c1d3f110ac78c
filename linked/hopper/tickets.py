"""The counter from which the programs of a launch take their tiles, on Hopper."""

from __future__ import annotations

import torch
from torch import Tensor

from ...._linked.host.internals import current_device, current_stream

# of a launch: the counter has 32 bits, and every program takes one more than there are
MAX_TICKETS = 2**31 - 2**16


def new_ticket(device: torch.device) -> Tensor:
    """Return the counter from which the programs of a launch take their tiles."""
    return torch.zeros(1, dtype=torch.int32, device=device)


# counters, zero between launches, one a stream
_tickets: dict[tuple[int, int], Tensor] = {}


def kept_ticket(device: torch.device) -> Tensor:
    """Return the counter of the current stream, or while that is captured a new one.

    For calls past the operators alone: what a compiled graph calls may allocate from a pool of
    memory of its own, in which nothing may stay.
    """
    index = device.index
    if index != current_device() or torch.cuda.is_current_stream_capturing():
        # a graph may be replayed on any stream
        return new_ticket(device)
    key = index, current_stream(index)
    ticket = _tickets.get(key)
    if ticket is None:
        ticket = _tickets[key] = new_ticket(device)
    return ticket
