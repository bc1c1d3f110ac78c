"""Arguments of the portable kernels, as the host passes them.

Fields in upper case are compile-time constants, all others are run-time values; no structure has
both. The host passes the fields one by one, in this order. An entry regroups them into the
structures of ``structures.py``.
"""

from typing import Any, NamedTuple


def pointers_of_callers(fields: tuple[str, ...]) -> tuple[str, ...]:
    """Return the pointers to tensors of the caller, whose alignment is unknown."""
    return tuple(name for name in fields if not name.startswith("part_"))


# ---- attention kernel


class Pointers(NamedTuple):
    """The tensors of a call, in the order of ``Tensors``; None if one is not given."""

    q_ptr: Any
    k_cache_ptr: Any
    v_cache_ptr: Any
    k_ptr: Any  # new keys and values
    v_ptr: Any
    block_table_ptr: Any
    cu_seqlens_q_ptr: Any
    seqlens_k_ptr: Any
    alibi_slopes_ptr: Any
    sinks_ptr: Any
    q_descale_ptr: Any
    k_descale_ptr: Any
    v_descale_ptr: Any
    k_scale_cache_ptr: Any  # a scale per slot and head
    v_scale_cache_ptr: Any
    out_scale_ptr: Any
    positions_ptr: Any
    tree_mask_ptr: Any
    out_ptr: Any
    lse_ptr: Any
    part_out_ptr: Any  # results of splits, which are merged later
    part_lse_ptr: Any


class Scores(NamedTuple):
    """The scale, softcap and window of the scores."""

    scale: Any
    softcap: Any
    window_left: Any
    window_right: Any


class Counts(NamedTuple):
    """Sizes of the batch and of the grid."""

    batch: Any
    heads_k: Any
    tokens: Any
    units: Any  # tiles of rows that the sequences may have; see ``locate``
    splits: Any


class Strides(NamedTuple):
    """Strides: s of a token or slot, h of a head, p of a page, x of a run, d of a number.

    Strides of a cache that is read in words count words; all others count numbers.
    """

    stride_qs: Any
    stride_qh: Any
    stride_os: Any
    stride_oh: Any
    stride_kcp: Any
    stride_kcs: Any
    stride_kch: Any
    stride_kcx: Any
    stride_kcd: Any
    stride_vcp: Any
    stride_vcs: Any
    stride_vch: Any
    stride_vcd: Any
    stride_ks: Any
    stride_kh: Any
    stride_vs: Any
    stride_vh: Any
    stride_table_b: Any
    stride_table_p: Any
    stride_alibi_b: Any
    stride_skp: Any  # of the scales per slot, named as for keys and values
    stride_sks: Any
    stride_skh: Any
    stride_svp: Any
    stride_svs: Any
    stride_svh: Any


class CacheLayout(NamedTuple):
    """Memory layout of the vectors (keys and values) of a cache."""

    PAGE: Any  # slots of a page; 0: dense keys without pages
    K_RUN: Any  # numbers of a key in one run
    K_UNIT: Any  # runs have no gaps
    K_BYTES: Any  # alignment of every run
    V_UNIT: Any
    V_BYTES: Any


class Layout(NamedTuple):
    """Memory layout of a source of keys and values: of a cache, or of new ones."""

    PAGE: Any
    K_RUN: Any
    K_UNIT: Any
    K_BYTES: Any
    V_UNIT: Any
    V_BYTES: Any
    V_COLUMN_RUN: Any  # neighbouring slots that are contiguous; 0: columns are
    V_AS_K: Any  # values have the strides of keys
    IN_ORDER: Any  # a packed cache is read in memory order: see ``in_order.py``
    SLICES: Any  # numbers per word; 1: no words
    WORD_BITS: Any  # 16; 0: words are elements of the cache


class RowLayout(NamedTuple):
    """Memory layout of the rows of queries, outputs and new keys and values."""

    NEW_V_AS_K: Any  # new values have the strides of new keys
    ROW_BYTES: Any  # alignment of the rows of q, k and v
    OUT_BYTES: Any  # width of stores to out: the alignment of its rows, or one number
    PART_BYTES: Any  # width of stores to partial results


