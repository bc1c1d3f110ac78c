"""Structures of arguments of the device functions of the Hopper forward.

Fields in upper case are constants of a build, passed as ``gl.constexpr``; fields in lower case are
run-time values. No structure mixes the two: a constant inside a run-time structure becomes a
tensor as soon as the structure is assigned to a name.

``gl.warp_specialize`` stores captured values in the order of the fields.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Options(NamedTuple):
    """Constants of a call's signature."""

    GROUP: Any  # query heads per key head
    PACK: Any  # query heads that share a tile (GQA packing)
    HAS_LEFT: Any  # the window limits how far back a row sees
    HAS_RIGHT: Any  # causal, or the window limits how far forward a row sees
    HAS_SOFTCAP: Any
    RAGGED: Any  # the TMA descriptors are ragged; see ``coordinates``
    BIAS_BATCH: Any  # which dimensions of a bias are not broadcast
    BIAS_HEADS: Any
    BIAS_ROWS: Any
    MERGES: Any  # merge with results over other keys


class Tile(NamedTuple):
    """Constants of a build: tile sizes, numbers of buffers, and how the warpgroups walk."""

    WARPGROUPS: Any  # consumer warpgroups
    ROWS: Any  # rows of queries per warpgroup
    BLOCK_N: Any  # keys per tile
    HEAD_DIM: Any  # columns of queries and keys; of the wide panel if there is a narrow one
    NARROW: Any  # columns of the narrow panel, or 0; see ``panels.py``
    HEAD_DIM_V: Any  # the same two for values and output
    NARROW_V: Any
    BUFFERS_Q: Any  # query buffers per warpgroup
    STAGES_K: Any
    STAGES_V: Any
    STAGES_B: Any  # stages of the bias
    SHARE: Any  # the output is stored from the buffer of the queries
    PIPELINE: Any  # the walk does not stop between blocks of queries
    LAG: Any  # pivots may be smaller than the maxima
    ORDERED: Any  # the softmax ends before the wait for the product with the values


class Problem(NamedTuple):
    """Tensors and numbers of a call that the consumers read; the producer reads some of them."""

    lse_ptr: Any
    cu_seqlens_q_ptr: Any  # None: all sequences have one length
    alibi_slopes_ptr: Any
    sinks_ptr: Any
    factors_ptr: Any  # FP8: one factor of the scores and one of the values per head
    rng_state_ptr: Any  # None without dropout
    scale: Any
    softcap: Any
    keep_scale: Any
    dropout_threshold: Any
    window_left: Any
    window_right: Any
    batch: Any
    heads_q: Any
    tokens_q: Any
    stride_alibi_b: Any
    bias: Any  # None, or its ``BiasRing``
    before: Any  # None, or ``Before``


class Schedule(NamedTuple):
    """Values that only the producer reads: key lengths, and the order of the query blocks."""

    ticket_ptr: Any  # tile counter: the query blocks that programs have taken
    cu_seqlens_k_ptr: Any
    seqused_k_ptr: Any
    tokens_k: Any
    tiles: Any  # ``locate`` explains tiles, span and last
    span: Any
    last: Any
    total: Any
    bias_desc: Any


class Before(NamedTuple):
    """Earlier results over other keys, in ``out`` and ``lse``; the merged results replace them."""

    stride_lse_b: Any
    stride_lse_h: Any
    full: Any  # one mbarrier per warpgroup: its tile of the earlier output is in ``out_s``


class Finished(NamedTuple):
    """Results of the softmax of a block of queries, ``[ROWS]`` each."""

    weight: Any  # factor of the output
    empty: Any  # the row saw no key
    lse: Any
    kept: Any  # factor of the earlier output, if results are merged


class BiasRing(NamedTuple):
    """Tiles of the bias in shared memory, and the mbarriers that signal a full stage."""

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
