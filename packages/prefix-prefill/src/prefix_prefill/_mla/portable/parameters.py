"""Arguments of the kernels of multi-head latent attention, by names."""

from typing import Any, NamedTuple


class MlaPointers(NamedTuple):
    """The tensors of a call, in the order of its ``MlaTensors``, and results of splits."""

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
    """The scale, how much there is, and how it is shared out."""

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
    """How the cache lies, and what is asked for."""

    PAGE: Any
    KV_UNIT: Any  # columns of the cache have no gaps
    KV_BYTES: Any  # alignment of the first column, and of the first that is no value
    ROW_BYTES: Any  # alignment of the same columns of q
    CAUSAL: Any


class MlaTile(NamedTuple):
    """How a program divides its work."""

    HEAD_DIM: Any
    HEAD_DIM_V: Any
    BLOCK_N: Any
    BLOCK_V: Any  # columns of a tile of values, a power of two
    BLOCK_R: Any  # and of the rest of the keys
    PRECISION: Any
    UPCAST: Any  # the interpreter multiplies in fp32


class MlaWritePointers(NamedTuple):
    """The tensors of a write, in the order of its ``MlaWriteTensors``."""

    kv_c_ptr: Any
    k_pe_ptr: Any
    kv_cache_ptr: Any
    slot_mapping_ptr: Any
    scale_ptr: Any


class MlaWriteNumbers(NamedTuple):
    """How much there is, and strides."""

    tokens: Any
    slots: Any
    stride_slot: Any
    stride_cs: Any
    stride_ps: Any
    stride_kvp: Any
    stride_kvs: Any
    stride_kvd: Any


class MlaWriteTile(NamedTuple):
    """How the cache lies, and how programs divide the work."""

    PAGE: Any
    HEAD_DIM_V: Any
    ROTARY: Any  # columns behind those
    ROW_BYTES: Any  # alignment of the rows of both parts
    FP8_MAX: Any
    BLOCK_T: Any
    BLOCK_V: Any
    BLOCK_R: Any


# ---- what functions hand on


class Share(NamedTuple):
    """The keys of a program: tiles ``[begin, end)``, and what bounds them."""

    begin: Any
    end: Any
    last: Any  # of the keys that some row sees


class MlaSource(NamedTuple):
    """Where the keys of a sequence lie."""

    v: Any  # the columns that are values, too
    r: Any  # those that are not
    table: Any


class MlaQueries(NamedTuple):
    """What keys are held against, row by row."""

    v: Any
    r: Any
    position: Any
    factor: Any  # of products, for logits to base 2