class Options(NamedTuple):
    """The features of a call."""

    HAS_LEFT: Any
    HAS_RIGHT: Any
    HAS_SOFTCAP: Any
    SIGNED_ALIBI: Any
    FOLD: Any  # scores need only a positive scale, which is folded into exp2
    DESCALE_NDIM: Any
    SHIFT: Any  # binary exponent added to p, so that fp8 keeps more of its small values
    OUT_MAX: Any  # largest finite value of an fp8 output, 0 for other outputs
    DECODE_FROM_CACHE: Any  # the key of a sequence's only query is in the cache


class Schedule(NamedTuple):
    """Which sequences a launch serves, and the rows of its tiles."""

    GROUP: Any  # query heads per key head
    MIN_TOKENS: Any  # fewest and most queries of a sequence served here
    MAX_TOKENS: Any
    TILES: Any  # tiles per sequence; 0: any number
    BLOCK_M: Any


class Tile(NamedTuple):
    """Sizes of a step, and how it computes."""

    HEAD_DIM: Any
    HEAD_DIM_V: Any  # of values and outputs
    BLOCK_N: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    FILL_TOKENS: Any  # padding tokens zeroed per extra program at the end of the grid; 0: none
    PRECISION: Any
    UPCAST: Any  # the interpreter multiplies in fp32
    PTX: Any  # inline PTX may be used
    OVERLAP: Any  # programs of the next kernel start while this one runs (PDL)


# ---- kernels that merge


class SplitMergePointers(NamedTuple):
    """Partial results of splits, and the merged result."""

    part_out_ptr: Any
    part_lse_ptr: Any
    out_ptr: Any
    lse_ptr: Any
    cu_seqlens_q_ptr: Any
    out_scale_ptr: Any


class SplitMergeNumbers(NamedTuple):
    """Sizes and strides of partial and merged results."""

    batch: Any
    heads_k: Any
    tokens: Any
    splits: Any
    rows: Any  # rows of a tile that can hold queries
    stride_os: Any
    stride_oh: Any


class SplitMergeTile(NamedTuple):
    """Sizes of what a program merges."""

    HEAD_DIM: Any
    OUT_MAX: Any  # as in ``Options``
    BLOCK_D: Any
    ROWS: Any  # rows of one program
    CHUNK: Any  # splits that are read at once
    OVERLAP: Any  # programs start while the previous kernel runs (PDL)


class StateMergePointers(NamedTuple):
    """Two results over disjoint keys, and the merged result."""

    out_a_ptr: Any
    lse_a_ptr: Any
    out_b_ptr: Any
    lse_b_ptr: Any
    out_ptr: Any
    lse_ptr: Any
    out_scale_ptr: Any


class StateMergeNumbers(NamedTuple):
    """Sizes of two results, and strides of the merged one."""

    heads_q: Any
    tokens: Any
    stride_os: Any
    stride_oh: Any


class StateMergeTile(NamedTuple):
    """Sizes of what a program merges."""

    HEAD_DIM: Any
    OUT_MAX: Any
    BLOCK_D: Any
    ROWS: Any


# ---- kernel that writes into a cache


class WritePointers(NamedTuple):
    """New keys and values, the cache and the slots, in the order of ``WriteTensors``."""

    k_ptr: Any
    v_ptr: Any
    k_cache_ptr: Any
    v_cache_ptr: Any
    slot_mapping_ptr: Any
    k_scale_ptr: Any
    v_scale_ptr: Any
    k_scale_cache_ptr: Any
    v_scale_cache_ptr: Any


class WriteCounts(NamedTuple):
    """How many tokens are written, and how many slots there are."""

    tokens: Any
    slots: Any


class WriteStrides(NamedTuple):
    """Strides, named as in ``Strides``."""

    stride_slot: Any
    stride_ks: Any
    stride_kh: Any
    stride_vs: Any
    stride_vh: Any
    stride_kcp: Any
    stride_kcs: Any
    stride_kch: Any
    stride_kcx: Any
    stride_kcd: Any
    stride_vcp: Any
    stride_vcs: Any
    stride_vch: Any
    stride_vcx: Any
    stride_vcd: Any
    stride_skp: Any
    stride_sks: Any
    stride_skh: Any
    stride_svp: Any
    stride_svs: Any
    stride_svh: Any


