"""What launches pass to the portable kernels, see ``entry``, and structures that Hopper's share.

Fields in upper case are constants of a build, all others are run-time values; no structure has
both. Strides count elements.
"""

from __future__ import annotations

from typing import NamedTuple

from ..launch.entries import Constant, Foreign, Number, Pointer
from ..portable.strides import Strides


class Scores(NamedTuple):
    """The scale, softcap and window of scores; -1 is no window."""

    scale: Number
    softcap: Number
    window_left: Number
    window_right: Number


class KeyStrides(NamedTuple):
    """Strides of keys."""

    page: Number  # from one page, or sequence, to the next
    slot: Number
    head: Number
    run: Number  # from one run of consecutive numbers of a key to the next
    number: Number


class ValueStrides(NamedTuple):
    """Strides of values."""

    page: Number
    slot: Number
    head: Number
    number: Number


class RowStrides(NamedTuple):
    """Strides of new keys or values."""

    token: Number
    head: Number


class TableStrides(NamedTuple):
    """Strides of a page table."""

    sequence: Number
    page: Number


class LseStrides(NamedTuple):
    """Strides of log-sum-exps."""

    batch: Number
    head: Number


class Tensors(NamedTuple):
    """The tensors of a call, in the order of ``Call``; all from ``lse_ptr`` on are optional."""

    q_ptr: Foreign
    k_ptr: Foreign
    v_ptr: Foreign
    out_ptr: Foreign
    lse_ptr: Foreign
    sinks_ptr: Foreign
    k_descale_ptr: Foreign
    v_descale_ptr: Foreign
    block_table_ptr: Foreign  # None: keys are dense
    new_k_ptr: Foreign  # dense keys and values that follow those in pages
    new_v_ptr: Foreign
    cu_seqlens_q_ptr: Foreign  # None: sequences of one length
    cu_seqlens_k_ptr: Foreign
    seqlens_k_ptr: Foreign
    part_out_ptr: Pointer  # sums of segments, to be merged later
    part_max_ptr: Pointer
    part_sum_ptr: Pointer


class Numbers(NamedTuple):
    """The numbers of a call."""

    scores: Scores
    batch: Number
    heads_k: Number
    tokens_q: Number  # per sequence if all have one length, else in total
    tokens_k: Number
    tiles: Number  # tiles of rows per sequence, if all have one length
    parts: Number  # segments with their own programs; 1: one program walks all segments
    q: Strides
    out: Strides
    lse: LseStrides
    k: KeyStrides
    v: ValueStrides
    new_k: RowStrides
    new_v: RowStrides
    table: TableStrides


class Options(NamedTuple):
    """What a call computes, and how its tensors lie."""

    GROUP: Constant  # query heads per key head
    HAS_LEFT: Constant
    HAS_RIGHT: Constant
    HAS_SOFTCAP: Constant
    FOLD: Constant  # a positive scale is the only step between products and softmax
    DESCALE_NDIM: Constant
    PAGE: Constant  # slots per page; 0: keys are dense
    K_RUN: Constant  # consecutive numbers of a key
    K_BYTES: Constant  # alignment of every run; 0: its numbers have gaps
    V_BYTES: Constant
    ROW_BYTES: Constant  # alignment of rows of q and of new keys and values
    DECODE_FROM_CACHE: Constant  # a sequence of one query has all of its keys in the cache
    PIECE: Constant = 0  # on Hopper: keys per TMA copy; 0: a warpgroup loads them


class Tile(NamedTuple):
    """Tile sizes of the walk, fixed by head dimension, dtype and platform."""

    HEAD_DIM: Constant
    HEAD_DIM_V: Constant
    BLOCK_D: Constant  # the head dimensions, padded
    BLOCK_DV: Constant
    BLOCK_M: Constant
    BLOCK_N: Constant
    SEGMENT: Constant
    PRECISION: Constant
    UPCAST: Constant  # interpreted


class MergeTensors(NamedTuple):
    """The tensors of a merge; ``lse_ptr``, ``sinks_ptr`` and ``cu_seqlens_q_ptr`` are optional."""

    out_ptr: Foreign
    part_out_ptr: Pointer
    part_max_ptr: Pointer
    part_sum_ptr: Pointer
    lse_ptr: Foreign
    sinks_ptr: Foreign
    cu_seqlens_q_ptr: Foreign


class MergeNumbers(NamedTuple):
    """The numbers of a merge."""

    batch: Number
    heads_q: Number
    tokens_q: Number
    rows: Number
    parts: Number
    out: Strides
    lse: LseStrides


class MergeTile(NamedTuple):
    """Constants of a merge."""

    HEAD_DIM_V: Constant
    BLOCK_DV: Constant
    ROWS: Constant
