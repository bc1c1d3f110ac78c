"""Integer helpers for grids and tiles."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """Return ``ceil(a / b)``, exactly, for any ``a`` and ``b >= 1``."""
    if b < 1:
        raise ValueError(f"cdiv: b must be at least 1, got {b}")
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``n``."""
    if multiple < 1:
        raise ValueError(f"round_up: multiple must be at least 1, got {multiple}")
    return -(-n // multiple) * multiple


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least ``n``, for ``n >= 1``."""
    if n < 1:
        raise ValueError(f"next_power_of_2: n must be at least 1, got {n}")
    return 1 << (n - 1).bit_length()


def is_power_of_2(n: int) -> bool:
    """Say whether ``n`` is 1, 2, 4, ...; zero and negative numbers are not."""
    return n > 0 and n & (n - 1) == 0
