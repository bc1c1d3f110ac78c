"""Arguments of the portable kernels of multi-head latent attention."""

from __future__ import annotations

from typing import NamedTuple

from ..._cache.kernels.arguments import RowStrides, TableStrides
from ..._linked.launch.entries import Constant, Foreign, Number, Pointer


class CacheStrides(NamedTuple):
    """Strides of the cache."""

    page: Number
    slot: Number
    column: Number


# ---- attention


class Tensors(NamedTuple):
    """The tensors of a call, in the order of ``MlaTensors``, and partial results of splits."""

    q_ptr: Foreign
    kv_cache_ptr: Foreign
    block_table_ptr: Foreign
    cu_seqlens_q_ptr: Foreign
    seqlens_k_ptr: Foreign
    q_descale_ptr: Foreign
    kv_descale_ptr: Foreign
    out_ptr: Foreign
    lse_ptr: Foreign
    part_out_ptr: Pointer
    part_lse_ptr: Pointer


class Numbers(NamedTuple):
    """The scale, sizes of the batch and of the grid, and strides."""

    scale: Number
    batch: Number
    tokens: Number
    splits: Number
    q: RowStrides
    out: RowStrides
    kv: CacheStrides
    table: TableStrides


class Options(NamedTuple):
    """Memory layout of the cache, and the features of a call."""

    HEAD_DIM: Constant
    HEAD_DIM_V: Constant
    PAGE: Constant
    KV_UNIT: Constant  # columns of the cache have no gaps
    KV_BYTES: Constant  # alignment of the first column and of the first rotary column of the cache
    ROW_BYTES: Constant  # alignment of the same columns of q
    CAUSAL: Constant


class Tile(NamedTuple):
    """How a program divides its work; the first fields are those of ``Schedule``."""

    GROUP: Constant
    MIN_TOKENS: Constant
    MAX_TOKENS: Constant
    TILES: Constant
    BLOCK_M: Constant
    BLOCK_N: Constant
    BLOCK_V: Constant  # columns of a tile of values, a power of two
    BLOCK_R: Constant  # columns of a tile of the rest of the keys, a power of two
    PRECISION: Constant
    UPCAST: Constant  # the interpreter multiplies in fp32


# ---- writing into a cache


class WriteTensors(NamedTuple):
    """The tensors of a write, in the order of ``MlaWriteTensors``."""

    kv_c_ptr: Foreign
    k_pe_ptr: Foreign
    kv_cache_ptr: Foreign
    slot_mapping_ptr: Foreign
    scale_ptr: Foreign


class WriteNumbers(NamedTuple):
    """Sizes and strides."""

    tokens: Number
    slots: Number
    slot_mapping: Number
    kv_c: Number
    k_pe: Number
    kv: CacheStrides


class WriteOptions(NamedTuple):
    """Memory layout of the cache, and how programs divide the work."""

    PAGE: Constant
    HEAD_DIM_V: Constant
    ROTARY: Constant  # rotary columns, after the values
    ROW_BYTES: Constant  # alignment of the rows of kv_c and k_pe
    FP8_MAX: Constant
    BLOCK_T: Constant
    BLOCK_V: Constant
    BLOCK_R: Constant
