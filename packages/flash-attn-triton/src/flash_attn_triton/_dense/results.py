"""Types of the results of :func:`flash_attn_func` and its like; see ``_linked/host/results.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, overload

from torch import Tensor

from .._linked.host.results import P, refuses_unknown

# a type for each positional argument before return_attn_probs: of 14, or of the first ones
_any: Any = None
BEFORE = (_any, _any, _any, _any, _any, _any, _any, _any, _any, _any, _any, _any, _any, _any)

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    No = Literal[False]
    Yes = Literal[True]
    Pair = tuple[Tensor, Tensor]
    Three = tuple[Tensor, Tensor, Tensor | None]
    Before = TypeVarTuple("Before")

    class WithParts(Protocol[Unpack[Before]]):
        """What ``return_lse`` and ``return_attn_probs``, which may be positional, add."""

        @overload
        def __call__(self, *args: Unpack[tuple[Unpack[Before], Yes]], **kwargs: Any) -> Three: ...
        @overload
        def __call__(
            self, *args: Unpack[tuple[Unpack[Before], bool]], **kwargs: Any
        ) -> Tensor | Pair | Three: ...
        @overload
        def __call__(
            self, *args: Any, return_attn_probs: No = False, return_lse: No = False, **kwargs: Any
        ) -> Tensor: ...
        @overload
        def __call__(
            self, *args: Any, return_attn_probs: No = False, return_lse: Yes, **kwargs: Any
        ) -> Pair: ...
        @overload
        def __call__(
            self, *args: Any, return_attn_probs: Yes, return_lse: bool = False, **kwargs: Any
        ) -> Three: ...
        @overload
        def __call__(self, *args: Any, **kwargs: Any) -> Tensor | Pair | Three: ...


def returns_parts(
    before: tuple[Unpack[Before]],
) -> Callable[[Callable[P, object]], Callable[P, NoReturn] | WithParts[Unpack[Before]]]:
    """Type the results of a function by ``return_lse`` and ``return_attn_probs``.

    Args:
        before: as many parts of ``BEFORE`` as there are arguments before ``return_attn_probs``.
    """
    return refuses_unknown  # type: ignore[return-value]
