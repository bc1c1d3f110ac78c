"""Arguments of the kernels for a cache of rows or pages that a call appends to."""

from __future__ import annotations

from typing import NamedTuple

from ..._cache.kernels.arguments import (
    AngleStrides,
    RowStrides,
    SlotStrides,
    TableStrides,
    VectorStrides,
)
from ..._linked.launch.entries import Foreign, Number


class Tensors(NamedTuple):
    """The tensors of an append, in the order of ``AppendTensors``."""

    q_ptr: Foreign
    k_ptr: Foreign
    v_ptr: Foreign
    k_cache_ptr: Foreign
    v_cache_ptr: Foreign
    cache_seqlens_ptr: Foreign
    cache_batch_idx_ptr: Foreign
    block_table_ptr: Foreign
    rotary_cos_ptr: Foreign
    rotary_sin_ptr: Foreign
    rotated_ptr: Foreign
    k_scale_cache_ptr: Foreign
    v_scale_cache_ptr: Foreign


class Numbers(NamedTuple):
    """Sizes of the batch and of the cache, and strides."""

    batch: Number
    seqlen_new: Number
    seqlen_q: Number
    page: Number  # slots of a page, or of a row
    room: Number  # slots of a sequence
    pages: Number  # pages, or rows, of the cache
    seqlen_ro: Number  # positions in the tables of cosines and sines
    q: RowStrides
    k: RowStrides
    v: RowStrides
    k_cache: VectorStrides
    v_cache: VectorStrides
    table: TableStrides
    cos: AngleStrides
    sin: AngleStrides
    k_scales: SlotStrides
    v_scales: SlotStrides


class PageTensors(NamedTuple):
    """Lengths and rows of a cache, and the attention kernel's arguments that they become."""

    cache_seqlens_ptr: Foreign
    cache_batch_idx_ptr: Foreign
    cache_leftpad_ptr: Foreign
    starts_ptr: Foreign
    lengths_ptr: Foreign
    table_ptr: Foreign


class PageNumbers(NamedTuple):
    """Sizes of rows as pages; a page begins at every slot, so page numbers count slots."""

    seqlen_q: Number
    new: Number  # keys after those that ``cache_seqlens`` counts
    row_pages: Number = 0  # page numbers from one row to the next
    step: Number = 0  # page numbers from one page of a sequence to the next
    pages: Number = 0  # pages of a sequence
