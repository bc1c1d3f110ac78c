"""Integer helpers for grids and tiles."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """Return the exact ``ceil(a / b)`` for any ``a`` and ``b >= 1``."""
    _check_ints("cdiv", a=a, b=b)
    if b < 1:
        raise ValueError(f"cdiv: b must be at least 1, got {b}")
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``n``."""
    _check_ints("round_up", n=n, multiple=multiple)
    if multiple < 1:
        raise ValueError(f"round_up: multiple must be at least 1, got {multiple}")
    return -(-n // multiple) * multiple


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least ``n``, for ``n >= 1``."""
    _check_ints("next_power_of_2", n=n)
    if n < 1:
        raise ValueError(f"next_power_of_2: n must be at least 1, got {n}")
    return 1 << (n - 1).bit_length()


def is_power_of_2(n: int) -> bool:
    """Return whether ``n`` is 1, 2, 4, ...; False for zero and negative numbers."""
    _check_ints("is_power_of_2", n=n)
    return n > 0 and n & (n - 1) == 0


def _check_ints(function: str, **numbers: object) -> None:
    for name, number in numbers.items():
        # ``__index__``: NumPy's integers and torch's symbolic ones
        if not isinstance(number, int) and not hasattr(number, "__index__"):
            raise TypeError(f"{function}: {name} must be an int, got {type(number).__name__}")
