"""The plan of the gradient of the decays, which is made of two walks and a kernel of its own."""

from __future__ import annotations

import torch
from attn_common import cdiv
from torch import Tensor

from .decay_gradient import decay_gradient_kernel
from .launch.runtime import Launch, token_strides
from .structures import DecayGradientNumbers, DecayGradientOptions, DecayGradientTensors
from .walks import Inputs, Walk, constants_of, tile_of


class DecayGradientPlan:
    """The gradient of the decays for the calls of one form.

    Unlike all else it keeps two states per chunk.
    """

    def __init__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        cu_seqlens: Tensor | None,
        scale: float,
    ) -> None:
        written = Inputs(k, v, decay, cu_seqlens)
        gradients = Inputs(q, dout, decay, cu_seqlens)
        self._scale = scale
        self._tile = tile = tile_of(k, k.shape[-1], v.shape[-1])
        size = tile.chunk
        self._forward = Walk(written, schedule="parallel", size=size)
        self._backward = Walk(
            gradients, write_scale=scale, reverse=True, schedule="parallel", size=size
        )
        self._strides = (
            *token_strides(q),
            *token_strides(k),
            *token_strides(v),
            *token_strides(dout),
        )
        options = DecayGradientOptions(k.shape[-1], v.shape[-1])
        self._launch = Launch(
            decay_gradient_kernel,
            {
                **options._asdict(),
                **constants_of(tile, q, v, is_exact=True),
                "num_warps": max(8, tile.num_warps),  # it holds two states
                "num_stages": 1,
            },
        )

    def gradient(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        cu_seqlens: Tensor | None,
        initial_state: Tensor | None,
        dfinal_state: Tensor | None,
    ) -> Tensor:
        """Return the gradient of readable tensors."""
        walk = self._forward
        if walk.batch == 0 or q.numel() == 0:
            return torch.zeros_like(decay)
        arriving = walk.segment_states(Inputs(k, v, decay, cu_seqlens, initial_state))
        leaving = self._backward.segment_states(Inputs(q, dout, decay, cu_seqlens, dfinal_state))
        tokens = k.shape[-3]
        segments = walk.segments(tokens)
        pieces = segments * (1 if walk.is_packed else walk.batch)
        splits = cdiv(walk.e, self._tile.block_e)
        # a slot without tokens writes nothing
        out = torch.zeros((pieces, walk.heads, splits), dtype=torch.float32, device=q.device)
        lengths = walk.batch, walk.heads, tokens, self._tile.chunk, segments
        self._launch(
            out.numel(),
            DecayGradientTensors(
                q, k, v, dout, out, decay, arriving.memory, leaving.memory, cu_seqlens
            ),
            DecayGradientNumbers(self._scale, *lengths, *self._strides, *arriving.strides),
        )
        return -out.sum(dim=(0, 2))
