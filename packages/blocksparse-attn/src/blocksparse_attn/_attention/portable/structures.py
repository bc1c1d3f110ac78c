"""The arguments of the portable kernels, as structures that the host and the device share.

Fields in lower case are run-time values, fields in upper case are compile-time constants; no
structure mixes the two. A kernel's parameters are, in this order, the fields of its tensors and its
numbers, and its constants.
"""

from typing import Any, NamedTuple


class Constants(NamedTuple):
    """Constants of ``attention_kernel``."""

    # the call
    GROUP: Any  # query heads per key head
    HEAD_DIM: Any
    HEAD_DIM_V: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    ROW_BYTES: Any  # alignment of rows
    ROW_BYTES_V: Any
    BLOCK_Q: Any  # the layout's block size
    BLOCK_K: Any
    IS_CAUSAL: Any
    PER_HEAD: Any  # each unit has its own lists; otherwise all units share one
    TOP_LEFT: Any  # query i stands at position i
    # the tile of queries; 0 if programs own tiles of keys
    POSITIONS: Any = 0
    HEADS: Any = 0  # from one group
    PACKS: Any = 0  # tiles that hold all heads of a group
    SPAN: Any = 0  # positions per owner of a list
    ROW_MEMBERS: Any = 0  # rows of blocks in a tile
    HEAD_MEMBERS: Any = 0  # heads whose lists are united
    # the pass
    BY_KEY: Any = False  # programs own tiles of keys, for dk and dv; otherwise tiles of queries
    MERGES: Any = False  # merge the splits of the forward
    PAGE: Any = 0  # tokens of a page, 0 without pages
    IS_SHORT: Any = False  # tiles of sequences of a few queries
    SHORT: Any = 0  # most queries of a sequence with such tiles, in the forward
    FOLD: Any = True  # the scale is not negative
    SETTLE: Any = False  # wait for the products of dk at the end of each step
    # the tile of scores of a step
    BLOCK_M: Any = 0
    BLOCK_N: Any = 0
    PRECISION: Any = ""
    UPCAST: Any = False  # the interpreter multiplies in fp32


class RowOptions(NamedTuple):
    """Constants of ``row_kernel``, which runs before and after the backward."""

    HEAD_DIM_V: Any
    BLOCK_DV: Any
    ROW_BYTES_V: Any
    BLOCK: Any  # rows per program
    # sums of gradients
    ROUNDS: Any = False  # write the gradients from the sums
    HEAD_DIM: Any = 0
    PER_HEAD: Any = False  # each key head has its own lists; otherwise all share one
    TOP_LEFT: Any = False  # query i stands at position i
    TOKENS: Any = 0  # tokens per block of the layout, at most 64
    WIDTH: Any = 0  # columns of sums
    WIDTH_V: Any = 0
    PIECE: Any = 0  # elements of dq's sums that one store sets to 0
    IS_EARLY: Any = False  # the launch that adds to the sums may still run


class Tensors(NamedTuple):
    """Pointers of ``attention_kernel``; None if a pass does not use one."""

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    # the backward only
    dout_ptr: Any
    lse2_ptr: Any
    delta_ptr: Any
    out_ptr: Any  # the output, dq, or dk
    dv_ptr: Any
    lse_ptr: Any
    # results of each split
    part_out_ptr: Any
    part_lse_ptr: Any
    # the lists, as ``Lists``
    begin_ptr: Any
    whole_ptr: Any
    items_ptr: Any
    members_ptr: Any
    # None if all sequences have one length
    cu_seqlens_q_ptr: Any
    cu_seqlens_k_ptr: Any
    block_table_ptr: Any
    rule_ptr: Any  # first and last key that a position sees


class Numbers(NamedTuple):
    """Scale, sizes and strides of ``attention_kernel``; 0 if a pass does not use one."""

    scale: Any
    batch: Any
    heads_q: Any
    tokens_q: Any
    tokens_k: Any
    tiles: Any  # tiles of positions per unit, or tiles of keys per head
    span: Any  # units, or heads, that are worked on together
    splits: Any
    fills: Any  # whether the short grid writes padding
    list_rows: Any  # owners in the lists of a unit
    list_stride: Any  # owners per sequence, or 0 if all sequences share their lists
    extent: Any  # keys that the layout covers, or queries if the walk is over queries
    stride_table: Any
    rule_stride: Any  # between the rules of two sequences, or 0
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
    """Pointers of ``row_kernel``; it fills delta and lse2, ``[batch, heads_q, tokens]``."""

    out_ptr: Any
    dout_ptr: Any
    lse_ptr: Any
    dlse_ptr: Any  # or None
    delta_ptr: Any
    lse2_ptr: Any
    # the Hopper backward only: see ``BackwardTensors``
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
    """Sizes and strides of ``row_kernel``."""

    tokens_q: Any
    rows: Any  # rows of all heads and sequences
    stride_dob: Any
    stride_dos: Any
    stride_doh: Any
    heads_q: Any
    # sums of gradients
    scale: Any = 0.0
    batch: Any = 0
    heads_k: Any = 0
    tokens_k: Any = 0
    tiles_q: Any = 0
    tiles_k: Any = 0
    list_pieces: Any = 0
    slots_q: Any = 0  # tiles of dq's sums
    slots_k: Any = 0  # tiles of dk's and dv's sums
    share: Any = 0  # pieces of dq's sums that one program sets to 0
    pieces: Any = 0


# ---- used on the device only


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
    """What the rows of a tile of queries see."""

    positions: Any  # at most the last key's position
    bits: Any  # index of each row's member within the list's owner
    first_position: Any
    last_position: Any
    span_start: Any  # the first position of the list's owner
    seqlen_k: Any
    # first and last key that the token rule lets each row see; not read without a rule
    first_key: Any
    last_key: Any


class Keys(NamedTuple):
    """Pointers to the keys and values of a program's head, and the steps that it takes."""

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
    """A tile of queries, its part of dout, and the numbers of its rows."""

    q: Any
    dout: Any
    lse2: Any
    delta: Any


class TileRows(NamedTuple):
    """The rows of a tile of queries."""

    batch: Any  # the sequence, clamped to 0 .. batch - 1, as int64
    row: Any  # index in the sequence
    head: Any
    inside: Any  # whether the row exists


class RowPointers(NamedTuple):
    """Pointers to a sequence's queries, dout and row numbers, and the key head."""

    q_ptr: Any
    dout_ptr: Any
    lse2_ptr: Any
    delta_ptr: Any
    head_k: Any
    rule_ptr: Any  # or None


class Columns(NamedTuple):
    """A tile of keys and values, and what the mask of its sequence needs."""

    k: Any
    v: Any
    keys: Any
    bits: Any  # index of each key's column of blocks within the list's owner
    diagonal: Any
    seqlen_q: Any
    seqlen_k: Any
