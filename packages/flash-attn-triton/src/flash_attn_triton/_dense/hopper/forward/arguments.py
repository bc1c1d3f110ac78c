"""Structures that the launches of the Hopper forward pass."""

from __future__ import annotations

from typing import NamedTuple

from ...._linked.launch.entries import Constant, Foreign, Map, Number, Pointer
from ...._linked.portable.strides import Strides

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

    GROUP: Constant  # query heads per key head
    HAS_LEFT: Constant  # the window limits how far back a row sees
    HAS_RIGHT: Constant  # causal, or the window limits how far forward a row sees
    HAS_SOFTCAP: Constant
    RAGGED: Constant  # the TMA descriptors are ragged; see ``coordinates``
    PACK: Constant = 1  # query heads that share a tile (GQA packing)
    BIAS_BATCH: Constant = False  # which dimensions of a bias are not broadcast
    BIAS_HEADS: Constant = False
    BIAS_ROWS: Constant = False
    MERGES: Constant = False  # merge with results over other keys


class Tile(NamedTuple):
    """Constants of a build: tile sizes, numbers of buffers, and how the warpgroups walk."""

    WARPGROUPS: Constant  # consumer warpgroups
    ROWS: Constant  # rows of queries per warpgroup
    BLOCK_N: Constant  # keys per tile
    HEAD_DIM: Constant  # columns of queries and keys; of the wide panel if there is a narrow one
    NARROW: Constant  # columns of the narrow panel, or 0; see ``panels.py``
    HEAD_DIM_V: Constant  # the same two for values and output
    NARROW_V: Constant
    BUFFERS_Q: Constant  # query buffers per warpgroup
    STAGES_K: Constant
    STAGES_V: Constant
    STAGES_B: Constant  # stages of the bias
    SHARE: Constant  # the output is stored from the buffer of the queries
    PIPELINE: Constant  # the walk does not stop between blocks of queries
    LAG: Constant  # pivots may be smaller than the maxima
    ORDERED: Constant  # the softmax ends before the wait for the product with the values


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

    HEAD_DIM: Constant
    HAS_LEFT: Constant
    DESCALE_PER_HEAD: Constant
    BLOCK_N: Constant
    BLOCK_D: Constant
