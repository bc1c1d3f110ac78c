"""What the CPU runs of sequences that are cut across ranks; see :mod:`._sharded`."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from einops import einsum
from torch import Tensor

from ._call import LARGEST_RATE, BackwardTensors, Inputs
from ._eager import (
    Rule,
    all_sequences,
    decay_gradient,
    dense,
    read_gradient,
    write_gradients,
)
from ._sharded import Sharded
from ._shards import OnDevice, Sources

__all__ = [
    "arrive",
    "correct",
    "decay_gradient",
    "read_gradient",
    "read_runs",
    "write_gradients_of_runs",
    "write_runs",
]


def write_runs(x: Inputs, slots: Tensor | None, reverse: bool, options: Sharded) -> None:
    """Fill ``x.last`` with the states behind the runs."""
    scale = options.scale if reverse else 1.0
    _, last = all_sequences(x._replace(read=None), Rule(reverse, write_scale=scale))
    if x.last is not None:
        x.last.copy_(last)


def read_runs(x: Inputs, kept: Any, options: Sharded) -> Tensor:
    """Return what the runs read, as if nothing had come before but ``x.first``."""
    return all_sequences(x, Rule(read_scale=options.scale))[0]


def arrive(every: Tensor, decay: Tensor, base: Tensor | None, sources: Sources) -> Tensor:
    """Return ``base`` and what decayed on its way from the states of all ranks, for each row."""
    rates = decay.clamp(max=LARGEST_RATE)
    offsets = sources.offsets.tolist()
    rows = every.new_zeros((len(offsets) - 1, *every.shape[1:])) if base is None else base.clone()
    entries = sources.entries.tolist()
    for row, (begin, end) in enumerate(itertools.pairwise(offsets)):
        for slot, distance in entries[begin:end]:
            rows[row] += torch.exp(-rates * distance)[:, None, None] * every[slot]
    return rows


def correct(
    out: Tensor,
    q: Tensor,
    decay: Tensor,
    before: Tensor,
    on: OnDevice,
    longest: int,
    scale: float,
) -> None:
    """Add to ``out`` what the runs read of the states before them."""
    rates = decay.clamp(max=LARGEST_RATE)
    starts = on.cu_seqlens.tolist()
    for run in on.corrected.tolist():
        rows = slice(starts[run], starts[run + 1])
        since = torch.arange(1, rows.stop - rows.start + 1)[:, None]
        reads = einsum(dense(q[rows]), before[run], "i h d, h d e -> i h e")
        factors = scale * torch.exp(-rates * since)
        out[rows] = (out[rows].float() + factors[..., None] * reads).to(out.dtype)


def write_gradients_of_runs(
    x: BackwardTensors, kept: Any, needs_dinitial: bool, options: Sharded
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dk, dv and, if asked for, the gradients of the states before the runs."""
    return write_gradients(x, options.scale, options.schedule, needs_dinitial)
