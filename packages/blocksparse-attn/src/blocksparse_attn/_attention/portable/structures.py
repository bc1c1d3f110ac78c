"""What the portable kernels are given, by names that the host and the device share.

Fields in lower case are known when a kernel runs, those in upper case when it is compiled; no
structure mixes the two. A kernel's parameters are, in this order, the fields of its tensors, its
numbers and its constants.
"""

from typing import Any, NamedTuple


class Constants(NamedTuple):
    """What the kernel over tiles of scores is compiled for."""

    # of a call
    GROUP: Any  # query heads per key head
    HEAD_DIM: Any
    HEAD_DIM_V: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    ROW_BYTES: Any  # alignment of rows
    ROW_BYTES_V: Any
    BLOCK_Q: Any  # of the layout
    BLOCK_K: Any
    IS_CAUSAL: Any
    PER_HEAD: Any  # lists of each unit, or one for all
    TOP_LEFT: Any  # query i stands at position i
    # of a tile of queries; 0 where tiles are of keys
    POSITIONS: Any = 0
    HEADS: Any = 0  # from one group
    PACKS: Any = 0  # tiles that hold all heads of a group
    SPAN: Any = 0  # positions of a list's owner
    ROW_MEMBERS: Any = 0  # rows of blocks in a tile
    HEAD_MEMBERS: Any = 0  # heads whose lists are united
    # of a pass
    BY_KEY: Any = False  # tiles of keys, for dk and dv, or of queries
    MERGES: Any = False  # the forward over splits of keys is over, and is put together
    PAGE: Any = 0  # tokens of a page, 0 without pages
    IS_SHORT: Any = False  # tiles of sequences of a few queries
    SHORT: Any = 0  # queries of a sequence that has such tiles, in the forward
    FOLD: Any = True  # the scale is not negative
    SETTLE: Any = False  # wait for the products of dk at the end of each step
    # of the tile of scores of a step
    BLOCK_M: Any = 0
    BLOCK_N: Any = 0
    PRECISION: Any = ""
    UPCAST: Any = False  # the interpreter multiplies in fp32


class RowOptions(NamedTuple):
    """What the launches around the backward are compiled for."""

    HEAD_DIM_V: Any
    BLOCK_DV: Any
    ROW_BYTES_V: Any
    BLOCK: Any  # rows per program
    # of sums of gradients
    ROUNDS: Any = False  # they become gradients
    HEAD_DIM: Any = 0
    PER_HEAD: Any = False  # lists of each key head, or one for all
    TOP_LEFT: Any = False  # query i stands at position i
    TOKENS: Any = 0  # of the layout's blocks, up to 64
    WIDTH: Any = 0  # columns of sums
    WIDTH_V: Any = 0
    PIECE: Any = 0  # sums of dq that are set to 0 at a time
    IS_EARLY: Any = False  # the launch that adds to them may still run


class Tensors(NamedTuple):
    """Pointers of the kernel over tiles of scores; None where a pass has none."""

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    # of the backward
    dout_ptr: Any
    lse2_ptr: Any
    delta_ptr: Any
    out_ptr: Any  # the output, dq, or dk
    dv_ptr: Any
    lse_ptr: Any
    # what each split finds
    part_out_ptr: Any
    part_lse_ptr: Any
    # the lists, as ``Lists``
    begin_ptr: Any
    whole_ptr: Any
    items_ptr: Any
    members_ptr: Any
    # None where all sequences have one length
    cu_seqlens_q_ptr: Any
    cu_seqlens_k_ptr: Any
    block_table_ptr: Any
    rule_ptr: Any  # first and last key that a position sees


class Numbers(NamedTuple):
    """Scale, sizes and strides of that kernel; 0 where a pass has none."""

    scale: Any
    batch: Any
    heads_q: Any
    tokens_q: Any
    tokens_k: Any
    tiles: Any  # of positions, of each unit; or of keys, of each head
    span: Any  # units, or heads, that are worked on together
    splits: Any
    fills: Any  # whether the short grid writes padding
    list_rows: Any  # owners that a list of a unit has
    list_stride: Any  # owners of a sequence, or 0 if all sequences share theirs
    extent: Any  # tokens that the layout covers, of those that are walked
    stride_table: Any
    rule_stride: Any  # of a sequence's rule, or 0
    stride_dob: Any
    stride_dos: Any
    stride_doh: Any
    stride_qb: Any
    stride_qs: Any
    stride_qh: Any
    stride_kb: Any
    stride_ks: Any
    stride_kh: Any
    stride_vb: Any
    stride_vs: Any
    stride_vh: Any


