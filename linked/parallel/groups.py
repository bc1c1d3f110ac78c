"""Process groups by name, which is what operators take, and the exchange of rows in them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..host.internals import process_group_named


class Where(NamedTuple):
    """This rank among the others, as operators take it."""

    group: str
    rank: int
    group_size: int


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def where(group: Any) -> Where:
    """Return where a rank is in its group; None is all ranks."""
    group = dist.group.WORLD if group is None else group
    # a trace may hand a stand-in for the group
    group = group_named(str(group.group_name))
    return Where(str(group.group_name), group.rank(), group.size())


def group_named(name: str) -> Any:
    """Return the group of this name."""
    return process_group_named(name)
