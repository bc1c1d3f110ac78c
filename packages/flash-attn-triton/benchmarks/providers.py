"""This package's implementations.

Every provider gets the same memory, ``[batch, seqlen, heads, head_dim]`` or packed
``[tokens, heads, head_dim]``: those that want heads before tokens get transposed views.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import flash_attn_triton as fat
import torch
from _linked.providers import Portable, Prepared, Provider, with_autograd, without_hopper
from cases import Problem
from checks import Inputs, make_inputs, reference
from flash_attn_triton import api
from flash_attn_triton._dense import tiles

# of q, k, v, and of the bias where there is one
Attention = Callable[..., torch.Tensor]


def prepared(
    call: Attention,
    problem: Problem,
    inputs: Inputs,
    passes: tuple[str, ...],
    *context: Callable[[], AbstractContextManager[Any]],
) -> Prepared:
    """Wrap a differentiable function; ``step`` is a training loop's forward and backward."""
    learned = 4 if problem.learned else 3
    found = with_autograd(call, inputs.given, inputs.dout, passes, *context, learned=learned)
    if "step" in passes:
        leaves = [x.detach().requires_grad_() for x in inputs.given]

        def step() -> None:
            call(*leaves).sum().backward()
            for leaf in leaves:
                leaf.grad = None

        found.calls["step"] = step
    return found


class Ours(Provider):
    name, label, module = "ours", "flash-attn-triton", "flash_attn_triton.api"
    needs_gpu = False
    compiles = True

    def prepare(self, problem: Problem, inputs: Inputs, passes: tuple[str, ...]) -> Prepared:
        if problem.fp8:
            return self._prepare_fp8(problem, inputs)
        call = _tree(problem, inputs) if problem.tree else _sequences(problem, inputs)
        return prepared(call, problem, inputs, passes)

    def _prepare_fp8(self, problem: Problem, inputs: Inputs) -> Prepared:
        quantised, descales = [], []
        for tensor in inputs.given:
            descale = tensor.abs().amax().float().reshape(1) / torch.finfo(torch.float8_e4m3fn).max
            quantised.append((tensor.float() / descale).to(torch.float8_e4m3fn))
            descales.append(descale)
        scales = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
        operands = tuple(t.float() * s for t, s in zip(quantised, descales, strict=True))
        return Prepared(
            {"fwd": lambda: fat.flash_attn_func(*quantised, causal=problem.causal, **scales)},
            expected=lambda: reference(problem, inputs, ("fwd",), operands),
        )


def _sequences(problem: Problem, inputs: Inputs) -> Attention:
    """Return our function of q, k, v and perhaps a bias, with a problem's features."""
    options: dict[str, Any] = {"causal": problem.causal, "dropout_p": problem.dropout}
    options |= {"alibi_slopes": inputs.slopes, "deterministic": problem.deterministic}
    options["invariant"] = problem.invariant
    if problem.window:
        options["window_size"] = (problem.window, 0)
    if not problem.packed:
        return lambda q, k, v, bias=None: fat.flash_attn_func(q, k, v, bias=bias, **options)
    cu, longest = inputs.cu_seqlens, problem.max_seqlen
    if problem.used:
        options["seqused_k"] = cu.diff()
    return lambda q, k, v: fat.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, **options)


def _tree(problem: Problem, inputs: Inputs) -> Attention:
    """Return our function over a prompt and its answers."""
    above = [-1] + [0] * (problem.batch - 1)
    parents = torch.tensor(above, dtype=torch.int32, device=inputs.q.device)
    cu, longest = inputs.cu_seqlens, problem.max_seqlen
    return lambda q, k, v: fat.flash_attn_tree_func(q, k, v, cu, parents, longest)


class Base(Ours):
    """What a feature is compared with: the same problem without it."""

    name, label = "base", "flash-attn-triton, without it"

    def prepare(self, problem: Problem, inputs: Inputs, passes: tuple[str, ...]) -> Prepared:
        other = problem.base()
        own = make_inputs(other, inputs.q.device.type)
        found = super().prepare(other, own, passes)
        found.expected = lambda: reference(other, own, passes)
        found.problem = other
        return found


class PortableOurs(Portable, Ours):
    name, label = "portable", "flash-attn-triton, portable"
    kernels = staticmethod(without_hopper(tiles, api))
