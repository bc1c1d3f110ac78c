"""CPU implementation of the passes over sequences cut across ranks; see :mod:`.passes`."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from .._linear.call import LARGEST_RATE, BackwardTensors, Inputs
from .._linear.eager import (
    Rule,
    all_sequences,
    decay_gradient,
    read_gradient,
    write_gradients,
)
from .passes import Sharded
from .shards import Sources

__all__ = [
    "arrive",
    "decay_gradient",
    "read_gradient",
    "read_runs",
    "write_gradients_of_runs",
    "write_runs",
]


def write_runs(x: Inputs, slots: Tensor | None, reverse: bool, options: Sharded) -> None:
    """Fill ``x.last`` with the states after the runs."""
    scale = options.scale if reverse else 1.0
    _, last = all_sequences(x._replace(read=None), Rule(reverse, write_scale=scale))
    if x.last is not None:
        # a message has the rows of the rank that sends most, and no rows for runs that stay
        rows = min(x.last.shape[0], last.shape[0])
        x.last[:rows].copy_(last[:rows])


def read_runs(x: Inputs, kept: Any, options: Sharded) -> Tensor:
    """Return the outputs of the runs, from the states before them."""
    return all_sequences(x, Rule(read_scale=options.scale))[0]


def arrive(every: Tensor, decay: Tensor, base: Tensor | None, sources: Sources) -> Tensor:
    """Return, for each row, ``base`` plus the decayed states of its sources."""
    rates = decay.clamp(max=LARGEST_RATE)
    offsets = sources.offsets.tolist()
    rows = every.new_zeros((len(offsets) - 1, *every.shape[1:])) if base is None else base.clone()
    entries = sources.entries.tolist()
    for row, (begin, end) in enumerate(itertools.pairwise(offsets)):
        for slot, distance in entries[begin:end]:
            rows[row] += torch.exp(-rates * distance)[:, None, None] * every[slot]
    return rows


def write_gradients_of_runs(
    x: BackwardTensors, kept: Any, needs_dinitial: bool, options: Sharded
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dk, dv and, if needed, the gradients of the states before the runs."""
    return write_gradients(x, options.scale, options.schedule, needs_dinitial)
