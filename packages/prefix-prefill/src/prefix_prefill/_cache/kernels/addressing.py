"""Strides, alignments and scales of a cache, as the kernels take them."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from torch import Tensor

from ..._linked.host.forms import ACCESS_BYTES
from ..._linked.launch.runtime import dense
from ..._paged.call import Tensors
from ..._paged.tiles import padded_head_dim, words_of
from ..layout import cache_sizes, head_dim_of_values, is_packed, numbers_of_byte
from .arguments import CacheLayout, RowStrides, Vector, VectorStrides

T = TypeVar("T", bound=tuple[Any, ...])


class CacheForm:
    """Strides and layout of a cache."""

    def __init__(
        self, k_cache: Tensor, v_cache: Tensor, block_n: int = 1, in_words: bool = False
    ) -> None:
        """Describe a cache that is read in tiles of ``block_n`` keys, and in words if it can be."""
        self.k = k = _key_strides(k_cache)
        self.v = v = _value_strides(k_cache, v_cache)
        self.page = cache_sizes(k_cache).block_size
        # a key is cut into runs of numbers, a value is one run
        run = k_cache.shape[-1]
        self.values_lie_as_keys = (k.page, k.slot) == (v.page, v.slot)
        of_byte = numbers_of_byte(k_cache)
        v_bytes = _begins(v_cache, v, head_dim_of_values(k_cache, v_cache) // of_byte)
        # contiguous slots that lie in one page and in one tile
        self.v_column_run = 0
        if v.number != 1 and v.slot == 1:
            slots = math.gcd(self.page, block_n)
            self.v_column_run = slots & -slots
            v_bytes = _gcd(v_cache, (v.page, v.head, v.number), self.v_column_run)
        k_bytes = _begins(k_cache, k, run)
        self.word_bits, self.slices = 0, of_byte
        if in_words and k.number == v.number == 1 and k_bytes % 2 == v_bytes % 2 == 0:
            self.word_bits, self.slices, run = 16, 2 * of_byte, run // 2
            self.k, self.v = k.of_words(2), v.of_words(2)
        self.layout = CacheLayout(
            PAGE=self.page,
            K_RUN=run,
            K_UNIT=k.number == 1,
            K_BYTES=k_bytes,
            V_UNIT=v.number == 1,
            V_BYTES=v_bytes,
        )

    def vectors(self, k: Tensor, v: Tensor) -> tuple[Vector, Vector]:
        """Return the vectors of new keys and values that are written into the cache."""
        x, widths = self.layout, (k.shape[2], v.shape[2])
        forms = (x.K_RUN, x.K_UNIT, x.K_BYTES), (widths[1] // self.slices, x.V_UNIT, x.V_BYTES)
        key, value = (
            Vector(d, padded_head_dim(d), *form) for d, form in zip(widths, forms, strict=True)
        )
        return key, value


def has_narrow_words(x: Tensors) -> bool:
    """Return whether a cache is read in words, but in accesses of less than 16 bytes."""
    cache = CacheForm(x.k_cache, x.v_cache, in_words=words_of(x) != "")
    return cache.word_bits > 0 and min(cache.layout.K_BYTES, cache.layout.V_BYTES) < ACCESS_BYTES


def _begins(cache: Tensor, strides: VectorStrides, run: int) -> int:
    """Return the alignment of all runs of a cache."""
    begins = (strides.page, strides.slot, strides.head, strides.run)
    return _gcd(cache, begins, run) if strides.number == 1 else cache.element_size()


def _gcd(x: Tensor, begins: tuple[int, ...], run: int) -> int:
    # a dimension of size 1 may have any stride, which at most lowers the result
    return math.gcd(ACCESS_BYTES, x.data_ptr(), *(n * x.element_size() for n in (*begins, run)))


def _key_strides(k_cache: Tensor) -> VectorStrides:
    if is_packed(k_cache):
        page, head, step, slot, inner = k_cache.stride()
        return VectorStrides(page, slot, head, step, inner)
    page, slot, head, inner = k_cache.stride()
    return VectorStrides(page, slot, head, 0, inner)


def _value_strides(k_cache: Tensor, v_cache: Tensor) -> VectorStrides:
    if is_packed(k_cache):
        page, head, inner, slot = v_cache.stride()
        return VectorStrides(page, slot, head, 0, inner)
    return _key_strides(v_cache)


def row_strides(x: Tensor | None) -> RowStrides:
    """Return the strides of a token and of a head; zeros without the tensor."""
    token, head, _ = (0, 0, 0) if x is None else x.stride()
    return RowStrides(token, head)


def strides_of(kind: type[T], x: Tensor | None) -> T:
    """Return the strides of all dimensions as a structure; zeros without the tensor."""
    return kind(*x.stride()) if x is not None else kind(*(0 for _ in kind._fields))


def descale_ndim(*descales: Tensor | None) -> int:
    """Return the most dimensions of the descales: 0, 1 per head, 2 per sequence and head."""
    return max((d.ndim for d in descales if d is not None and d.numel() != 1), default=0)


def one_form(shape: tuple[int, ...], *descales: Tensor | None) -> tuple[Tensor | None, ...]:
    """Expand the scales to one shape; an empty shape leaves scales of one element."""
    if not shape:
        return tuple(map(dense, descales))
    parts = (None if d is None else d.reshape(()) if d.numel() == 1 else d for d in descales)
    return tuple(dense(None if d is None else d.expand(shape)) for d in parts)
