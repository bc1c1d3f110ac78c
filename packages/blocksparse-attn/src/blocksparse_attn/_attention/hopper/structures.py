"""What the Hopper kernels are given, by names that the host and the device share.

Fields in lower case are known when a kernel runs, those in upper case when it is compiled; no
structure mixes the two. A kernel's parameters are, in this order, the fields of its tensors, its
numbers and its options.
"""

from typing import Any, NamedTuple


class QueryTensors(NamedTuple):
    """Tensor maps (TMA) and pointers of the kernel that owns tiles of queries.

    With a gradient of the output it makes dq, else the output and the LSE.
    """

    q_desc: Any
    k_desc: Any
    v_desc: Any
    dout_desc: Any  # or None
    out_desc: Any  # the output, or dq
    out_ptr: Any
    lse_ptr: Any  # None where dq is made
    # None where the output is made
    lse2_ptr: Any
    delta_ptr: Any
    ticket_ptr: Any  # the counter from which programs take their tiles
    # the lists, as ``Lists``
    begin_ptr: Any
    whole_ptr: Any
    items_ptr: Any
    members_ptr: Any
    # None where all sequences have one length
    cu_seqlens_q_ptr: Any
    cu_seqlens_k_ptr: Any


class QueryNumbers(NamedTuple):
    """Scale and sizes of the kernel that owns tiles of queries."""

    scale: Any
    batch: Any
    heads_q: Any
    tokens_q: Any
    tokens_k: Any
    width: Any  # columns of what is written
    tiles: Any  # of positions, of each unit
    span: Any  # units that are worked on together
    last: Any  # units in the last such span
    total: Any  # tiles of all units
    list_rows: Any  # owners that a list of a unit has
    list_stride: Any  # owners of a sequence, or 0 if all sequences share theirs
    extent_k: Any  # keys that the layout covers


class QueryOptions(NamedTuple):
    """What that kernel is compiled for of a call, and the sizes on which it works."""

    GROUP: Any  # query heads per key head
    HEADS: Any  # of a tile
    SPAN: Any  # positions of a list's owner
    ROW_MEMBERS: Any  # rows of blocks in it
    BLOCK_Q: Any  # of the layout
    BLOCK_K: Any
    IS_CAUSAL: Any
    PER_HEAD: Any  # lists of each unit, or one for all
    SHORT: Any  # queries of a sequence that another kernel serves
    TOP_LEFT: Any  # query i stands at position i
    HALVES: Any  # lists tell what one warpgroup sees alone, which then multiplies it alone
    ROWS: Any  # of a warpgroup
    BLOCK_N: Any
    HEAD_DIM: Any
    HEAD_DIM_V: Any
    STAGES_K: Any
    STAGES_V: Any


class QueryPipeline(NamedTuple):
    """Its shared memory and the barriers (mbarrier) that say when it is full or empty."""

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
    # ``k_s`` and ``v_s`` as copies fill them
    k_boxes: Any
    v_boxes: Any


class QueryTile(NamedTuple):
    """A tile of queries."""

    ticket: Any  # its number in the order in which tiles are taken
    index: Any  # counted from position 0
    sequence: Any
    unit: Any
    q_start: Any
    k_start: Any
    len_q: Any
    len_k: Any
    diagonal: Any  # where the first query stands


class Walk(NamedTuple):
    """The items of a list that a tile of queries walks: ``seen`` from ``first`` on, then the rest.

    The walk takes steps of several items, from the last to the first one. Ahead of them it takes
    half steps, in which each warpgroup multiplies half a step's keys: what it sees alone, then the
    last ``odd`` items that both see, which are no part of ``count``.
    """

    first: Any
    seen: Any
    cut: Any  # where the rest begins
    count: Any  # items of whole steps
    whole: Any  # steps that need no mask
    halves: Any  # half steps
    alone_at: Any  # where items begin that the second warpgroup sees alone, ahead of the first's
    alone_0: Any
    alone_1: Any
    odd: Any


class Announced(NamedTuple):
    """What the copying warp tells the others of a tile of queries."""

    head: Any  # -1 if no tile is left
    first_row: Any
    sequence: Any
    q_start: Any
    len_q: Any
    len_k: Any
    walk: Any


class Entries(NamedTuple):
    """Key blocks of a step, and which of the tile's rows of blocks keep each."""

    items: Any
    members: Any


class Rows(NamedTuple):
    """What the rows of a warpgroup see."""

    last_seen: Any  # the last key of each row
    bits: Any  # the row of blocks of each row, within its owner
    factor: Any  # from scores to logits in base 2


class Softmax(NamedTuple):
    """A running softmax, and the step's probabilities that are yet to meet their values."""

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
    """What a warpgroup has to do of a tile of queries."""

    walk: Any
    rows: Any
    place: Any


