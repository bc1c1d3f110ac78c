"""What launches pass to the attention kernel and to the kernels that merge, see ``entry``.

Fields in upper case are constants of a build, all others are run-time values; no structure has
both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..._cache.kernels.arguments import RowStrides, SlotStrides, TableStrides, VectorStrides
from ..._linked.launch.entries import Constant, Foreign, Number, Pointer

# ---- strides


class ValueStrides(NamedTuple):
    """Strides of the values of a cache, each of which is one run."""

    page: Number
    slot: Number
    head: Number
    number: Number


# ---- attention kernel


class Scores(NamedTuple):
    """The scale, softcap and window of the scores."""

    scale: Number
    softcap: Number
    window_left: Number
    window_right: Number


class Tensors(NamedTuple):
    """The tensors of a call, in the order of ``call.Tensors``; None if one is not given."""

    q_ptr: Foreign
    k_cache_ptr: Foreign
    v_cache_ptr: Foreign
    k_ptr: Foreign  # new keys and values
    v_ptr: Foreign
    block_table_ptr: Foreign
    cu_seqlens_q_ptr: Foreign
    seqlens_k_ptr: Foreign
    alibi_slopes_ptr: Foreign
    sinks_ptr: Foreign
    q_descale_ptr: Foreign
    k_descale_ptr: Foreign
    v_descale_ptr: Foreign
    k_scale_cache_ptr: Foreign  # a scale per slot and head
    v_scale_cache_ptr: Foreign
    out_scale_ptr: Foreign
    positions_ptr: Foreign
    tree_mask_ptr: Foreign
    out_ptr: Foreign
    lse_ptr: Foreign
    part_out_ptr: Pointer  # results of splits, which are merged later
    part_lse_ptr: Pointer


class Numbers(NamedTuple):
    """The numbers of a call."""

    scores: Scores
    batch: Number
    heads_k: Number
    tokens: Number
    units: Number  # tiles of rows that the sequences may have; see ``locate``
    splits: Number
    q: RowStrides
    out: RowStrides
    k_cache: VectorStrides
    v_cache: ValueStrides
    k: RowStrides
    v: RowStrides
    table: TableStrides
    slopes: Number  # from the slopes of one sequence, or token, to the next
    k_scales: SlotStrides
    v_scales: SlotStrides


class SourceLayout(NamedTuple):
    """Memory layout of keys and values: of a cache, or of new ones."""

    PAGE: Any  # slots of a page; 0: dense
    K: Any  # ``VectorLayout``
    V: Any
    V_AS_K: Any  # values have the strides of keys
    K_WORDS: Any  # ``Columns`` of a key, counted in words
    V_WORDS: Any
    IN_ORDER: Any = False  # a packed cache is read in memory order: see ``in_order.py``
    SLICES: Any = 1  # numbers per word; 1: no words
    WORD_BITS: Any = 0  # 16; 0: words are elements of the cache
    SCALED: Any = False  # scales per slot and head
    ZERO_POINTS: Any = False  # in the lowest bits of the scales


class Options(NamedTuple):
    """The features of a call, and how its tensors lie."""

    CACHE: Constant  # ``SourceLayout``
    NEW: Constant  # the same of new keys and values, or None
    ROW_BYTES: Constant  # alignment of the rows of q, k and v
    OUT_BYTES: Constant  # width of stores to out: the alignment of its rows, or one number
    PART_BYTES: Constant  # width of stores to partial results
    HAS_LEFT: Constant
    HAS_RIGHT: Constant
    HAS_SOFTCAP: Constant
    SIGNED_ALIBI: Constant
    FOLD: Constant  # scores need only a positive scale, which is folded into exp2
    DESCALE_NDIM: Constant
    SHIFT: Constant  # binary exponent added to p, so that fp8 keeps more of its small values
    OUT_MAX: Constant  # largest finite value of an fp8 output, 0 for other outputs
    DECODE_FROM_CACHE: Constant  # the key of a sequence's only query is in the cache


class Schedule(NamedTuple):
    """Which sequences a launch serves, and the rows of its tiles."""

    GROUP: Constant  # query heads per key head
    MIN_TOKENS: Constant  # fewest and most queries of a sequence served here
    MAX_TOKENS: Constant
    TILES: Constant  # tiles per sequence; 0: any number
    BLOCK_M: Constant


class Tile(NamedTuple):
    """Sizes of a step, and how it computes."""

    HEAD_DIM: Constant
    HEAD_DIM_V: Constant  # of values and outputs
    BLOCK_N: Constant
    BLOCK_D: Constant
    BLOCK_DV: Constant
    FILL_TOKENS: Constant  # padding tokens zeroed per extra program at the end of the grid; 0: none
    PRECISION: Constant
    UPCAST: Constant  # the interpreter multiplies in fp32
    PTX: Constant  # inline PTX may be used
    OVERLAP: Constant  # programs of the next kernel start while this one runs (PDL)


# ---- kernels that merge


class SplitMergeTensors(NamedTuple):
    """Partial results of splits, and the merged result."""

    part_out_ptr: Pointer
    part_lse_ptr: Pointer
    out_ptr: Foreign
    lse_ptr: Foreign
    cu_seqlens_q_ptr: Foreign
    out_scale_ptr: Foreign


class SplitMergeNumbers(NamedTuple):
    """Sizes of partial results, and strides of the merged one."""

    batch: Number
    heads_k: Number
    tokens: Number
    splits: Number
    rows: Number  # rows of a tile that can hold queries
    out: RowStrides


class SplitMergeTile(NamedTuple):
    """Sizes of what a program merges."""

    HEAD_DIM: Constant
    OUT_MAX: Constant  # as in ``Options``
    BLOCK_D: Constant
    ROWS: Constant  # rows of one program
    CHUNK: Constant  # splits that are read at once
    OVERLAP: Constant  # programs start while the previous kernel runs (PDL)


class StateMergeTensors(NamedTuple):
    """Two results over disjoint keys, and the merged result."""

    out_a_ptr: Foreign
    lse_a_ptr: Foreign
    out_b_ptr: Foreign
    lse_b_ptr: Foreign
    out_ptr: Foreign
    lse_ptr: Foreign
    out_scale_ptr: Foreign


class StateMergeNumbers(NamedTuple):
    """Sizes of two results, and strides of the merged one."""

    heads_q: Number
    tokens: Number
    out: RowStrides


class StateMergeTile(NamedTuple):
    """Sizes of what a program merges."""

    HEAD_DIM: Constant
    OUT_MAX: Constant
    BLOCK_D: Constant
    ROWS: Constant
