"""Who is measured."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from _linked.providers import (
    Portable,
    Prepared,
    Provider,
    by_name,
    compiled_flex,
    heads_first,
    with_autograd,
    without_hopper,
)
from blocksparse_attn import blocksparse_attn_func
from blocksparse_attn._attention import tiles
from cases import Problem
from checks import Inputs, dense_reference, first_keys, reference
from torch import Tensor

Passes = tuple[str, ...]


class Ours(Provider):
    name, label, module = "ours", "blocksparse-attn", "blocksparse_attn"
    needs_gpu = False
    compiles = True

    def prepare(self, problem: Problem, inputs: Inputs, passes: Passes) -> Prepared:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return blocksparse_attn_func(q, k, v, inputs.layout)

        return with_autograd(attend, inputs.given, inputs.dout, passes)


class PortableOurs(Portable, Ours):
    """What serves other GPUs, and on Hopper what its own kernels do not take."""

    name, label = "portable", "blocksparse-attn, portable kernels"
    kernels = staticmethod(without_hopper(tiles))

    def prepare(self, problem: Problem, inputs: Inputs, passes: Passes) -> Prepared:
        # a layout that is not planned yet
        own = replace(inputs, layout=copy.copy(inputs.layout))
        return super().prepare(problem, own, passes)


class Causal(Provider):
    """One that computes the causal whole."""

    def attend(self) -> Callable[..., Tensor]:
        """Return a function of q, k and v."""
        raise NotImplementedError

    def prepare(self, problem: Problem, inputs: Inputs, passes: Passes) -> Prepared:
        found = with_autograd(self.attend(), inputs.given, inputs.dout, passes)
        found.expected = lambda: dense_reference(problem, inputs, passes)
        return found


class Dense(Causal):
    name, label, module = "dense", "flash-attn-triton, dense", "flash_attn_triton"
    needs_gpu = False

    def attend(self) -> Callable[..., Tensor]:
        import flash_attn_triton

        return lambda q, k, v: flash_attn_triton.flash_attn_func(q, k, v, causal=True)


class Cudnn(Causal):
    name, label = "cudnn", "cuDNN (SDPA), dense"

    def attend(self) -> Callable[..., Tensor]:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return heads_first(attend)


class Fa3(Provider):
    """The raw operators of FlashAttention-3, through a thin module ``fa3`` on the path.

    ``fa3.fwd(q, k, v, causal=) -> (out, lse)`` and ``fa3.bwd(dout, q, k, v, out, lse, causal=)``.
    """

    name, label, module = "fa3", "FlashAttention-3, dense", "fa3"
    is_short: ClassVar[bool] = False

    def prepare(self, problem: Problem, inputs: Inputs, passes: Passes) -> Prepared:
        import fa3

        q, k, v = inputs.given
        causal = not self.is_short
        if self.is_short:
            first = first_keys(inputs.density, problem.seqlen)
            k, v = k[:, :first], v[:, :first]
        calls: dict[str, Any] = {"fwd": lambda: fa3.fwd(q, k, v, causal=causal)[0]}
        if "bwd" in passes:
            out, lse = fa3.fwd(q, k, v, causal=causal)
            calls["bwd"] = lambda: fa3.bwd(inputs.dout, q, k, v, out, lse, causal=causal)
        if self.is_short:
            return Prepared(calls, expected=lambda: reference(problem, inputs, passes, "first"))
        return Prepared(calls, expected=lambda: dense_reference(problem, inputs, passes))


class Fa3Short(Fa3):
    """What FlashAttention-3 takes for as many products as the layout keeps, in walks as short."""

    name, label = "fa3-short", "FlashAttention-3, as many products"
    is_short = True


class Flex(Provider):
    name, label = "flex", "FlexAttention"
    compiles = True

    def prepare(self, problem: Problem, inputs: Inputs, passes: Passes) -> Prepared:
        from blocksparse_attn.integrations.flex_attention import to_block_mask

        # one compilation serves all densities of a block size
        torch._dynamo.config.recompile_limit = 64
        options: dict[str, Any] = {}
        if problem.block == 64:  # its own tiles have 128 queries, which such blocks forbid
            names = (f"BLOCK_{way}{number}" for way in "MN" for number in ("", "1", "2"))
            options = dict.fromkeys(names, 64)
        mask = to_block_mask(inputs.layout, problem.seqlen)
        attend = compiled_flex(block_mask=mask, enable_gqa=True, kernel_options=options)
        return with_autograd(attend, inputs.given, inputs.dout, passes)


PROVIDERS = by_name(Ours(), PortableOurs(), Dense(), Fa3(), Fa3Short(), Cudnn(), Flex())
