"""Structures that the functions of the kernels that write into a cache pass on."""

from typing import Any, NamedTuple


class New(NamedTuple):
    """New queries, keys or values."""

    ptr: Any
    strides: Any


class Side(NamedTuple):
    """New keys or values, and the cache into which they are written."""

    new: Any
    cache_ptr: Any
    cache: Any  # strides
    scale_ptr: Any
    scale_cache_ptr: Any  # scales per token of the cache, or None
    scales: Any  # their strides


class Tokens(NamedTuple):
    """A block of new tokens: their sequences and positions."""

    token: Any  # index in the batch
    sequence: Any
    position: Any
    exists: Any
