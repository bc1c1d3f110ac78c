"""Structures of the portable kernels of multi-head latent attention."""

from typing import Any, NamedTuple


class MlaPointers(NamedTuple):
    """The tensors of a call, in the order of ``MlaTensors``, and partial results of splits."""

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


class MlaCounts(NamedTuple):
    """The scale, and sizes of the batch and of the grid."""

    scale: Any
    batch: Any
    tokens: Any
    splits: Any


class MlaStrides(NamedTuple):
    """Strides of tokens and heads; of pages, slots and columns of the cache; of the table."""

    stride_qs: Any
    stride_qh: Any
    stride_os: Any
    stride_oh: Any
    stride_kvp: Any
    stride_kvs: Any
    stride_kvd: Any
    stride_table_b: Any
    stride_table_p: Any


class MlaOptions(NamedTuple):
    """Memory layout of the cache, and the features of a call."""

    PAGE: Any
    KV_UNIT: Any  # columns of the cache have no gaps
    KV_BYTES: Any  # alignment of the first column and of the first rotary column of the cache
    ROW_BYTES: Any  # alignment of the same columns of q
    CAUSAL: Any


class MlaTile(NamedTuple):
    """How a program divides its work."""

    HEAD_DIM: Any
    HEAD_DIM_V: Any
    BLOCK_N: Any
    BLOCK_V: Any  # columns of a tile of values, a power of two
    BLOCK_R: Any  # columns of a tile of the rest of the keys, a power of two
    PRECISION: Any
    UPCAST: Any  # the interpreter multiplies in fp32


class MlaWritePointers(NamedTuple):
    """The tensors of a write, in the order of ``MlaWriteTensors``."""

    kv_c_ptr: Any
    k_pe_ptr: Any
    kv_cache_ptr: Any
    slot_mapping_ptr: Any
    scale_ptr: Any


class MlaWriteNumbers(NamedTuple):
    """Sizes and strides."""

    tokens: Any
    slots: Any
    stride_slot: Any
    stride_cs: Any
    stride_ps: Any
    stride_kvp: Any
    stride_kvs: Any
    stride_kvd: Any


class MlaWriteTile(NamedTuple):
    """Memory layout of the cache, and how programs divide the work."""

    PAGE: Any
    HEAD_DIM_V: Any
    ROTARY: Any  # rotary columns, after the values
    ROW_BYTES: Any  # alignment of the rows of kv_c and k_pe
    FP8_MAX: Any
    BLOCK_T: Any
    BLOCK_V: Any
    BLOCK_R: Any


# ---- between functions


class Share(NamedTuple):
    """The tiles of keys of a program, ``[begin, end)``."""

    begin: Any
    end: Any
    last: Any  # end of the keys that some row sees


class MlaSource(NamedTuple):
    """The keys of a sequence."""

    v: Any  # the columns that are also values
    r: Any  # the rest of the columns
    table: Any


class MlaQueries(NamedTuple):
    """The rows of a tile of queries."""

    v: Any
    r: Any
    position: Any
    factor: Any  # factor of products, for logits in base 2
