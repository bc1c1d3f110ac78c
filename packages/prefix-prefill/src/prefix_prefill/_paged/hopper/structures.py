"""Structures that the functions of the Hopper kernels pass on; see ``arguments.py``."""

from typing import Any, NamedTuple

# ---- what the entry hands to the warps


class Pipeline(NamedTuple):
    """Shared memory, and the mbarriers that signal full and empty buffers."""

    q_s: Any
    k_s: Any
    v_s: Any
    out_s: Any
    fields_s: Any  # the announced tiles of queries
    q_full: Any
    q_empty: Any
    k_full: Any
    v_full: Any
    tile_full: Any
    tile_empty: Any


class Rows(NamedTuple):
    """An output ``[tokens, heads, head_dim]``."""

    ptr: Any
    strides: Any


class Results(NamedTuple):
    """What consumers read and write in global memory."""

    out: Any  # for an fp32 output
    lse_ptr: Any
    alibi_slopes_ptr: Any
    sinks_ptr: Any
    k_descale_ptr: Any  # None unless the cache is FP8
    v_descale_ptr: Any
    scores: Any
    tokens: Any
    stride_alibi_b: Any
    heads_k: Any = None  # for descales per sequence
    scales_s: Any = None  # shared memory: scales per token of keys and values, tile by tile


class CacheMap(NamedTuple):
    """The keys or the values of a cache."""

    desc: Any
    page_rows: Any  # rows from one page to the next


class WideCache(NamedTuple):
    """The keys or values of a cache in 8 or 4 bits."""

    ptr: Any
    page_rows: Any
    strides: Any


class Words(NamedTuple):
    """The keys or values of one head in words of 32 bits; strides count words."""

    ptr: Any
    page_rows: Any  # slots from one page to the next
    stride_slot: Any


class Half(NamedTuple):
    """The keys or the values: source, shared memory, barriers."""

    cache: Any
    new_desc: Any
    full: Any
    memory: Any
    scales_s: Any  # for keys of a cache of integers, else None
    empty: Any  # first named barrier of the stages
    stages: Any
    written: Any  # named barrier of the warpgroup that brings them


class TokenScales(NamedTuple):
    """Scales per token and head, of keys or values."""

    ptr: Any
    strides: Any


class Table(NamedTuple):
    """The page table."""

    ptr: Any
    stride_sequence: Any
    stride_page: Any


class Sequences(NamedTuple):
    """Offsets and lengths of the sequences."""

    cu_seqlens_q_ptr: Any
    seqlens_k_ptr: Any
    batch: Any


class Tickets(NamedTuple):
    """The tile counter, tile numbers per slot, and how many there are."""

    ptr: Any
    packs: Any
    total: Any


class Inputs(NamedTuple):
    """What the producer reads."""

    q_desc: Any
    k: Any
    v: Any
    new_k_desc: Any  # None: all keys are in the cache
    new_v_desc: Any
    table: Any
    sequences: Any
    tickets: Any
    scores: Any
    k_scales: Any = None  # for caches of integers
    v_scales: Any = None
    scales_s: Any = None


# ---- between functions


class Announced(NamedTuple):
    """A tile of queries as the producer announces it; a head of -1: no tile is left."""

    head: Any
    sequence: Any
    first_row: Any
    q_start: Any
    len_q: Any
    len_k: Any


class Work(NamedTuple):
    """The tile of queries of a ticket; a first row below 0: there is none."""

    ticket: Any
    first_row: Any
    sequence: Any
    q_start: Any
    len_q: Any
    len_k: Any


class KeyTiles(NamedTuple):
    """Tiles of keys from ``low`` up to ``high``; no mask cuts those from ``left`` up to ``right``.

    The first ``context`` keys are in the cache. Tiles from ``new`` on hold new keys; ``cached`` of
    the visited tiles hold cached keys, which begin ``shift`` keys later than a multiple of BLOCK_N.
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
    """The rows of a warpgroup."""

    buffer: Any  # index in the shared memory for queries
    rows: Any  # positions: the key to which each row is aligned
    slopes: Any  # None without ALiBi
    len_k: Any


class Factors(NamedTuple):
    """The factors of products with cached keys and values."""

    scale: Any
    flips: Any  # the descale of the keys is negative; None without one
    v_descale: Any  # None without one, or if no new values follow
    scales_s: Any  # scales per token, or None


class Seen(NamedTuple):
    """The keys of a head that some row of a tile of queries sees: ``[first, last)``."""

    head: Any
    first: Any
    last: Any


class Walk(NamedTuple):
    """The keys that a producer copies for a tile of queries."""

    tiles: Any
    seen: Any
    new_seen: Any
    q_start: Any  # the first new key


class Softmax(NamedTuple):
    """The running softmax; ``o`` lacks the product of ``p`` with the last tile of values.

    With scales per token in fp16, ``o`` and ``p`` are divided by ``unit``, and ``top`` is the
    largest unit so far: see ``_weighted``.
    """

    o: Any
    m: Any
    l: Any
    p: Any
    unit: Any
    top: Any
