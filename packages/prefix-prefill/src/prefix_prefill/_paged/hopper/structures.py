"""Arguments of the kernel for Hopper, by names; see ``portable/parameters.py``.

The host makes the structures of the first part, and the entry puts them together again, by who
reads them.
"""

from typing import Any, NamedTuple

# ---- what the host passes


class Arguments(NamedTuple):
    """Tensor maps (TMA), and pointers; None for what is not given."""

    q_desc: Any
    k_desc: Any
    v_desc: Any
    new_k_desc: Any  # None where all keys are in the cache
    new_v_desc: Any
    out_desc: Any  # None where the output is fp32, which goes out of registers
    out_ptr: Any  # None where it is not
    lse_ptr: Any
    ticket_ptr: Any  # the counter from which programs take their tiles
    block_table_ptr: Any
    cu_seqlens_q_ptr: Any
    seqlens_k_ptr: Any
    alibi_slopes_ptr: Any
    sinks_ptr: Any


class Scores(NamedTuple):
    """What turns products into scores, and which of them count."""

    scale: Any
    softcap: Any
    window_left: Any
    window_right: Any


class Counts(NamedTuple):
    """How much there is, and how it is shared out."""

    batch: Any
    packs: Any  # groups of query heads that share a tile
    tokens: Any
    total: Any  # tickets


class Strides(NamedTuple):
    """Rows between pages of a cache; strides of the output, and of what is given by sequence."""

    page_rows_k: Any
    page_rows_v: Any
    stride_os: Any
    stride_oh: Any
    stride_table_b: Any
    stride_table_p: Any
    stride_alibi_b: Any


class Options(NamedTuple):
    """What is asked for."""

    HAS_LEFT: Any
    HAS_RIGHT: Any
    HAS_SOFTCAP: Any
    HAS_NEW: Any  # keys of the queries' tokens are beside the cache
    DESCALE_NDIM: Any  # of the scales of an FP8 cache


class Tile(NamedTuple):
    """How a program divides its work; see ``HopperTile``."""

    GROUP: Any  # query heads per key head
    PACK: Any  # those of them that share a tile
    PAGE: Any
    PIECE: Any  # keys that are copied at once, of one page
    NEW_PIECE: Any  # likewise of new keys
    MIN_TOKENS: Any  # queries of the sequences served here
    ROWS: Any  # of a warpgroup
    BLOCK_N: Any
    HEAD_DIM: Any  # of a tile
    WIDTH: Any  # and of the tensors
    STAGES_K: Any
    STAGES_V: Any
    BUFFERS_Q: Any  # tiles of queries, of each warpgroup
    WARPGROUPS: Any  # that multiply
    SHARE: Any  # the output leaves through the memory of the queries
    WARPS: Any  # that bring keys
    WIDENERS: Any  # warpgroups that widen keys and values; 0: TMA copies them
    PARTIES: Any  # threads that meet where a stage becomes free: theirs, and those that multiply


# ---- what the entry hands to the warps


class Pipeline(NamedTuple):
    """Shared memory, and the mbarriers that say when a part of it is full or empty."""

    q_s: Any
    k_s: Any
    v_s: Any
    out_s: Any
    fields_s: Any  # what the producer announces of a tile
    q_full: Any
    q_empty: Any
    k_full: Any
    v_full: Any
    tile_full: Any
    tile_empty: Any


class Rows(NamedTuple):
    """Where rows of tokens and heads lie."""

    ptr: Any
    stride_token: Any
    stride_head: Any


class Results(NamedTuple):
    """What consumers read and write beside shared memory."""

    out: Any  # where it is fp32
    lse_ptr: Any
    alibi_slopes_ptr: Any
    sinks_ptr: Any
    k_descale_ptr: Any  # None but for FP8 caches
    v_descale_ptr: Any
    scores: Any
    tokens: Any
    stride_alibi_b: Any
    heads_k: Any = None  # with scales of sequences
    scales_s: Any = None  # shared memory for scales of keys and values, tile by tile


class WideArguments(NamedTuple):
    """Tensor maps, and pointers, of the kernel that widens keys; None for what is not given."""

    q_desc: Any
    new_k_desc: Any
    new_v_desc: Any
    out_desc: Any
    k_cache_ptr: Any
    v_cache_ptr: Any
    out_ptr: Any
    lse_ptr: Any
    ticket_ptr: Any
    block_table_ptr: Any
    cu_seqlens_q_ptr: Any
    seqlens_k_ptr: Any
    alibi_slopes_ptr: Any
    sinks_ptr: Any
    k_descale_ptr: Any
    v_descale_ptr: Any
    k_scale_cache_ptr: Any  # of caches of integers
    v_scale_cache_ptr: Any


