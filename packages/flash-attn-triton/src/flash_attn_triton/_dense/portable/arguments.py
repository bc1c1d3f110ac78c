"""Arguments of the portable kernels: the structures that a launch passes.

``launch/entries.py`` explains the types of fields. Names of constants are in upper case.
"""

from __future__ import annotations

from typing import NamedTuple

from ..._linked.launch.entries import Constant, Foreign, Number, Pointer
from ..._linked.portable.strides import Strides

# ---- launches pass: tensors


class ForwardTensors(NamedTuple):
    """The tensors of the forward; optional from ``bias_ptr`` on."""

    q_ptr: Foreign
    k_ptr: Foreign
    v_ptr: Foreign
    out_ptr: Pointer
    lse_ptr: Pointer
    bias_ptr: Foreign
    alibi_slopes_ptr: Foreign
    sinks_ptr: Foreign
    q_descale_ptr: Foreign
    k_descale_ptr: Foreign
    v_descale_ptr: Foreign
    out_scale_ptr: Foreign
    rng_state_ptr: Foreign
    cu_seqlens_q_ptr: Foreign
    cu_seqlens_k_ptr: Foreign
    seqused_k_ptr: Foreign
    spans_ptr: Foreign = None


class Inputs(NamedTuple):
    """The inputs of every gradient."""

    q_ptr: Foreign
    k_ptr: Foreign
    v_ptr: Foreign
    dout_ptr: Foreign
    lse2_ptr: Pointer  # the LSE in base 2, [batch, heads_q, tokens_q] or [heads_q, tokens_q]
    delta_ptr: Pointer  # sum(out * dout) - dlse, the same shape


class Extras(NamedTuple):
    """Optional tensors of the backward, passed after the gradients."""

    bias_ptr: Foreign
    alibi_slopes_ptr: Foreign
    rng_state_ptr: Foreign
    cu_seqlens_q_ptr: Foreign
    cu_seqlens_k_ptr: Foreign
    seqused_k_ptr: Foreign
    spans_ptr: Foreign = None


class RowTensors(NamedTuple):
    """The tensors of the row kernel; ``dlse_ptr`` and ``sums_ptr`` are optional."""

    out_ptr: Foreign
    dout_ptr: Foreign
    lse_ptr: Foreign
    dlse_ptr: Foreign
    delta_ptr: Pointer
    lse2_ptr: Pointer
    sums_ptr: Pointer


class ShortTensors(NamedTuple):
    """The tensors of the backward of short sequences; ``dlse_ptr`` is optional."""

    q_ptr: Foreign
    k_ptr: Foreign
    v_ptr: Foreign
    dout_ptr: Foreign
    out_ptr: Foreign
    lse_ptr: Foreign
    dlse_ptr: Foreign
    dq_ptr: Pointer
    dk_ptr: Pointer
    dv_ptr: Pointer


class HullTensors(NamedTuple):
    """The tensors of the kernel that makes the table of hulls; optional but the first two."""

    hulls_ptr: Pointer
    spans_ptr: Foreign
    cu_seqlens_q_ptr: Foreign
    cu_seqlens_k_ptr: Foreign
    seqused_k_ptr: Foreign


# ---- launches pass: numbers


class Scalars(NamedTuple):
    """Numbers that the signature of a call determines."""

    scale: Number
    softcap: Number
    keep_scale: Number  # factor of kept probabilities; see ``_reference/philox.py``
    dropout_threshold: Number  # draws below it are dropped
    window_left: Number
    window_right: Number
    batch: Number
    heads_q: Number


class Counts(NamedTuple):
    """Numbers that depend on the numbers of tokens."""

    tokens_q: Number
    tokens_k: Number
    tiles: Number  # blocks per head; packed: slots for the blocks of all sequences
    span: Number  # heads that are walked together


class BiasCounts(NamedTuple):
    """``Counts`` for the gradient of a bias: its sizes, and which of them are broadcast."""

    tokens_q: Number
    tokens_k: Number
    bias_heads: Number
    bias_rows: Number
    bias_cols: Number
    one_batch: Number
    one_head: Number
    one_row: Number
    one_col: Number


class BiasStrides(NamedTuple):
    """Strides of a bias, in elements; 0 if broadcast."""

    batch: Number
    head: Number
    row: Number
    col: Number


class InputStrides(NamedTuple):
    """Strides of the inputs of the forward."""

    q: Strides
    k: Strides
    v: Strides
    bias: BiasStrides
    alibi: Number  # from the slopes of a sequence to those of the next; 0 if they share them


class GradientStrides(NamedTuple):
    """Strides of the inputs of a gradient."""

    dout: Strides
    q: Strides
    k: Strides
    v: Strides
    bias: BiasStrides
    alibi: Number


class HullNumbers(NamedTuple):
    """The numbers of the kernel that makes the table of hulls."""

    batch: Number
    tokens_q: Number
    tokens_k: Number
    tiles: Number  # of one sequence, if all have one length


class RowNumbers(NamedTuple):
    """The numbers of the row kernel."""

    tokens: Number
    rows: Number
    heads_q: Number
    dout: Strides
    share: Number  # pieces of the sums that one program sets to 0
    pieces: Number


class ShortNumbers(NamedTuple):
    """The numbers of the backward of short sequences."""

    scale: Number
    softcap: Number
    window_left: Number
    window_right: Number
    heads_q: Number
    tokens_q: Number
    tokens_k: Number
    key_programs: Number  # the first programs, so many, own keys; the rest own queries
    dout: Strides
    q: Strides
    k: Strides
    v: Strides


# ---- constants


class Options(NamedTuple):
    """Constants of a call's signature."""

    GROUP: Constant  # query heads per key head
    HAS_LEFT: Constant
    HAS_RIGHT: Constant
    HAS_SOFTCAP: Constant
    BIAS_BYTES: Constant  # bytes per memory access to a row of the bias; 0 without a bias
    SPANS: Constant = 0  # spans of a row; 0 where a window is the mask
    SPANS_BATCH: Constant = False  # each sequence has its own spans, at fixed length
    # of the forward:
    FOLD: Constant = False  # scores have only a positive scale, which the exponential applies
    DESCALE_PER_HEAD: Constant = False
    SHIFT: Constant = 0  # binary exponent added to p, to use the range of FP8
    OUT_MAX: Constant = 0.0  # largest finite value of an FP8 output, 0 for other outputs


class Tile(NamedTuple):
    """Sizes of the tiles of a program."""

    HEAD_DIM: Constant
    HEAD_DIM_V: Constant
    BLOCK_D: Constant  # the head dimensions, padded
    BLOCK_DV: Constant
    BLOCK_M: Constant
    BLOCK_N: Constant
    PRECISION: Constant
    UPCAST: Constant  # the interpreter multiplies in fp32
    SETTLE: Constant = False  # wait for the products at the end of each step


# elements that the row kernel sets to 0 at a time
PIECE = 2048


class RowTile(NamedTuple):
    """Constants of the row kernel."""

    HEAD_DIM_V: Constant
    BLOCK_DV: Constant
    ROW_BYTES: Constant  # alignment of a row of the output
    BLOCK: Constant  # rows per program
    PIECE: Constant  # sums that are set to 0 at a time


class HullTile(NamedTuple):
    """Constants of the kernel that makes the table of hulls."""

    SPANS: Constant
    BLOCK: Constant  # rows per tile
