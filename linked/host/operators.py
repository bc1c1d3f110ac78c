"""Operators of ``torch.library``: their registration, and what all derivatives have in common."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from .arguments import on_one_device
from .forms import interpreted
from .internals import is_plain_tensor, is_transformed, is_watched

# a NamedTuple of tensors
X = TypeVar("X", bound=tuple[Any, ...])
Implementation = Callable[..., Any]


def free_namespace(module: str, operator: str) -> str:
    """Return a namespace for the operators of a package, in which ``operator`` is not taken.

    It is the name that the package was imported by. A copy that was imported by another name, as
    the kernels of Hugging Face's hub are, has its own; one by the same name is counted.
    """
    package = module.partition(".")[0]
    names = (f"{package}{n}" if n > 1 else package for n in itertools.count(1))
    return next(name for name in names if not hasattr(getattr(torch.ops, name), operator))


def register(
    operator: str,
    schema: str,
    *,
    fake: Implementation,
    kernels: Implementation,
    eager: Implementation,
    check: Implementation | None = None,
    on_host: tuple[str, ...] = (),
) -> Any:
    """Define an operator and return it, to be called.

    Args:
        operator: its name, with the namespace.
        schema: its arguments and results.
        fake: what traces run: results without data.
        kernels: what GPUs run, and the CPU where kernels are interpreted.
        eager: what the CPU runs otherwise.
        check: raises on the CPU where a tensor holds what it may not; a trace does not come there.
        on_host: names of tensors that are on the CPU also when the others are on a GPU.
    """

    def on_cpu(*arguments: Any) -> Any:
        if check is not None:
            check(*arguments)
        return (kernels if interpreted() else eager)(*arguments)

    torch.library.define(operator, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.register_fake(operator, fake)
    namespace, name = operator.split("::")
    defined = getattr(getattr(torch.ops, namespace), name).default
    elsewhere = [i for i, x in enumerate(defined._schema.arguments) if x.name in on_host]
    torch.library.impl(operator, "cuda", on_one_device(kernels, elsewhere))
    torch.library.impl(operator, "cpu", on_cpu)
    return defined


def no_second_derivative(reference: str) -> Callable[..., NoReturn]:
    """Return the derivative of a backward operator: it raises, and names what has one."""

    def refuse(*_: Any) -> NoReturn:
        raise NotImplementedError(
            "second derivatives are not offered: the gradients of this attention cannot be "
            f"differentiated again; {reference} can be differentiated twice"
        )

    return refuse


def no_forward_mode(*_: Any) -> NoReturn:
    """Refuse to push tangents forward."""
    raise NotImplementedError(
        "forward-mode differentiation (torch.func.jvp, jacfwd, hessian, forward_ad) is not offered"
    )


def differentiable(
    operator: Any, differentiate: Callable[..., Any], keep: Callable[..., None] | None = None
) -> Callable[..., Any]:
    """Register the derivative of an operator, and return a function to call it by.

    Graphs of ``torch.compile`` and ``torch.export`` hold the operator and its formula. The
    transforms of ``torch.func`` take no formula of an operator, and get it as a function.

    Args:
        operator: what ``register`` returned.
        differentiate: from the context and the gradients of the results to those of the arguments.
        keep: puts away in the context what that needs. Default: nothing.
    """
    torch.library.register_autograd(operator.name(), differentiate, setup_context=keep)

    class Transformed(torch.autograd.Function):
        """The operator with its derivative, as the transforms take it."""

        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments: Any) -> Any:
            return operator(*arguments)

        setup_context = staticmethod(keep or _keep_nothing)  # type: ignore[assignment]
        backward = staticmethod(differentiate)
        jvp = staticmethod(no_forward_mode)  # type: ignore[assignment]

    def call(*arguments: Any) -> Any:
        return (Transformed.apply if is_transformed() else operator)(*arguments)

    return call


def _keep_nothing(*_: Any) -> None:
    return None


def may_skip_operator(*gradients: Tensor | None) -> bool:
    """Say whether a backward pass may go past its operator.

    With a graph of its own it has to be the operator, whose derivative raises.
    """
    if torch.is_grad_enabled() or is_watched():
        return False
    for x in gradients:  # noqa: SIM110 (``all`` takes twice as long)
        if x is not None and not is_plain_tensor(x):
            return False
    return True


def without_repeats(x: X) -> X:
    """Return the tensors under several identities: dynamo refuses one as two inputs."""
    several = [
        one.view_as(one) if any(one is other for other in x[:i] if one is not None) else one
        for i, one in enumerate(x)
    ]
    return x.__class__(*several)
