"""Strides, alignments and scales of a cache, as the kernels take them."""

from __future__ import annotations

import math

from torch import Tensor

from ..._linked.host.forms import ACCESS_BYTES
from ..._linked.launch.runtime import dense
from ..._paged.call import Tensors
from ..._paged.portable.parameters import CacheLayout
from ..._paged.tiles import words_of
from ..layout import (
    Strides,
    cache_sizes,
    head_dim_of_values,
    key_strides,
    numbers_of_byte,
    value_strides,
)


class CacheForm:
    """Strides and layout of a cache."""

    def __init__(
        self, k_cache: Tensor, v_cache: Tensor, block_n: int = 1, in_words: bool = False
    ) -> None:
        """Describe a cache that is read in tiles of ``block_n`` keys, and in words if it can be."""
        self.k = k = key_strides(k_cache)
        self.v = v = value_strides(k_cache, v_cache)
        self.page = cache_sizes(k_cache).block_size
        # a key is cut into runs of numbers, a value is one run
        run = k_cache.shape[-1]
        self.values_lie_as_keys = (k.page, k.slot) == (v.page, v.slot)
        of_byte = numbers_of_byte(k_cache)
        v_bytes = _begins(v_cache, v, head_dim_of_values(k_cache, v_cache) // of_byte)
        # contiguous slots that lie in one page and in one tile
        self.v_column_run = 0
        if v.inner != 1 and v.slot == 1:
            slots = math.gcd(self.page, block_n)
            self.v_column_run = slots & -slots
            v_bytes = _gcd(v_cache, (v.page, v.head, v.inner), self.v_column_run)
        k_bytes = _begins(k_cache, k, run)
        self.word_bits, self.slices = 0, of_byte
        if in_words and k.inner == v.inner == 1 and k_bytes % 2 == v_bytes % 2 == 0:
            self.word_bits, self.slices, run = 16, 2 * of_byte, run // 2
            self.k, self.v = k.of_words(2), v.of_words(2)
        self.layout = CacheLayout(
            PAGE=self.page,
            K_RUN=run,
            K_UNIT=k.inner == 1,
            K_BYTES=k_bytes,
            V_UNIT=v.inner == 1,
            V_BYTES=v_bytes,
        )


def has_narrow_words(x: Tensors) -> bool:
    """Return whether a cache is read in words, but in accesses of less than 16 bytes."""
    cache = CacheForm(x.k_cache, x.v_cache, in_words=words_of(x) != "")
    return cache.word_bits > 0 and min(cache.layout.K_BYTES, cache.layout.V_BYTES) < ACCESS_BYTES


def _begins(cache: Tensor, strides: Strides, run: int) -> int:
    """Return the alignment of all runs of a cache."""
    begins = (strides.page, strides.slot, strides.head, strides.step)
    return _gcd(cache, begins, run) if strides.inner == 1 else cache.element_size()


def _gcd(x: Tensor, begins: tuple[int, ...], run: int) -> int:
    # a dimension of size 1 may have any stride, which at most lowers the result
    return math.gcd(ACCESS_BYTES, x.data_ptr(), *(n * x.element_size() for n in (*begins, run)))


def row_strides(x: Tensor) -> tuple[int, int]:
    """Return the strides of a token and of a head."""
    token, head, _ = x.stride()
    return token, head


def descale_ndim(*descales: Tensor | None) -> int:
    """Return the most dimensions of the descales: 0, 1 per head, 2 per sequence and head."""
    return max((d.ndim for d in descales if d is not None and d.numel() != 1), default=0)


def one_form(shape: tuple[int, ...], *descales: Tensor | None) -> tuple[Tensor | None, ...]:
    """Expand the scales to one shape; an empty shape leaves scales of one element."""
    if not shape:
        return tuple(map(dense, descales))
    parts = (None if d is None else d.reshape(()) if d.numel() == 1 else d for d in descales)
    return tuple(dense(None if d is None else d.expand(shape)) for d in parts)
