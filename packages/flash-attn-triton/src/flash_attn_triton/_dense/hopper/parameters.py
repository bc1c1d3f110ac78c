"""Parameters of the Hopper kernels, in the order in which their launches pass them.

Each kernel takes its tensors, then its numbers, then its constants. The constants of the forward
are ``Options`` and ``Tile`` of ``forward/structures.py``. All parameters of the backward stand in
``backward/structures.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class ForwardTensors(NamedTuple):
    """Maps and tensors of ``forward_kernel``.

    Optional are the maps from ``q_narrow_desc`` on and the tensors from ``alibi_slopes_ptr`` on.
    """

    q_desc: Any
    k_desc: Any
    v_desc: Any
    out_desc: Any
    q_narrow_desc: Any
    k_narrow_desc: Any
    v_narrow_desc: Any
    out_narrow_desc: Any
    bias_desc: Any
    lse_ptr: Any
    ticket_ptr: Any
    alibi_slopes_ptr: Any
    sinks_ptr: Any
    factors_ptr: Any
    rng_state_ptr: Any
    cu_seqlens_q_ptr: Any
    cu_seqlens_k_ptr: Any
    seqused_k_ptr: Any


class ForwardNumbers(NamedTuple):
    """Numbers of ``forward_kernel``."""

    scale: float
    softcap: float
    keep_scale: float
    dropout_threshold: int
    window_left: int
    window_right: int
    batch: int
    heads_q: int
    tokens_q: int
    tokens_k: int
    tiles: int  # per head; packed: slots
    span: int  # heads that are walked together
    last: int  # heads of the last span
    total: int  # tiles of all heads
    stride_alibi_b: int
    stride_lse_b: int  # read only with ``MERGES``
    stride_lse_h: int  # read only with ``MERGES``


class ValuesTensors(NamedTuple):
    """The tensors of ``transpose_values``; optional from ``q_descale_ptr`` on."""

    v_ptr: Any
    out_ptr: Any
    factors_ptr: Any
    q_descale_ptr: Any
    k_descale_ptr: Any
    v_descale_ptr: Any
    cu_seqlens_q_ptr: Any
    cu_seqlens_k_ptr: Any
    seqused_k_ptr: Any


class ValuesNumbers(NamedTuple):
    """Numbers of ``transpose_values``."""

    window_left: int
    batch: int
    heads_k: int
    tokens_q: int
    tokens_k: int
    tiles: int
    stride_b: int
    stride_s: int
    stride_h: int


class ValuesConstants(NamedTuple):
    """Constants of ``transpose_values``."""

    HEAD_DIM: int
    HAS_LEFT: bool
    DESCALE_PER_HEAD: bool
    BLOCK_N: int
    BLOCK_D: int


class RoundingTensors(NamedTuple):
    """The tensors of ``round_dq_kernel``."""

    sums_ptr: Any
    dq_ptr: Any
    cu_seqlens_q_ptr: Any
    cu_seqlens_k_ptr: Any
    seqused_k_ptr: Any


class RoundingNumbers(NamedTuple):
    """Numbers of ``round_dq_kernel``."""

    scale: float
    window_right: int
    batch: int
    heads_q: int
    tokens_q: int
    tokens_k: int
    tiles: int


class RoundingConstants(NamedTuple):
    """Constants of ``round_dq_kernel``."""

    HAS_RIGHT: bool
    BLOCK_M: int
    HEAD_DIM: int
    WIDE: int
    NARROW: int


class BiasSumTensors(NamedTuple):
    """The tensors of ``sum_bias_kernel``."""

    ds_ptr: Any
    dbias_ptr: Any


class BiasSumNumbers(NamedTuple):
    """Numbers of ``sum_bias_kernel``."""

    keep_scale: float
    window_right: int
    batch: int
    heads_q: int
    tokens_q: int
    tokens_k: int
    tiles_q: int
    tiles_k: int


class BiasSumConstants(NamedTuple):
    """Constants of ``sum_bias_kernel``."""

    HAS_RIGHT: bool
    BIAS_BATCH: bool
    BIAS_HEADS: bool
    ACCESS: int  # elements per memory access
    BLOCK_M: int
    BLOCK_N: int
