"""Structures of the invariant kernels: NamedTuples that device functions read by field name.

A kernel's parameters are the fields of the structures that its launch passes, in order. Constants
of a compilation have upper-case names and their own structures.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# ---- what launches pass


class Tensors(NamedTuple):
    """The tensors of a call; all from ``lse_ptr`` on are optional."""

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    out_ptr: Any
    lse_ptr: Any
    sinks_ptr: Any
    k_descale_ptr: Any
    v_descale_ptr: Any
    block_table_ptr: Any  # None: keys are dense
    new_k_ptr: Any  # dense keys and values that follow those in pages
    new_v_ptr: Any
    cu_seqlens_q_ptr: Any  # None: sequences of one length
    cu_seqlens_k_ptr: Any
    seqlens_k_ptr: Any
    part_out_ptr: Any  # sums of segments, to be merged later
    part_max_ptr: Any
    part_sum_ptr: Any


class Numbers(NamedTuple):
    """The numbers of a call; strides count elements."""

    scale: Any
    softcap: Any
    window_left: Any
    window_right: Any
    batch: Any
    heads_k: Any
    tokens_q: Any  # per sequence if all have one length, else in total
    tokens_k: Any
    tiles: Any  # tiles of rows per sequence, if all have one length
    parts: Any  # segments with their own programs; 1: one program walks all segments
    stride_qb: Any
    stride_qs: Any
    stride_qh: Any
    stride_ob: Any
    stride_os: Any
    stride_oh: Any
    stride_lb: Any
    stride_lh: Any
    stride_kb: Any  # of a sequence, or of a page
    stride_ks: Any
    stride_kh: Any
    stride_kx: Any  # of a run of consecutive numbers of a key
    stride_kd: Any
    stride_vb: Any
    stride_vs: Any
    stride_vh: Any
    stride_vd: Any
    stride_new_ks: Any
    stride_new_kh: Any
    stride_new_vs: Any
    stride_new_vh: Any
    stride_table_b: Any
    stride_table_p: Any


class MergeTensors(NamedTuple):
    """The tensors of a merge; ``lse_ptr``, ``sinks_ptr`` and ``cu_seqlens_q_ptr`` are optional."""

    out_ptr: Any
    part_out_ptr: Any
    part_max_ptr: Any
    part_sum_ptr: Any
    lse_ptr: Any
    sinks_ptr: Any
    cu_seqlens_q_ptr: Any


class MergeNumbers(NamedTuple):
    """The numbers of a merge."""

    batch: Any
    heads_q: Any
    tokens_q: Any
    rows: Any
    parts: Any
    stride_ob: Any
    stride_os: Any
    stride_oh: Any
    stride_lb: Any
    stride_lh: Any


# pointers to memory that the package did not allocate and whose alignment is not known
FOREIGN = tuple(name for name in Tensors._fields if not name.startswith("part_"))
MERGE_FOREIGN = ("out_ptr", "lse_ptr", "sinks_ptr", "cu_seqlens_q_ptr")


# ---- constants


class Options(NamedTuple):
    """What a call computes, and how its tensors lie."""

    GROUP: Any  # query heads per key head
    HAS_LEFT: Any
    HAS_RIGHT: Any
    HAS_SOFTCAP: Any
    FOLD: Any  # a positive scale is the only step between products and softmax
    DESCALE_NDIM: Any
    PAGE: Any  # slots per page; 0: keys are dense
    K_RUN: Any  # consecutive numbers of a key
    K_BYTES: Any  # alignment of every run; 0: its numbers have gaps
    V_BYTES: Any
    ROW_BYTES: Any  # alignment of rows of q and of new keys and values
    DECODE_FROM_CACHE: Any  # a sequence of one query has all of its keys in the cache


class Tile(NamedTuple):
    """Tile sizes of the walk, fixed by head dimension, dtype and platform."""

    HEAD_DIM: Any
    HEAD_DIM_V: Any
    BLOCK_D: Any  # the head dimensions, padded
    BLOCK_DV: Any
    BLOCK_M: Any
    BLOCK_N: Any
    SEGMENT: Any
    PRECISION: Any
    UPCAST: Any  # interpreted


class MergeTile(NamedTuple):
    """Constants of a merge."""

    HEAD_DIM_V: Any
    BLOCK_DV: Any
    ROWS: Any


# ---- passed between device functions


class Place(NamedTuple):
    """A tile of rows; ``tile`` is negative if there is none."""

    sequence: Any
    tile: Any
    q_start: Any
    seqlen_q: Any
    k_start: Any
    seqlen_k: Any


class Rows(NamedTuple):
    """The queries of a tile; some see keys of ``[first, last)``.

    All of them see ``[full_first, full_last)``, which may be empty.
    """

    q: Any
    position: Any
    first: Any
    last: Any
    full_first: Any
    full_last: Any


class Source(NamedTuple):
    """Addresses of the keys of a sequence and a head; keys from ``context`` on are dense."""

    k_ptr: Any
    v_ptr: Any
    table_ptr: Any
    new_k_ptr: Any
    new_v_ptr: Any
    context: Any
    seqlen_k: Any
    k_descale: Any
    v_descale: Any


class Softmax(NamedTuple):
    """Sums of weighted values, sums of weights and base-2 maxima over some keys."""

    acc: Any
    l_i: Any
    m_i: Any
