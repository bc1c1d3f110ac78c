"""What the kernels that make lists are given, in the order of their parameters."""

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
    counts_ptr: Any  # int32 [owners of all lists, parts, chunks]
    ends_ptr: Any  # int64, the sums of the counts ahead of each, and of all
    begin_ptr: Any
    whole_ptr: Any
    items_ptr: Any
    members_ptr: Any
    common_ptr: Any  # range of keys that a row of blocks sees whole by the rule, or None


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
    HALVES: Any  # see ``ListSpec.halves``
    BLOCK: Any  # items per program
    WRITES: Any


class PairTensors(NamedTuple):
    """What the planning of the Hopper backward reads and writes, stage by stage."""

    bits_ptr: Any  # of pieces of keys
    cells_ptr: Any  # int32 [blocks, items], of several pieces a block: which of them see which
    alone_ptr: Any  # int32 [blocks], or of pieces: items that are seen without neighbours
    last_ptr: Any  # int32 alike: behind the last of these
    order_ptr: Any  # int32 alike: as they go together
    rank_ptr: Any  # int32 alike: the inverse
    pieces_ptr: Any  # int32 [blocks, SIDE]: in their list, or -1
    lasts_ptr: Any  # int32 [blocks]: the last 64 tokens that a block touches, or -1
    alike_ptr: Any  # int32 [pairs]: whether two that go together see mostly the same
    counts_ptr: Any  # int64 [2, owners, chunks]: entries, and their weights
    ends_ptr: Any  # int64, the sums of the counts so far
    first_ptr: Any  # int32 [owners + 1]: programs ahead of an owner
    owner_ptr: Any  # int32 [programs]
    starts_ptr: Any  # int64 [programs + 1]: entries ahead of a program
    entries_ptr: Any  # int32 [bound], by programs
    seen_ptr: Any  # int32 [bound], their bits
    keys_ptr: Any  # int64 [programs], by which they are put in order
    parts_of_ptr: Any  # int32 [programs, 4]: how many entries each part has
    places_ptr: Any  # int64 [programs]: the program at a place
    sums_ptr: Any  # int64 [programs, 4]: of the parts, by place, so far
    begin_ptr: Any  # from here on see ``Pairs``
    parts_ptr: Any
    items_ptr: Any
    owners_ptr: Any
    real_ptr: Any
    out_bits_ptr: Any


class PairNumbers(NamedTuple):
    """Sizes in the planning of the Hopper backward."""

    pairs: Any  # of blocks, of all lists
    items: Any
    group: Any
    words: Any  # of a line of bits
    in_list: Any  # pieces of a list
    in_blocks: Any  # blocks of a list
    sorted: Any  # blocks, or pieces, of a list that are put in order
    kept: Any  # as many items stay where they are
    chunks: Any  # of an owner's items
    most: Any  # weight of a program of neighbours
    most_apart: Any  # and of others
    programs: Any  # bound
    turns: Any
    rows: Any
    lists: Any
    bound: Any  # places for items
    head: Any  # as ``HEAD``, and so on, in ``_lists``
    window: Any
    alike: Any


class PairOptions(NamedTuple):
    """What a stage is compiled for."""

    STAGE: Any
    SIDE: Any  # pieces of a block
    IS_CAUSAL: Any
    BLOCK: Any  # items at a time
    ENTRIES: Any  # entries of a program at a time
