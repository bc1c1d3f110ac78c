"""Structures of arguments of the tree kernels on Hopper, in addition to those of the dense kernels.

Fields in upper case are constants of a build; fields in lower case are run-time values.
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
    total: Any  # an upper bound of the number of blocks of queries


class TreeOptions(NamedTuple):
    """Constants of a call's signature."""

    GROUP: Any  # query heads per key head
    HAS_SOFTCAP: Any


class TreeSchedule(NamedTuple):
    """Values that only the producer of the forward reads."""

    ticket_ptr: Any  # tile counter: the blocks of queries that programs have taken
    parents_ptr: Any
    total: Any


class Run(NamedTuple):
    """The tokens of one segment: a run of keys, or of queries."""

    segment: Any  # -1: none
    start: Any
    length: Any


class Counted(NamedTuple):
    """The numbers of tiles of keys in all segments above a block's own."""

    tails: Any  # tiles that a segment does not fill
    wholes: Any  # tiles that a segment fills


class Path(NamedTuple):
    """The keys that a warpgroup's rows of a block see: of their own segment, and all above."""

    own: Any  # the ``Walk`` over their own segment
    tails: Any  # number of tiles that a segment above does not fill
    wholes: Any  # number of tiles that all rows see whole, in all segments


# ---- backward


class TreeTensors(NamedTuple):
    """The tensors of ``tree_backward_kernel`` that have no map."""

    lse2_ptr: Any  # base-2 LSE: [heads_q, tokens]
    delta_ptr: Any  # [heads_q, tokens]
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
    tiles_q: Any  # slots for the tiles of queries of all segments
    tiles_k: Any  # slots for the blocks of keys of all segments


class Descent(NamedTuple):
    """Values with which the producer of the backward finds the segments below."""

    cu_seqlens_ptr: Any
    parents_ptr: Any
    links_ptr: Any
    segments: Any
    tiles_q: Any
    own: Any  # the ``Walk`` over the queries of the block's own segment, of one head


class Place(NamedTuple):
    """A tile of queries in the list of a program."""

    head: Any
    row: Any  # first row, within the run
    first_row: Any  # first row as the mask counts it
    dq_tile: Any  # index of the tile in the sums of dq
