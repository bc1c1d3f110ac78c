"""Structures of the invariant kernel for Hopper; see ``..structures``.

Fields in upper case are constants of a build, lower-case fields are run-time values; no structure
has both. The host passes the fields of the first structures one by one, in this order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# ---- what the host passes


class Arguments(NamedTuple):
    """Tensor maps (TMA) and pointers, or None."""

    q_desc: Any
    k_desc: Any  # None: a warpgroup loads keys and values; see ``gather.py``
    v_desc: Any
    out_desc: Any
    k_ptr: Any
    v_ptr: Any
    new_k_ptr: Any  # dense keys and values that follow those in pages
    new_v_ptr: Any
    k_descale_ptr: Any
    v_descale_ptr: Any
    lse_ptr: Any
    part_out_ptr: Any  # sums of segments, to be merged later
    part_max_ptr: Any
    part_sum_ptr: Any
    park_ptr: Any  # a program's sums of earlier segments
    ticket_ptr: Any  # the tile counter
    sinks_ptr: Any
    block_table_ptr: Any
    cu_seqlens_q_ptr: Any
    cu_seqlens_k_ptr: Any
    seqlens_k_ptr: Any


class Scores(NamedTuple):
    """Scale, softcap and window of scores."""

    scale: Any
    softcap: Any
    window_left: Any
    window_right: Any


class Counts(NamedTuple):
    """Sizes of the problem, and its division into tickets."""

    batch: Any
    packs: Any  # groups of query heads that share a tile
    heads_k: Any
    tokens_q: Any  # per sequence if all have one length, else in total
    tokens_k: Any
    tiles: Any  # the order of tiles of sequences of one length; see ``pipeline.locate``
    span: Any
    last: Any
    parts: Any  # segments with their own tickets; 1: one program walks all segments
    total: Any  # tickets


class Strides(NamedTuple):
    """Rows from one page of a cache to the next, and strides in elements.

    The strides from ``stride_kb`` on are those of ``..structures.Numbers``, for loads.
    """

    page_rows_k: Any
    page_rows_v: Any
    stride_table_b: Any
    stride_table_p: Any
    stride_kb: Any
    stride_ks: Any
    stride_kh: Any
    stride_kx: Any
    stride_kd: Any
    stride_vb: Any
    stride_vs: Any
    stride_vh: Any
    stride_vd: Any
    stride_new_ks: Any
    stride_new_kh: Any
    stride_new_vs: Any
    stride_new_vh: Any


class Options(NamedTuple):
    """What a call computes, and the layout of its keys."""

    HAS_LEFT: Any
    HAS_RIGHT: Any
    HAS_SOFTCAP: Any
    FOLD: Any  # a positive scale is the only step between products and softmax
    PAGE: Any  # slots per page; 0: keys are dense
    PIECE: Any  # keys per TMA copy; 0: a warpgroup loads them
    DESCALE_NDIM: Any
    K_RUN: Any  # for loads, as in ``..structures.Options``
    K_BYTES: Any
    V_BYTES: Any
    ROW_BYTES: Any
    DECODE_FROM_CACHE: Any


class Tile(NamedTuple):
    """How a program divides its work."""

    GROUP: Any  # query heads per key head
    PACK: Any  # query heads that share a tile
    WARPGROUPS: Any
    ROWS: Any  # of a warpgroup
    BLOCK_N: Any
    HEAD_DIM: Any  # padded
    HEAD_DIM_V: Any
    WIDTH: Any  # not padded
    WIDTH_V: Any
    STAGES_K: Any
    STAGES_V: Any
    SHARE: Any  # the output is staged in the memory of the queries
    SEGMENT: Any  # tiles of keys


# ---- passed from the entry to the warps


class Pipeline(NamedTuple):
    """Shared memory, and the mbarriers that signal full and empty buffers."""

    q_s: Any
    k_s: Any
    v_s: Any
    out_s: Any
    fields_s: Any  # the producer's descriptions of tiles
    q_full: Any
    q_empty: Any
    k_full: Any
    v_full: Any
    tile_full: Any
    tile_empty: Any


class Parts(NamedTuple):
    """Where sums of segments are written."""

    out_ptr: Any
    max_ptr: Any
    sum_ptr: Any
    park_ptr: Any


class Results(NamedTuple):
    """What consumers read and write besides shared memory."""

    lse_ptr: Any
    parts: Any
    sinks_ptr: Any
    cu_seqlens_q_ptr: Any
    scores: Any
    counts: Any


class Inputs(NamedTuple):
    """What the producer reads."""

    q_desc: Any
    k_desc: Any
    v_desc: Any
    k_ptr: Any
    v_ptr: Any
    new_k_ptr: Any
    new_v_ptr: Any
    k_descale_ptr: Any
    v_descale_ptr: Any
    block_table_ptr: Any
    cu_seqlens_q_ptr: Any
    cu_seqlens_k_ptr: Any
    seqlens_k_ptr: Any
    ticket_ptr: Any
    scores: Any
    counts: Any
    strides: Any


# ---- passed between device functions


class Work(NamedTuple):
    """A tile of queries; a head of -1 means that none is left.

    ``part`` is the only segment to walk, or -1 for all.
    """

    head: Any
    sequence: Any
    first_row: Any
    q_start: Any
    len_q: Any
    len_k: Any
    part: Any


class KeyTiles(NamedTuple):
    """Tiles of keys ``[low, high)``; the tiles ``[left, right)`` need no mask."""

    low: Any
    left: Any
    right: Any
    high: Any


class Seen(NamedTuple):
    """The keys ``[first, last)`` of a head that some row of a tile of queries sees."""

    sequence: Any
    head: Any
    start: Any  # of the sequence's dense keys, or of its new keys
    context: Any  # keys from here on are new
    first: Any
    last: Any


class Lines(NamedTuple):
    """Addresses and strides of the keys or values of a cache, and of new ones."""

    ptr: Any
    stride_page: Any
    stride_slot: Any
    stride_head: Any
    stride_run: Any
    stride_number: Any
    new_ptr: Any
    stride_new: Any
    stride_new_head: Any


class Layout(NamedTuple):
    """Constants of ``Lines``."""

    WIDTH: Any
    RUN: Any  # consecutive numbers
    BYTES: Any  # alignment of every run; 0: its numbers have gaps
    NEW_BYTES: Any


class Queries(NamedTuple):
    """The queries of a warpgroup, row by row."""

    q: Any
    rows: Any  # positions of the queries on the axis of keys
    len_k: Any
    factor: Any


class State(NamedTuple):
    """The running softmax; ``o`` lacks the product of ``p`` and the last tile of values."""

    o: Any
    m: Any
    l: Any
    p: Any
    turn: Any
