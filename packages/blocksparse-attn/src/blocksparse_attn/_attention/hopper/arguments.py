"""What the launches of the Hopper kernels pass: run-time values and compile-time constants."""

from __future__ import annotations

from typing import NamedTuple

from ..._linked.launch.entries import Constant, Foreign, Map, Number, Pointer


class QueryTensors(NamedTuple):
    """Tensor maps (TMA) and pointers of ``hopper_query_kernel``.

    With dout the kernel makes dq, without it the output and the LSE.
    """

    q_desc: Map
    k_desc: Map
    v_desc: Map
    dout_desc: Map  # None for the output
    out_desc: Map  # the output, or dq
    out_ptr: Foreign
    ticket_ptr: Foreign  # the tile counter
    # the lists, as ``Lists``
    begin_ptr: Foreign
    whole_ptr: Foreign
    items_ptr: Foreign
    members_ptr: Foreign
    # None for dq
    lse_ptr: Foreign = None
    # None for the output
    lse2_ptr: Foreign = None
    delta_ptr: Foreign = None
    # None if all sequences have one length
    cu_seqlens_q_ptr: Foreign = None
    cu_seqlens_k_ptr: Foreign = None


class QueryNumbers(NamedTuple):
    """Scale and sizes of ``hopper_query_kernel``."""

    scale: Number
    batch: Number
    heads_q: Number
    tokens_q: Number
    tokens_k: Number
    width: Number  # columns of the tensor that is written
    tiles: Number  # tiles of positions per unit
    span: Number  # units that are worked on together
    last: Number  # units in the last such span
    total: Number  # tiles of all units
    list_rows: Number  # owners in the lists of a unit
    list_stride: Number  # owners per sequence, or 0 if all sequences share their lists
    extent_k: Number  # keys that the layout covers


class QueryOptions(NamedTuple):
    """Constants of ``hopper_query_kernel``."""

    GROUP: Constant  # query heads per key head
    HEADS: Constant  # heads of a tile
    SPAN: Constant  # positions per owner of a list
    ROW_MEMBERS: Constant  # rows of blocks per owner
    BLOCK_Q: Constant  # the layout's block size
    BLOCK_K: Constant
    IS_CAUSAL: Constant
    PER_HEAD: Constant  # each unit has its own lists; otherwise all units share one
    SHORT: Constant  # most queries of a sequence that another kernel serves
    TOP_LEFT: Constant  # query i stands at position i
    HALVES: Constant  # lists name the blocks that only one warpgroup sees: these make half steps
    ROWS: Constant  # rows per warpgroup
    BLOCK_N: Constant
    HEAD_DIM: Constant
    HEAD_DIM_V: Constant
    STAGES_K: Constant
    STAGES_V: Constant


class BackwardTensors(NamedTuple):
    """The backward's tensor maps (TMA) and pointers."""

    q_desc: Map
    k_desc: Map
    v_desc: Map
    dout_desc: Map
    dk_desc: Map
    dv_desc: Map
    # sums of gradients in fp32
    dq_ptr: Pointer
    dk_ptr: Pointer
    dv_ptr: Pointer
    lse2_ptr: Pointer
    delta_ptr: Pointer
    # the lists, as ``Pairs``
    begin_ptr: Foreign
    parts_ptr: Foreign
    items_ptr: Foreign
    owners_ptr: Foreign
    real_ptr: Foreign
    bits_ptr: Foreign
    # None if all sequences have one length
    cu_seqlens_ptr: Foreign
    # int32. With dq: per key head of each sequence, minus the number of programs that have yet to
    # add to dq. Without dq: the number of programs that began, then per piece of keys the number of
    # additions to its sums
    counters_ptr: Foreign


class BackwardNumbers(NamedTuple):
    """The backward's scale and sizes."""

    scale: Number
    batch: Number
    heads_k: Number
    span: Number  # key heads whose programs are interleaved
    tokens_q: Number
    tokens_k: Number
    tiles_q: Number  # tiles of sums per head
    tiles_k: Number
    rows: Number  # rows of blocks of the layout
    list_pieces: Number


class BackwardOptions(NamedTuple):
    """Constants of the backward."""

    GROUP: Constant  # query heads per key head
    IS_CAUSAL: Constant
    PER_HEAD: Constant  # each key head has its own lists; otherwise all share one
    TOP_LEFT: Constant  # query i stands at position i
    PIECE: Constant  # tokens per block of the layout, at most 64
    HEAD_DIM: Constant
    HEAD_DIM_V: Constant
    STAGES: Constant
    MAKES_DQ: Constant  # otherwise another launch makes dq, and programs add in a fixed order
