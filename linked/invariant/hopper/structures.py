"""Structures that the functions of the kernel for Hopper pass on; see ``arguments.py``."""

from __future__ import annotations

from typing import Any, NamedTuple

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
    places: Any


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
    strides: Any
    new_ptr: Any
    new_strides: Any


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
