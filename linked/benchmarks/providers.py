"""Implementations under measurement behind one interface; an absent one says so and is skipped."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

Run = Callable[[], Any]


class UnsupportedError(Exception):
    """The provider does not offer the problem; it is skipped, not failed."""


@dataclass
class Prepared:
    """One provider, ready to run one problem.

    Attributes:
        calls: What runs each pass; the backward alone returns the gradients.
        context: Entered around every run; selects a backend, say.
        expected: Returns what its results are held to, where that is not the problem's own.
        problem: The problem whose results and work it is, where it is another.
    """

    calls: dict[str, Run]
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    expected: Callable[[], Any] | None = None
    problem: Any = None


class Provider:
    """Base: a name for tables and files, a label for plots."""

    name: ClassVar[str]
    label: ClassVar[str]
    # what has to be imported
    module: ClassVar[str] = "torch"
    needs_gpu: ClassVar[bool] = True
    # compiled at first use: the benchmark compiles these ahead, in parallel
    compiles: ClassVar[bool] = False

    def unavailable(self, device: str) -> str | None:
        """Return why the provider cannot run here, or None."""
        if self.needs_gpu and device != "cuda":
            return "needs a CUDA device"
        try:
            __import__(self.module)
        except Exception as error:  # loading a rival's library may fail in any way
            return f"cannot import {self.module}: {type(error).__name__}: {error}"
        return None

    def prepare(self, problem: Any, inputs: Any, passes: tuple[str, ...]) -> Prepared:
        """Return the runnable passes, or raise ``UnsupportedError``."""
        raise NotImplementedError


class Portable:
    """Mixed into a package's own provider: the kernels that serve every GPU, on one of Hopper."""

    kernels: Callable[[], AbstractContextManager[None]]

    def prepare(self, problem: Any, inputs: Any, passes: tuple[str, ...]) -> Prepared:
        """Prepare with them, and run with them: a graph that is captured plans anew."""
        with self.kernels():
            found: Prepared = super().prepare(problem, inputs, passes)  # type: ignore[misc]
        found.context = self.kernels
        return found


def with_autograd(
    call: Callable[..., Tensor],
    given: tuple[Tensor, ...],
    dout: Tensor,
    passes: tuple[str, ...],
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    learned: int = 3,
) -> Prepared:
    """Wrap a differentiable function; its backward reuses one recorded forward.

    Besides ``fwd`` and ``bwd`` there are ``fwd-grad``, a forward that is recorded, and ``train``,
    a recorded forward and its backward.

    Args:
        call: A function of ``given``.
        given: Its arguments.
        dout: The gradient of its result.
        passes: Those that are measured.
        context: See ``Prepared``.
        learned: How many arguments have a gradient.
    """
    calls: dict[str, Run] = {"fwd": functools.partial(call, *given)}
    if any(one != "fwd" for one in passes):
        leaves = [x.detach().requires_grad_() for x in given[:learned]]
        every = *leaves, *given[learned:]
        calls["fwd-grad"] = functools.partial(call, *every)
        calls["train"] = lambda: torch.autograd.grad(call(*every), leaves, dout)
        with context():
            out = call(*every)
        calls["bwd"] = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
    return Prepared(calls, context)


def heads_first(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of ``[batch, tokens, heads, D]`` by one that wants heads before tokens."""

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        turned = (x.transpose(1, 2) for x in (q, k, v))
        return function(*turned, **options).transpose(1, 2)

    return call


def compiled_flex(**options: Any) -> Callable[..., Tensor]:
    """Return FlexAttention as a function of ``[batch, tokens, heads, D]``."""
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    # a graph whose buffers are donated cannot run its backward twice
    torch._functorch.config.donated_buffer = False
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return heads_first(functools.partial(compiled, **options))


@contextlib.contextmanager
def replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Give names of modules other values within."""
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in places]
    try:
        for holder, name, value in places:
            setattr(holder, name, value)
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


def without_hopper(configs: Any, *holders: Any) -> Callable[[], AbstractContextManager[None]]:
    """Return what switches a package's kernels for Hopper off within.

    Args:
        configs: Its module that has ``HOPPER``.
        holders: Its modules that know of earlier calls; within, they know of calls within alone.
    """
    known = [(holder, "_known", type(holder._known)()) for holder in holders]
    return functools.partial(replaced, (configs, "HOPPER", False), *known)


def by_name(*providers: Provider) -> dict[str, Provider]:
    """Return the table of all providers."""
    return {provider.name: provider for provider in providers}
