"""Properties of a call that all ranks must share, and their comparison."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dense.call import Tensors
from .._linked.parallel.agreement import agree
from .._linked.parallel.groups import group_named
from .passes import Sharded

# what ranks compare; the operator adds the values of the sinks
NAMES = (
    "the dtype of q",
    "the heads and head dimensions of q, k and v",
    "the shards",
    "softmax_scale",
    "softcap",
    "deterministic",
    "whether a gradient is asked for",
)


class _Shown(str):
    """Text that ranks compare; messages show it without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def claims_of(x: Tensors, options: Sharded, has_gradient: bool) -> list[str]:
    """Return the properties of a call that must be the same on every rank; see ``NAMES``."""
    layout = options.layout
    return [
        str(x.q.dtype),
        f"{list(x.q.shape[1:])}, {list(x.k.shape[1:])} and {list(x.v.shape[1:])}",
        f"{layout.shard} of lengths {layout.lengths}, window {layout.window}",
        str(options.softmax_scale),
        str(options.softcap),
        str(options.deterministic),
        str(has_gradient),
    ]


def compare(
    claims: list[str],
    sinks: Tensor | None,
    groups: list[str],
    device: torch.device,
    error: Exception | None = None,
) -> None:
    """Compare the ranks' claims; raise on all ranks if they differ.

    Groups are compared one after the other: a difference in one group is reported as an error of
    its ranks in the next group.
    """
    named: dict[str, Any] = dict(zip(NAMES, map(_Shown, claims), strict=True))
    named["sinks"] = None if sinks is None else sinks.tolist()
    for name in groups:
        try:
            agree(named, group_named(name), device, error)
        except (TypeError, ValueError, NotImplementedError) as raised:
            error = raised
    if error is not None:
        raise error
