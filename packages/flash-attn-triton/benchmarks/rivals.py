"""The other implementations, and the table of all providers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from _linked.providers import (
    Prepared,
    Provider,
    UnsupportedError,
    by_name,
    compiled_flex,
    heads_first,
)
from cases import Problem
from checks import Inputs
from providers import Base, Ours, PortableOurs, prepared
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def refuse(problem: Problem, *features: str) -> None:
    """Raise for the first of these features that a problem has."""
    for feature in features:
        if getattr(problem, feature):
            raise UnsupportedError(f"no {'FP8' if feature == 'fp8' else feature}")


class Sdpa(Provider):
    """``scaled_dot_product_attention`` held to one backend."""

    backend: ClassVar[SDPBackend]

    def prepare(self, problem: Problem, inputs: Inputs, passes: tuple[str, ...]) -> Prepared:
        refuse(problem, "fp8", "alibi", "used", "deterministic", "invariant", "tree", "window")
        if problem.packed and not problem.equal_lengths:
            return self.prepare_packed(problem, inputs, passes)
        options: dict[str, Any] = {"dropout_p": problem.dropout, "is_causal": problem.causal}
        options["enable_gqa"] = problem.heads_q != problem.heads_k
        attend = heads_first(scaled_dot_product_attention)

        def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
            if problem.packed:
                q, k, v = (t.unflatten(0, (problem.batch, -1)) for t in (q, k, v))
            out = attend(q, k, v, attn_mask=bias, **options)
            return out.flatten(0, 1) if problem.packed else out

        if problem.family == "host" and not problem.packed:
            # views would cost time of the host: this one gets memory in its own order
            turned = {
                name: getattr(inputs, name).transpose(1, 2) for name in ["q", "k", "v", "dout"]
            }
            inputs = replace(inputs, **{name: t.contiguous() for name, t in turned.items()})
            call = functools.partial(scaled_dot_product_attention, **options)

        context = functools.partial(sdpa_kernel, self.backend)
        return prepared(call, problem, inputs, passes, context)

    def prepare_packed(self, problem: Problem, inputs: Inputs, passes: tuple[str, ...]) -> Prepared:
        raise UnsupportedError("only sequences of one length")


class Cudnn(Sdpa):
    name, label = "cudnn", "cuDNN (SDPA)"
    backend = SDPBackend.CUDNN_ATTENTION


class Fa2(Sdpa):
    name, label = "fa2", "FlashAttention-2 (SDPA)"
    backend = SDPBackend.FLASH_ATTENTION
    needs_gpu = False

    def prepare_packed(self, problem: Problem, inputs: Inputs, passes: tuple[str, ...]) -> Prepared:
        cu, longest = inputs.cu_seqlens, problem.max_seqlen

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.ops.aten._flash_attention_forward(
                q, k, v, cu, cu, longest, longest, 0.0, problem.causal, False
            )[0]

        return prepared(call, problem, inputs, passes)


def _causal(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


class Flex(Provider):
    name, label = "flex", "FlexAttention"
    needs_gpu = False
    compiles = True

    def prepare(self, problem: Problem, inputs: Inputs, passes: tuple[str, ...]) -> Prepared:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        refuse(problem, "fp8", "dropout", "bias", "alibi", "used", "deterministic", "window")
        device = inputs.q.device
        span = problem.tokens if problem.packed else problem.max_seqlen
        mask_mod = _documents(problem, device) if problem.packed else _causal
        block_mask = None
        if problem.packed or problem.causal:
            block_mask = create_block_mask(mask_mod, None, None, span, span, device=device)
        options = {"block_mask": block_mask, "enable_gqa": problem.heads_q != problem.heads_k}
        if device.type == "cuda":
            # earlier problems' specialisations would count towards the recompilation limit
            torch._dynamo.reset()
            attend = compiled_flex(**options)
        else:
            attend = heads_first(functools.partial(flex_attention, **options))

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if problem.packed:
                q, k, v = (t[None] for t in (q, k, v))
            out = attend(q, k, v)
            return out[0] if problem.packed else out

        # without a GPU there is no backward
        return prepared(call, problem, inputs, passes if device.type == "cuda" else ("fwd",))


def _documents(problem: Problem, device: torch.device) -> Callable[..., Tensor]:
    """Return the mask of packed sequences: one row of all tokens, each with its document."""
    lengths = torch.tensor(problem.lengths, device=device)
    document = torch.repeat_interleave(
        torch.arange(problem.batch, device=device), lengths, output_size=problem.tokens
    )

    def mask(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
        visible = document[q] == document[k]
        if problem.causal:
            visible = visible & (q >= k)
        # the first document is above all others
        return visible | ((document[k] == 0) & (document[q] != 0)) if problem.tree else visible

    return mask


class Fa3(Provider):
    """The raw operators of FlashAttention-3, through a thin module ``fa3`` on the path.

    ``fa3.fwd(q, k, v, causal=, window=, cu_q=, cu_k=, max_q=, max_k=) -> (out, lse)`` and
    ``fa3.bwd(dout, q, k, v, out, lse, <same>, deterministic=) -> (dq, dk, dv)``.
    """

    name, label, module = "fa3", "FlashAttention-3", "fa3"
    deterministic: ClassVar[bool] = False

    def prepare(self, problem: Problem, inputs: Inputs, passes: tuple[str, ...]) -> Prepared:
        import fa3

        refuse(problem, "fp8", "dropout", "bias", "alibi", "used")
        if problem.tree:
            return self._prepare_tree(problem, inputs)
        q, k, v, dout, cu = inputs.q, inputs.k, inputs.v, inputs.dout, inputs.cu_seqlens
        options: dict[str, Any] = {"causal": problem.causal}
        if problem.window:
            options["window"] = (problem.window, 0)
        if problem.packed:
            longest = problem.max_seqlen
            options |= {"cu_q": cu, "cu_k": cu, "max_q": longest, "max_k": longest}
        calls: dict[str, Callable[[], Any]] = {"fwd": lambda: fa3.fwd(q, k, v, **options)[0]}
        if "bwd" in passes:
            out, lse = fa3.fwd(q, k, v, **options)
            run = functools.partial(fa3.bwd, dout, q, k, v, out, lse, **options)
            calls["bwd"] = functools.partial(run, deterministic=self.deterministic)
        return Prepared(calls)

    def _prepare_tree(self, problem: Problem, inputs: Inputs) -> Prepared:
        """Two calls: each segment over itself, and the answers over the prompt; merged by LSE."""
        import fa3
        from flash_attn_triton import merge_attn_states

        q, k, v, dout, cu = inputs.q, inputs.k, inputs.v, inputs.dout, inputs.cu_seqlens
        prompt = problem.lengths[0]
        own = {"causal": True, "cu_q": cu, "cu_k": cu, "max_q": prompt, "max_k": prompt}

        def forward() -> tuple[Tensor, Tensor]:
            out, lse = fa3.fwd(q, k, v, **own)
            far, far_lse = fa3.fwd(q[None, prompt:], k[None, :prompt], v[None, :prompt])
            near = out[prompt:], lse[:, prompt:].contiguous()
            out[prompt:], lse[:, prompt:] = merge_attn_states(*near, far[0], far_lse[0])
            return out, lse

        out, lse = forward()

        def backward() -> tuple[Tensor, ...]:
            # with the output and the LSE of the whole, each call gives its part of the gradients
            dq, dk, dv = fa3.bwd(dout, q, k, v, out, lse, **own)
            far_q, far_k, far_v = fa3.bwd(
                dout[None, prompt:],
                q[None, prompt:],
                k[None, :prompt],
                v[None, :prompt],
                out[None, prompt:],
                lse[None, :, prompt:].contiguous(),
            )
            dq[prompt:] += far_q[0]
            dk[:prompt] += far_k[0]
            dv[:prompt] += far_v[0]
            return dq, dk, dv

        return Prepared({"fwd": lambda: forward()[0], "bwd": backward})


class Fa3Repeats(Fa3):
    name, label = "fa3-repeats", "FlashAttention-3, deterministic"
    deterministic = True


PROVIDERS = by_name(Ours(), PortableOurs(), Base(), Fa3(), Fa3Repeats(), Cudnn(), Fa2(), Flex())
