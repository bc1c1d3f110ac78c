"""GPU implementation of the passes over sequences cut across ranks."""

from __future__ import annotations

import torch
from attn_common import cdiv, detect
from torch import Tensor

from ..._linear.call import BackwardTensors, Inputs
from ..._linear.launch import (
    decay_gradient,
    read_gradient,
    readable_gradient,
    states_like,
    write_gradients_by,
)
from ..._linear.portable.walk_launch import States, Walk, readable, walk_of
from ..._linked.host.forms import Memory
from ..._linked.launch.kernels import Kernel
from ..._linked.launch.runtime import Launch
from ..passes import Sharded
from ..shards import Sources
from .arguments import Numbers, Tensors

arrive_kernel = Kernel(__package__, ".arrival", "arrive_kernel")

__all__ = [
    "arrive",
    "decay_gradient",
    "read_gradient",
    "read_runs",
    "write_gradients_of_runs",
    "write_runs",
]

# elements of a state per program
STATE_BLOCK = 1024

_launches: Memory[Launch] = Memory()


def write_runs(
    x: Inputs, slots: Tensor | None, reverse: bool, options: Sharded
) -> tuple[Inputs, States] | None:
    """Fill ``x.last`` with the states after the runs; return the contributions of their segments.

    The states before the first segments have yet to arrive.

    Args:
        x: a walk without reads.
        slots: -1 for runs whose states are not needed; None: all are.
        reverse: from the last token to the first.
        options: options of the call.
    """
    x = readable(x)
    walk = _walk_of(x, reverse, options)
    if walk.batch == 0:
        return None
    if not walk.plan(x.key.shape[-3]).segmented:
        walk.finish(x._replace(slots=slots))
        return None
    return x, walk.written_states(x, slots)


def read_runs(x: Inputs, kept: tuple[Inputs, States] | None, options: Sharded) -> Tensor:
    """Return the outputs of the runs; ``kept`` is the result of ``write_runs``."""
    x = readable(x)
    walk, states = _walk_of(x, False, options), None
    if kept is not None:
        states = kept[1]
        walk.combine(x, states)
    return walk.out(x, options.scale, states)


def write_gradients_of_runs(
    x: BackwardTensors,
    kept: tuple[Inputs, States] | None,
    needs_dinitial: bool,
    options: Sharded,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dk, dv and, if needed, the gradients of the states before the runs."""
    x = readable_gradient(x)
    dfirst = states_like(x.k, x.v, x.cu_seqlens) if needs_dinitial else None
    of_dk, of_dv = x.walk_of_dk(), x.walk_of_dv(dfirst)
    walk_dk, walk_dv = (_walk_of(of, True, options) for of in (of_dk, of_dv))
    written = None if kept is None else kept[1]
    dk, dv = write_gradients_by(walk_dk, walk_dv, of_dk, of_dv, written)
    return dk, dv, x.k.new_empty((0,)) if dfirst is None else dfirst


def _walk_of(x: Inputs, reverse: bool, options: Sharded) -> Walk:
    """Return a walk whose segments are the same for writes and reads."""
    # states that are only read need no more precision than reads have
    last = x.last if options.is_exact else None
    scale = options.scale if reverse else 1.0
    given = x._replace(last=last)
    return walk_of(given, write_scale=scale, reverse=reverse, schedule=options.schedule)


def arrive(every: Tensor, decay: Tensor, base: Tensor | None, sources: Sources) -> Tensor:
    """Return, for each row, ``base`` plus the decayed states of its sources."""
    rows = sources.offsets.shape[0] - 1
    _, heads, d, e = every.shape
    out = torch.empty((rows, heads, d, e), dtype=torch.float32, device=every.device)
    form = "arrive", base is None, every.device, detect(every.device)
    launch = _launches.get(form)
    if launch is None:
        constants = {"BLOCK": STATE_BLOCK, "num_warps": 4, "num_stages": 2}
        launch = _launches.keep(form, Launch(arrive_kernel, constants))
    tensors = Tensors(every, decay.contiguous(), base, out, *sources)
    grid = rows * heads * cdiv(d * e, STATE_BLOCK)
    launch(grid, tensors, Numbers(heads, size=d * e))
    return out
