"""Structures of the portable kernels: named tuples, made on the host, read on the device by name.

The parameters of a kernel are the fields of the structures that its launch passes, in order.
Constants have upper-case names and separate structures: Triton would turn a constant among run-time
values into a run-time value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# ---- launches pass: tensors


class ForwardTensors(NamedTuple):
    """The tensors of the forward; optional from ``bias_ptr`` on."""

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    out_ptr: Any
    lse_ptr: Any
    bias_ptr: Any
    alibi_slopes_ptr: Any
    sinks_ptr: Any
    q_descale_ptr: Any
    k_descale_ptr: Any
    v_descale_ptr: Any
    out_scale_ptr: Any
    rng_state_ptr: Any
    cu_seqlens_q_ptr: Any
    cu_seqlens_k_ptr: Any
    seqused_k_ptr: Any


class Inputs(NamedTuple):
    """The inputs of every gradient; a kernel's gradients follow."""

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    dout_ptr: Any
    lse2_ptr: Any  # the LSE in base 2, [batch, heads_q, tokens_q] or [heads_q, tokens_q]
    delta_ptr: Any  # sum(out * dout) - dlse, the same shape


class Extras(NamedTuple):
    """Optional tensors of the backward, after the gradients."""

    bias_ptr: Any
    alibi_slopes_ptr: Any
    rng_state_ptr: Any
    cu_seqlens_q_ptr: Any
    cu_seqlens_k_ptr: Any
    seqused_k_ptr: Any


class RowTensors(NamedTuple):
    """The tensors of the row kernel; ``dlse_ptr`` and ``sums_ptr`` are optional."""

    out_ptr: Any
    dout_ptr: Any
    lse_ptr: Any
    dlse_ptr: Any
    delta_ptr: Any
    lse2_ptr: Any
    sums_ptr: Any


class ShortTensors(NamedTuple):
    """The tensors of the backward of short sequences; ``dlse_ptr`` is optional."""

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    dout_ptr: Any
    out_ptr: Any
    lse_ptr: Any
    dlse_ptr: Any
    dq_ptr: Any
    dk_ptr: Any
    dv_ptr: Any


# pointers to memory that the package did not allocate, which may begin anywhere
FOREIGN = (
    "q_ptr",
    "k_ptr",
    "v_ptr",
    "dout_ptr",
    "sinks_ptr",
    "q_descale_ptr",
    "k_descale_ptr",
    "v_descale_ptr",
    "out_scale_ptr",
    *Extras._fields,
)
FOREIGN_ROWS = ("out_ptr", "dout_ptr", "lse_ptr", "dlse_ptr")
SHORT_FOREIGN = ShortTensors._fields[:7]


class MergeTensors(NamedTuple):
    """The outputs, then two to four pieces; all pieces have an LSE, or none has."""

    out_ptr: Any
    lse_ptr: Any
    out0_ptr: Any
    lse0_ptr: Any
    out1_ptr: Any
    lse1_ptr: Any
    out2_ptr: Any
    lse2_ptr: Any
    out3_ptr: Any
    lse3_ptr: Any


# ---- launches pass: numbers


class Scalars(NamedTuple):
    """Numbers that the signature of a call determines."""

    scale: Any
    softcap: Any
    keep_scale: Any  # factor of kept probabilities; see ``_reference/philox.py``
    dropout_threshold: Any  # draws below it are dropped
    window_left: Any
    window_right: Any
    batch: Any
    heads_q: Any


class Counts(NamedTuple):
    """Numbers that depend on the numbers of tokens."""

    tokens_q: Any
    tokens_k: Any
    tiles: Any  # blocks per head; packed: slots for the blocks of all sequences
    span: Any  # heads that are walked together


class BiasCounts(NamedTuple):
    """``Counts`` for the gradient of a bias: its sizes, and which of them are broadcast."""

    tokens_q: Any
    tokens_k: Any
    bias_heads: Any
    bias_rows: Any
    bias_cols: Any
    one_batch: Any
    one_head: Any
    one_row: Any
    one_col: Any


class GradientStrides(NamedTuple):
    """Strides of the incoming gradient."""

    stride_dob: Any
    stride_dos: Any
    stride_doh: Any


class Strides(NamedTuple):
    """Strides of the inputs, in elements: batch, token and head; 0 if broadcast."""

    stride_qb: Any
    stride_qs: Any
    stride_qh: Any
    stride_kb: Any
    stride_ks: Any
    stride_kh: Any
    stride_vb: Any
    stride_vs: Any
    stride_vh: Any
    stride_bias_b: Any
    stride_bias_h: Any
    stride_bias_m: Any
    stride_bias_n: Any
    stride_alibi_b: Any


class RowCounts(NamedTuple):
    """The numbers of the row kernel before the strides of dout."""

    tokens: Any
    rows: Any
    heads_q: Any


class SumCounts(NamedTuple):
    """The numbers of the row kernel after the strides of dout."""

    share: Any  # pieces of the sums that one program sets to 0
    pieces: Any


