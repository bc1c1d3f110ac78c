"""Arguments of the kernels that write into a cache, of a cache's pages or of its rows."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..._linked.launch.entries import Constant, Foreign, Number

# ---- strides


class RowStrides(NamedTuple):
    """Strides of a tensor ``[tokens, heads, head_dim]``."""

    token: Number
    head: Number


class VectorStrides(NamedTuple):
    """Strides of keys or values.

    Number d of a vector is ``d // size * run + d % size * number`` after its first number, where
    ``size`` is the last dimension of the keys, or the head dimension of values.
    """

    page: Number
    slot: Number
    head: Number
    run: Number  # from one run of numbers to the next
    number: Number  # from one number of a run to the next

    def of_words(self, size: int) -> VectorStrides:
        """Return the strides in words of ``size`` contiguous numbers."""
        page, slot, head, run, number = self
        return VectorStrides(page // size, slot // size, head // size, run // size, number)


class SlotStrides(NamedTuple):
    """Strides of a scale per slot and head."""

    page: Number
    slot: Number
    head: Number


class TableStrides(NamedTuple):
    """Strides of a page table."""

    sequence: Number
    page: Number


class AngleStrides(NamedTuple):
    """Strides of a table of cosines or sines."""

    position: Number
    pair: Number


# ---- constants


class CacheLayout(NamedTuple):
    """Memory layout of the vectors (keys and values) of a cache."""

    PAGE: Any  # slots of a page; 0: dense keys without pages
    K_RUN: Any  # numbers of a key in one run
    K_UNIT: Any  # runs have no gaps
    K_BYTES: Any  # alignment of every run
    V_UNIT: Any
    V_BYTES: Any


class Vector(NamedTuple):
    """The vectors of keys or of values, and how they lie in the cache; see ``CacheLayout``."""

    HEAD_DIM: Any
    BLOCK_D: Any
    RUN: Any
    UNIT: Any
    BYTES: Any


class Options(NamedTuple):
    """Sizes of what a program writes, and how it rotates and rounds."""

    KEY: Constant  # vectors
    VALUE: Constant
    HEADS: Constant  # of keys
    ROW_BYTES: Constant  # alignment of the rows of new tensors
    INT_MAX: Constant  # largest code of a cache with a scale per token, 0 for other caches
    BLOCK_T: Constant
    PAGE: Constant = None  # slots of a page; None: it is a number
    SCALE_PER_HEAD: Constant = False
    FP8_MAX: Constant = 0.0  # largest finite value of an fp8 cache, 0 for other caches
    OVERLAP: Constant = False  # programs start while the previous kernel runs (PDL)
    PER_TOKEN_HEAD: Constant = False  # scales and codes as vLLM makes them
    HEADS_Q: Constant = 0
    ROTARY_DIM: Constant = 0  # 0: nothing is rotated
    INTERLEAVED: Constant = False
    MOVING: Constant = False  # query i is at position i after the first new one


# ---- kernel that writes into pages


class Tensors(NamedTuple):
    """New keys and values, the cache and the slots, in the order of ``WriteTensors``."""

    k_ptr: Foreign
    v_ptr: Foreign
    k_cache_ptr: Foreign
    v_cache_ptr: Foreign
    slot_mapping_ptr: Foreign
    k_scale_ptr: Foreign
    v_scale_ptr: Foreign
    k_scale_cache_ptr: Foreign
    v_scale_cache_ptr: Foreign


class Numbers(NamedTuple):
    """How many tokens are written, how many slots there are, and strides."""

    tokens: Number
    slots: Number
    slot_mapping: Number
    k: RowStrides
    v: RowStrides
    k_cache: VectorStrides
    v_cache: VectorStrides
    k_scales: SlotStrides
    v_scales: SlotStrides
