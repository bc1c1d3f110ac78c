"""Who is measured; each returns a function of no arguments whose results are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from cases import Case
from checks import Inputs

Run = Callable[[], tuple[torch.Tensor, ...]]


class UnsupportedError(Exception):
    """A case that a provider does not have."""


class Provider:
    """One implementation."""

    name = ""
    label = ""
    sees = "layout"  # or "causal", the whole; or "first", keys that come to as many products

    def unavailable(self, device: str) -> str | None:
        """Return why it cannot run here."""
        return None

    def prepare(self, case: Case, inputs: Inputs) -> Run:
        """Return what is to be timed: a forward pass, or a backward alone."""
        raise NotImplementedError


def with_autograd(case: Case, inputs: Inputs, attend: Callable[..., torch.Tensor]) -> Run:
    """Return the forward without a graph, or the backward of a graph that is kept."""
    if case.way == "fwd":

        def forward() -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                return (attend(inputs.q, inputs.k, inputs.v),)

        return forward
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = attend(*leaves)
    return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)


class Ours(Provider):
    name, label = "ours", "blocksparse-attn"

    def prepare(self, case: Case, inputs: Inputs) -> Run:
        from blocksparse_attn import blocksparse_attn_func

        return with_autograd(
            case, inputs, lambda q, k, v: blocksparse_attn_func(q, k, v, inputs.layout)
        )


class Portable(Provider):
    """What serves other GPUs, and on Hopper what its own kernels do not take."""

    name, label = "portable", "blocksparse-attn, portable kernels"

    def prepare(self, case: Case, inputs: Inputs) -> Run:
        from blocksparse_attn import blocksparse_attn_func
        from blocksparse_attn._attention import tiles

        if case.family == "decode":
            raise UnsupportedError("is what ours is")
        layout = copy.copy(inputs.layout)  # not planned yet
        run = None

        def portable() -> tuple[torch.Tensor, ...]:
            nonlocal run
            # at every call, as a graph that is captured plans anew
            before, tiles.HOPPER = tiles.HOPPER, False
            try:
                run = run or with_autograd(
                    case, inputs, lambda q, k, v: blocksparse_attn_func(q, k, v, layout)
                )
                return run()
            finally:
                tiles.HOPPER = before

        return portable


class Dense(Provider):
    name, label = "dense", "flash-attn-triton, dense"
    sees = "causal"

    def unavailable(self, device: str) -> str | None:
        return import_error("flash_attn_triton")

    def prepare(self, case: Case, inputs: Inputs) -> Run:
        import flash_attn_triton

        if case.family != "dense":
            raise UnsupportedError("stands beside density 1")
        attend = flash_attn_triton.flash_attn_func
        return with_autograd(case, inputs, lambda q, k, v: attend(q, k, v, causal=True))


class Fa3(Provider):
    """The raw operators of FlashAttention-3, through a thin module ``fa3`` on the path.

    ``fa3.fwd(q, k, v, causal=) -> (out, lse)`` and ``fa3.bwd(dout, q, k, v, out, lse, causal=)``.
    """

    name, label = "fa3", "FlashAttention-3, dense"
    sees = "causal"

    def unavailable(self, device: str) -> str | None:
        return import_error("fa3") if device == "cuda" else "needs a CUDA device"

    def prepare(self, case: Case, inputs: Inputs) -> Run:
        import fa3

        if case.family == "decode":
            raise UnsupportedError("decode is held against bandwidth")
        q, k, v = inputs.q, inputs.k, inputs.v
        if case.way == "fwd":
            return lambda: (fa3.fwd(q, k, v, causal=True)[0],)
        out, lse = fa3.fwd(q, k, v, causal=True)
        return lambda: fa3.bwd(inputs.dout, q, k, v, out, lse, causal=True)


class Fa3Short(Fa3):
    """What FlashAttention-3 takes for as many products as the layout keeps, in walks as short."""

    name, label = "fa3-short", "FlashAttention-3, as many products"
    sees = "first"

    def prepare(self, case: Case, inputs: Inputs) -> Run:
        import fa3

        if case.family != "pattern":
            raise UnsupportedError("stands beside the patterns")
        q, k, v = inputs.q, inputs.k[:, : inputs.first], inputs.v[:, : inputs.first]
        if case.way == "fwd":
            return lambda: (fa3.fwd(q, k, v, causal=False)[0],)
        out, lse = fa3.fwd(q, k, v, causal=False)
        return lambda: fa3.bwd(inputs.dout, q, k, v, out, lse, causal=False)


class Cudnn(Provider):
    name, label = "cudnn", "cuDNN (SDPA), dense"
    sees = "causal"

    def unavailable(self, device: str) -> str | None:
        return None if device == "cuda" else "needs a CUDA device"

    def prepare(self, case: Case, inputs: Inputs) -> Run:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        if case.family != "dense":
            raise UnsupportedError("stands beside density 1")

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2)

        return with_autograd(case, inputs, attend)


class Flex(Provider):
    name, label = "flex", "FlexAttention"

    def unavailable(self, device: str) -> str | None:
        return None if device == "cuda" else "needs a CUDA device"

    def prepare(self, case: Case, inputs: Inputs) -> Run:
        from blocksparse_attn.integrations.flex_attention import to_block_mask
        from torch.nn.attention.flex_attention import flex_attention

        if case.family != "curve":
            raise UnsupportedError("stands in the curve: each other case compiles anew")
        block_mask = to_block_mask(inputs.layout, case.seqlen)
        # one compilation serves all densities of a block size
        torch._dynamo.config.recompile_limit = 64
        # a graph whose buffers are donated cannot run its backward twice
        torch._functorch.config.donated_buffer = False
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        options: dict[str, Any] = {}
        if case.block == 64:  # its own tiles have 128 queries, which such blocks forbid
            options = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_M1": 64, "BLOCK_N1": 64}
            options |= {"BLOCK_M2": 64, "BLOCK_N2": 64}

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            return compiled(
                *heads_first, block_mask=block_mask, enable_gqa=True, kernel_options=options
            ).transpose(1, 2)

        return with_autograd(case, inputs, attend)


def import_error(module: str) -> str | None:
    """Return why a module cannot be imported."""
    try:
        __import__(module)
    except Exception as error:  # loading a rival's library may fail in any way
        return f"cannot import {module}: {type(error).__name__}: {error}"
    return None


PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (Ours(), Portable(), Dense(), Fa3(), Fa3Short(), Cudnn(), Flex())
}
