"""Arguments of the portable kernels, by names: what the host passes.

Fields in upper case are constants of a compilation, the others are known when a kernel runs; no
structure has both. The host passes the fields one by one, in this order; an entry puts them
together again, by who reads them (``structures.py``).
"""

from typing import Any, NamedTuple


def pointers_of_callers(fields: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of some pointers that may begin anywhere; partial results are the package's."""
    return tuple(name for name in fields if not name.startswith("part_"))


# ---- attention kernel


class Pointers(NamedTuple):
    """The tensors of a call, in the order of its ``Tensors``; None for those that are not given."""

    q_ptr: Any
    k_cache_ptr: Any
    v_cache_ptr: Any
    k_ptr: Any  # new keys and values, beside the cache
    v_ptr: Any
    block_table_ptr: Any
    cu_seqlens_q_ptr: Any
    seqlens_k_ptr: Any
    alibi_slopes_ptr: Any
    sinks_ptr: Any
    q_descale_ptr: Any
    k_descale_ptr: Any
    v_descale_ptr: Any
    k_scale_cache_ptr: Any  # a scale for each slot and head of keys
    v_scale_cache_ptr: Any
    out_scale_ptr: Any
    positions_ptr: Any
    tree_mask_ptr: Any
    out_ptr: Any
    lse_ptr: Any
    part_out_ptr: Any  # results of splits, which are merged later
    part_lse_ptr: Any


class Scores(NamedTuple):
    """What turns products into scores, and which of them count."""

    scale: Any
    softcap: Any
    window_left: Any
    window_right: Any


class Counts(NamedTuple):
    """How much there is, and how it is shared out."""

    batch: Any
    heads_k: Any
    tokens: Any
    units: Any  # tiles of rows that a sequence may have; see ``locate``
    splits: Any


class Strides(NamedTuple):
    """Strides: s of a token or slot, h of a head, p of a page, x of a run, d of a number.

    Those of a cache are in words, if it is read in words; all others are in numbers.
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
    stride_skp: Any  # of the scales of slots, as of what they scale
    stride_sks: Any
    stride_skh: Any
    stride_svp: Any
    stride_svs: Any
    stride_svh: Any


class CacheLayout(NamedTuple):
    """How the vectors of a cache lie."""

    PAGE: Any  # slots of a page; 0: keys that lie dense, in no page
    K_RUN: Any  # numbers of a key that follow each other
    K_UNIT: Any  # without gaps
    K_BYTES: Any  # alignment of every run
    V_UNIT: Any
    V_BYTES: Any


class Layout(NamedTuple):
    """How the vectors of a source of keys and values lie: of a cache, or of what is new."""

    PAGE: Any
    K_RUN: Any
    K_UNIT: Any
    K_BYTES: Any
    V_UNIT: Any
    V_BYTES: Any
    V_COLUMN_RUN: Any  # neighbouring slots follow each other, so many of them; 0: columns do
    V_AS_K: Any  # values have the strides of keys
    IN_ORDER: Any  # read in the order in which a packed cache lies; see ``in_order.py``
    SLICES: Any  # numbers of a word; 1: numbers are read one by one
    WORD_BITS: Any  # 16; 0: words are elements of the cache


class RowLayout(NamedTuple):
    """How rows of queries, outputs and new keys and values lie."""

    NEW_V_AS_K: Any  # new values have the strides of new keys
    ROW_BYTES: Any  # alignment of the rows of q, k and v
    OUT_BYTES: Any  # alignment of the rows of out, as far as stores are to be that wide
    PART_BYTES: Any  # and of those of partial results


class Options(NamedTuple):
    """What is asked for."""

    HAS_LEFT: Any
    HAS_RIGHT: Any
    HAS_SOFTCAP: Any
    SIGNED_ALIBI: Any
    FOLD: Any  # plain scores with a positive scale
    DESCALE_NDIM: Any
    SHIFT: Any  # binary exponent added to p, so that fp8 holds it well
    OUT_MAX: Any  # largest finite value of an fp8 output, 0 for other outputs
    DECODE_FROM_CACHE: Any  # the key of a single query is in the cache, not dense


class Schedule(NamedTuple):
    """Which rows of which sequences a launch serves, in tiles of how many."""

    GROUP: Any  # query heads per key head
    MIN_TOKENS: Any  # queries of the sequences served here
    MAX_TOKENS: Any
    TILES: Any  # tiles per sequence; 0: any number
    BLOCK_M: Any


class Tile(NamedTuple):
    """What a step works on, and how."""

    HEAD_DIM: Any
    HEAD_DIM_V: Any  # of values and outputs
    BLOCK_N: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    FILL_TOKENS: Any  # tokens that a program behind all clears of padding; 0: none
    PRECISION: Any
    UPCAST: Any  # the interpreter multiplies in fp32
    PTX: Any  # inline PTX may be used
    OVERLAP: Any  # programs of the kernel behind are set up while this one still runs


# ---- kernels that merge


class SplitMergePointers(NamedTuple):
    """Partial results of splits, and where the merged ones go."""

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
    rows: Any  # rows of a tile that can hold any
    stride_os: Any
    stride_oh: Any


class SplitMergeTile(NamedTuple):
    """What a program merges."""

    HEAD_DIM: Any
    OUT_MAX: Any  # as in ``Options``
    BLOCK_D: Any
    ROWS: Any  # rows of one program
    CHUNK: Any  # splits that are read at once
    OVERLAP: Any  # programs are set up while the kernel before still runs


class StateMergePointers(NamedTuple):
    """Two results over disjoint keys, and where the merged one goes."""

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
    """What a program merges."""

    HEAD_DIM: Any
    OUT_MAX: Any
    BLOCK_D: Any
    ROWS: Any


# ---- kernel that writes into a cache


class WritePointers(NamedTuple):
    """New keys and values, and where they go."""

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
    """What a program writes, and how."""

    HEADS: Any
    HEAD_DIM: Any
    HEAD_DIM_V: Any
    ROW_BYTES: Any  # alignment of the rows of k and v
    SCALE_PER_HEAD: Any
    FP8_MAX: Any  # largest finite value of an fp8 cache, 0 for other caches
    INT_MAX: Any  # largest code of a cache with a scale in each slot, 0 for other caches
    BLOCK_T: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    OVERLAP: Any  # programs are set up while the kernel before still runs


# ---- kernels for a cache of rows or pages that a call appends to


class AppendPointers(NamedTuple):
    """What is appended, and to what, in the order of ``AppendTensors``."""

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
    """How much there is, and how much room."""

    batch: Any
    seqlen_new: Any
    seqlen_q: Any
    page: Any  # slots of a page, or of a row
    room: Any  # slots that a sequence has
    pages: Any  # pages, or rows, of the cache
    seqlen_ro: Any


class AppendStrides(NamedTuple):
    """Strides, named as in ``Strides``; t of a position in the tables of rotations."""

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
    """What a program writes, and how."""

    HEADS_Q: Any
    HEADS_K: Any
    HEAD_DIM: Any
    HEAD_DIM_V: Any
    ROTARY_DIM: Any  # 0: nothing is rotated
    INTERLEAVED: Any
    MOVING: Any  # queries stand one behind the other
    ROW_BYTES: Any  # alignment of the rows of q, k and v
    K_UNIT: Any  # keys in the cache have no gaps
    K_BYTES: Any  # alignment of every key
    V_UNIT: Any
    V_BYTES: Any
    INT_MAX: Any  # the largest code of a quantised cache; 0: none
    BLOCK_T: Any
    BLOCK_D: Any
    BLOCK_DV: Any


class PagePointers(NamedTuple):
    """Lengths and rows of a cache, and what of the attention kernel's arguments they come to."""

    cache_seqlens_ptr: Any
    cache_batch_idx_ptr: Any
    cache_leftpad_ptr: Any
    starts_ptr: Any
    lengths_ptr: Any
    table_ptr: Any


class PageCounts(NamedTuple):
    """How much there is."""

    seqlen_q: Any
    new: Any  # keys behind those that ``cache_seqlens`` counts
    row_pages: Any  # pages, which begin at every slot, from one row to the next
    step: Any  # and from one page of a sequence to the next
    pages: Any  # of a sequence


class PageTile(NamedTuple):
    """What a program writes at once."""

    BLOCK: Any  # entries
