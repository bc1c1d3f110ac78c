"""Checks of calls' arguments: errors name wrong ones, and explain those of an older dialect."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from .errors import NkiValidationError

P = ParamSpec("P")
R = TypeVar("R")
MIGRATION = "nki/migration"
# arguments that neuronxcc.nki had
OLD_ARGUMENTS = {
    "dtype": "is of neuronxcc.nki; the dtype of dst decides",
    "mask": "is of neuronxcc.nki; slice the operands",
}


def named(namespace: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that raises ``NkiValidationError`` for wrong arguments, not TypeError."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        call = f"{namespace}.{function.__name__}"

        @functools.wraps(function)
        def run(*arguments: P.args, **options: P.kwargs) -> R:
            try:
                return function(*arguments, **options)
            except TypeError:
                _check(call, inspect.signature(function), arguments, options)
                raise

        return run

    return decorate


def _check(
    call: str, signature: inspect.Signature, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Raise if the arguments do not fit the call."""
    names = list(signature.parameters)
    page = call.replace("nisa.", "nki.isa.").replace("nl.", "nki.language.")
    for name, value in options.items():
        if name in OLD_ARGUMENTS and name not in names:
            raise NkiValidationError(call, name, OLD_ARGUMENTS[name], repr(value), MIGRATION)
        if name not in names or name in names[: len(arguments)]:
            left = ", ".join(names[len(arguments) :])
            raise NkiValidationError(call, name, f"must be one of {left}", repr(value), page)
    if len(arguments) > len(names):
        raise NkiValidationError(
            call, "arguments", f"may be {len(names)} at most", len(arguments), page
        )
    for name, parameter in list(signature.parameters.items())[len(arguments) :]:
        if parameter.default is parameter.empty and name not in options:
            raise NkiValidationError(call, name, "must be given", "nothing", page)
