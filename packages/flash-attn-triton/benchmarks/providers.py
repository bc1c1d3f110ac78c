"""Implementations under measurement behind one interface; an absent one says so and is skipped.

Every provider gets the same memory, ``[batch, seqlen, heads, head_dim]`` or packed
``[tokens, heads, head_dim]``: those that want heads before tokens get transposed views.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch._functorch.config
from cases import Problem
from checks import Inputs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

FP8 = torch.float8_e4m3fn


class UnsupportedError(Exception):
    """The provider does not offer the problem; it is skipped, not failed."""


@dataclass
class Prepared:
    """One provider, ready to run one problem.

    Attributes:
        forward: The forward pass alone, without autograd; returns the output.
        backward: The backward pass alone; returns dq, dk and dv.
        forward_grad: The forward pass that also records for autograd, where there is autograd.
        context: Entered around every run; selects a backend, say.
        operands: What the reference is to compute on when it differs from the inputs.
    """

    forward: Callable[[], torch.Tensor]
    backward: Callable[[], tuple[torch.Tensor, ...]] | None = None
    forward_grad: Callable[[], torch.Tensor] | None = None
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _with_autograd(
    call: Attention,
    inputs: Inputs,
    backward: bool,
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Prepared:
    """Wrap a differentiable function of q, k, v; its backward reuses one recorded forward."""
    plain = (inputs.q, inputs.k, inputs.v)
    prepared = Prepared(forward=lambda: call(*plain), context=context)
    if backward:
        leaves = [t.detach().requires_grad_() for t in plain]
        prepared.forward_grad = lambda: call(*leaves)
        with context():
            out = call(*leaves)
        prepared.backward = functools.partial(
            torch.autograd.grad, out, leaves, inputs.dout, retain_graph=True
        )
    return prepared


class Provider:
    """Base: a name for tables and files, a label for plots."""

    name: ClassVar[str]
    label: ClassVar[str]
    # compiled at first use: the benchmark compiles these ahead, in parallel
    compiles: ClassVar[bool] = False

    def unavailable(self, device: str) -> str | None:
        """Return why the provider cannot run here, or None."""
        return None

    def prepare(self, problem: Problem, inputs: Inputs, backward: bool) -> Prepared:
        """Return the runnable passes, or raise ``UnsupportedError``."""
        raise NotImplementedError


class Ours(Provider):
    name = "ours"
    label = "flash-attn-triton"
    compiles = True

    def unavailable(self, device: str) -> str | None:
        return _import_error("flash_attn_triton.api")

    def prepare(self, problem: Problem, inputs: Inputs, backward: bool) -> Prepared:
        import flash_attn_triton as fat

        if problem.dtype == "fp8":
            return self._prepare_fp8(problem, inputs)
        if problem.packed:
            cu, longest = inputs.cu_seqlens, problem.max_seqlen

            def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return fat.flash_attn_varlen_func(
                    q, k, v, cu, cu, longest, longest, causal=problem.causal
                )

        else:

            def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return fat.flash_attn_func(q, k, v, causal=problem.causal)

        return _with_autograd(call, inputs, backward)

    def _prepare_fp8(self, problem: Problem, inputs: Inputs) -> Prepared:
        import flash_attn_triton as fat

        quantised, descales = [], []
        for tensor in (inputs.q, inputs.k, inputs.v):
            descale = tensor.abs().amax().float().reshape(1) / torch.finfo(FP8).max
            quantised.append((tensor.float() / descale).to(FP8))
            descales.append(descale)
        q, k, v = quantised
        scales = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
        exact = [t.float() * s for t, s in zip(quantised, descales, strict=True)]
        return Prepared(
            forward=lambda: fat.flash_attn_func(q, k, v, causal=problem.causal, **scales),
            operands=(exact[0], exact[1], exact[2]),
        )


class Portable(Ours):
    """The kernels that serve every GPU, on a GPU that has its own."""

    name = "portable"
    label = "flash-attn-triton, portable"

    def prepare(self, problem: Problem, inputs: Inputs, backward: bool) -> Prepared:
        with _portable_kernels():
            prepared = super().prepare(problem, inputs, backward)
        prepared.context = _portable_kernels
        return prepared


# what is known of the calls that went there
_portable_calls: list[Any] = []


@contextlib.contextmanager
def _portable_kernels() -> Iterator[None]:
    from flash_attn_triton import _configs, api
    from flash_attn_triton._linked.host.forms import Memory

    if not _portable_calls:
        _portable_calls.append(Memory())
    before = _configs.HOPPER, api._known
    _configs.HOPPER, api._known = False, _portable_calls[0]
    try:
        yield
    finally:
        _configs.HOPPER, api._known = before


class OursBf16(Ours):
    """The bf16 kernel on the FP8 problems: what FP8 is compared with."""

    name = "ours-bf16"
    label = "flash-attn-triton, bf16"

    def prepare(self, problem: Problem, inputs: Inputs, backward: bool) -> Prepared:
        if problem.dtype != "fp8":
            raise UnsupportedError("only stands beside FP8")
        import flash_attn_triton as fat

        return _with_autograd(
            lambda q, k, v: fat.flash_attn_func(q, k, v, causal=problem.causal), inputs, False
        )


class Sdpa(Provider):
    """``scaled_dot_product_attention`` held to one backend."""

    backend: ClassVar[SDPBackend]

    def prepare(self, problem: Problem, inputs: Inputs, backward: bool) -> Prepared:
        if problem.dtype != "bf16":
            raise UnsupportedError("no FP8")
        if problem.packed and not problem.equal_lengths:
            return self.prepare_packed(problem, inputs, backward)
        gqa = problem.heads_q != problem.heads_k

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if problem.packed:
                q, k, v = (t.unflatten(0, (problem.batch, -1)) for t in (q, k, v))
            out = scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=problem.causal,
                enable_gqa=gqa,
            ).transpose(1, 2)
            return out.flatten(0, 1) if problem.packed else out

        context = functools.partial(sdpa_kernel, self.backend)
        return _with_autograd(call, inputs, backward, context)

    def prepare_packed(self, problem: Problem, inputs: Inputs, backward: bool) -> Prepared:
        raise UnsupportedError("only sequences of one length")


class Cudnn(Sdpa):
    name = "cudnn"
    label = "cuDNN (SDPA)"
    backend = SDPBackend.CUDNN_ATTENTION

    def unavailable(self, device: str) -> str | None:
        return None if device == "cuda" else "needs a CUDA device"


class Fa2(Sdpa):
    name = "fa2"
    label = "FlashAttention-2 (SDPA)"
    backend = SDPBackend.FLASH_ATTENTION

    def prepare_packed(self, problem: Problem, inputs: Inputs, backward: bool) -> Prepared:
        cu, longest = inputs.cu_seqlens, problem.max_seqlen

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten._flash_attention_forward(
                q, k, v, cu, cu, longest, longest, 0.0, problem.causal, False
            )[0]

        return _with_autograd(call, inputs, backward)


def _causal(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q >= k


class Flex(Provider):
    name = "flex"
    label = "FlexAttention"
    compiles = True

    def prepare(self, problem: Problem, inputs: Inputs, backward: bool) -> Prepared:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if problem.dtype != "bf16":
            raise UnsupportedError("no FP8")
        device, tokens = inputs.q.device, problem.tokens
        span = tokens if problem.packed else problem.max_seqlen
        mask_mod = _causal if problem.causal else None
        if problem.packed:
            # one row of all tokens; a token's sequence is its document
            lengths = torch.tensor(problem.lengths, device=device)
            document = torch.repeat_interleave(
                torch.arange(problem.batch, device=device), lengths, output_size=tokens
            )

            def mask_mod(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
                same = document[q] == document[k]
                return same & (q >= k) if problem.causal else same

        block_mask = None
        if mask_mod is not None:
            block_mask = create_block_mask(mask_mod, None, None, span, span, device=device)
        attend: Callable[..., Any] = flex_attention
        if device.type == "cuda":
            # earlier problems' specialisations would count towards the recompilation limit
            torch._dynamo.reset()
            # a graph whose buffers are donated cannot run its backward twice
            torch._functorch.config.donated_buffer = False
            attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        gqa = problem.heads_q != problem.heads_k

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if problem.packed:
                q, k, v = (t[None] for t in (q, k, v))
            out = attend(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                block_mask=block_mask,
                enable_gqa=gqa,
            ).transpose(1, 2)
            return out[0] if problem.packed else out

        # without a GPU there is no backward
        return _with_autograd(call, inputs, backward and device.type == "cuda")


class Fa3(Provider):
    """The raw operators of FlashAttention-3, through a thin module ``fa3`` on the path.

    ``fa3.fwd(q, k, v, causal=, cu_q=, cu_k=, max_q=, max_k=) -> (out, lse)`` and
    ``fa3.bwd(dout, q, k, v, out, lse, <same>) -> (dq, dk, dv)``.
    """

    name = "fa3"
    label = "FlashAttention-3"

    def unavailable(self, device: str) -> str | None:
        return _import_error("fa3") if device == "cuda" else "needs a CUDA device"

    def prepare(self, problem: Problem, inputs: Inputs, backward: bool) -> Prepared:
        import fa3

        if problem.dtype != "bf16":
            raise UnsupportedError("this build has no FP8")
        q, k, v, dout, cu = inputs.q, inputs.k, inputs.v, inputs.dout, inputs.cu_seqlens
        options: dict[str, Any] = {"causal": problem.causal}
        if problem.packed:
            longest = problem.max_seqlen
            options |= {"cu_q": cu, "cu_k": cu, "max_q": longest, "max_k": longest}
        prepared = Prepared(forward=lambda: fa3.fwd(q, k, v, **options)[0])
        if backward:
            out, lse = fa3.fwd(q, k, v, **options)
            prepared.backward = functools.partial(fa3.bwd, dout, q, k, v, out, lse, **options)
        return prepared


def _import_error(module: str) -> str | None:
    try:
        __import__(module)
    except Exception as error:  # loading a rival's library may fail in any way
        return f"cannot import {module}: {type(error).__name__}: {error}"
    return None


PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (Ours(), Portable(), OursBf16(), Fa3(), Cudnn(), Fa2(), Flex())
}
LABELS = {name: provider.label for name, provider in PROVIDERS.items()}
