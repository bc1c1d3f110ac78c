"""The two layouts of a cache (NHD and packed), as one set of sizes.

NHD: keys ``[num_blocks, block_size, heads_k, head_dim]``, values
``[num_blocks, block_size, heads_k, head_dim_v]``. Packed: keys
``[num_blocks, heads_k, head_dim // x, block_size, x]``, values
``[num_blocks, heads_k, head_dim_v, block_size]``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

PACKED_NDIM = 5
# largest code of caches with a scale per token and head; uint8 holds two int4 codes
INT_MAX = {torch.int8: 127, torch.uint8: 7}


class CacheSizes(NamedTuple):
    """Sizes of a cache in either layout; ``head_dim`` is that of the keys."""

    num_blocks: int
    block_size: int
    heads_k: int
    head_dim: int


def is_packed(k_cache: Tensor) -> bool:
    """Return whether a cache has the packed layout."""
    return k_cache.ndim == PACKED_NDIM


def numbers_of_byte(cache: Tensor) -> int:
    """Return how many numbers an element holds: 2 in uint8 (int4), else 1."""
    return 2 if cache.dtype == torch.uint8 else 1


def cache_sizes(k_cache: Tensor) -> CacheSizes:
    """Return the sizes of a cache, from its keys."""
    shape = k_cache.shape
    if is_packed(k_cache):
        return CacheSizes(shape[0], shape[3], shape[1], shape[2] * shape[4])
    return CacheSizes(shape[0], shape[1], shape[2], shape[3] * numbers_of_byte(k_cache))


def head_dim_of_values(k_cache: Tensor, v_cache: Tensor) -> int:
    """Return the head dimension of values."""
    if is_packed(k_cache):
        return v_cache.shape[2]
    return v_cache.shape[3] * numbers_of_byte(v_cache)


def gather_pages(cache: Tensor, pages: Tensor, packed: bool) -> Tensor:
    """Return whole pages, concatenated: ``[tokens, heads_k, head_dim]``."""
    # indexing does not support FP8
    is_fp8 = cache.element_size() == 1
    found = cache.view(torch.uint8)[pages].view(cache.dtype) if is_fp8 else cache[pages]
    if packed and found.ndim == PACKED_NDIM:
        found = found.permute(0, 3, 1, 2, 4).flatten(3)
    elif packed:
        found = found.permute(0, 3, 1, 2)
    return found.flatten(0, 1)
