"""Process groups by name, since operators take names."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..host.internals import process_group_named


class Where(NamedTuple):
    """A group's name, this rank and the number of ranks, as arguments of operators."""

    group: str
    rank: int
    group_size: int


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def where(group: Any) -> Where:
    """Return this rank's place in a group; None is the group of all ranks."""
    group = dist.group.WORLD if group is None else group
    # a trace may pass a proxy of the group
    group = group_named(str(group.group_name))
    return Where(str(group.group_name), group.rank(), group.size())


def group_named(name: str) -> Any:
    """Return the group of this name."""
    return process_group_named(name)
