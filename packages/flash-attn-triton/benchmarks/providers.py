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
from cases import Problem
from checks import Inputs, make_inputs

FP8 = torch.float8_e4m3fn


class UnsupportedError(Exception):
    """The provider does not offer the problem; it is skipped, not failed."""


@dataclass
class Prepared:
    """One provider, ready to run one problem.

    Attributes:
        forward: The forward pass alone, without autograd; returns the output.
        backward: The backward pass alone; returns dq, dk, dv, and dbias of a bias that is learned.
        forward_grad: The forward pass that also records for autograd, where there is autograd.
        step: A forward and a backward, as a training loop calls them, where there is autograd.
        context: Entered around every run; selects a backend, say.
        operands: What the reference is to compute on when it differs from the inputs.
        instead: The problem whose results and work it is, with its inputs, where it is another.
    """

    forward: Callable[[], torch.Tensor]
    backward: Callable[[], tuple[torch.Tensor, ...]] | None = None
    forward_grad: Callable[[], torch.Tensor] | None = None
    step: Callable[[], None] | None = None
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    operands: tuple[torch.Tensor, ...] = ()
    instead: tuple[Problem, Inputs] | None = None


# of q, k, v, and of the bias where there is one
Attention = Callable[..., torch.Tensor]


def with_autograd(
    call: Attention,
    problem: Problem,
    inputs: Inputs,
    backward: bool,
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Prepared:
    """Wrap a differentiable function; its backward reuses one recorded forward."""
    bias = () if inputs.bias is None else (inputs.bias,)
    plain = (inputs.q, inputs.k, inputs.v)
    prepared = Prepared(forward=lambda: call(*plain, *bias), context=context)
    if backward:
        leaves = [t.detach().requires_grad_() for t in (*plain, *(bias if problem.learned else ()))]
        given = leaves if problem.learned else [*leaves, *bias]
        prepared.forward_grad = lambda: call(*given)
        prepared.step = functools.partial(_step, call, given)
        with context():
            out = call(*given)
        prepared.backward = functools.partial(
            torch.autograd.grad, out, leaves, inputs.dout, retain_graph=True
        )
    return prepared


def _step(call: Attention, given: list[torch.Tensor]) -> None:
    call(*given).sum().backward()
    for tensor in given:
        tensor.grad = None


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
        return import_error("flash_attn_triton.api")

    def prepare(self, problem: Problem, inputs: Inputs, backward: bool) -> Prepared:
        if problem.dtype == "fp8":
            return self._prepare_fp8(problem, inputs)
        call = _tree(problem, inputs) if problem.tree else _sequences(problem, inputs)
        return with_autograd(call, problem, inputs, backward)

    def _prepare_fp8(self, problem: Problem, inputs: Inputs) -> Prepared:
        import flash_attn_triton as fat

        quantised, descales = [], []
        for tensor in (inputs.q, inputs.k, inputs.v):
            descale = tensor.abs().amax().float().reshape(1) / torch.finfo(FP8).max
            quantised.append((tensor.float() / descale).to(FP8))
            descales.append(descale)
        q, k, v = quantised
        scales = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
        return Prepared(
            forward=lambda: fat.flash_attn_func(q, k, v, causal=problem.causal, **scales),
            operands=tuple(t.float() * s for t, s in zip(quantised, descales, strict=True)),
        )


def _sequences(problem: Problem, inputs: Inputs) -> Attention:
    """Return our function of q, k, v and perhaps a bias, with a problem's features."""
    import flash_attn_triton as fat

    options: dict[str, Any] = {"causal": problem.causal, "dropout_p": problem.dropout}
    options |= {"alibi_slopes": inputs.slopes, "deterministic": problem.deterministic}
    options["invariant"] = problem.invariant
    if not problem.packed:
        return lambda q, k, v, bias=None: fat.flash_attn_func(q, k, v, bias=bias, **options)
    cu, longest = inputs.cu_seqlens, problem.max_seqlen
    if problem.used:
        options["seqused_k"] = cu.diff()
    return lambda q, k, v: fat.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, **options)


def _tree(problem: Problem, inputs: Inputs) -> Attention:
    """Return our function over a prompt and its answers."""
    import flash_attn_triton as fat

    above = [-1] + [0] * (problem.batch - 1)
    parents = torch.tensor(above, dtype=torch.int32, device=inputs.q.device)
    cu, longest = inputs.cu_seqlens, problem.max_seqlen
    return lambda q, k, v: fat.flash_attn_tree_func(q, k, v, cu, parents, longest)


class Base(Ours):
    """What a feature is compared with: the same problem without it."""

    name = "base"
    label = "flash-attn-triton, without it"

    def prepare(self, problem: Problem, inputs: Inputs, backward: bool) -> Prepared:
        other = problem.base()
        own = make_inputs(other, inputs.q.device.type)
        prepared = super().prepare(other, own, backward)
        prepared.instead = other, own
        return prepared


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
    from flash_attn_triton import api
    from flash_attn_triton._dense import tiles
    from flash_attn_triton._linked.host.forms import Memory

    if not _portable_calls:
        _portable_calls.append(Memory())
    before = tiles.HOPPER, api._known
    tiles.HOPPER, api._known = False, _portable_calls[0]
    try:
        yield
    finally:
        tiles.HOPPER, api._known = before


def import_error(module: str) -> str | None:
    """Return why a module cannot be imported, or None."""
    try:
        __import__(module)
    except Exception as error:  # loading a rival's library may fail in any way
        return f"cannot import {module}: {type(error).__name__}: {error}"
    return None
