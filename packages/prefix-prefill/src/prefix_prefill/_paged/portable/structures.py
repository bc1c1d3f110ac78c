"""Structures that the functions of the portable kernels pass on; see ``parameters.py``.

No field is called ``values`` or ``type``: Triton's own tuples have attributes of these names.
"""

from typing import Any, NamedTuple


class Place(NamedTuple):
    """A tile of queries: its sequence and its index in the sequence; -1: there is none."""

    sequence: Any
    tile: Any
    q_start: Any
    seqlen_q: Any


class Packed(NamedTuple):
    """A tensor ``[tokens, heads, head_dim]`` whose rows have no gaps."""

    ptr: Any
    stride_token: Any
    stride_head: Any


class Rows(NamedTuple):
    """The token and query head of each row of a tile; the columns of queries and outputs."""

    token: Any  # index in the sequence
    token_64: Any  # index in the batch
    head: Any
    is_inside: Any
    cols: Any
    cols_v: Any


class Positions(NamedTuple):
    """The position of each row (the key to which it is aligned), and a tile's first and last."""

    position: Any
    first: Any
    last: Any


class Queries(NamedTuple):
    """The rows of a tile of queries."""

    q: Any  # a tuple of slices, one for each number of a word of the source
    unit: Any  # factor by which the rows of q were divided, or None: see ``unit_of``
    position: Any  # counts from the first key of the source
    slopes: Any  # None without ALiBi
    tree: Any  # bits of the new tokens that a row sees; None without a tree
    branches: Any  # bits of the new tokens that some row sees
    first_new: Any  # the key of the first new token


class Vectors(NamedTuple):
    """Pointer and strides of keys or values: a vector in each slot, cut into runs of numbers.

    Strides that the layout does not need are None.
    """

    base: Any
    stride_page: Any
    stride_slot: Any
    stride_run: Any
    stride_number: Any  # from one number of a run to the next


class VectorLayout(NamedTuple):
    """Memory layout of keys or values; see ``CacheLayout``."""

    RUN: Any  # numbers of a run
    UNIT: Any  # runs have no gaps
    BYTES: Any  # alignment of every run
    SLOT_RUN: Any  # neighbouring slots that are contiguous; 0: numbers are


class Columns(NamedTuple):
    """The columns of a vector, and of a tile."""

    HEAD_DIM: Any
    BLOCK_D: Any


class Table(NamedTuple):
    """A row of the page table."""

    base: Any
    stride: Any


class Source(NamedTuple):
    """The keys and values of one head of a sequence."""

    k: Any
    v: Any
    k_scales: Any  # None without a scale per token
    v_scales: Any
    table: Any  # None for dense keys


class SourceLayout(NamedTuple):
    """Memory layout of a source."""

    PAGE: Any  # slots of a page; 0: dense
    K: Any
    V: Any
    V_AS_K: Any  # values have the strides of keys
    IN_ORDER: Any  # a packed cache is read in memory order; then no words
    K_WORDS: Any  # columns of a key, counted in words
    V_WORDS: Any  # columns of a value, counted in words
    SLICES: Any  # numbers per word; 1: no words
    STORED: Any  # dtype of the numbers in words
    WEIGHTS: Any  # dtype in which probabilities multiply values
    SCALED: Any  # scales per token


class KeyRange(NamedTuple):
    """Keys ``[first, last)`` that some row sees; all rows see ``[full_first, full_last)``."""

    first: Any
    last: Any
    full_first: Any
    full_last: Any


class Walk(NamedTuple):
    """Keys ``[first, last)``, visited in tiles from ``start``, a multiple of BLOCK_N.

    Tiles before ``full_start`` and from ``full_end`` on need a mask, tiles between do not.
    """

    first: Any
    last: Any
    start: Any
    full_start: Any
    full_end: Any


class Softmax(NamedTuple):
    """The running softmax of FlashAttention-2: sums of values and of weights, and the maximum."""

    acc: Any  # a tuple of slices, one for each number of a word of the source
    l_i: Any
    m_i: Any


class Results(NamedTuple):
    """The output, its scale, and the log-sum-exps."""

    out: Any
    lse_ptr: Any
    out_scale_ptr: Any
    tokens: Any


class Side(NamedTuple):
    """New keys or values, and the cache into which they are written."""

    new: Any
    cache: Any
    stride_head: Any  # of the cache
    scale_ptr: Any
    scales: Any  # scales per token of the cache, or None
    stride_head_scales: Any


class Slots(NamedTuple):
    """The slots of the tokens."""

    slot_mapping_ptr: Any
    stride_slot: Any
    tokens: Any
    slots: Any


class Rope(NamedTuple):
    """Tables of cosines and sines for ``seqlen`` positions."""

    cos_ptr: Any
    sin_ptr: Any
    stride_cos_t: Any
    stride_cos_d: Any
    stride_sin_t: Any
    stride_sin_d: Any
    seqlen: Any


class Room(NamedTuple):
    """The pages or the row of each sequence, and how many slots it has."""

    table_ptr: Any
    stride_sequence: Any
    stride_entry: Any
    batch_idx_ptr: Any
    page: Any
    slots: Any
    pages: Any


class Tokens(NamedTuple):
    """A block of new tokens: their sequences and positions."""

    token: Any  # index in the batch
    sequence: Any
    position: Any
    exists: Any
