"""The counter from which the programs of a persistent Hopper kernel take their tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from ..host.internals import current_device, current_stream

# in a launch: the counter has 32 bits, and each program takes one ticket past the last
MAX_TICKETS = 2**31 - 2**16


def new_ticket(device: torch.device) -> Tensor:
    """Return the counter from which the programs of a launch take their tiles."""
    return torch.zeros(1, dtype=torch.int32, device=device)


# counters, zero between launches, one a stream
_tickets: dict[tuple[int, int], Tensor] = {}


def kept_ticket(device: torch.device) -> Tensor:
    """Return the counter of the current stream, or a new one while that stream is captured.

    Only for calls past the operators: a compiled graph may allocate from a memory pool of its own,
    in which nothing may stay.
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
