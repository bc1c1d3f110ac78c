"""What functions of the portable kernels hand on, by names; see ``parameters.py``.

No field is called ``values`` or ``type``: Triton's own tuples have attributes of these names.
"""

from typing import Any, NamedTuple


class Place(NamedTuple):
    """A tile of queries: of which sequence, and the how manyth; -1 where there is none."""

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
    """Which query head of which token each row of a tile is; the columns of queries and outputs."""

    token: Any  # of the sequence
    token_64: Any  # of all
    head: Any
    is_inside: Any
    cols: Any
    cols_v: Any


class Positions(NamedTuple):
    """Where in its sequence the token of each row stands, and the first and last of a tile."""

    position: Any
    first: Any
    last: Any


class Queries(NamedTuple):
    """What keys are held against, row by row."""

    q: Any  # a tuple of slices, as many as words of the source have numbers
    unit: Any  # what the rows of q are to be multiplied with, to be queries; None: they are
    position: Any  # counts from the first key of the source
    slopes: Any  # None without ALiBi
    tree: Any  # bits of the new tokens that a row sees; None without a tree
    branches: Any  # those that some row sees
    first_new: Any  # the key of the first new token


class Vectors(NamedTuple):
    """Where keys, or values, lie: a vector in each slot, cut into runs of numbers.

    Strides that the vectors' layout makes no use of are None.
    """

    base: Any
    stride_page: Any
    stride_slot: Any
    stride_run: Any
    stride_number: Any  # from one number of a run to the next


class VectorLayout(NamedTuple):
    """How keys, or values, lie; see ``CacheLayout``."""

    RUN: Any  # numbers of a run
    UNIT: Any  # runs have no gaps
    BYTES: Any  # alignment of every run
    SLOT_RUN: Any  # neighbouring slots follow each other, so many of them; 0: numbers do


class Columns(NamedTuple):
    """The columns of a vector: as many as there are, and as a tile has."""

    HEAD_DIM: Any
    BLOCK_D: Any


class Table(NamedTuple):
    """The pages of a sequence."""

    base: Any
    stride: Any


class Source(NamedTuple):
    """Where the keys and values of one head of a sequence lie."""

    k: Any
    v: Any
    k_scales: Any  # None without a scale for each key
    v_scales: Any
    table: Any  # None for keys that lie dense


class SourceLayout(NamedTuple):
    """How the keys and values of a source lie."""

    PAGE: Any  # slots of a page; 0: dense
    K: Any
    V: Any
    V_AS_K: Any  # values have the strides of keys
    IN_ORDER: Any  # read in the order in which a packed cache lies; then no words
    K_WORDS: Any  # the columns of a key, counted in words
    V_WORDS: Any  # and those of a value
    SLICES: Any  # numbers of a word; 1: numbers are read one by one
    STORED: Any  # dtype of the numbers of words
    WEIGHTS: Any  # dtype of weights, which multiply values
    SCALED: Any  # each key has a scale


class KeyRange(NamedTuple):
    """Keys ``[first, last)`` that some row sees, and those that all rows see, which may be none."""

    first: Any
    last: Any
    full_first: Any
    full_last: Any


class Walk(NamedTuple):
    """Tiles of keys in order: those up to ``full_start`` and from ``full_end`` need a mask."""

    first: Any
    last: Any
    start: Any
    full_start: Any
    full_end: Any


class Softmax(NamedTuple):
    """The running softmax of FlashAttention-2: sums of values and of weights, and the maximum."""

    acc: Any  # a tuple of slices, as many as words of the source have numbers
    l_i: Any
    m_i: Any


class Results(NamedTuple):
    """Where outputs go, and their log-sum-exps."""

    out: Any
    lse_ptr: Any
    out_scale_ptr: Any
    tokens: Any


class Side(NamedTuple):
    """Of new tokens the keys, or the values, and the cache that they go into."""

    new: Any
    cache: Any
    stride_head: Any  # of the cache
    scale_ptr: Any
    scales: Any  # of the slots of the cache; None without
    stride_head_scales: Any


class Slots(NamedTuple):
    """Where the tokens go."""

    slot_mapping_ptr: Any
    stride_slot: Any
    tokens: Any
    slots: Any


class Rope(NamedTuple):
    """Tables of cosines and sines by position, as far as they reach."""

    cos_ptr: Any
    sin_ptr: Any
    stride_cos_t: Any
    stride_cos_d: Any
    stride_sin_t: Any
    stride_sin_d: Any
    seqlen: Any


class Room(NamedTuple):
    """The pages, or the row, of each sequence, and how many slots it has there."""

    table_ptr: Any
    stride_sequence: Any
    stride_entry: Any
    batch_idx_ptr: Any
    page: Any
    slots: Any
    pages: Any


class Tokens(NamedTuple):
    """A block of new tokens: of which sequences, at which positions."""

    token: Any  # of all
    sequence: Any
    position: Any
    exists: Any
