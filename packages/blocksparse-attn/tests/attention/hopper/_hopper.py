"""Helpers of hopper tests that other tests use too."""

from __future__ import annotations

from ..._numerics import (
    check,
    takes_hopper,
)


def served(case):
    """Hold the kernel for Hopper to the budget of the package."""
    assert takes_hopper(case)
    return check(case, grad=False)
