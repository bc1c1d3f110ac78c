"""What the launches of the kernels that make lists pass."""

from __future__ import annotations

from typing import NamedTuple

from ..._linked.launch.entries import Constant, Foreign, Number

# blocks that one program ranks
RANKED = 64


class Pieces(NamedTuple):
    """How blocks are cut into pieces, each with a bit of its own."""

    in_q: Number  # pieces per block
    in_k: Number
    tokens_q: Number  # tokens per piece
    tokens_k: Number
    side: Number = 1  # pieces of queries per item, if lines are columns


class MadePairs(NamedTuple):
    """Pointers to :class:`..lists.Pairs`."""

    begin_ptr: Foreign
    parts_ptr: Foreign
    items_ptr: Foreign
    owners_ptr: Foreign
    real_ptr: Foreign
    bits_ptr: Foreign


class BitTensors(NamedTuple):
    """A layout, and the bits of its kept blocks."""

    crow_ptr: Foreign
    col_ptr: Foreign
    bits_ptr: Foreign  # int32 [lines of all lists, words]


class BitNumbers(NamedTuple):
    """Sizes of a layout and of its bits."""

    chunks: Number  # programs per head
    nnz: Number
    rows: Number
    cols: Number
    steps: Number  # steps of a binary search in the rows
    group: Number  # heads that share the lines of a list
    lines: Number  # lines per list
    words: Number  # 32-bit words per line
    pieces: Pieces


class BitOptions(NamedTuple):
    """Constants of ``bit_kernel``."""

    BY_KEY: Constant  # lines are columns
    IS_CAUSAL: Constant
    BLOCK: Constant  # entries of ``col`` per program


class ListTensors(NamedTuple):
    """Bits, and the lists that are made of them."""

    bits_ptr: Foreign
    counts_ptr: Foreign  # int32 [owners of all lists, parts, chunks]
    ends_ptr: Foreign  # int64, the sums of the counts before each, and of all
    begin_ptr: Foreign
    whole_ptr: Foreign
    items_ptr: Foreign
    members_ptr: Foreign
    common_ptr: Foreign  # see ``common_bounds``, or None


class ListNumbers(NamedTuple):
    """Sizes of lists."""

    owners: Number  # owners per list
    chunks: Number  # chunks of an owner's items
    items: Number
    lines: Number  # lines per list, or per head if members are heads
    words: Number
    heads: Number
    group: Number
    packs: Number
    span: Number  # tokens per owner
    block: Number  # tokens per item's block
    bound: Number  # upper bound of the items of all lists


class ListOptions(NamedTuple):
    """Constants of ``list_kernel``."""

    BY_KEY: Constant
    IS_CAUSAL: Constant
    IS_PACKED: Constant  # members are heads
    MEMBERS: Constant
    HALVES: Constant  # see ``ListSpec.halves``
    BLOCK: Constant  # items per program
    WRITES: Constant  # write the items; otherwise count them


class PairTensors(NamedTuple):
    """What the stages of ``pair_kernel`` read and write."""

    bits_ptr: Foreign  # a line per piece of keys
    cells_ptr: Foreign  # int32 [blocks, items], if a block has several pieces: see ``pair_blocks``
    alone_ptr: Foreign  # int32 [blocks], or of pieces: number of items that see no neighbour
    last_ptr: Foreign  # int32 [blocks], or of pieces: one more than the last such item
    order_ptr: Foreign  # int32 [blocks], or of pieces: sorted, so that consecutive ones are paired
    rank_ptr: Foreign  # int32 [blocks], or of pieces: the inverse of the order
    pieces_ptr: Foreign  # int32 [blocks, SIDE]: the block's pieces, as indices in the list, or -1
    lasts_ptr: Foreign  # int32 [blocks]: index of the last 64 tokens that a block touches, or -1
    alike_ptr: Foreign  # int32 [pairs]: whether mostly the same items see the two of a pair
    counts_ptr: Foreign  # int64 [2, owners, chunks]: entries, and their weights
    ends_ptr: Foreign  # int64, the inclusive sums of the counts
    first_ptr: Foreign  # int32 [owners + 1]: programs before an owner
    owner_ptr: Foreign  # int32 [programs]
    starts_ptr: Foreign  # int64 [programs + 1]: entries before a program
    entries_ptr: Foreign  # int32 [bound]: items, by programs
    seen_ptr: Foreign  # int32 [bound]: the bits of the entries
    keys_ptr: Foreign  # int64 [programs]: sort keys
    parts_of_ptr: Foreign  # int32 [programs, 4]: number of entries of each part
    places_ptr: Foreign  # int64 [programs]: the program at each place of the sorted order
    sums_ptr: Foreign  # int64 [programs, 4]: inclusive sums of the parts' entries, by place
    made: MadePairs


class PairNumbers(NamedTuple):
    """Sizes of ``pair_kernel``."""

    pairs: Number  # pairs of blocks of all lists
    items: Number
    group: Number
    words: Number  # 32-bit words per line of bits
    in_list: Number  # pieces per list
    in_blocks: Number  # blocks per list
    sorted: Number  # blocks, or pieces, per list that are sorted
    kept: Number  # up to so many items are not moved
    chunks: Number  # chunks of an owner's items
    most: Number  # most weight of a program of neighbours
    most_apart: Number  # most weight of any other program
    programs: Number  # upper bound
    turns: Number
    rows: Number
    lists: Number
    bound: Number  # upper bound of items
    head: Number  # ``HEAD``, ``WINDOW`` and ``ALIKE`` of ``_layout/lists.py``
    window: Number
    alike: Number


class PairOptions(NamedTuple):
    """Constants of ``pair_kernel``."""

    STAGE: Constant
    SIDE: Constant  # pieces per block
    IS_CAUSAL: Constant
    BLOCK: Constant  # items per step
    ENTRIES: Constant  # entries of a program per step
