"""Structures of the invariant kernel for Hopper; see ``..structures``.

Fields in upper case are constants of a build, the others are known when a kernel runs; no structure
has both. The host passes the fields of the first part one by one, in this order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# ---- what the host passes


class Arguments(NamedTuple):
    """Tensor maps (TMA), and pointers; None for what is not given."""

    q_desc: Any
    k_desc: Any  # None: what TMA does not read, is loaded; see ``gather.py``
    v_desc: Any
    out_desc: Any
    k_ptr: Any
    v_ptr: Any
    new_k_ptr: Any  # dense keys and values behind those in pages
    new_v_ptr: Any
    k_descale_ptr: Any
    v_descale_ptr: Any
    lse_ptr: Any
    part_out_ptr: Any  # sums of segments that are merged later
    part_max_ptr: Any
    part_sum_ptr: Any
    park_ptr: Any  # a program's sums of the segments before
    ticket_ptr: Any  # the counter from which programs take their tiles
    sinks_ptr: Any
    block_table_ptr: Any
    cu_seqlens_q_ptr: Any
    cu_seqlens_k_ptr: Any
    seqlens_k_ptr: Any


class Scores(NamedTuple):
    """What turns products into scores, and which of them count."""

    scale: Any
    softcap: Any
    window_left: Any
    window_right: Any


class Counts(NamedTuple):
    """How much there is, and how it is shared out."""

    batch: Any
    packs: Any  # groups of query heads that share a tile
    heads_k: Any
    tokens_q: Any  # of a sequence where all have one length, else of all
    tokens_k: Any
    tiles: Any  # the order of tiles of sequences of one length; see ``pipeline.locate``
    span: Any
    last: Any
    parts: Any  # segments that have tickets of their own; 1: a program walks all
    total: Any  # tickets


class Strides(NamedTuple):
    """Rows from one page of a cache to the next, and strides; those from ``stride_kb`` on count
    elements of what is loaded, as in ``..structures.Numbers``."""

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
    """What is asked for, and how keys lie."""

    HAS_LEFT: Any
    HAS_RIGHT: Any
    HAS_SOFTCAP: Any
    FOLD: Any  # nothing but a positive scale is between products and softmax
    PAGE: Any  # slots of a page; 0: keys lie dense
    PIECE: Any  # keys that are copied at once; 0: they are loaded
    DESCALE_NDIM: Any
    K_RUN: Any  # of what is loaded, as in ``..structures.Options``
    K_BYTES: Any
    V_BYTES: Any
    ROW_BYTES: Any
    DECODE_FROM_CACHE: Any


class Tile(NamedTuple):
    """How a program divides its work."""

    GROUP: Any  # query heads per key head
    PACK: Any  # those of them that share a tile
    WARPGROUPS: Any
    ROWS: Any  # of a warpgroup
    BLOCK_N: Any
    HEAD_DIM: Any  # padded
    HEAD_DIM_V: Any
    WIDTH: Any  # not padded
    WIDTH_V: Any
    STAGES_K: Any
    STAGES_V: Any
    SHARE: Any  # the output leaves through the memory of the queries
    SEGMENT: Any  # tiles of keys


# ---- what the entry hands to the warps


class Pipeline(NamedTuple):
    """Shared memory, and the mbarriers that say when a part of it is full or empty."""

    q_s: Any
    k_s: Any
    v_s: Any
    out_s: Any
    fields_s: Any  # what the producer announces of a tile
    q_full: Any
    q_empty: Any
    k_full: Any
    v_full: Any
    tile_full: Any
    tile_empty: Any


class Parts(NamedTuple):
    """Where sums of segments go, and how many rows a segment has there."""

    out_ptr: Any
    max_ptr: Any
    sum_ptr: Any
    park_ptr: Any


class Results(NamedTuple):
    """What consumers read and write beside shared memory."""

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


# ---- what functions hand on


class Work(NamedTuple):
    """A tile of queries; a head of -1 means that none is left.

    ``part`` is the one segment that is walked, or -1 for all.
    """

    head: Any
    sequence: Any
    first_row: Any
    q_start: Any
    len_q: Any
    len_k: Any
    part: Any


class KeyTiles(NamedTuple):
    """Tiles of keys from ``low`` up to ``high``; those from ``left`` up to ``right`` are whole."""

    low: Any
    left: Any
    right: Any
    high: Any


class Seen(NamedTuple):
    """Of a head of keys those that some row of a tile of queries sees: ``[first, last)``."""

    sequence: Any
    head: Any
    start: Any  # of the sequence, or of its new keys, where keys lie dense
    context: Any  # keys from here on are new
    first: Any
    last: Any


class Lines(NamedTuple):
    """Where the keys, or the values, of a cache lie, and new ones."""

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
    RUN: Any  # numbers that follow each other
    BYTES: Any  # alignment of every run; 0: its numbers have gaps
    NEW_BYTES: Any


class Queries(NamedTuple):
    """What keys are held against, row by row."""

    q: Any
    rows: Any  # counted from the one that faces key 0
    len_k: Any
    factor: Any


class State(NamedTuple):
    """The running softmax: ``o`` lacks the product of ``p`` with the last tile of values."""

    o: Any
    m: Any
    l: Any
    p: Any
    turn: Any
