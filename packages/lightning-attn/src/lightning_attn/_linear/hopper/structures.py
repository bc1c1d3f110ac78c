"""What functions of the walk on Hopper pass to each other; see :mod:`.walk`."""

from typing import Any, NamedTuple


class Pipeline(NamedTuple):
    """Shared memory of a program, and the barriers at which chunks arrive."""

    key: Any  # [STAGES * HALVES, 1, 1, 1, SIDE, SIDE]
    value: Any  # [STAGES * WARPGROUPS, 1, 1, 1, SIDE, SIDE]
    read: Any  # as ``key``
    scores: Any  # [WARPGROUPS, SIDE, SIDE]
    out: Any  # [WARPGROUPS, 1, 1, 1, SIDE, SIDE]
    since: Any  # [WARPGROUPS, SIDE]
    until: Any  # [WARPGROUPS, SIDE]
    full: Any  # an mbarrier per stage


class Piece(NamedTuple):
    """The piece of tokens that a program walks."""

    sequence: Any
    head: Any
    begin: Any  # its first row
    length: Any
    chunks: Any
    first_col: Any  # of the state


class Recurrence(NamedTuple):
    """Decay, scales and states of a program."""

    rate: Any
    first_ptr: Any
    last_ptr: Any
    has_first: Any
    has_last: Any
    scales: Any
    piece: Any
    stride_first_d: Any
    stride_first_e: Any
    stride_last_d: Any
    stride_last_e: Any


class Chunk(NamedTuple):
    """A chunk of a piece: its first row and its number of tokens."""

    row: Any
    count: Any


class Halves(NamedTuple):
    """Panels of a state, of keys or of reads; both are the same if one holds a row."""

    low: Any
    high: Any


class Reads(NamedTuple):
    """The pending products of reads with keys and with the state."""

    scores: Any
    out: Any
