"""What a launch passes to the kernel for Hopper, see ``entry``; its options are those of all."""

from __future__ import annotations

from typing import NamedTuple

from ...launch.entries import Constant, Foreign, Map, Number, Pointer
from ..arguments import KeyStrides, RowStrides, Scores, TableStrides, ValueStrides


class Tensors(NamedTuple):
    """Tensor maps (TMA) and pointers, or None."""

    q_desc: Map
    k_desc: Map  # None: a warpgroup loads keys and values; see ``gather.py``
    v_desc: Map
    out_desc: Map
    k_ptr: Foreign
    v_ptr: Foreign
    new_k_ptr: Foreign  # dense keys and values that follow those in pages
    new_v_ptr: Foreign
    k_descale_ptr: Foreign
    v_descale_ptr: Foreign
    lse_ptr: Foreign
    part_out_ptr: Pointer  # sums of segments, to be merged later
    part_max_ptr: Pointer
    part_sum_ptr: Pointer
    park_ptr: Pointer  # a program's sums of earlier segments
    ticket_ptr: Foreign  # the tile counter
    sinks_ptr: Foreign
    block_table_ptr: Foreign
    cu_seqlens_q_ptr: Foreign
    cu_seqlens_k_ptr: Foreign
    seqlens_k_ptr: Foreign


class Counts(NamedTuple):
    """Sizes of the problem, and its division into tickets."""

    batch: Number
    packs: Number  # groups of query heads that share a tile
    heads_k: Number
    tokens_q: Number  # per sequence if all have one length, else in total
    tokens_k: Number
    tiles: Number  # the order of tiles of sequences of one length; see ``pipeline.locate``
    span: Number
    last: Number
    parts: Number  # segments with their own tickets; 1: one program walks all segments
    total: Number  # tickets


class Places(NamedTuple):
    """Rows from one page of a cache to the next, and strides for loads."""

    page_rows_k: Number
    page_rows_v: Number
    table: TableStrides
    k: KeyStrides
    v: ValueStrides
    new_k: RowStrides
    new_v: RowStrides


class Numbers(NamedTuple):
    """The numbers of a call."""

    scores: Scores
    counts: Counts
    places: Places


class Tile(NamedTuple):
    """How a program divides its work."""

    PACK: Constant  # query heads that share a tile
    WARPGROUPS: Constant
    ROWS: Constant  # of a warpgroup
    BLOCK_N: Constant
    HEAD_DIM: Constant  # padded
    HEAD_DIM_V: Constant
    WIDTH: Constant  # not padded
    WIDTH_V: Constant
    STAGES_K: Constant
    STAGES_V: Constant
    SHARE: Constant  # the output is staged in the memory of the queries
    SEGMENT: Constant  # tiles of keys
