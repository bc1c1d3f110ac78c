"""Types of functions whose result depends on a flag, and what ``help`` shows of keyword arguments.

A decorated function stays the same object. To a type checker it is a union, so that every call must
fit both members: the function's own parameters, whose result, ``NoReturn``, adds nothing to the
union of both results, and the overloads of a protocol, which name the flag and the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn, ParamSpec, Protocol, TypeVar, overload

from torch import Tensor

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])


class WithLse(Protocol):
    """What ``return_lse`` adds to a result."""

    @overload
    def __call__(self, *args: Any, return_lse: Literal[False] = False, **kwargs: Any) -> Tensor: ...
    @overload
    def __call__(
        self, *args: Any, return_lse: Literal[True], **kwargs: Any
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(
        self, *args: Any, return_lse: bool, **kwargs: Any
    ) -> Tensor | tuple[Tensor, Tensor]: ...


def refuses_unknown(function: F) -> F:
    """Show the keyword arguments that a function refuses without their type, ``NoReturn``."""
    function.__annotations__.pop("unknown", None)
    return function


def returns_lse(function: Callable[P, object]) -> Callable[P, NoReturn] | WithLse:
    """Type the results of a function by its argument ``return_lse``."""
    return refuses_unknown(function)  # type: ignore[return-value]
