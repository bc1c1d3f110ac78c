"""The arguments of the tree operators as structures."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._dense.call import Options, Tensors


class TreeCall(NamedTuple):
    """The arguments of the forward operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    parents: Tensor
    sinks: Tensor | None
    max_seqlen: int
    softmax_scale: float
    softcap: float
    deterministic: bool = False  # for the derivative

    @property
    def tensors(self) -> Tensors:
        """The tensors of a call over the segments alone."""
        offsets = self.cu_seqlens, self.cu_seqlens
        return Tensors(self.q, self.k, self.v, *offsets, sinks=self.sinks)

    @property
    def options(self) -> Options:
        """The options of a call over the segments alone: it is causal."""
        return Options(self.softmax_scale, -1, 0, self.softcap, 0.0)


class TreeBackwardCall(NamedTuple):
    """The arguments of the backward operator."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None
    cu_seqlens: Tensor
    parents: Tensor
    sinks: Tensor | None
    max_seqlen: int
    softmax_scale: float
    softcap: float
    deterministic: bool

    @property
    def forward(self) -> TreeCall:
        """The call whose gradients are computed."""
        return TreeCall(*(getattr(self, name) for name in TreeCall._fields))
