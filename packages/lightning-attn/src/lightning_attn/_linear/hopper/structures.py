"""What the walk on Hopper passes between its functions; see :mod:`.walk`.

The fields of ``Tensors``, ``Numbers``, ``Options`` and ``Tile`` are, in order, the parameters of
the kernel: the host fills them.
"""

from typing import Any, NamedTuple


class Tensors(NamedTuple):
    """Tensor maps and pointers of a launch; what a launch lacks is None."""

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
    SKIP: Any  # the state behind the last segment is not asked for
    RAGGED: Any  # packed sequences
    TERMS: Any  # numbers of 16 bits that stand for a value as it is written to the state


class Tile(NamedTuple):
    """Constants of a build."""

    HALVES: Any  # panels that hold a row of keys
    WARPGROUPS: Any
    STAGES: Any


class Maps(NamedTuple):
    """Tensor maps of panels; ``out`` and ``read`` are None where nobody reads."""

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
    full: Any  # an mbarrier a stage


class Piece(NamedTuple):
    """What a program walks."""

    sequence: Any
    head: Any
    begin: Any  # its first row
    length: Any
    chunks: Any
    first_col: Any  # of the state


class Recurrence(NamedTuple):
    """What a program computes, and where its states are."""

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
    """A chunk of a piece: its first row, and how many tokens it has."""

    row: Any
    count: Any


class Halves(NamedTuple):
    """Panels of a state, of keys or of reads; both are the same where one holds a row."""

    low: Any
    high: Any


class Reads(NamedTuple):
    """The products of reads with keys, and with the state, under way."""

    scores: Any
    out: Any
