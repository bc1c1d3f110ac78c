"""The ``nki.collectives`` namespace of the simulator, whose functions are not modelled."""

from __future__ import annotations

from typing import Any

from .errors import Missing
from .language.objects import NKIObject

NAMES = (
    "all_reduce",
    "all_gather",
    "all_gather_v",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_v",
    "collective_permute",
    "collective_permute_implicit",
    "collective_permute_implicit_reduce",
    "collective_permute_implicit_current_processing_rank_id",
    "rank_id",
)


class ReplicaGroup(NKIObject):
    """Ranks that take part in a collective."""

    def __init__(self, groups: Any = None) -> None:
        self.groups = groups


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"nki.collectives has no {name}")
    return Missing(f"nki.collectives.{name}", f"nki.collectives.{name}")
