"""What launches pass to the Hopper kernels, see ``entry``; the entries regroup it by warps."""

from __future__ import annotations

from typing import NamedTuple

from ..._cache.kernels.arguments import RowStrides, SlotStrides, TableStrides
from ..._linked.launch.entries import Constant, Foreign, Map, Number
from ..portable.arguments import Scores


class Tensors(NamedTuple):
    """Tensor maps (TMA) and pointers of both kernels; None if one is not given."""

    q_desc: Map
    k_desc: Map  # None: the cache is widened, see ``WideTensors``
    v_desc: Map
    new_k_desc: Map  # None: all keys are in the cache
    new_v_desc: Map
    out_desc: Map  # None for an fp32 output, which is stored from registers
    out_ptr: Foreign  # None for other outputs
    lse_ptr: Foreign
    ticket_ptr: Foreign  # the tile counter
    block_table_ptr: Foreign
    cu_seqlens_q_ptr: Foreign
    seqlens_k_ptr: Foreign
    alibi_slopes_ptr: Foreign
    sinks_ptr: Foreign


class WideTensors(NamedTuple):
    """A cache that is widened, and its scales."""

    k_cache_ptr: Foreign
    v_cache_ptr: Foreign
    k_descale_ptr: Foreign
    v_descale_ptr: Foreign
    k_scale_cache_ptr: Foreign  # for caches of integers
    v_scale_cache_ptr: Foreign


class Numbers(NamedTuple):
    """The numbers of a call."""

    scores: Scores
    batch: Number
    packs: Number  # packs of query heads that share a tile
    tokens: Number
    total: Number  # tile numbers (tickets)
    page_rows_k: Number  # rows from one page of a cache to the next
    page_rows_v: Number
    out: RowStrides
    table: TableStrides
    slopes: Number  # from the slopes of one sequence to the next


class CacheStrides(NamedTuple):
    """Strides of keys or values within a page."""

    slot: Number
    head: Number


class WideNumbers(NamedTuple):
    """Strides of a cache that is widened, and of its scales."""

    k_cache: CacheStrides
    v_cache: CacheStrides
    k_scales: SlotStrides
    v_scales: SlotStrides
    heads_k: Number


class Options(NamedTuple):
    """The features of a call."""

    HAS_LEFT: Constant
    HAS_RIGHT: Constant
    HAS_SOFTCAP: Constant
    HAS_NEW: Constant  # keys of the queries' tokens come in tensors of their own
    DESCALE_NDIM: Constant  # dimensions of the descales of an FP8 cache


class Tile(NamedTuple):
    """How a program divides its work; see ``HopperTile``."""

    GROUP: Constant  # query heads per key head
    PACK: Constant  # query heads that share a tile
    PAGE: Constant
    PIECE: Constant  # keys of one page that one copy brings
    NEW_PIECE: Constant  # new keys that one copy brings
    MIN_TOKENS: Constant  # fewest queries of a sequence that this kernel serves
    ROWS: Constant  # rows of a warpgroup
    BLOCK_N: Constant
    HEAD_DIM: Constant  # columns of a tile
    WIDTH: Constant  # columns of the tensors
    STAGES_K: Constant
    STAGES_V: Constant
    BUFFERS_Q: Constant  # buffers for tiles of queries, per warpgroup
    WARPGROUPS: Constant  # MMA warpgroups
    SHARE: Constant  # the output is staged in the queries' shared memory
    WARPS: Constant  # warps that bring keys
    WIDENERS: Constant  # warpgroups that widen keys and values; 0: TMA copies them
    PARTIES: Constant  # threads at the barrier that frees a stage: MMA warpgroups and WARPS
