"""Types of the results of :func:`lightning_attn_func` and its like; see ``_linked/host``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn, Protocol, overload

from torch import Tensor

from .._linked.host.results import P, refuses_unknown


class WithState(Protocol):
    """What ``output_final_state`` makes of the second result."""

    @overload
    def __call__(
        self, *args: Any, output_final_state: Literal[False] = False, **kwargs: Any
    ) -> tuple[Tensor, None]: ...
    @overload
    def __call__(
        self, *args: Any, output_final_state: Literal[True], **kwargs: Any
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(
        self, *args: Any, output_final_state: bool, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]: ...


def returns_state(function: Callable[P, object]) -> Callable[P, NoReturn] | WithState:
    """Type the results of a function by its argument ``output_final_state``."""
    return refuses_unknown(function)  # type: ignore[return-value]
