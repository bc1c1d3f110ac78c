"""Structures of arguments of the kernels for trees on Hopper, beside those of the dense ones.

As there, upper-case fields are constants of a build and lower-case fields values at run time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# ---- forward


class TreeForwardTensors(NamedTuple):
    """Maps and tensors of ``tree_forward_kernel``; ``sinks_ptr`` is optional."""

    q_desc: Any
    k_desc: Any
    v_desc: Any
    out_desc: Any
    lse_ptr: Any
    ticket_ptr: Any
    sinks_ptr: Any
    cu_seqlens_ptr: Any
    parents_ptr: Any


class TreeForwardNumbers(NamedTuple):
    """Numbers of ``tree_forward_kernel``."""

    scale: Any
    softcap: Any
    segments: Any
    heads_q: Any
    tokens: Any
    total: Any  # an upper bound of the number of tickets


class TreeOptions(NamedTuple):
    """Constants of the form of a call."""

    GROUP: Any  # query heads per key head
    HAS_SOFTCAP: Any


class TreeSchedule(NamedTuple):
    """What the producer of the forward alone reads."""

    ticket_ptr: Any  # counts the blocks of queries that programs have taken
    parents_ptr: Any
    total: Any


class Run(NamedTuple):
    """The tokens of one segment: a run of keys, or of queries."""

    segment: Any  # -1: there is none
    start: Any
    length: Any


class Counted(NamedTuple):
    """The tiles of keys of all segments above a block's own."""

    tails: Any  # those that a segment does not fill
    wholes: Any  # the others


class Path(NamedTuple):
    """What a warpgroup's rows of a block walk over: keys of their own segment, and those above."""

    own: Any  # the ``Walk`` over their own segment
    tails: Any  # tiles of other segments that these do not fill
    wholes: Any  # tiles that all rows see whole, of all segments


# ---- backward


class TreeTensors(NamedTuple):
    """The tensors of ``tree_backward_kernel`` that have no map."""

    lse2_ptr: Any  # base-2 LSE: [heads_q, tokens]
    delta_ptr: Any  # of the same shape
    cu_seqlens_ptr: Any
    parents_ptr: Any
    links_ptr: Any  # [2, segments]; see ``link_kernel``
    below_ptr: Any  # [segments]; see ``count_below_kernel``


class TreeNumbers(NamedTuple):
    """The numbers of ``tree_backward_kernel``."""

    scale: Any
    softcap: Any
    segments: Any
    heads_k: Any
    tokens: Any
    tiles_q: Any  # slots that hold the tiles of queries of all segments
    tiles_k: Any  # and the blocks of keys


class Descent(NamedTuple):
    """What the producer of the backward follows to the segments below."""

    cu_seqlens_ptr: Any
    parents_ptr: Any
    links_ptr: Any
    segments: Any
    tiles_q: Any
    own: Any  # the ``Walk`` over the queries of the block's own segment, of one head


class Place(NamedTuple):
    """A tile of queries in the list of a program."""

    head: Any
    row: Any  # of its run
    first_row: Any  # the row that its first query is for the mask
    dq_tile: Any  # the tile in the sums of dq
