"""Structures of arguments of the device functions of the Hopper forward.

Constants of a build have fields in upper case and are passed as ``gl.constexpr``. Values that are
known at run time have fields in lower case. No structure mixes the two: a constant inside a
run-time structure becomes a tensor as soon as the structure is assigned to a name.

``gl.warp_specialize`` stores what the partitions capture in the order in which fields come.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Options(NamedTuple):
    """Constants of the form of a call."""

    GROUP: Any  # query heads per key head
    PACK: Any  # those of them that share a tile
    HAS_LEFT: Any  # masks: a window's far end, and the diagonal
    HAS_RIGHT: Any
    HAS_SOFTCAP: Any
    RAGGED: Any  # form of the TMA descriptors; see ``coordinates``
    BIAS_BATCH: Any  # which dimensions of a bias are not broadcast
    BIAS_HEADS: Any
    BIAS_ROWS: Any
    MERGES: Any  # with results over other keys


class Tile(NamedTuple):
    """Constants of a build: sizes of tiles, numbers of buffers, and how the warpgroups walk."""

    WARPGROUPS: Any  # that multiply
    ROWS: Any  # of queries, of a warpgroup
    BLOCK_N: Any  # keys
    HEAD_DIM: Any  # columns of queries and keys; of the wide panel if there is a narrow one
    NARROW: Any  # columns of the narrow panel, or 0; see ``panels.py``
    HEAD_DIM_V: Any  # likewise of values and output
    NARROW_V: Any
    BUFFERS_Q: Any  # of every warpgroup
    STAGES_K: Any
    STAGES_V: Any
    STAGES_B: Any  # of the bias
    SHARE: Any  # the output is stored from the buffer of the queries
    PIPELINE: Any  # the walk does not stop between blocks of queries
    LAG: Any  # pivots may lag behind the maxima
    ORDERED: Any  # the softmax ends ahead of the wait for the product with the values


class Problem(NamedTuple):
    """Tensors and numbers of a call that the consumers read; the producer reads some of them."""

    lse_ptr: Any
    cu_seqlens_q_ptr: Any  # None: all sequences have one length
    alibi_slopes_ptr: Any
    sinks_ptr: Any
    factors_ptr: Any  # FP8: per head the factors of scores and of values
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
    """What the producer alone reads: lengths of keys, and the order of the blocks of queries."""

    ticket_ptr: Any  # counts the blocks that programs have taken
    cu_seqlens_k_ptr: Any
    seqused_k_ptr: Any
    tokens_k: Any
    tiles: Any  # the rest is explained in ``locate``
    span: Any
    last: Any
    total: Any
    bias_desc: Any


class Before(NamedTuple):
    """Results over other keys, which lie where this call's will, and are merged with them."""

    stride_lse_b: Any
    stride_lse_h: Any
    full: Any  # mbarriers of the warpgroups: a tile of that output is in ``out_s``


class Finished(NamedTuple):
    """What the softmax of a block of queries ends with, ``[ROWS]`` each."""

    weight: Any  # of the output
    empty: Any  # no key was seen
    lse: Any
    kept: Any  # the weight of the output over other keys, if it is merged with one


class BiasRing(NamedTuple):
    """Tiles of the bias in shared memory, and the mbarriers that say when a stage is full."""

    tiles: Any  # [STAGES_B * WARPGROUPS, 1, 1, 1, ROWS, BLOCK_N], of one row [STAGES_B, ..]
    full: Any


class Pipeline(NamedTuple):
    """Buffers in shared memory, and the mbarriers that say when one is full or empty.

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
    """A block of queries, as the producer finds it by its ticket."""

    first_row: Any
    sequence: Any
    head: Any  # the first of those that share the block
    q_start: Any  # the first token of the sequence
    k_start: Any  # and the first key, without those ahead of every window
    len_q: Any
    len_k: Any


class Block(NamedTuple):
    """A block of queries, as the producer announces it to the consumers."""

    head: Any  # -1: there is no block left
    sequence: Any
    first_row: Any
    q_start: Any
    len_q: Any
    len_k: Any


class Walk(NamedTuple):
    """What a warpgroup's rows of a block walk over."""

    block: Any
    low: Any  # tiles of keys, as ``key_tiles`` returns them
    left: Any
    right: Any
    high: Any
    rows: Any  # [ROWS], counted from the one that faces key 0
    slope: Any  # ALiBi's, [ROWS, 1] or a number
    behind: Any  # with ALiBi: tiles of keys, as ``sides`` returns them
    ahead: Any
    dropout: Any  # its ``DropoutKey``, or 0


class State(NamedTuple):
    """What a warpgroup carries from one tile of keys to the next: the online softmax."""

    o: Any  # [ROWS, HEAD_DIM_V], a tuple of panels: output so far, without the last tile's
    m: Any  # [ROWS], maxima, or pivots
    l: Any  # [ROWS, 4], sums of exponentials, as far as a thread holds them
    p: Any  # [ROWS, BLOCK_N], probabilities of the last tile
    turn: Any  # tiles of keys so far, over all blocks


class Fp8State(NamedTuple):
    """What ``State`` is in FP8."""

    o: Any  # [ROWS, HEAD_DIM_V], output so far
    m: Any  # [ROWS], maxima
    l: Any  # [ROWS, 4], sums of exponentials, as far as a thread holds them
    turn: Any  # tiles of keys so far, over all blocks


class Search(NamedTuple):
    """Where the search for the next ticket's block begins; see ``_find_block``."""

    first: Any  # a sequence
    before: Any  # the blocks ahead of it
