"""What a launch passes to the portable kernels, and to the walk on Hopper.

Numbers and pointers are not specialised: a variant per value or alignment would make rounding
depend on strides and compilations on lengths, and would need a look-up per call.
"""

from __future__ import annotations

from typing import NamedTuple

from ..._linked.launch.entries import Constant, Foreign, Number
from ..._linked.portable.strides import Strides


class Rows(NamedTuple):
    """Tensors with a row per token and head; ``out`` is contiguous. See :mod:`.walk`."""

    key_ptr: Foreign
    value_ptr: Foreign
    read_ptr: Foreign  # None, like ``out_ptr``, for a walk without reads
    out_ptr: Foreign


class RowStrides(NamedTuple):
    """Strides of these tensors."""

    key: Strides
    value: Strides
    read: Strides


class Tensors(NamedTuple):
    """The other tensors of a walk, or None."""

    decay_ptr: Foreign
    first_ptr: Foreign  # states before each piece of tokens
    last_ptr: Foreign  # states after each piece
    cu_seqlens_ptr: Foreign
    slots_ptr: Foreign = None  # of the states of each sequence
    has_first_ptr: Foreign = None


class StateStrides(NamedTuple):
    """Strides of states ``[d, e]``."""

    batch: Number
    token: Number  # between states of one sequence: of segments, or of tokens
    head: Number
    d: Number
    e: Number


class Lengths(NamedTuple):
    """How many there are of what."""

    batch: Number
    heads: Number
    tokens: Number  # of a sequence; packed: of all
    size: Number  # tokens per segment, or of a sequence
    pieces: Number  # of a fixed-length sequence


class Scales(NamedTuple):
    """Factors of all reads and of all writes."""

    read: Number
    write: Number


class Numbers(NamedTuple):
    """Scales, lengths and strides of a walk."""

    scales: Scales
    lengths: Lengths
    first: StateStrides
    last: StateStrides


class CombineNumbers(NamedTuple):
    """Lengths and strides of the scan over segments."""

    lengths: Lengths
    states: StateStrides
    first: StateStrides
    last: StateStrides


class DecayGradientNumbers(NamedTuple):
    """The scale, lengths and strides of the gradient of the decays."""

    scale: Number
    lengths: Lengths
    rows: RowStrides
    dout: Strides
    states: StateStrides  # of ``first`` and ``last``


class Options(NamedTuple):
    """Constants of calls of one form; each kernel reads some of them."""

    D: Constant
    E: Constant
    REVERSE: Constant = False  # from the last token to the first
    SEGMENTED: Constant = True  # pieces are segments; else sequences
    REPLACE: Constant = True  # replace the states that segments wrote by those before them
    RAGGED: Constant = False  # packed sequences
    SKIP: Constant = False  # the state after the last segment is not needed


class WalkTile(NamedTuple):
    """Tile sizes of a program, and how it multiplies."""

    BLOCK_D: Constant
    BLOCK_E: Constant
    CHUNK: Constant  # tokens per step
    ROW_BYTES: Constant  # alignment of rows of reads and keys
    ROW_BYTES_V: Constant
    TERMS: Constant  # numbers of 16 bits per value that is written to the state
    NARROW: Constant  # round computed operands to the inputs' dtype
    PRECISION: Constant
    UPCAST: Constant  # the interpreter multiplies in fp32
    SETTLE: Constant  # wait for products before the next step


class StateTile(NamedTuple):
    """The part of a state that a program computes."""

    BLOCK_D: Constant
    BLOCK_E: Constant


class DecodeTensors(NamedTuple):
    """Tensors of a decoding step, in the order of ``StepTensors``."""

    out_ptr: Foreign
    q_ptr: Foreign
    k_ptr: Foreign
    v_ptr: Foreign
    state_cache_ptr: Foreign
    decay_ptr: Foreign
    slot_idx_ptr: Foreign
    states_out_ptr: Foreign  # None: the cache is updated in place


class ElementStrides(NamedTuple):
    """Strides of a tensor ``[batch, tokens, heads, elements]``."""

    batch: Number
    token: Number
    head: Number
    element: Number


class DecodeNumbers(NamedTuple):
    """The scale, lengths and strides of a decoding step."""

    scale: Number
    tokens: Number
    heads: Number
    out: ElementStrides
    q: ElementStrides
    k: ElementStrides
    v: ElementStrides
    state_cache: StateStrides
    states_out: StateStrides


class DecodeOptions(NamedTuple):
    """Constants of a decoding step."""

    D: Constant
    E: Constant
    BYTES: Constant  # alignment of rows of the cache
    ALONG: Constant  # the dimension of the cache with stride 1: 1 e, 0 d, -1 neither
    BYTES_OUT: Constant  # the same of ``states_out``
    ALONG_OUT: Constant
