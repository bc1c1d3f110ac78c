"""The launcher of the gradient of the decays: two walks and a kernel."""

from __future__ import annotations

from typing import Any

import torch
from attn_common import cdiv
from torch import Tensor

from ..._linked.host.forms import Memory
from ..._linked.launch.entries import flat
from ..._linked.launch.kernels import Kernel
from ..._linked.launch.runtime import Launch
from ..call import BackwardTensors, Inputs
from .arguments import DecayGradientNumbers, Lengths, Options, Rows, RowStrides, Tensors
from .walk_launch import Walk, strides_of, tile_constants, tile_of

decay_gradient_kernel = Kernel(__package__, ".decay_gradient", "decay_gradient_kernel")


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
        # by tokens
        self._numbers: Memory[tuple[float, ...]] = Memory()
        constants = {
            "OPTIONS": Options(d, e),
            "TILE": tile_constants(tile, x.q, x.v, is_exact=True),
            "num_warps": max(8, tile.num_warps),  # it holds two states
            "num_stages": 1,
        }
        self._launch = Launch(decay_gradient_kernel, constants)

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
        numbers = self._numbers.get(tokens)
        if numbers is None:
            lengths = Lengths(walk.batch, walk.heads, tokens, self._tile.chunk, segments)
            given = DecayGradientNumbers(
                scale=self._scale,
                lengths=lengths,
                rows=RowStrides(*map(strides_of, (x.k, x.v, x.q))),
                dout=strides_of(x.dout),
                states=arriving.strides,
            )
            numbers = self._numbers.keep(tokens, flat(given))
        rows = Rows(x.k, x.v, x.q, out)
        states = Tensors(x.decay, arriving.memory, leaving.memory, x.cu_seqlens)
        self._launch(out.numel(), (*rows, x.dout, *states), numbers)
        return -out.sum(dim=(0, 2))


def _walks_of(x: BackwardTensors) -> tuple[Inputs, Inputs]:
    """Return the walks of the states and of their gradients."""
    written = Inputs(None, x.k, x.v, x.decay, x.cu_seqlens, x.initial_state)
    return written, x.walk_of_dv()
