"""Structures that device functions of the Hopper kernels pass on to each other."""

from typing import Any, NamedTuple


class QueryPipeline(NamedTuple):
    """Shared memory of ``hopper_query_kernel``, and the barriers that signal full and empty."""

    q_s: Any
    dout_s: Any  # or None; arrives with the queries
    k_s: Any
    v_s: Any
    out_s: Any
    fields_s: Any  # numbers that describe a tile of queries: see ``Announced``
    q_full: Any
    q_empty: Any
    k_full: Any
    v_full: Any
    tile_full: Any
    tile_empty: Any
    # ``k_s`` and ``v_s`` in boxes, as copies fill them
    k_boxes: Any
    v_boxes: Any


class QueryTile(NamedTuple):
    """A tile of queries."""

    ticket: Any  # its number in the order in which programs take tiles
    index: Any  # counted from position 0
    sequence: Any
    unit: Any
    q_start: Any
    k_start: Any
    len_q: Any
    len_k: Any
    diagonal: Any  # position of the first query


class Walk(NamedTuple):
    """The items of a list that a tile of queries walks.

    They are ``seen`` items from ``first`` on, and items from ``cut`` on. The walk takes half steps
    first: in each, a warpgroup multiplies half a step's keys, those of the items that only it sees
    and then those of the last ``odd`` items that both see. Whole steps follow, from the last items
    to the first.
    """

    first: Any
    seen: Any
    cut: Any
    count: Any  # items of whole steps
    whole: Any  # steps that need no mask
    halves: Any  # half steps
    alone_at: Any  # first item that only warpgroup 1 sees; those of warpgroup 0 follow
    alone_0: Any
    alone_1: Any
    odd: Any


class Announced(NamedTuple):
    """The numbers of a tile of queries that the copying warp sends to the warpgroups."""

    head: Any  # -1 if no tile is left
    first_row: Any
    sequence: Any
    q_start: Any
    len_q: Any
    len_k: Any
    walk: Any


class Entries(NamedTuple):
    """Key blocks of a step, and which of the tile's rows of blocks keep each block."""

    items: Any
    members: Any


class Rows(NamedTuple):
    """What the rows of a warpgroup see."""

    last_seen: Any  # last key that each row may see
    bits: Any  # index of each row's row of blocks within the list's owner
    factor: Any  # scale * log2(e)


class Softmax(NamedTuple):
    """A running softmax, and the last step's probabilities, not yet multiplied by the values."""

    o: Any
    m: Any
    l: Any
    p: Any
    turn: Any  # tiles of keys so far


class Place(NamedTuple):
    """Where the rows of a warpgroup stand."""

    row: Any
    head: Any
    sequence: Any
    q_start: Any
    len_q: Any


class Task(NamedTuple):
    """A warpgroup's work on a tile of queries."""

    walk: Any
    rows: Any
    place: Any


class RowGradients(NamedTuple):
    """dq of a warpgroup's rows so far, the rows' numbers, and the number of steps taken."""

    dq: Any
    lse2: Any
    delta: Any
    turn: Any


class BackwardPipeline(NamedTuple):
    """The backward's shared memory, and the barriers (mbarrier) that signal when it is full."""

    q_s: Any
    k_s: Any
    v_s: Any
    dout_s: Any
    ds_s: Any  # gradients of scores, which the warpgroups exchange
    lse2_s: Any
    delta_s: Any
    fields_s: Any  # numbers that describe a step
    q_full: Any
    k_full: Any
    v_full: Any
    dout_full: Any
    dq_added: Any  # the program has issued all its additions to dq


class Program(NamedTuple):
    """The sequence and key head of a program."""

    index: Any  # index of its lists
    # the sequence has queries in the rows of blocks from low to high - 1
    low: Any
    high: Any
    sequence: Any
    head_k: Any
    start: Any
    len_q: Any
    len_k: Any
    diagonal: Any  # position of the first query


class Steps(NamedTuple):
    """First item and number of items of the four parts of a program's list."""

    whole_at: Any
    whole: Any
    partial_at: Any
    partial: Any
    alone: Any  # max(alone_0, alone_1)
    alone_0_at: Any
    alone_0: Any
    alone_1_at: Any
    alone_1: Any


class Keys(NamedTuple):
    """The two blocks of keys of a program."""

    # mine: a bit per piece, times ``OTHERS`` if other programs own the piece as well;
    # block: the last piece, or ``NO_BLOCK`` if none lies in the sequence
    mine_0: Any
    block_0: Any
    mine_1: Any
    block_1: Any
    # as block, but ``NO_BLOCK`` if no query of the program sees the block
    seen_0: Any
    seen_1: Any
    # bits of the pieces that some query sees, and of the pieces that lie in the sequence
    seen: Any
    kept: Any


class Origin(NamedTuple):
    """Offsets of a sequence's row numbers and of its tiles of dq's sums, and strides of heads."""

    row_at: Any
    row_pitch: Any
    sums_at: Any
    sums_pitch: Any


class Work(NamedTuple):
    """All that a program works on.

    With another order of the captured values, ptxas spills more in builds of small blocks.
    """

    owned_ptr: Any  # the indices of its pieces of keys
    steps: Any
    keys: Any
    program: Any
    origin: Any


class Mine(NamedTuple):
    """A warpgroup's block of keys, and the length of the walk."""

    positions: Any  # positions of the keys in the block, or with pieces in the sequence
    factor: Any  # scale * log2(e)
    dq_ptr: Any
    both: Any  # blocks of queries that both warpgroups multiply
    total: Any  # blocks of queries of the walk


class Item(NamedTuple):
    """A block of queries of a program's walk."""

    block: Any
    head: Any  # index in the group
    is_there: Any
    bits: Any  # which piece of queries sees which piece of keys


class Gradients(NamedTuple):
    """What a warpgroup accumulates, and the state of its walk."""

    dk: Any
    dv: Any
    s: Any  # scores of the next step
    last: Any  # tile of sums of the last step's dq; -1 for none
    turn: Any
