"""The launch that links each segment to its children, for all tree backward kernels."""

from __future__ import annotations

from attn_common import cdiv
from torch import Tensor

from ..._linked.launch.kernels import Kernel
from ..._linked.launch.runtime import Launch
from .arguments import LinkTensors

link_kernel = Kernel(__package__, ".walk", "link_kernel")

# segments per program
LINKS = 64


class Links:
    """The launch of ``link_kernel``."""

    def __init__(self) -> None:
        self._launch = Launch(link_kernel, {"BLOCK": LINKS, "num_warps": 4})

    def __call__(self, parents: Tensor) -> Tensor:
        """Return the links, ``[2, segments]``."""
        segments = parents.shape[0]
        links = parents.new_empty((2, segments))
        self._launch(cdiv(segments, LINKS), LinkTensors(parents, links), (segments,))
        return links
