"""What the launches of the portable kernels pass: run-time values and compile-time constants."""

from __future__ import annotations

from typing import NamedTuple

from ..._linked.launch.entries import Constant, Foreign, Number, Pointer
from ..._linked.portable.strides import Strides

# of a tensor that a launch does not read
NO_STRIDES = Strides(0, 0, 0)


class Options(NamedTuple):
    """Constants of ``attention_kernel``."""

    # the call
    GROUP: Constant  # query heads per key head
    HEAD_DIM: Constant
    HEAD_DIM_V: Constant
    BLOCK_D: Constant
    BLOCK_DV: Constant
    ROW_BYTES: Constant  # alignment of rows
    ROW_BYTES_V: Constant
    BLOCK_Q: Constant  # the layout's block size
    BLOCK_K: Constant
    IS_CAUSAL: Constant
    PER_HEAD: Constant  # each unit has its own lists; otherwise all units share one
    TOP_LEFT: Constant  # query i stands at position i
    # the tile of queries; 0 if programs own tiles of keys
    POSITIONS: Constant = 0
    HEADS: Constant = 0  # from one group
    PACKS: Constant = 0  # tiles that hold all heads of a group
    SPAN: Constant = 0  # positions per owner of a list
    ROW_MEMBERS: Constant = 0  # rows of blocks in a tile
    HEAD_MEMBERS: Constant = 0  # heads whose lists are united
    # the pass
    BY_KEY: Constant = (
        False  # programs own tiles of keys, for dk and dv; otherwise tiles of queries
    )
    MERGES: Constant = False  # merge the splits of the forward
    PAGE: Constant = 0  # tokens of a page, 0 without pages
    IS_SHORT: Constant = False  # tiles of sequences of a few queries
    SHORT: Constant = 0  # most queries of a sequence with such tiles, in the forward
    FOLD: Constant = True  # the scale is not negative
    SETTLE: Constant = False  # wait for the products of dk at the end of each step
    # the tile of scores of a step
    BLOCK_M: Constant = 0
    BLOCK_N: Constant = 0
    PRECISION: Constant = ""
    UPCAST: Constant = False  # the interpreter multiplies in fp32


class RowOptions(NamedTuple):
    """Constants of ``row_kernel``, which runs before and after the backward."""

    HEAD_DIM_V: Constant
    BLOCK_DV: Constant
    ROW_BYTES_V: Constant
    BLOCK: Constant  # rows per program
    # sums of gradients
    ROUNDS: Constant = False  # write the gradients from the sums
    HEAD_DIM: Constant = 0
    PER_HEAD: Constant = False  # each key head has its own lists; otherwise all share one
    TOP_LEFT: Constant = False  # query i stands at position i
    TOKENS: Constant = 0  # tokens per block of the layout, at most 64
    WIDTH: Constant = 0  # columns of sums
    WIDTH_V: Constant = 0
    PIECE: Constant = 0  # elements of dq's sums that one store sets to 0
    IS_EARLY: Constant = False  # the launch that adds to the sums may still run


class Tensors(NamedTuple):
    """Pointers of ``attention_kernel``; None if a pass does not use one."""

    q_ptr: Foreign
    k_ptr: Foreign
    v_ptr: Foreign
    # the backward only
    dout_ptr: Foreign = None
    lse2_ptr: Foreign = None
    delta_ptr: Foreign = None
    out_ptr: Foreign = None  # the output, dq, or dk
    dv_ptr: Foreign = None
    lse_ptr: Foreign = None
    # results of each split
    part_out_ptr: Foreign = None
    part_lse_ptr: Foreign = None
    # the lists, as ``Lists``
    begin_ptr: Foreign = None
    whole_ptr: Foreign = None
    items_ptr: Foreign = None
    members_ptr: Foreign = None
    # None if all sequences have one length
    cu_seqlens_q_ptr: Foreign = None
    cu_seqlens_k_ptr: Foreign = None
    block_table_ptr: Foreign = None
    rule_ptr: Foreign = None  # first and last key that a position sees


class Numbers(NamedTuple):
    """Scale, sizes and strides of ``attention_kernel``; 0 if a pass does not use one."""

    scale: Number
    batch: Number
    heads_q: Number
    tokens_q: Number
    tokens_k: Number
    tiles: Number  # tiles of positions per unit, or tiles of keys per head
    span: Number  # units, or heads, that are worked on together
    splits: Number
    fills: Number  # whether the short grid writes padding
    list_rows: Number  # owners in the lists of a unit
    list_stride: Number  # owners per sequence, or 0 if all sequences share their lists
    extent: Number  # keys that the layout covers, or queries if the walk is over queries
    table_stride: Number
    rule_stride: Number  # between the rules of two sequences, or 0
    dout: Strides
    q: Strides
    k: Strides
    v: Strides


class RowTensors(NamedTuple):
    """Pointers of ``row_kernel``; it fills delta and lse2, ``[batch, heads_q, tokens]``."""

    out_ptr: Foreign
    dout_ptr: Foreign
    lse_ptr: Foreign
    dlse_ptr: Foreign  # or None
    delta_ptr: Foreign
    lse2_ptr: Foreign
    # the Hopper backward only: see ``BackwardTensors``
    parts_ptr: Foreign = None
    owners_ptr: Foreign = None
    real_ptr: Foreign = None
    cu_seqlens_ptr: Foreign = None
    counters_ptr: Pointer = None  # None without sums of dq
    dq_sums_ptr: Pointer = None
    dk_sums_ptr: Pointer = None
    dv_sums_ptr: Pointer = None
    dq_ptr: Pointer = None
    dk_ptr: Pointer = None
    dv_ptr: Pointer = None


class RowNumbers(NamedTuple):
    """Sizes and strides of ``row_kernel``."""

    tokens_q: Number
    rows: Number  # rows of all heads and sequences
    dout: Strides
    heads_q: Number
    # sums of gradients
    scale: Number = 0.0
    batch: Number = 0
    heads_k: Number = 0
    tokens_k: Number = 0
    tiles_q: Number = 0
    tiles_k: Number = 0
    list_pieces: Number = 0
    slots_q: Number = 0  # tiles of dq's sums
    slots_k: Number = 0  # tiles of dk's and dv's sums
    share: Number = 0  # pieces of dq's sums that one program sets to 0
    pieces: Number = 0
