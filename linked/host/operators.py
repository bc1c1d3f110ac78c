"""Registration of ``torch.library`` operators and of their derivatives."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import islice
from typing import Annotated, Any, NoReturn, TypeVar, get_type_hints

import torch
from torch import Tensor

from .arguments import on_one_device
from .forms import VALIDATES, checks_values, interpreted, is_noting
from .internals import is_plain_tensor, is_transformed, is_watched
from .overlap import check_apart

# a NamedTuple of tensors
X = TypeVar("X", bound=tuple[Any, ...])
S = TypeVar("S")
Implementation = Callable[..., Any]

# a tensor that the operator writes into; ``schema_of`` gives it a letter
Written = Annotated[Tensor, "Tensor(!)"]

# types of the fields of structures, as a schema spells them, unless they are annotated with it
_SPELLED = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Written | None: "Tensor(!)?",
    int: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
    list[int]: "SymInt[]",
    list[bool]: "bool[]",
    torch.dtype | None: "ScalarType?",
}


@cache
def _written_by(structure: type) -> tuple[int, ...]:
    """Return which tensors of a structure its operator writes into."""
    return tuple(i for i, words in enumerate(_spelled(structure)) if "!" in words)


def check_written(x: Any) -> None:
    """Check that tensors that a call writes share no memory; for calls that bypass the operator."""
    check_apart(x._fields, x, _written_by(x.__class__))


@cache
def _fields_of(structure: type) -> dict[str, Any]:
    return get_type_hints(structure, include_extras=True)


def schema_of(structure: Any) -> str:
    """Return the arguments of an operator that takes a structure, field by field.

    Fields may be structures. Of defaults the schema has those of its last flags.
    """
    letters = iter("abcdefgh")  # the name of each tensor that is written into
    return re.sub(r"\(!", lambda _: f"({next(letters)}!", ", ".join(_spelled(structure)))


def _spelled(structure: Any) -> Iterator[str]:
    for name, kind in _fields_of(structure).items():
        if hasattr(kind, "_fields"):
            yield from _spelled(kind)
        else:
            default = structure._field_defaults.get(name)
            is_optional_flag = kind is bool and default is not None
            (words,) = getattr(kind, "__metadata__", None) or (_SPELLED[kind],)
            yield f"{words} {name}{f'={default}' if is_optional_flag else ''}"


def structured(structure: type[S], arguments: Iterable[Any]) -> S:
    """Return the arguments of such an operator as the structure.

    PyTorch leaves out last arguments that have their defaults.
    """
    taken: S = _take(structure, iter(arguments))
    return taken


def _take(structure: Any, rest: Iterator[Any]) -> Any:
    given: list[Any] = []
    for kind in _fields_of(structure).values():
        if hasattr(kind, "_fields"):
            given.append(_take(kind, rest))
        else:
            given += islice(rest, 1)
    return structure(*given)


def free_namespace(module: str, operator: str) -> str:
    """Return a namespace for the operators of a package in which ``operator`` is not taken.

    It is the package's import name, so that a copy under another name, such as a kernel of Hugging
    Face's hub, has its own. A further copy under the same name gets a number.
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
    """Define an operator and return it.

    On real tensors it raises if one that it writes into shares memory with itself or another. While
    launches are noted, tensors on meta take the kernels' implementation.

    Args:
        operator: name with its namespace.
        schema: arguments and results.
        fake: implementation for traces: results without data.
        kernels: implementation for GPUs, and for the CPU if kernels are interpreted.
        eager: implementation for the CPU otherwise.
        check: raises if a tensor's data are invalid; runs on the CPU, and on a GPU with
            ``ATTN_VALIDATE=1``, but not in traces.
        on_host: names of tensors that stay on the CPU while the others are on a GPU.
    """

    def check_and_run(*arguments: Any) -> Any:
        if written:
            check_apart(names, arguments, written)
        first = next(x for x in arguments if isinstance(x, Tensor))
        if VALIDATES and check is not None and checks_values(first):
            check(*arguments)
        return kernels(*arguments)

    def on_cpu(*arguments: Any) -> Any:
        if written:
            check_apart(names, arguments, written)
        if check is not None:
            check(*arguments)
        return (kernels if interpreted() else eager)(*arguments)

    def without_data(*arguments: Any) -> Any:
        return (kernels if is_noting() else fake)(*arguments)

    torch.library.define(operator, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.register_fake(operator, without_data)
    namespace, name = operator.split("::")
    defined = getattr(getattr(torch.ops, namespace), name).default
    names = [x.name for x in defined._schema.arguments]
    written = [i for i, x in enumerate(defined._schema.arguments) if x.is_write]
    elsewhere = [i for i, name in enumerate(names) if name in on_host]
    on_gpu = check_and_run if written or VALIDATES else kernels
    torch.library.impl(operator, "cuda", on_one_device(on_gpu, elsewhere))
    torch.library.impl(operator, "cpu", on_cpu)
    return defined


def no_second_derivative(reference: str) -> Callable[..., NoReturn]:
    """Return the derivative of a backward operator: it raises and names the reference."""

    def refuse(*_: Any) -> NoReturn:
        raise NotImplementedError(
            "second derivatives are not offered: the gradients of this attention cannot be "
            f"differentiated again; {reference} can be differentiated twice"
        )

    return refuse


def no_forward_mode(*_: Any) -> NoReturn:
    """Raise on forward-mode differentiation."""
    raise NotImplementedError(
        "forward-mode differentiation (torch.func.jvp, jacfwd, hessian, forward_ad) is not offered"
    )


def differentiable(
    operator: Any, differentiate: Callable[..., Any], keep: Callable[..., None] | None = None
) -> Callable[..., Any]:
    """Register the derivative of an operator, and return a function that calls the operator.

    Graphs of ``torch.compile`` and ``torch.export`` hold the operator and its derivative. The
    transforms of ``torch.func`` ignore an operator's derivative, so they get an autograd function.

    Args:
        operator: the result of ``register``.
        differentiate: takes the context and the gradients of the results, returns the gradients of
            the arguments.
        keep: saves in the context what ``differentiate`` needs. Default: nothing.
    """
    torch.library.register_autograd(operator.name(), differentiate, setup_context=keep)

    class Transformed(torch.autograd.Function):
        """The operator and its derivative for the transforms of ``torch.func``."""

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
    """Return whether a backward may skip its operator: not under ``create_graph``, which raises."""
    if torch.is_grad_enabled() or is_watched():
        return False
    for x in gradients:  # noqa: SIM110 (``all`` takes twice as long)
        if x is not None and not is_plain_tensor(x):
            return False
    return True


def without_repeats(x: X) -> X:
    """Return the tensors with views for repeats: dynamo refuses one tensor as two inputs."""
    several = [
        one.view_as(one) if any(one is other for other in x[:i] if one is not None) else one
        for i, one in enumerate(x)
    ]
    return x.__class__(*several)
