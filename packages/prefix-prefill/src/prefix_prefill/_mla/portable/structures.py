"""Structures that the functions of the portable kernels of latent attention pass on."""

from typing import Any, NamedTuple


class Share(NamedTuple):
    """The tiles of keys of a program, ``[begin, end)``."""

    begin: Any
    end: Any
    last: Any  # end of the keys that some row sees


class Source(NamedTuple):
    """The keys of a sequence."""

    v: Any  # the columns that are also values
    r: Any  # the rest of the columns
    table: Any


class Queries(NamedTuple):
    """The rows of a tile of queries."""

    v: Any
    r: Any
    position: Any
    factor: Any  # factor of products, for logits in base 2


class Block(NamedTuple):
    """A block of new tokens, and the offsets of their slots in the cache."""

    token: Any
    exists: Any
    slots: Any
    inside: Any
