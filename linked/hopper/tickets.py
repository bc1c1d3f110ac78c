"""The tile counter of a persistent Hopper kernel, from which its programs take tickets."""

from __future__ import annotations

import torch
from torch import Tensor

from ..host.internals import current_device, current_stream

# per launch: the counter has 32 bits, and each program takes one ticket past the last
MAX_TICKETS = 2**31 - 2**16


def new_ticket(device: torch.device) -> Tensor:
    """Return a new tile counter, int32 ``[1]``."""
    return torch.zeros(1, dtype=torch.int32, device=device)


# by device and stream: a counter that is zero between launches
_tickets: dict[tuple[int, int], Tensor] = {}


def kept_ticket(device: torch.device) -> Tensor:
    """Return the counter of the current stream, or a new one while that stream is captured.

    Only for calls past the operators: a compiled graph may allocate from its own memory pool, in
    which no tensor may outlive the call.
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
