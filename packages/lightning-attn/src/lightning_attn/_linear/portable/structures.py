"""What device functions of the walks pass to each other."""

from typing import Any, NamedTuple


class Found(NamedTuple):
    """A piece of tokens: its sequence, first row, length and index."""

    sequence: Any
    begin: Any
    length: Any
    index: Any


class Output(NamedTuple):
    """One head of a contiguous ``[tokens, heads, E]``."""

    ptr: Any
    heads: Any
    head: Any
