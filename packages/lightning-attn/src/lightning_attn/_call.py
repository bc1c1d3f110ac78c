"""A checked call: what the checks of its form came to."""

from __future__ import annotations

from typing import Any, NamedTuple


class Checked(NamedTuple):
    """What is known of every call of one form."""

    scale: float
    # how to launch it past the operators; None where they have to be asked
    plan: Any = None
