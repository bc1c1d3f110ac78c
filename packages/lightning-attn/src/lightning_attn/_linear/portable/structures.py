"""Structures of arguments of the portable kernels and their device functions.

A kernel's parameters are the fields of its ``...Tensors``, ``...Numbers`` and constants, in order;
the host fills them. Numbers and pointers are not specialised: a variant per value or alignment
would make rounding depend on strides and compilations on lengths, and would need a look-up per
call.
"""

from typing import Any, NamedTuple


class WalkTensors(NamedTuple):
    """Pointers of a walk, or None."""

    key_ptr: Any
    value_ptr: Any
    read_ptr: Any
    out_ptr: Any
    decay_ptr: Any
    first_ptr: Any
    last_ptr: Any
    cu_seqlens_ptr: Any
    slots_ptr: Any
    has_first_ptr: Any


class WalkNumbers(NamedTuple):
    """Scales, lengths and strides of a walk."""

    read_scale: float
    write_scale: float
    batch: int
    heads: int
    tokens: int
    size: int
    pieces: int
    stride_rb: int
    stride_rs: int
    stride_rh: int
    stride_kb: int
    stride_ks: int
    stride_kh: int
    stride_vb: int
    stride_vs: int
    stride_vh: int
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


class WalkOptions(NamedTuple):
    """Constants of a form of walks."""

    D: Any
    E: Any
    REVERSE: Any  # from the last token to the first
    SEGMENTED: Any
    SETTLE: Any  # wait for products before the next step


class CombineTensors(NamedTuple):
    """Pointers of the scan over segments."""

    states_ptr: Any
    decay_ptr: Any
    first_ptr: Any
    last_ptr: Any
    cu_seqlens_ptr: Any
    slots_ptr: Any
    has_first_ptr: Any


class CombineNumbers(NamedTuple):
    """Lengths and strides of the scan over segments."""

    batch: int
    heads: int
    tokens: int
    size: int
    pieces: int
    stride_states_b: int
    stride_states_s: int
    stride_states_h: int
    stride_states_d: int
    stride_states_e: int
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


class CombineOptions(NamedTuple):
    """Constants of the scan over segments."""

    D: Any
    E: Any
    BLOCK_D: Any
    BLOCK_E: Any
    REVERSE: Any
    REPLACE: Any  # replace the states that segments wrote by those before them; else fill ``last``


class ArriveTensors(NamedTuple):
    """Pointers of the sum of states that arrive from other ranks."""

    states_ptr: Any
    decay_ptr: Any
    base_ptr: Any
    out_ptr: Any
    offsets_ptr: Any
    entries_ptr: Any


class ArriveNumbers(NamedTuple):
    """Lengths of the sum of states."""

    heads: int
    size: int


class ArriveOptions(NamedTuple):
    """Constants of the sum of states."""

    BLOCK: Any


class DecodeTensors(NamedTuple):
    """Pointers of a decoding step; ``last_ptr`` is None if the cache is updated in place."""

    read_ptr: Any
    key_ptr: Any
    value_ptr: Any
    out_ptr: Any
    states_ptr: Any
    last_ptr: Any
    decay_ptr: Any
    slots_ptr: Any


class DecodeNumbers(NamedTuple):
    """The scale, lengths and strides of a decoding step."""

    scale: float
    tokens: int
    heads: int
    stride_rb: int
    stride_rs: int
    stride_rh: int
    stride_rd: int
    stride_kb: int
    stride_ks: int
    stride_kh: int
    stride_kd: int
    stride_vb: int
    stride_vs: int
    stride_vh: int
    stride_vd: int
    stride_ob: int
    stride_os: int
    stride_oh: int
    stride_od: int
    stride_states_b: int
    stride_states_h: int
    stride_states_d: int
    stride_states_e: int
    stride_last_b: int
    stride_last_s: int
    stride_last_h: int
    stride_last_d: int
    stride_last_e: int


class DecodeOptions(NamedTuple):
    """Constants of a decoding step."""

    D: Any
    E: Any
    BLOCK_D: Any
    BLOCK_E: Any
    BYTES: Any  # alignment of rows of the cache
    ALONG: Any  # the dimension of the cache with stride 1: 1 e, 0 d, -1 neither
    BYTES_LAST: Any
    ALONG_LAST: Any


class DecayGradientTensors(NamedTuple):
    """Pointers of the gradient of the decays.

    ``first_ptr``: the state before each chunk; ``last_ptr``: the gradient of the state after it,
    with the same strides.
    """

    read_ptr: Any
    key_ptr: Any
    value_ptr: Any
    dout_ptr: Any
    out_ptr: Any
    decay_ptr: Any
    first_ptr: Any
    last_ptr: Any
    cu_seqlens_ptr: Any


class DecayGradientNumbers(NamedTuple):
    """The scale, lengths and strides of the gradient of the decays."""

    scale: float
    batch: int
    heads: int
    tokens: int
    size: int
    pieces: int
    stride_rb: int
    stride_rs: int
    stride_rh: int
    stride_kb: int
    stride_ks: int
    stride_kh: int
    stride_vb: int
    stride_vs: int
    stride_vh: int
    stride_db: int
    stride_ds: int
    stride_dh: int
    stride_first_b: int
    stride_first_s: int
    stride_first_h: int
    stride_first_d: int
    stride_first_e: int


class DecayGradientOptions(NamedTuple):
    """Constants of a form."""

    D: Any
    E: Any


class WalkTile(NamedTuple):
    """Tile sizes of a program."""

    BLOCK_D: Any
    BLOCK_E: Any
    CHUNK: Any
    ROW_BYTES: Any  # alignment of rows of reads and keys
    ROW_BYTES_V: Any


class Products(NamedTuple):
    """How a kernel multiplies."""

    TERMS: Any  # numbers of 16 bits per value that is written to the state
    NARROW: Any  # round computed operands to the inputs' dtype
    PRECISION: Any
    UPCAST: Any  # the interpreter multiplies in fp32


# passed between device functions


class Lengths(NamedTuple):
    """Numbers of sequences, tokens, tokens per piece, and pieces per sequence."""

    batch: Any
    tokens: Any
    size: Any
    pieces: Any


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


class StateMemory(NamedTuple):
    """States in memory, with the strides of sequence, segment, head, rows and columns."""

    ptr: Any
    stride_b: Any
    stride_s: Any
    stride_h: Any
    stride_rows: Any
    stride_cols: Any
