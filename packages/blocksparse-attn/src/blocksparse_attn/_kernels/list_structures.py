"""What the kernels that make lists are given; see :mod:`.structures` for the order of fields."""

from typing import Any, NamedTuple


class BitTensors(NamedTuple):
    """A layout, and the bits of its kept blocks."""

    crow_ptr: Any
    col_ptr: Any
    bits_ptr: Any  # int32 [lines of all lists, words]


class BitNumbers(NamedTuple):
    """Sizes of a layout and of its bits."""

    chunks: Any  # programs of a head
    nnz: Any
    rows: Any
    cols: Any
    steps: Any  # of a search among the rows
    group: Any  # heads that share the lines of a list
    lines: Any  # of a list
    words: Any  # of a line
    parts_q: Any  # pieces of a block
    parts_k: Any
    piece_q: Any  # tokens of a piece
    piece_k: Any
    side: Any  # pieces of queries of an item, by keys


class BitOptions(NamedTuple):
    """What the marking of bits is compiled for."""

    BY_KEY: Any
    IS_CAUSAL: Any
    BLOCK: Any  # slots per program


class ListTensors(NamedTuple):
    """Bits, and what is made of them."""

    bits_ptr: Any
    counts_ptr: Any  # int32 [owners of all lists, 2, chunks]
    ends_ptr: Any  # int64, the sums of the counts so far; None while they are counted
    begin_ptr: Any
    whole_ptr: Any
    items_ptr: Any
    members_ptr: Any


class ListNumbers(NamedTuple):
    """Sizes of lists."""

    owners: Any  # of a list
    chunks: Any  # of an owner's items
    items: Any
    lines: Any  # of a list, or, if members are heads, of a head
    words: Any
    heads: Any
    group: Any
    packs: Any
    span: Any  # tokens of an owner
    block: Any  # tokens of an item's block
    bound: Any  # places for items of all lists


class ListOptions(NamedTuple):
    """What the counting and writing of items is compiled for."""

    BY_KEY: Any
    IS_CAUSAL: Any
    IS_PACKED: Any  # members are heads
    MEMBERS: Any
    BLOCK: Any  # items per program
