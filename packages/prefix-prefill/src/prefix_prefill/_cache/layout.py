"""The two layouts of a cache, as one set of sizes and strides.

NHD: keys ``[num_blocks, block_size, heads_k, head_dim]``, values
``[num_blocks, block_size, heads_k, head_dim_v]``. Packed: keys
``[num_blocks, heads_k, head_dim // x, block_size, x]``, values
``[num_blocks, heads_k, head_dim_v, block_size]``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

PACKED_NDIM = 5
# the largest code of caches that have a scale for each token and head; uint8 holds two of 4 bits
INT_MAX = {torch.int8: 127, torch.uint8: 7}


class CacheSizes(NamedTuple):
    """What both layouts have, of the keys."""

    num_blocks: int
    block_size: int
    heads_k: int
    head_dim: int


class Strides(NamedTuple):
    """Where number d of a slot of a page lies.

    At ``page * page + slot * slot + head * head + d // run * step + d % run * inner``. The
    last size of the keys is their ``run``; that of values is their head dim.
    """

    page: int
    slot: int
    head: int
    step: int
    inner: int

    def of_words(self, size: int) -> "Strides":
        """Return the same in words of ``size`` numbers, which lie next to each other."""
        page, slot, head, step, inner = self
        return Strides(page // size, slot // size, head // size, step // size, inner)


def is_packed(k_cache: Tensor) -> bool:
    """Say which layout a cache has; its keys tell."""
    return k_cache.ndim == PACKED_NDIM


def numbers_of_byte(cache: Tensor) -> int:
    """Return how many numbers an element of a cache is: bytes of an FP8 cache have its dtype."""
    return 2 if cache.dtype == torch.uint8 else 1


def cache_sizes(k_cache: Tensor) -> CacheSizes:
    """Return the sizes of a cache, from its keys."""
    shape = k_cache.shape
    if is_packed(k_cache):
        return CacheSizes(shape[0], shape[3], shape[1], shape[2] * shape[4])
    return CacheSizes(shape[0], shape[1], shape[2], shape[3] * numbers_of_byte(k_cache))


def head_dim_of_values(k_cache: Tensor, v_cache: Tensor) -> int:
    """Return how many numbers a value of a cache has."""
    if is_packed(k_cache):
        return v_cache.shape[2]
    return v_cache.shape[3] * numbers_of_byte(v_cache)


def key_strides(k_cache: Tensor) -> Strides:
    """Return how keys are addressed."""
    if is_packed(k_cache):
        page, head, step, slot, inner = k_cache.stride()
        return Strides(page, slot, head, step, inner)
    page, slot, head, inner = k_cache.stride()
    return Strides(page, slot, head, 0, inner)


def value_strides(k_cache: Tensor, v_cache: Tensor) -> Strides:
    """Return how values are addressed."""
    if is_packed(k_cache):
        page, head, inner, slot = v_cache.stride()
        return Strides(page, slot, head, 0, inner)
    return key_strides(v_cache)


def gather_pages(cache: Tensor, pages: Tensor, packed: bool) -> Tensor:
    """Return whole pages, one after the other: ``[tokens, heads_k, head_dim]``."""
    # indexing knows no FP8
    is_fp8 = cache.element_size() == 1
    found = cache.view(torch.uint8)[pages].view(cache.dtype) if is_fp8 else cache[pages]
    if packed and found.ndim == PACKED_NDIM:
        found = found.permute(0, 3, 1, 2, 4).flatten(3)
    elif packed:
        found = found.permute(0, 3, 1, 2)
    return found.flatten(0, 1)
