"""Structures that the launches of the Hopper forward pass."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...._linked.launch.entries import Foreign, Map, Number, Pointer
from ...._linked.portable.primitives import Strides

# ---- ``forward_kernel``


class PanelMaps(NamedTuple):
    """The tensor maps of one panel of each tensor; see ``panels.py``."""

    q: Map
    k: Map
    v: Map
    out: Map


class Maps(NamedTuple):
    """All tensor maps; those of narrow panels and of the bias may be None."""

    wide: PanelMaps
    narrow: PanelMaps
    bias: Map


class Tensors(NamedTuple):
    """The other tensors."""

    lse_ptr: Foreign
    ticket_ptr: Foreign  # tile counter: the query blocks that programs have taken
    alibi_slopes_ptr: Foreign = None
    sinks_ptr: Foreign = None
    factors_ptr: Foreign = None  # FP8: one factor of the scores and one of the values per head
    rng_state_ptr: Foreign = None  # without dropout None
    cu_seqlens_q_ptr: Foreign = None  # None: all sequences have one length
    cu_seqlens_k_ptr: Foreign = None
    seqused_k_ptr: Foreign = None


class Numbers(NamedTuple):
    """The numbers of a call."""

    scale: Number
    softcap: Number
    keep_scale: Number
    dropout_threshold: Number
    window_left: Number
    window_right: Number
    batch: Number
    heads_q: Number
    tokens_q: Number
    tokens_k: Number
    # ``locate`` explains tiles, span and last
    tiles: Number  # per head; packed: slots
    span: Number  # heads that are walked together
    last: Number  # heads of the last span
    total: Number  # tiles of all heads
    stride_alibi_b: Number
    stride_lse_b: Number  # read only with ``MERGES``
    stride_lse_h: Number  # read only with ``MERGES``


class Options(NamedTuple):
    """Constants of a call's signature."""

    GROUP: Any  # query heads per key head
    HAS_LEFT: Any  # the window limits how far back a row sees
    HAS_RIGHT: Any  # causal, or the window limits how far forward a row sees
    HAS_SOFTCAP: Any
    RAGGED: Any  # the TMA descriptors are ragged; see ``coordinates``
    PACK: Any = 1  # query heads that share a tile (GQA packing)
    BIAS_BATCH: Any = False  # which dimensions of a bias are not broadcast
    BIAS_HEADS: Any = False
    BIAS_ROWS: Any = False
    MERGES: Any = False  # merge with results over other keys


class Tile(NamedTuple):
    """Constants of a build: tile sizes, numbers of buffers, and how the warpgroups walk."""

    WARPGROUPS: Any  # consumer warpgroups
    ROWS: Any  # rows of queries per warpgroup
    BLOCK_N: Any  # keys per tile
    HEAD_DIM: Any  # columns of queries and keys; of the wide panel if there is a narrow one
    NARROW: Any  # columns of the narrow panel, or 0; see ``panels.py``
    HEAD_DIM_V: Any  # the same two for values and output
    NARROW_V: Any
    BUFFERS_Q: Any  # query buffers per warpgroup
    STAGES_K: Any
    STAGES_V: Any
    STAGES_B: Any  # stages of the bias
    SHARE: Any  # the output is stored from the buffer of the queries
    PIPELINE: Any  # the walk does not stop between blocks of queries
    LAG: Any  # pivots may be smaller than the maxima
    ORDERED: Any  # the softmax ends before the wait for the product with the values


# ---- ``transpose_values``


class ValuesTensors(NamedTuple):
    """Tensors of ``transpose_values``; optional from ``q_descale_ptr`` on."""

    v_ptr: Foreign
    out_ptr: Pointer
    factors_ptr: Pointer
    q_descale_ptr: Foreign
    k_descale_ptr: Foreign
    v_descale_ptr: Foreign
    cu_seqlens_q_ptr: Foreign
    cu_seqlens_k_ptr: Foreign
    seqused_k_ptr: Foreign


class ValuesNumbers(NamedTuple):
    """Numbers of ``transpose_values``."""

    window_left: Number
    batch: Number
    heads_k: Number
    tokens_q: Number
    tokens_k: Number
    tiles: Number
    v: Strides


class ValuesOptions(NamedTuple):
    """Constants of ``transpose_values``."""

    HEAD_DIM: Any
    HAS_LEFT: Any
    DESCALE_PER_HEAD: Any
    BLOCK_N: Any
    BLOCK_D: Any
