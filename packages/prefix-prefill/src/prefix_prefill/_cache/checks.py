"""Checks of paged caches: layout, dtype, and the inputs of writes."""

import torch
from torch import Tensor

from .._linked.host.arguments import (
    DEVICES,
    FLOAT_DTYPES,
    FP8_DTYPES,
    check_choice,
    check_fp8_hardware,
    check_tensor,
)
from .._paged.tensor_checks import check_device, check_indices, check_scale_tensor
from .layout import PACKED_NDIM, CacheSizes, cache_sizes, head_dim_of_values, is_packed

# storage dtype of integer caches, which need a kv_dtype to be told from FP8 in bytes
KV_DTYPES = {"int8": torch.int8, "int4": torch.uint8}
# the same with vLLM's rounding; None is the platform's e4m3, which bytes may hold
PER_TOKEN_HEAD = {
    "int8_per_token_head": torch.int8,
    "int4_per_token_head": torch.uint8,
    "fp8_per_token_head": None,
}
# where a cache of bytes holds FP8
OF_FP8 = (None, "fp8_per_token_head")

_NHD = "[num_blocks, block_size, heads_k, head_dim]"
_NHD_V = "[num_blocks, block_size, heads_k, head_dim_v]"
_PACKED_K = "[num_blocks, heads_k, head_dim // x, block_size, x]"
_PACKED_V = "[num_blocks, heads_k, head_dim_v, block_size]"


def fp8_view(q: Tensor, cache: Tensor) -> Tensor:
    """Return a uint8 cache as a view in the platform's FP8 dtype (e4m3), other caches unchanged."""
    if not isinstance(cache, Tensor) or cache.dtype != torch.uint8 or not isinstance(q, Tensor):
        return cache
    return cache.view(check_fp8_hardware("k_cache", cache.device))


def fp8_dtypes_of(device: torch.device, name: str) -> tuple[torch.dtype, torch.dtype]:
    """Return the e4m3 and the e5m2 dtype of a device."""
    e4m3 = check_fp8_hardware(name, device)
    fnuz = e4m3 == torch.float8_e4m3fnuz
    return e4m3, torch.float8_e5m2fnuz if fnuz else torch.float8_e5m2


def check_kv_dtype(kv_dtype: str | None, is_own: bool = False) -> None:
    """Check the name of a cache's numbers; ``is_own``: vLLM's formats are not offered."""
    check_choice("kv_dtype", kv_dtype, (None, *KV_DTYPES, *(() if is_own else PER_TOKEN_HEAD)))


def stored_view(q: Tensor, cache: Tensor, kv_dtype: str | None) -> Tensor:
    """Return a cache in the dtype in which it is read; after this, uint8 always means int4."""
    return fp8_view(q, cache) if kv_dtype in OF_FP8 else cache


def check_quantised(k_cache: Tensor, kv_dtype: str) -> None:
    """Check a cache with scales of single tokens; ``check_scale_caches`` checks these."""
    dtype = {**KV_DTYPES, **PER_TOKEN_HEAD}[kv_dtype]
    if dtype is None:
        dtype = check_fp8_hardware("k_cache", k_cache.device)
    if k_cache.dtype != dtype:
        raise TypeError(f"k_cache must be {dtype} for kv_dtype {kv_dtype!r}, got {k_cache.dtype}")
    if is_packed(k_cache):
        raise NotImplementedError(
            f"k_cache must be {_NHD} for kv_dtype {kv_dtype!r}, got {list(k_cache.shape)}; the "
            "packed layout holds FP8"
        )


def check_fp8_cache(k_cache: Tensor) -> None:
    """Check the dtype of an FP8 cache."""
    allowed = fp8_dtypes_of(k_cache.device, "k_cache")
    if k_cache.dtype not in allowed:
        raise TypeError(
            f"k_cache must be {allowed[0]} or {allowed[1]} to be FP8 on this platform, "
            f"got {k_cache.dtype}"
        )


