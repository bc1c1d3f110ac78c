"""Structures of the Hopper kernels of multi-head latent attention."""

from typing import Any, NamedTuple

# ---- what the host passes


class Arguments(NamedTuple):
    """Tensor maps (TMA) and pointers; None if an argument is not given."""

    half_desc: Any  # a piece of a page, 256 columns
    rest_desc: Any  # a piece of a page, the rotary columns
    q_ptr: Any
    block_table_ptr: Any
    cu_seqlens_q_ptr: Any
    seqlens_k_ptr: Any
    out_ptr: Any
    lse_ptr: Any
    part_out_ptr: Any
    part_lse_ptr: Any


class Counts(NamedTuple):
    """The scale, and sizes of the batch and of the grid."""

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
    """Pointers of the kernel that widens FP8 keys, in the order of ``MlaTensors``."""

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
    """The features of a call, and how a program divides its work."""

    CAUSAL: Any
    GROUP: Any  # heads, all of which share the keys
    TILES: Any  # tiles per sequence; 0: any number
    PAGE: Any
    PIECE: Any  # keys of one page that one copy brings
    ROWS: Any  # heads times tokens
    BLOCK_N: Any
    STAGES: Any
    PARTIES: Any  # threads at the barrier that frees half of a stage
    FOLD: Any  # the scale is positive, and is folded into exp2


# ---- what the entry hands to the warps


class Pipeline(NamedTuple):
    """Shared memory, and the mbarriers that signal full halves of a stage."""

    q_s: Any  # two halves
    q_rest_s: Any
    k_s: Any  # two halves per stage
    k_rest_s: Any
    p_s: Any  # probabilities for the second warpgroup
    factor_s: Any  # factors of its rows
    low_full: Any
    high_full: Any


class Rows(NamedTuple):
    """Pointer and strides of a tensor ``[tokens, heads, columns]``."""

    ptr: Any
    stride_token: Any
    stride_head: Any


class Results(NamedTuple):
    """The outputs, or the partial results of splits."""

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
    stride: Any  # stride of rows
    entries: Any  # the sequence's row of the page table
    stride_page: Any


class Inputs(NamedTuple):
    """What the producer reads."""

    half_desc: Any
    rest_desc: Any
    page_rows: Any
    table: Any


class Work(NamedTuple):
    """The rows of a program, and its tiles of keys, ``[begin, end)``."""

    row: Any  # first row, counted in the sequence
    sequence: Any
    q_start: Any
    len_q: Any  # 0: the program has no rows
    len_k: Any
    begin: Any
    end: Any
    last: Any  # end of the keys that some row sees
    whole: Any  # end of the keys that every row sees


class Softmax(NamedTuple):
    """The running softmax of a tile's rows."""

    m: Any
    l: Any
