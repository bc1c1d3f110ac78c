"""The arguments of the kernels that make lists, in the order of their parameters."""

from typing import Any, NamedTuple


class BitTensors(NamedTuple):
    """A layout, and the bits of its kept blocks."""

    crow_ptr: Any
    col_ptr: Any
    bits_ptr: Any  # int32 [lines of all lists, words]


class BitNumbers(NamedTuple):
    """Sizes of a layout and of its bits."""

    chunks: Any  # programs per head
    nnz: Any
    rows: Any
    cols: Any
    steps: Any  # steps of a binary search in the rows
    group: Any  # heads that share the lines of a list
    lines: Any  # lines per list
    words: Any  # 32-bit words per line
    parts_q: Any  # pieces per block
    parts_k: Any
    piece_q: Any  # tokens per piece
    piece_k: Any
    side: Any  # pieces of queries per item, if lines are columns


class BitOptions(NamedTuple):
    """Constants of ``bit_kernel``."""

    BY_KEY: Any  # lines are columns
    IS_CAUSAL: Any
    BLOCK: Any  # entries of ``col`` per program


class ListTensors(NamedTuple):
    """Bits, and the lists that are made of them."""

    bits_ptr: Any
    counts_ptr: Any  # int32 [owners of all lists, parts, chunks]
    ends_ptr: Any  # int64, the sums of the counts before each, and of all
    begin_ptr: Any
    whole_ptr: Any
    items_ptr: Any
    members_ptr: Any
    common_ptr: Any  # see ``common_bounds``, or None


class ListNumbers(NamedTuple):
    """Sizes of lists."""

    owners: Any  # owners per list
    chunks: Any  # chunks of an owner's items
    items: Any
    lines: Any  # lines per list, or per head if members are heads
    words: Any
    heads: Any
    group: Any
    packs: Any
    span: Any  # tokens per owner
    block: Any  # tokens per item's block
    bound: Any  # upper bound of the items of all lists


class ListOptions(NamedTuple):
    """Constants of ``list_kernel``."""

    BY_KEY: Any
    IS_CAUSAL: Any
    IS_PACKED: Any  # members are heads
    MEMBERS: Any
    HALVES: Any  # see ``ListSpec.halves``
    BLOCK: Any  # items per program
    WRITES: Any  # write the items; otherwise count them


class PairTensors(NamedTuple):
    """What the stages of ``pair_kernel`` read and write."""

    bits_ptr: Any  # a line per piece of keys
    cells_ptr: Any  # int32 [blocks, items], if a block has several pieces: see ``pair_blocks``
    alone_ptr: Any  # int32 [blocks], or of pieces: number of items that see no neighbour
    last_ptr: Any  # int32 [blocks], or of pieces: one more than the last such item
    order_ptr: Any  # int32 [blocks], or of pieces: sorted, so that consecutive ones are paired
    rank_ptr: Any  # int32 [blocks], or of pieces: the inverse of the order
    pieces_ptr: Any  # int32 [blocks, SIDE]: the block's pieces, as indices in the list, or -1
    lasts_ptr: Any  # int32 [blocks]: index of the last 64 tokens that a block touches, or -1
    alike_ptr: Any  # int32 [pairs]: whether mostly the same items see the two of a pair
    counts_ptr: Any  # int64 [2, owners, chunks]: entries, and their weights
    ends_ptr: Any  # int64, the inclusive sums of the counts
    first_ptr: Any  # int32 [owners + 1]: programs before an owner
    owner_ptr: Any  # int32 [programs]
    starts_ptr: Any  # int64 [programs + 1]: entries before a program
    entries_ptr: Any  # int32 [bound]: items, by programs
    seen_ptr: Any  # int32 [bound]: the bits of the entries
    keys_ptr: Any  # int64 [programs]: sort keys
    parts_of_ptr: Any  # int32 [programs, 4]: number of entries of each part
    places_ptr: Any  # int64 [programs]: the program at each place of the sorted order
    sums_ptr: Any  # int64 [programs, 4]: inclusive sums of the parts' entries, by place
    begin_ptr: Any  # from here on see ``Pairs``
    parts_ptr: Any
    items_ptr: Any
    owners_ptr: Any
    real_ptr: Any
    out_bits_ptr: Any


class PairNumbers(NamedTuple):
    """Sizes of ``pair_kernel``."""

    pairs: Any  # pairs of blocks of all lists
    items: Any
    group: Any
    words: Any  # 32-bit words per line of bits
    in_list: Any  # pieces per list
    in_blocks: Any  # blocks per list
    sorted: Any  # blocks, or pieces, per list that are sorted
    kept: Any  # up to so many items are not moved
    chunks: Any  # chunks of an owner's items
    most: Any  # most weight of a program of neighbours
    most_apart: Any  # most weight of any other program
    programs: Any  # upper bound
    turns: Any
    rows: Any
    lists: Any
    bound: Any  # upper bound of items
    head: Any  # ``HEAD``, ``WINDOW`` and ``ALIKE`` of ``_layout/lists.py``
    window: Any
    alike: Any


class PairOptions(NamedTuple):
    """Constants of ``pair_kernel``."""

    STAGE: Any
    SIDE: Any  # pieces per block
    IS_CAUSAL: Any
    BLOCK: Any  # items per step
    ENTRIES: Any  # entries of a program per step