def check_caches(k_cache: Tensor, v_cache: Tensor) -> CacheSizes:
    """Check shapes, except ``head_dim_v``, dtypes and devices of a cache; return its sizes."""
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, x)
    k_shape, v_shape = k_cache.shape, v_cache.shape
    if len(k_shape) not in (4, PACKED_NDIM):
        raise ValueError(f"k_cache must be {_NHD} or {_PACKED_K}, got {list(k_shape)}")
    sizes = cache_sizes(k_cache)
    expected: list[int | str] = [*k_shape[:3], "head_dim_v"]
    form, width = _NHD_V, 3
    if is_packed(k_cache):
        expected = [sizes.num_blocks, sizes.heads_k, "head_dim_v", sizes.block_size]
        form, width = _PACKED_V, 2
    if len(v_shape) != 4 or any(
        n != m for i, (n, m) in enumerate(zip(v_shape, expected, strict=True)) if i != width
    ):
        shown = ", ".join(map(str, expected))
        raise ValueError(f"v_cache must be {form}, [{shown}], got {list(v_shape)}")
    if sizes.block_size < 1 or sizes.heads_k < 1:
        raise ValueError(
            f"k_cache must have a block_size and heads_k of at least 1, got {list(k_shape)}"
        )
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(
            f"v_cache must have the dtype of k_cache, {k_cache.dtype}, got {v_cache.dtype}"
        )
    check_device("v_cache", v_cache, "k_cache", k_cache)
    return sizes


def check_cache_inputs(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kv_dtype: str | None = None,
) -> None:
    """Check the inputs of a write into a cache."""
    check_tensor("k", k)
    check_tensor("v", v)
    if k.dtype not in FLOAT_DTYPES:
        raise TypeError(f"k must be torch.float16, torch.bfloat16 or torch.float32, got {k.dtype}")
    if v.dtype != k.dtype:
        raise TypeError(f"v must have the dtype of k, {k.dtype}, got {v.dtype}")
    if k.device.type not in DEVICES:
        raise NotImplementedError(f"k must be on a CPU or a CUDA or HIP device, got {k.device}")
    sizes = check_caches(k_cache, v_cache)
    check_device("v", v, "k", k)
    check_device("k_cache", k_cache, "k", k)
    if kv_dtype is not None:
        check_quantised(k_cache, kv_dtype)
    elif k_cache.dtype in FP8_DTYPES:
        check_fp8_cache(k_cache)
    elif k_cache.dtype != k.dtype:
        raise TypeError(
            f"k_cache must have the dtype of k, {k.dtype}, or be FP8 or torch.uint8, "
            f"got {k_cache.dtype}"
        )
    if k.ndim != 3 or k.shape[1:] != (sizes.heads_k, sizes.head_dim):
        raise ValueError(
            f"k must be [tokens, heads_k, head_dim], [tokens, {sizes.heads_k}, {sizes.head_dim}], "
            f"got {list(k.shape)}"
        )
    head_dim_v = head_dim_of_values(k_cache, v_cache)
    if min(sizes.head_dim, head_dim_v) < 1:
        name, cache = ("v_cache", v_cache) if sizes.head_dim else ("k_cache", k_cache)
        raise ValueError(f"{name} must have a head_dim of at least 1, got {list(cache.shape)}")
    form = [k.shape[0], sizes.heads_k, head_dim_v]
    if list(v.shape) != form:
        raise ValueError(f"v must be [tokens, heads_k, head_dim_v], {form}, got {list(v.shape)}")
    check_indices("slot_mapping", slot_mapping, "k", k, 1)
    if slot_mapping.shape[0] > k.shape[0]:
        raise ValueError(
            f"slot_mapping must have at most as many entries as k has tokens, {k.shape[0]}, "
            f"got {slot_mapping.shape[0]}"
        )
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        if k_cache.dtype not in FP8_DTYPES and kv_dtype is None:
            raise ValueError(
                f"{name} must be None unless k_cache and v_cache are FP8, which are {k_cache.dtype}"
            )
        check_scale_tensor(name, scale, "k", k, sizes.heads_k)
