"""Structures of the Hopper kernels of multi-head latent attention."""

from typing import Any, NamedTuple

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
    """A tensor ``[tokens, heads, columns]``."""

    ptr: Any
    strides: Any


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
    row: Any  # stride of rows
    entries: Any  # the sequence's row of the page table
    entry: Any  # stride of entries


class Inputs(NamedTuple):
    """What the producer reads."""

    maps: Any
    page_rows: Any
    table_ptr: Any
    table: Any  # strides


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
