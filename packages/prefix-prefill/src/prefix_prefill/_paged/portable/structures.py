"""Structures that the functions of the portable kernels pass on; see ``arguments.py``.

No field is called ``values`` or ``type``: Triton's own tuples have attributes of these names.
"""

from typing import Any, NamedTuple


class Problem(NamedTuple):
    """What the launch of the attention kernel passes."""

    tensors: Any
    numbers: Any


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
    scale: Any  # of products with the keys


class KeyRange(NamedTuple):
    """Keys ``[first, last)`` that some row sees; all rows see ``[full_first, full_last)``."""

    first: Any
    last: Any
    full_first: Any
    full_last: Any


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
