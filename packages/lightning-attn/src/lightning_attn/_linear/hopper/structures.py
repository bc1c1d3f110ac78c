"""Structures of the walk on Hopper; see :mod:`.walk`.

The kernel's parameters are the fields of ``Tensors``, ``Numbers``, ``Options`` and ``Tile``, in
order; the host fills them.
"""

from typing import Any, NamedTuple


class Tensors(NamedTuple):
    """Tensor maps and pointers of a launch, or None."""

    key_desc: Any
    value_desc: Any
    read_desc: Any
    out_desc: Any
    out_ptr: Any
    decay_ptr: Any
    first_ptr: Any
    last_ptr: Any
    cu_seqlens_ptr: Any
    slots_ptr: Any
    has_first_ptr: Any


class Numbers(NamedTuple):
    """Scales, lengths and strides of a launch."""

    read_scale: float
    write_scale: float
    batch: int
    heads: int
    tokens: int
    size: int
    pieces: int
    stride_first_b: int
    stride_first_s: int
    stride_first_h: int
    stride_first_d: int
    stride_first_e: int
    stride_last_b: int
    stride_last_s: int
    stride_last_h: int
    stride_last_d: int
    stride_last_e: int


class Options(NamedTuple):
    """Constants of a form of calls."""

    D: Any
    E: Any
    REVERSE: Any  # from the last token to the first
    SEGMENTED: Any
    SKIP: Any  # the state after the last segment is not needed
    RAGGED: Any  # packed sequences
    TERMS: Any  # numbers of 16 bits per value that is written to the state


class Tile(NamedTuple):
    """Constants of a build."""

    HALVES: Any  # panels per row of keys
    WARPGROUPS: Any
    STAGES: Any


class Maps(NamedTuple):
    """Tensor maps of panels; ``out`` and ``read`` are None without reads."""

    out: Any
    key: Any
    value: Any
    read: Any


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
    read_scale: Any
    write_scale: Any
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