class WriteTile(NamedTuple):
    """Sizes of what a program writes, and how it rounds."""

    HEADS: Any
    HEAD_DIM: Any
    HEAD_DIM_V: Any
    ROW_BYTES: Any  # alignment of the rows of k and v
    SCALE_PER_HEAD: Any
    FP8_MAX: Any  # largest finite value of an fp8 cache, 0 for other caches
    INT_MAX: Any  # largest code of a cache with a scale per token, 0 for other caches
    BLOCK_T: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    OVERLAP: Any  # programs start while the previous kernel runs (PDL)


# ---- kernels for a cache of rows or pages that a call appends to


class AppendPointers(NamedTuple):
    """The tensors of an append, in the order of ``AppendTensors``."""

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    k_cache_ptr: Any
    v_cache_ptr: Any
    cache_seqlens_ptr: Any
    cache_batch_idx_ptr: Any
    block_table_ptr: Any
    rotary_cos_ptr: Any
    rotary_sin_ptr: Any
    rotated_ptr: Any
    k_scale_cache_ptr: Any
    v_scale_cache_ptr: Any


class AppendCounts(NamedTuple):
    """Sizes of the batch and of the cache."""

    batch: Any
    seqlen_new: Any
    seqlen_q: Any
    page: Any  # slots of a page, or of a row
    room: Any  # slots of a sequence
    pages: Any  # pages, or rows, of the cache
    seqlen_ro: Any


class AppendStrides(NamedTuple):
    """Strides, named as in ``Strides``; t of a position in the tables of cosines and sines."""

    stride_qs: Any
    stride_qh: Any
    stride_ks: Any
    stride_kh: Any
    stride_vs: Any
    stride_vh: Any
    stride_kcp: Any
    stride_kcs: Any
    stride_kch: Any
    stride_kcd: Any
    stride_vcp: Any
    stride_vcs: Any
    stride_vch: Any
    stride_vcd: Any
    stride_table_b: Any
    stride_table_p: Any
    stride_cos_t: Any
    stride_cos_d: Any
    stride_sin_t: Any
    stride_sin_d: Any
    stride_skp: Any
    stride_sks: Any
    stride_skh: Any
    stride_svp: Any
    stride_svs: Any
    stride_svh: Any


class AppendTile(NamedTuple):
    """Sizes of what a program writes, and how it rotates and rounds."""

    HEADS_Q: Any
    HEADS_K: Any
    HEAD_DIM: Any
    HEAD_DIM_V: Any
    ROTARY_DIM: Any  # 0: nothing is rotated
    INTERLEAVED: Any
    MOVING: Any  # query i is at position i after the first new one
    ROW_BYTES: Any  # alignment of the rows of q, k and v
    K_UNIT: Any  # the numbers of a cached key have no gaps
    K_BYTES: Any  # alignment of every key
    V_UNIT: Any
    V_BYTES: Any
    INT_MAX: Any  # largest code of a quantised cache, 0 for other caches
    BLOCK_T: Any
    BLOCK_D: Any
    BLOCK_DV: Any


class PagePointers(NamedTuple):
    """Lengths and rows of a cache, and the attention kernel's arguments that they become."""

    cache_seqlens_ptr: Any
    cache_batch_idx_ptr: Any
    cache_leftpad_ptr: Any
    starts_ptr: Any
    lengths_ptr: Any
    table_ptr: Any


class PageCounts(NamedTuple):
    """Sizes of rows as pages; a page begins at every slot, so page numbers count slots."""

    seqlen_q: Any
    new: Any  # keys after those that ``cache_seqlens`` counts
    row_pages: Any  # page numbers from one row to the next
    step: Any  # page numbers from one page of a sequence to the next
    pages: Any  # pages of a sequence


class PageTile(NamedTuple):
    """Size of what a program writes at once."""

    BLOCK: Any  # entries