class WideStrides(NamedTuple):
    """Rows from one page to the next; strides of slots and heads, and of what sequences have."""

    page_rows_k: Any
    page_rows_v: Any
    stride_kcs: Any
    stride_kch: Any
    stride_vcs: Any
    stride_vch: Any
    stride_os: Any
    stride_oh: Any
    stride_table_b: Any
    stride_table_p: Any
    stride_alibi_b: Any
    stride_skp: Any
    stride_sks: Any
    stride_skh: Any
    stride_svp: Any
    stride_svs: Any
    stride_svh: Any
    heads_k: Any


class CacheMap(NamedTuple):
    """The keys, or the values, of a cache."""

    desc: Any
    page_rows: Any  # rows from one page to the next


class WideCache(NamedTuple):
    """The keys, or values, of a cache in 8 or 4 bits."""

    ptr: Any
    page_rows: Any
    stride_slot: Any
    stride_head: Any


class Words(NamedTuple):
    """The keys, or values, of one head, in words; strides in words, too."""

    ptr: Any
    page_rows: Any  # slots from a page to the next
    stride_slot: Any


class Half(NamedTuple):
    """The keys, or the values: where they come from, and where they go."""

    cache: Any
    new_desc: Any
    full: Any
    memory: Any
    scales_s: Any  # with keys of a cache of integers, else None
    empty: Any  # the first of their named barriers
    stages: Any
    written: Any  # the named barrier of the warpgroup that brings them


class TokenScales(NamedTuple):
    """Scales of single tokens and heads, of keys or of values."""

    ptr: Any
    stride_page: Any
    stride_slot: Any
    stride_head: Any


class Table(NamedTuple):
    """The pages of all sequences."""

    ptr: Any
    stride_sequence: Any
    stride_page: Any


class Sequences(NamedTuple):
    """Where sequences begin, and how many keys they have."""

    cu_seqlens_q_ptr: Any
    seqlens_k_ptr: Any
    batch: Any


class Tickets(NamedTuple):
    """The counter of tickets, how many share a slot, and how many there are."""

    ptr: Any
    packs: Any
    total: Any


class Inputs(NamedTuple):
    """What the producer reads."""

    q_desc: Any
    k: Any
    v: Any
    new_k_desc: Any  # None where all keys are in the cache
    new_v_desc: Any
    table: Any
    sequences: Any
    tickets: Any
    scores: Any
    k_scales: Any = None  # of caches of integers
    v_scales: Any = None
    scales_s: Any = None


# ---- what functions hand on


class Announced(NamedTuple):
    """A tile of queries: its first head, sequence and row; a head of -1 means that none is left."""

    head: Any
    sequence: Any
    first_row: Any
    q_start: Any
    len_q: Any
    len_k: Any


class Work(NamedTuple):
    """The tile of queries of a ticket."""

    ticket: Any
    first_row: Any
    sequence: Any
    q_start: Any
    len_q: Any
    len_k: Any


class KeyTiles(NamedTuple):
    """Tiles of keys from ``low`` up to ``high``; those from ``left`` up to ``right`` are whole.

    The first ``context`` keys are in the cache. Tiles from ``new`` on hold new ones, and
    ``cached`` of the tiles that are walked do not; their keys begin ``shift`` later than else.
    """

    low: Any
    left: Any
    right: Any
    high: Any
    context: Any
    new: Any
    cached: Any
    shift: Any


class Queries(NamedTuple):
    """What keys are held against, row by row."""

    buffer: Any  # of the shared memory for queries
    rows: Any  # counted from the one that faces key 0
    slopes: Any  # None without ALiBi
    len_k: Any


class Factors(NamedTuple):
    """What products with the keys and values of a cache are multiplied by."""

    scale: Any
    flips: Any  # whether the scale of the keys is negative; None without one
    v_descale: Any  # None without one, and where no other values follow
    scales_s: Any  # of single tokens; None without them


class Seen(NamedTuple):
    """Of a head of keys those that some row of a tile of queries sees: ``[first, last)``."""

    head: Any
    first: Any
    last: Any


class Walk(NamedTuple):
    """What of the keys a producer copies for a tile of queries."""

    tiles: Any
    seen: Any
    new_seen: Any
    q_start: Any  # the first new key


class Softmax(NamedTuple):
    """The running softmax: ``o`` lacks the product of ``p`` with the last tile of values.

    Both are in ``unit``, where fp16 holds probabilities times scales; ``top`` is the largest of the
    units that all tiles asked for.
    """

    o: Any
    m: Any
    l: Any
    p: Any
    unit: Any
    top: Any
