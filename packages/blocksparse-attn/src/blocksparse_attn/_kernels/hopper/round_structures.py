"""What the launches around the Hopper backward are given; see :mod:`.structures`."""

from typing import Any, NamedTuple


class PrepareTensors(NamedTuple):
    """Pointers of the launch ahead of the backward."""

    out_ptr: Any
    dout_ptr: Any
    lse_ptr: Any
    dlse_ptr: Any
    delta_ptr: Any
    lse2_ptr: Any
    dq_sums_ptr: Any
    dk_sums_ptr: Any
    dv_sums_ptr: Any
    parts_ptr: Any
    cu_seqlens_ptr: Any


class PrepareNumbers(NamedTuple):
    """Sizes and strides of the launch ahead of the backward."""

    tokens_q: Any
    rows: Any  # of all heads and sequences
    stride_dob: Any
    stride_dos: Any
    stride_doh: Any
    heads_q: Any
    batch: Any
    heads_k: Any
    tokens_k: Any
    tiles_k: Any
    list_pieces: Any
    slots_k: Any  # tiles of sums of dk and dv
    share: Any  # pieces of dq's sums that a program clears
    pieces: Any


class PrepareOptions(NamedTuple):
    """What the launch ahead of the backward is compiled for."""

    PER_HEAD: Any  # lists of each key head, or one for all
    TOKENS: Any  # of the layout's blocks, up to 64
    HEAD_DIM_V: Any
    BLOCK_DV: Any
    WIDTH: Any  # columns of sums
    WIDTH_V: Any
    ROW_BYTES_V: Any
    BLOCK: Any  # rows per program
    PIECE: Any  # sums that are cleared at a time


class RoundTensors(NamedTuple):
    """Pointers of the launch after the backward."""

    dq_sums_ptr: Any
    dk_sums_ptr: Any
    dv_sums_ptr: Any
    dq_ptr: Any
    dk_ptr: Any
    dv_ptr: Any
    parts_ptr: Any
    cu_seqlens_ptr: Any


class RoundNumbers(NamedTuple):
    """Scale and sizes of the launch after the backward."""

    scale: Any
    slots_q: Any  # tiles of sums of dq
    batch: Any
    heads_q: Any
    heads_k: Any
    tokens_q: Any
    tokens_k: Any
    tiles_q: Any
    tiles_k: Any
    list_pieces: Any


class RoundOptions(NamedTuple):
    """What the launch after the backward is compiled for."""

    PER_HEAD: Any  # lists of each key head, or one for all
    TOKENS: Any  # of the layout's blocks, up to 64
    HEAD_DIM: Any
    HEAD_DIM_V: Any
    WIDTH: Any  # columns of sums
    WIDTH_V: Any
    TOP_LEFT: Any  # query i stands at position i