class RowGradients(NamedTuple):
    """dq of a warpgroup's rows so far, what is known of them, and how many steps it took."""

    dq: Any
    lse2: Any
    delta: Any
    turn: Any


class BackwardTensors(NamedTuple):
    """The backward's tensor maps (TMA) and pointers."""

    q_desc: Any
    k_desc: Any
    v_desc: Any
    dout_desc: Any
    dk_desc: Any
    dv_desc: Any
    # sums of gradients in fp32
    dq_ptr: Any
    dk_ptr: Any
    dv_ptr: Any
    lse2_ptr: Any
    delta_ptr: Any
    # the lists, as ``Pairs``
    begin_ptr: Any
    parts_ptr: Any
    items_ptr: Any
    owners_ptr: Any
    real_ptr: Any
    bits_ptr: Any
    # None where all sequences have one length
    cu_seqlens_ptr: Any
    # int32: of each sequence's key head, minus how many programs have yet to add to dq. Where none
    # makes dq: how many programs began, then of each piece of keys how many have added to its sums
    counters_ptr: Any


class BackwardNumbers(NamedTuple):
    """The backward's scale and sizes."""

    scale: Any
    batch: Any
    heads_k: Any
    span: Any  # key heads whose programs are mixed
    tokens_q: Any
    tokens_k: Any
    tiles_q: Any  # tiles of sums, of a head
    tiles_k: Any
    rows: Any  # rows of blocks of the layout
    list_pieces: Any


class BackwardOptions(NamedTuple):
    """What the backward is compiled for of a call, and the sizes on which it works."""

    GROUP: Any  # query heads per key head
    IS_CAUSAL: Any
    PER_HEAD: Any  # lists of each key head, or one for all
    TOP_LEFT: Any  # query i stands at position i
    PIECE: Any  # tokens of the layout's blocks, up to 64
    HEAD_DIM: Any
    HEAD_DIM_V: Any
    STAGES: Any
    MAKES_DQ: Any  # or another launch does, and what several programs add has an order


class BackwardPipeline(NamedTuple):
    """The backward's shared memory, and the barriers (mbarrier) that say when it is full."""

    q_s: Any
    k_s: Any
    v_s: Any
    dout_s: Any
    ds_s: Any  # gradients of scores, which warpgroups exchange
    lse2_s: Any
    delta_s: Any
    fields_s: Any  # numbers that describe a step
    q_full: Any
    k_full: Any
    v_full: Any
    dout_full: Any
    dq_added: Any  # all that a program makes of dq is in memory, or on its way there


class Program(NamedTuple):
    """The sequence and key head of a program."""

    index: Any  # of its lists
    # rows of blocks in which the sequence has queries
    low: Any
    high: Any
    sequence: Any
    head_k: Any
    start: Any
    len_q: Any
    len_k: Any
    diagonal: Any  # where the first query stands


class Steps(NamedTuple):
    """Where the four parts of a program's list are, and how many items each has."""

    whole_at: Any
    whole: Any
    partial_at: Any
    partial: Any
    alone: Any  # the longer of the two that follow
    alone_0_at: Any
    alone_0: Any
    alone_1_at: Any
    alone_1: Any


class Keys(NamedTuple):
    """The two blocks of keys of a program."""

    # of each a bit for every piece that nobody else owns, and ``OTHERS`` times that if others do,
    # and the last piece, ``NO_BLOCK`` if the sequence has none
    mine_0: Any
    block_0: Any
    mine_1: Any
    block_1: Any
    # the same, or ``NO_BLOCK`` if no query of the program sees it
    seen_0: Any
    seen_1: Any
    # of pieces, bits of those that some query sees, and of those that there are
    seen: Any
    kept: Any


class Origin(NamedTuple):
    """Where the numbers of rows and the tiles of dq's sums begin, and how far heads are apart."""

    row_at: Any
    row_pitch: Any
    sums_at: Any
    sums_pitch: Any


class Work(NamedTuple):
    """All that a program works on.

    In another order of what partitions capture, ptxas spills more in builds of small blocks.
    """

    owned_ptr: Any  # where its pieces of keys are named
    steps: Any
    keys: Any
    program: Any
    origin: Any


class Mine(NamedTuple):
    """What a warpgroup knows of its block of keys, and of the walk."""

    positions: Any  # of the keys in a block, or in the sequence
    factor: Any  # from scores to logits in base 2
    dq_ptr: Any
    both: Any  # blocks of queries that both warpgroups multiply
    total: Any  # of all


class Item(NamedTuple):
    """A block of queries of a program's walk."""

    block: Any
    head: Any  # in the group
    is_there: Any
    bits: Any  # of pieces: which sees which


class Gradients(NamedTuple):
    """What a warpgroup accumulates, and the state of its walk."""

    dk: Any
    dv: Any
    s: Any  # scores of the next step
    last: Any  # to which sums the last step's dq belongs; -1 if to none
    turn: Any
