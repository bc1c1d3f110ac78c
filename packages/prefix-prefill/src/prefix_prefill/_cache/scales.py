"""Checks of the scales of integer caches: one per token and head."""

import torch
from torch import Tensor

from .._linked.host.arguments import FLOAT_DTYPES, check_tensor, kind
from .._paged.tensor_checks import check_device
from .layout import cache_sizes


def check_scale_caches(
    k_cache: Tensor,
    k_scale_cache: Tensor | None,
    v_scale_cache: Tensor | None,
    kv_dtype: str | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    is_reference: bool = False,
    names: tuple[str, str] = ("k_descale", "v_descale"),
) -> None:
    """Check the scales per token; ``names`` are the argument names of the scales per head."""
    sizes = cache_sizes(k_cache)
    scales = ("k_scale_cache", k_scale_cache), ("v_scale_cache", v_scale_cache)
    for (name, x), other_name, other in zip(scales, names, (k_scale, v_scale), strict=True):
        if kv_dtype is None:
            if x is not None:
                raise ValueError(f"{name} must be None unless kv_dtype is given, got {kind(x)}")
            continue
        if x is None:
            raise ValueError(f"{name} must be given for kv_dtype {kv_dtype!r}, got None")
        check_tensor(name, x)
        if other is not None:
            raise ValueError(f"{other_name} must be None beside {name}, got {kind(other)}")
        if x.dtype not in FLOAT_DTYPES and not (is_reference and x.dtype == torch.float64):
            raise TypeError(
                f"{name} must be torch.float16, torch.bfloat16 or torch.float32, got {x.dtype}"
            )
        if kv_dtype == "int4_per_token_head" and x.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"{name} must be torch.float32 for kv_dtype {kv_dtype!r}, which has zero points in "
                f"the lowest bits, got {x.dtype}"
            )
        check_device(name, x, "k_cache", k_cache)
        if x.shape != sizes[:3]:
            raise ValueError(
                f"{name} must be [num_blocks, block_size, heads_k], {list(sizes[:3])}, "
                f"got {list(x.shape)}"
            )
        if k_scale_cache is not None and x.dtype != k_scale_cache.dtype:
            raise TypeError(
                f"{name} must have the dtype of k_scale_cache, {k_scale_cache.dtype}, got {x.dtype}"
            )
