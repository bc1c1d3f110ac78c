"""Structures that device functions of the portable kernels pass on to each other."""

from typing import Any, NamedTuple


class Grid(NamedTuple):
    """The sizes by which a program finds its tile from its program id."""

    cu_seqlens_q_ptr: Any
    cu_seqlens_k_ptr: Any
    batch: Any
    units: Any  # programs that share a tile of positions, or key heads
    tokens_q: Any
    tokens_k: Any
    tiles: Any
    span: Any
    splits: Any


class Work(NamedTuple):
    """The tile of queries, or of keys, that a program owns."""

    # queries: counted from position 0; keys: counted from the sequence's first key, -1 for none
    tile: Any
    is_alive: Any
    sequence: Any
    unit: Any  # or key head
    split: Any
    q_start: Any
    k_start: Any
    seqlen_q: Any
    seqlen_k: Any
    diagonal: Any  # position of the first query


class Walk(NamedTuple):
    """The ranges of a list that a tile of queries walks.

    ``whole`` items from ``start`` on fill steps that every row sees whole. The ``rests`` items from
    ``rest`` on (whole blocks that do not fill a step, or that the sequence's end cuts) and the
    ``cuts`` items from ``cut`` on need a mask.
    """

    start: Any
    whole: Any
    rest: Any
    rests: Any
    cut: Any
    cuts: Any


class QueryWalk(NamedTuple):
    """The ranges of a list that a tile of keys walks.

    ``count`` items from ``whole`` on fill steps that see every key. The items from ``seen`` to
    ``whole``, from ``whole + count`` to ``seen_end`` and from ``cut`` to ``cut_end`` need a mask.
    """

    seen: Any
    whole: Any
    count: Any
    seen_end: Any
    cut: Any
    cut_end: Any


class Ranges(NamedTuple):
    """Three ranges of a list, walked one after the other."""

    first_a: Any
    count_a: Any
    first_b: Any
    count_b: Any
    first_c: Any
    count_c: Any


class Rows(NamedTuple):
    """The rows of a tile of queries, the keys and values of their head, and what they see."""

    work: Any
    # of the sequence, or of the whole cache
    k_ptr: Any
    v_ptr: Any
    table_ptr: Any  # pages of the sequence
    batch: Any  # the sequence, clamped to 0 .. batch - 1, as int64
    row: Any  # index in the sequence
    head: Any
    inside: Any  # whether the row exists
    positions: Any  # at most the last key's position
    bits: Any  # index of each row's member within the list's owner
    first_position: Any
    last_position: Any
    span_start: Any  # the first position of the list's owner
    # first and last key that the token rule lets each row see; not read without a rule
    first_key: Any
    last_key: Any


class Softmax(NamedTuple):
    """A running softmax."""

    acc: Any
    l_i: Any  # sum
    m_i: Any  # maximum


class RowValues(NamedTuple):
    """A tile of queries, its part of dout, and the numbers of its rows."""

    q: Any
    dout: Any
    lse2: Any
    delta: Any


class RowPointers(NamedTuple):
    """Pointers to a sequence's queries, dout, row numbers and token rule."""

    q_ptr: Any
    dout_ptr: Any
    lse2_ptr: Any
    delta_ptr: Any
    rule_ptr: Any  # or None


class Columns(NamedTuple):
    """A tile of keys and values, and what the mask of its sequence needs."""

    work: Any
    k: Any
    v: Any
    keys: Any
    bits: Any  # index of each key's column of blocks within the list's owner
