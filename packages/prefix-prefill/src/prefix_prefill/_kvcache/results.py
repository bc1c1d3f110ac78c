"""The type of the result of :func:`flash_attn_with_kvcache`; see ``_linked/host/results.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn, Protocol, overload

from torch import Tensor

from .._linked.host.results import P, refuses_unknown


class WithSoftmaxLse(Protocol):
    """What ``return_softmax_lse`` adds to a result."""

    @overload
    def __call__(
        self, *args: Any, return_softmax_lse: Literal[False] = False, **kwargs: Any
    ) -> Tensor: ...
    @overload
    def __call__(
        self, *args: Any, return_softmax_lse: Literal[True], **kwargs: Any
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(
        self, *args: Any, return_softmax_lse: bool, **kwargs: Any
    ) -> Tensor | tuple[Tensor, Tensor]: ...


def returns_softmax_lse(function: Callable[P, object]) -> Callable[P, NoReturn] | WithSoftmaxLse:
    """Type the results of a function by its argument ``return_softmax_lse``."""
    return refuses_unknown(function)  # type: ignore[return-value]
