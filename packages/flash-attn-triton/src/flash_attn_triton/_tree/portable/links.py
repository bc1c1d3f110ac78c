"""The launch that finds what hangs below each segment, for all backward kernels over trees."""

from __future__ import annotations

from attn_common import cdiv
from torch import Tensor

from ..._linked.launch.runtime import Launch
from .structures import LinkTensors
from .walk import link_kernel

# segments that a program links
LINKS = 64


class Links:
    """What hangs below each segment; see ``link_kernel``."""

    def __init__(self) -> None:
        self._launch = Launch(link_kernel, {"BLOCK": LINKS, "num_warps": 4})

    def __call__(self, parents: Tensor) -> Tensor:
        """Return ``[2, segments]``."""
        segments = parents.shape[0]
        links = parents.new_empty((2, segments))
        self._launch(cdiv(segments, LINKS), LinkTensors(parents, links), (segments,))
        return links
