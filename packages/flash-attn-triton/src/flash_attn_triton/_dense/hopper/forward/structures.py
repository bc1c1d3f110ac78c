"""Structures that device functions of the Hopper forward pass on to each other.

All fields are run-time values: a constant inside a run-time structure becomes a tensor as soon as
the structure is assigned to a name. ``gl.warp_specialize`` stores captured values in the order of
the fields.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .arguments import Numbers, Tensors


class Finished(NamedTuple):
    """Results of the softmax of a block of queries, ``[ROWS]`` each."""

    weight: Any  # factor of the output
    empty: Any  # the row saw no key
    lse: Any
    kept: Any  # factor of the earlier output, if results are merged


class BiasRing(NamedTuple):
    """The bias: its map, tiles in shared memory, and mbarriers that signal a full stage."""

    desc: Any
    tiles: Any  # [STAGES_B * WARPGROUPS, 1, 1, 1, ROWS, BLOCK_N], of one row [STAGES_B, ..]
    full: Any


class Pipeline(NamedTuple):
    """Buffers in shared memory, and the mbarriers that signal that one is full or empty.

    Tiles lie in panels: their buffers are tuples of one or two; see ``panels.py``.
    """

    q_s: Any  # [BUFFERS_Q * WARPGROUPS, 1, 1, PACK, ROWS // PACK, HEAD_DIM]
    k_s: Any  # [STAGES_K, 1, 1, 1, BLOCK_N, HEAD_DIM]
    v_s: Any  # [STAGES_V, 1, 1, 1, BLOCK_N, HEAD_DIM_V], FP8: [.., HEAD_DIM_V, BLOCK_N]
    out_s: Any  # [WARPGROUPS, 1, 1, PACK, ROWS // PACK, HEAD_DIM_V]
    fields_s: Any  # [SLOTS, FIELDS], the numbers of ``Block``
    q_full: Any
    q_empty: Any
    k_full: Any
    v_full: Any
    tile_full: Any  # of ``fields_s``
    tile_empty: Any


class Panels(NamedTuple):
    """The maps of each tensor, a tuple of one or two; see ``panels.py``."""

    q_descs: Any
    k_descs: Any
    v_descs: Any
    out_descs: Any


class Program(NamedTuple):
    """State that the roles of a warp-specialised program share.

    ``gl.warp_specialize`` hands it to the warps in the order of the fields.
    """

    maps: Panels
    pipeline: Pipeline
    tensors: Tensors
    numbers: Numbers
    bias: Any  # None, or a ``BiasRing``
    # None, or with ``MERGES`` one mbarrier per warpgroup: its tile of the earlier output, which
    # the merged output replaces, is in ``out_s``
    before: Any
    # None, or [STAGES_K, 1]: numbers of keys from a tile's first key on to the end of its segment
    tails_s: Any
    factor: Any  # None, or in consumers: brings logits to base 2


class Task(NamedTuple):
    """A block of queries, as the producer finds it from the tile counter."""

    first_row: Any
    sequence: Any
    head: Any  # the first of the heads that share the block
    q_start: Any  # the first token of the sequence
    k_start: Any  # the first key, after the keys before every window
    len_q: Any
    len_k: Any


class Block(NamedTuple):
    """A block of queries, as the producer announces it to the consumers."""

    head: Any  # -1: no block is left
    sequence: Any
    first_row: Any
    q_start: Any
    len_q: Any
    len_k: Any


class Walk(NamedTuple):
    """The tiles of keys that a warpgroup's rows of a block visit.

    Tiles by key: masked [low, left), whole [left, right), masked [right, high). With ALiBi, keys of
    tiles [left, behind) lie before all rows, and keys of tiles [ahead, right) after all rows.
    """

    block: Any
    low: Any  # see ``key_tiles``
    left: Any
    right: Any
    high: Any
    rows: Any  # [ROWS], the key that each row stands at
    slope: Any  # of ALiBi, [ROWS, 1] or a number
    behind: Any  # see ``sides``
    ahead: Any
    dropout: Any  # a ``DropoutKey``, or 0


class State(NamedTuple):
    """The online softmax, which a warpgroup carries from one tile of keys to the next."""

    o: Any  # [ROWS, HEAD_DIM_V], a tuple of panels: output so far, without the last tile's
    m: Any  # [ROWS], maxima, or pivots
    l: Any  # [ROWS, 4], partial sums of exponentials: those of a thread's columns
    p: Any  # [ROWS, BLOCK_N], probabilities of the last tile
    turn: Any  # tiles of keys so far, over all blocks


class Fp8State(NamedTuple):
    """``State`` in FP8."""

    o: Any  # [ROWS, HEAD_DIM_V], output so far
    m: Any  # [ROWS], maxima
    l: Any  # [ROWS, 4], partial sums of exponentials: those of a thread's columns
    turn: Any  # tiles of keys so far, over all blocks


class Search(NamedTuple):
    """Where the search for the program's next block begins; see ``find_block``."""

    first: Any  # a sequence
    before: Any  # number of blocks before it