class ShortNumbers(NamedTuple):
    """The numbers of the backward of short sequences."""

    scale: Any
    softcap: Any
    window_left: Any
    window_right: Any
    heads_q: Any
    tokens_q: Any
    tokens_k: Any
    key_programs: Any  # the first programs, so many, own keys; the rest own queries
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


NUMBERS = (*Scalars._fields, *Counts._fields, *GradientStrides._fields, *Strides._fields)


class MergeNumbers(NamedTuple):
    """The range of tokens that is written, the size of the whole, and each piece's place in it."""

    first: Any
    last: Any
    tokens: Any
    heads: Any
    begin0: Any
    size0: Any
    step0: Any
    batch0: Any
    begin1: Any
    size1: Any
    step1: Any
    batch1: Any
    begin2: Any
    size2: Any
    step2: Any
    batch2: Any
    begin3: Any
    size3: Any
    step3: Any
    batch3: Any


# ---- constants


class Options(NamedTuple):
    """Constants of a call's signature."""

    GROUP: Any  # query heads per key head
    HAS_LEFT: Any
    HAS_RIGHT: Any
    HAS_SOFTCAP: Any
    BIAS_BYTES: Any  # bytes per memory access to a row of the bias; 0 without a bias


class ForwardOptions(NamedTuple):
    """``Options`` of a forward call, and how scores and results are scaled."""

    GROUP: Any
    HAS_LEFT: Any
    HAS_RIGHT: Any
    HAS_SOFTCAP: Any
    BIAS_BYTES: Any
    FOLD: Any  # scores have only a positive scale, which the exponential applies
    DESCALE_PER_HEAD: Any
    SHIFT: Any  # binary exponent added to p, to use the range of FP8
    OUT_MAX: Any  # largest finite value of an FP8 output, 0 for other outputs


class Tile(NamedTuple):
    """Sizes of the tiles of a program."""

    HEAD_DIM: Any
    HEAD_DIM_V: Any
    BLOCK_D: Any  # the head dimensions, padded
    BLOCK_DV: Any
    BLOCK_M: Any
    BLOCK_N: Any
    PRECISION: Any
    UPCAST: Any  # the interpreter multiplies in fp32


# elements that the row kernel sets to 0 at a time
PIECE = 2048


class RowTile(NamedTuple):
    """Constants of the row kernel."""

    HEAD_DIM_V: Any
    BLOCK_DV: Any
    ROW_BYTES: Any  # alignment of a row of the output
    BLOCK: Any  # rows per program
    PIECE: Any  # sums that are set to 0 at a time


class MergeTile(NamedTuple):
    """Constants of the merge."""

    HEAD_DIM_V: int
    BLOCK_DV: int
    BLOCK: int


# ---- device functions pass on


class Scores(NamedTuple):
    """Parameters of the scores that all heads of a sequence share."""

    scale: Any
    softcap: Any
    stride_bias_m: Any
    stride_bias_n: Any
    diagonal: Any  # seqlen_k - seqlen_q: masks are aligned bottom-right
    seqlen_q: Any
    seqlen_k: Any
    window_left: Any
    window_right: Any
    rng_state_ptr: Any  # None without dropout
    dropout_threshold: Any
    keep_scale: Any


class Head(NamedTuple):
    """Values that differ between query heads."""

    slope: Any  # None without ALiBi
    bias_ptr: Any
    dropout: Any  # a ``DropoutKey``, or None


class DropoutKey(NamedTuple):
    """The key of a head's draws."""

    word: Any  # key of Philox
    row: Any  # xored with rows
    col: Any  # xored with columns


class Walk(NamedTuple):
    """The tokens ``[first, last)`` of the other side that a block sees, in tiles.

    Tiles ``[start, full_start)`` and ``[full_end, last)`` need a mask; tiles between them are seen
    whole. ``step_start`` walks them.
    """

    first: Any
    last: Any
    start: Any
    full_start: Any
    full_end: Any


class Keys(NamedTuple):
    """Keys and values of one head and sequence."""

    k_ptr: Any
    v_ptr: Any
    stride_ks: Any
    stride_vs: Any


class Queries(NamedTuple):
    """Queries of one sequence with their gradients and extras, for all heads of the group."""

    q_ptr: Any
    dout_ptr: Any
    lse2_ptr: Any  # with ``out_ptr``: the LSE to base e
    delta_ptr: Any  # with ``out_ptr``: dlse, or None
    alibi_slopes_ptr: Any
    bias_ptr: Any
    stride_qs: Any
    stride_qh: Any
    stride_dos: Any
    stride_doh: Any
    stride_row_h: Any  # stride of heads in ``lse2`` and ``delta``
    stride_bias_h: Any
    batch_id: Any
    head_k: Any
    heads_q: Any
    out_ptr: Any  # contiguous; None if an earlier kernel made ``lse2`` and ``delta``
