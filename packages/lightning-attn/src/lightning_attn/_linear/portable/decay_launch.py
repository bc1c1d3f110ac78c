"""The launcher of the gradient of the decays: two walks and a kernel."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from attn_common import cdiv
from torch import Tensor

from ..._linked.launch.runtime import Launch, token_strides
from ..call import BackwardTensors, Inputs
from .decay_gradient import decay_gradient_kernel
from .structures import DecayGradientNumbers, DecayGradientOptions, DecayGradientTensors
from .walk_launch import Walk, constants_of, tile_of


class DecayGradientPlan:
    """The gradient of the decays for calls of one form; it stores two states per chunk."""

    def __init__(self, x: BackwardTensors, scale: float) -> None:
        d, e = x.k.shape[-1], x.v.shape[-1]
        self._scale = scale
        self._tile = tile = tile_of(x.k, d, e)
        by_chunks: Any = {"schedule": "parallel", "size": tile.chunk}
        written, gradients = _walks_of(x)
        self._forward = Walk(written, **by_chunks)
        self._backward = Walk(gradients, write_scale=scale, reverse=True, **by_chunks)
        of_rows = [token_strides(rows) for rows in (x.q, x.k, x.v, x.dout)]
        self._strides = tuple(itertools.chain.from_iterable(of_rows))
        options = DecayGradientOptions(d, e)
        self._launch = Launch(
            decay_gradient_kernel,
            {
                **options._asdict(),
                **constants_of(tile, x.q, x.v, is_exact=True),
                "num_warps": max(8, tile.num_warps),  # it holds two states
                "num_stages": 1,
            },
        )

    def gradient(self, x: BackwardTensors) -> Tensor:
        """Return the gradient of readable tensors."""
        walk = self._forward
        if walk.batch == 0 or x.q.numel() == 0:
            return torch.zeros_like(x.decay)
        written, gradients = _walks_of(x)
        arriving = walk.segment_states(written)
        leaving = self._backward.segment_states(gradients)
        tokens = x.k.shape[-3]
        segments = walk.segments(tokens)
        pieces = segments * (1 if walk.is_packed else walk.batch)
        splits = cdiv(walk.e, self._tile.block_e)
        # slots without tokens write nothing
        out = torch.zeros((pieces, walk.heads, splits), dtype=torch.float32, device=x.q.device)
        lengths = walk.batch, walk.heads, tokens, self._tile.chunk, segments
        self._launch(
            out.numel(),
            DecayGradientTensors(
                x.q,
                x.k,
                x.v,
                x.dout,
                out,
                x.decay,
                arriving.memory,
                leaving.memory,
                x.cu_seqlens,
            ),
            DecayGradientNumbers(self._scale, *lengths, *self._strides, *arriving.strides),
        )
        return -out.sum(dim=(0, 2))


def _walks_of(x: BackwardTensors) -> tuple[Inputs, Inputs]:
    """Return the walks of the states and of their gradients."""
    written = Inputs(None, x.k, x.v, x.decay, x.cu_seqlens, x.initial_state)
    return written, x.walk_of_dv()