class RowTensors(NamedTuple):
    """What is known of rows, and the two tensors ``[batch, heads_q, tokens]`` to be filled."""

    out_ptr: Any
    dout_ptr: Any
    lse_ptr: Any
    dlse_ptr: Any  # or None
    delta_ptr: Any
    lse2_ptr: Any
    # of the backward for Hopper: see ``BackwardTensors``
    parts_ptr: Any = None
    owners_ptr: Any = None
    real_ptr: Any = None
    cu_seqlens_ptr: Any = None
    counters_ptr: Any = None  # None without sums of dq
    dq_sums_ptr: Any = None
    dk_sums_ptr: Any = None
    dv_sums_ptr: Any = None
    dq_ptr: Any = None
    dk_ptr: Any = None
    dv_ptr: Any = None


class RowNumbers(NamedTuple):
    """Sizes and strides of the rows."""

    tokens_q: Any
    rows: Any  # of all heads and sequences
    stride_dob: Any
    stride_dos: Any
    stride_doh: Any
    heads_q: Any
    # of sums of gradients
    scale: Any = 0.0
    batch: Any = 0
    heads_k: Any = 0
    tokens_k: Any = 0
    tiles_q: Any = 0
    tiles_k: Any = 0
    list_pieces: Any = 0
    slots_q: Any = 0  # tiles of sums of dq
    slots_k: Any = 0  # and of dk and dv
    share: Any = 0  # pieces of dq's sums that a program sets to 0
    pieces: Any = 0


# ---- on the device alone


class Grid(NamedTuple):
    """What the place of a program in the grid means."""

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

    tile: Any  # counted from position 0, or, of keys, from the sequence's first, and -1 for none
    is_alive: Any
    sequence: Any
    unit: Any  # or key head
    split: Any
    q_start: Any
    k_start: Any
    seqlen_q: Any
    seqlen_k: Any
    diagonal: Any  # where the first query stands


class Walk(NamedTuple):
    """The ranges of a list that a tile of queries walks.

    ``whole`` items from ``start`` on fill steps that every row sees whole. The ``rests`` items from
    ``rest`` on, left of the end of the sequence, and ``cuts`` from ``cut`` on, need a mask.
    """

    start: Any
    whole: Any
    rest: Any
    rests: Any
    cut: Any
    cuts: Any


class QueryWalk(NamedTuple):
    """The ranges of a list that a tile of keys walks.

    ``count`` items from ``whole`` on fill steps that see every key. Those from ``seen`` to
    ``whole``, from there to ``seen_end``, and from ``cut`` to ``cut_end`` need a mask.
    """

    seen: Any
    whole: Any
    count: Any
    seen_end: Any
    cut: Any
    cut_end: Any


class Ranges(NamedTuple):
    """Three ranges of a list, walked one behind the other."""

    first_a: Any
    count_a: Any
    first_b: Any
    count_b: Any
    first_c: Any
    count_c: Any


class Rows(NamedTuple):
    """Where the rows of a tile of queries stand, and the key where their sequence ends."""

    positions: Any  # or the last key's, behind it
    bits: Any  # which member of the list's owner a row is
    first_position: Any
    last_position: Any
    span_start: Any  # the first position of the list's owner
    seqlen_k: Any
    # first and last key that each row sees by the rule; without meaning where there is none
    first_key: Any
    last_key: Any


class Keys(NamedTuple):
    """Where the keys and values of a program's head begin, and which steps it takes."""

    k_base: Any
    v_base: Any
    table_ptr: Any  # pages of the sequence, or None
    first_step: Any
    last_step: Any


class Softmax(NamedTuple):
    """A running softmax."""

    acc: Any
    l_i: Any  # sum
    m_i: Any  # maximum


class RowValues(NamedTuple):
    """A tile of queries, the gradients that arrive there, and the numbers of its rows."""

    q: Any
    dout: Any
    lse2: Any
    delta: Any


class TileRows(NamedTuple):
    """The rows of a tile of queries."""

    batch: Any  # the sequence, or one that there is, in 64 bits
    row: Any  # in the sequence
    head: Any
    inside: Any  # whether there is such a row


class RowPointers(NamedTuple):
    """Where queries and what belongs to them begin in memory, for a sequence, and its key head."""

    q_ptr: Any
    dout_ptr: Any
    lse2_ptr: Any
    delta_ptr: Any
    head_k: Any
    rule_ptr: Any  # or None


class Columns(NamedTuple):
    """A tile of keys and their values, where they stand, and the queries that face them."""

    k: Any
    v: Any
    keys: Any
    bits: Any  # which column of blocks of the list's owner a key is in
    diagonal: Any
    seqlen_q: Any
    seqlen_k: Any
