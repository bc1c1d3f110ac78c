"""Arguments of the kernel of multi-head latent attention for Hopper."""

from typing import Any, NamedTuple

# ---- what the host passes


class Arguments(NamedTuple):
    """Tensor maps (TMA), and pointers; None for what is not given."""

    half_desc: Any  # of 256 columns of a piece of a page
    rest_desc: Any  # of its columns that are no values
    q_ptr: Any
    block_table_ptr: Any
    cu_seqlens_q_ptr: Any
    seqlens_k_ptr: Any
    out_ptr: Any
    lse_ptr: Any
    part_out_ptr: Any
    part_lse_ptr: Any


class Counts(NamedTuple):
    """The scale, how much there is, and how it is shared out."""

    scale: Any
    batch: Any
    tokens: Any
    splits: Any


class Strides(NamedTuple):
    """Strides of tokens and heads; rows from one page to the next; strides of the table."""

    stride_qs: Any
    stride_qh: Any
    stride_os: Any
    stride_oh: Any
    page_rows: Any
    stride_table_b: Any
    stride_table_p: Any


class WideArguments(NamedTuple):
    """Pointers of the kernel that widens FP8 keys, in the order of the call's ``MlaTensors``."""

    q_ptr: Any
    kv_cache_ptr: Any
    block_table_ptr: Any
    cu_seqlens_q_ptr: Any
    seqlens_k_ptr: Any
    q_descale_ptr: Any
    kv_descale_ptr: Any
    out_ptr: Any
    lse_ptr: Any
    part_out_ptr: Any
    part_lse_ptr: Any


class WideStrides(NamedTuple):
    """Strides of tokens and heads; rows between pages, and their stride; strides of the table."""

    stride_qs: Any
    stride_qh: Any
    stride_os: Any
    stride_oh: Any
    page_rows: Any
    stride_kvs: Any
    stride_table_b: Any
    stride_table_p: Any


class Tile(NamedTuple):
    """What is asked for, and how a program divides its work."""

    CAUSAL: Any
    GROUP: Any  # heads, all of which share the keys
    TILES: Any  # of each sequence; 0: sequences own tiles by their length
    PAGE: Any
    PIECE: Any  # keys that are copied at once, of one page
    ROWS: Any  # heads times tokens
    BLOCK_N: Any
    STAGES: Any
    PARTIES: Any  # threads that meet where a part of a stage becomes free
    FOLD: Any  # the scale is positive, and goes into the exponential


# ---- what the entry hands to the warps


class Pipeline(NamedTuple):
    """Shared memory, and the mbarriers that say when a part of a stage is full."""

    q_s: Any  # two halves
    q_rest_s: Any
    k_s: Any  # two halves of each stage
    k_rest_s: Any
    p_s: Any  # probabilities, for the other warpgroup
    factor_s: Any  # and the factors of its rows
    low_full: Any
    high_full: Any


class Rows(NamedTuple):
    """Where rows of tokens and heads lie."""

    ptr: Any
    stride_token: Any
    stride_head: Any


class Results(NamedTuple):
    """Where results go: of rows, or of parts of their keys."""

    out: Any
    lse_ptr: Any
    part_out_ptr: Any
    part_lse_ptr: Any
    tokens: Any
    value_scale: Any


class Cache(NamedTuple):
    """The FP8 keys of a sequence."""

    ptr: Any
    page_rows: Any
    stride: Any  # of rows
    entries: Any  # of the table
    stride_page: Any


class Inputs(NamedTuple):
    """What the producer reads."""

    half_desc: Any
    rest_desc: Any
    page_rows: Any
    table: Any


class Work(NamedTuple):
    """The rows of a program, and its tiles of keys, ``[begin, end)``."""

    row: Any  # the first, of the sequence's
    sequence: Any
    q_start: Any
    len_q: Any  # 0 where a program has no rows
    len_k: Any
    begin: Any
    end: Any
    last: Any  # of the keys that some row sees
    whole: Any  # of the keys that every row sees


class Softmax(NamedTuple):
    """The running softmax of a tile's rows."""

    m: Any
    l: Any
