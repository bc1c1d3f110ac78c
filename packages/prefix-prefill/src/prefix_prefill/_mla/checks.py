"""Checks of multi-head latent attention; the rules of ``_paged/checks.py`` apply."""

from __future__ import annotations

import torch
from torch import Tensor

from .._cache.checks import fp8_dtypes_of
from .._cache.layout import CacheSizes
from .._linked.host.arguments import (
    DEVICES,
    FLOAT_DTYPES,
    FP8_DTYPES,
    check_count,
    check_flag,
    check_fp8_hardware,
    check_offset_values,
    check_scale,
    check_tensor,
)
from .._paged.checks import HEAD_DIM_UNIT
from .._paged.options import MAX_SPLITS
from .._paged.tensor_checks import check_device, check_indices, check_scale_tensor
from .._paged.values import check_pages, check_slots
from .call import MlaOptions, MlaTensors, MlaWriteTensors

MAX_HEAD_DIM_V = 512
# columns of the keys after the columns that are also values
MAX_ROTARY = 64


def stored(kv_cache: Tensor) -> Tensor:
    """Return a uint8 cache as a view in the platform's FP8 dtype (e4m3), other caches unchanged."""
    if not isinstance(kv_cache, Tensor) or kv_cache.dtype != torch.uint8:
        return kv_cache
    return kv_cache.view(check_fp8_hardware("kv_cache", kv_cache.device))


def mla_sizes(kv_cache: Tensor) -> CacheSizes:
    """Return the sizes of a cache of latent vectors: it has one head."""
    blocks, page, head_dim = kv_cache.shape
    return CacheSizes(blocks, page, 1, head_dim)


def check_mla(q: Tensor, kv_cache: Tensor, head_dim_v: int) -> None:
    """Check queries and the cache."""
    check_tensor("q", q)
    if q.dtype not in FLOAT_DTYPES:
        if q.dtype not in FP8_DTYPES:
            raise TypeError(
                "q must be torch.float16, torch.bfloat16, torch.float32 or FP8 (e4m3), got "
                f"{q.dtype}; mla_attention_reference takes torch.float64"
            )
        expected = check_fp8_hardware("q", q.device)
        if q.dtype != expected:
            raise TypeError(f"q must be {expected} to be FP8 on this platform, got {q.dtype}")
    if q.device.type not in DEVICES:
        raise NotImplementedError(f"q must be on a CPU or a CUDA or HIP device, got {q.device}")
    check_shapes(q, kv_cache, head_dim_v)
    check_head_dims(kv_cache.shape[2], head_dim_v)
    check_device("kv_cache", kv_cache, "q", q)
    _check_cache_dtype(kv_cache, "q", q)


def check_shapes(q: Tensor, kv_cache: Tensor, head_dim_v: int) -> None:
    """Check the shapes of queries and cache."""
    if q.ndim != 3 or q.shape[1] < 1:
        raise ValueError(f"q must be [tokens, heads, head_dim], got {list(q.shape)}")
    check_cache(kv_cache)
    if kv_cache.shape[2] != q.shape[2]:
        raise ValueError(
            f"head_dim of kv_cache must be that of q, {q.shape[2]}, got {kv_cache.shape[2]}"
        )
    check_count("head_dim_v", head_dim_v, 0)
    if not 1 <= head_dim_v <= q.shape[2]:
        raise ValueError(
            f"head_dim_v must be from 1 to the head_dim of q, {q.shape[2]}, got {head_dim_v}"
        )


def check_cache(kv_cache: Tensor) -> None:
    """Check the shape of a cache."""
    check_tensor("kv_cache", kv_cache)
    if kv_cache.ndim != 3 or kv_cache.shape[1] < 1:
        raise ValueError(
            "kv_cache must be [num_blocks, block_size, head_dim] with a block_size of at least 1, "
            f"got {list(kv_cache.shape)}"
        )


def check_head_dims(head_dim: int, head_dim_v: int) -> None:
    """Check that the kernels have tiles for the head dimensions."""
    rotary = head_dim - head_dim_v
    if head_dim_v % HEAD_DIM_UNIT or head_dim_v > MAX_HEAD_DIM_V:
        raise NotImplementedError(
            f"head_dim_v must be a multiple of {HEAD_DIM_UNIT} up to {MAX_HEAD_DIM_V}, "
            f"got {head_dim_v}"
        )
    if rotary % HEAD_DIM_UNIT or rotary > MAX_ROTARY:
        raise NotImplementedError(
            f"head_dim of q must be head_dim_v, {head_dim_v}, and a multiple of {HEAD_DIM_UNIT} up "
            f"to {MAX_ROTARY} more, got {head_dim}"
        )


def _check_cache_dtype(kv_cache: Tensor, name: str, x: Tensor) -> None:
    if kv_cache.dtype in FP8_DTYPES:
        allowed = fp8_dtypes_of(kv_cache.device, "kv_cache")
        if kv_cache.dtype not in allowed:
            raise TypeError(
                f"kv_cache must be {allowed[0]} or {allowed[1]} to be FP8 on this platform, "
                f"got {kv_cache.dtype}"
            )
    elif kv_cache.dtype not in FLOAT_DTYPES or (
        x.dtype in FLOAT_DTYPES and kv_cache.dtype != x.dtype
    ):
        raise TypeError(
            f"kv_cache must have the dtype of {name}, {x.dtype}, or be FP8 or torch.uint8, "
            f"got {kv_cache.dtype}"
        )


def check_mla_descales(
    q: Tensor, kv_cache: Tensor, q_descale: Tensor | None, kv_descale: Tensor | None
) -> None:
    """Check that descales come only with FP8 tensors."""
    for name, scale, other_name, x in (
        ("q_descale", q_descale, "q", q),
        ("kv_descale", kv_descale, "kv_cache", kv_cache),
    ):
        if scale is None:
            continue
        if x.dtype not in FP8_DTYPES:
            raise ValueError(f"{name} must be None unless {other_name} is FP8, which is {x.dtype}")
        check_scale_tensor(name, scale, "q", q, 0)


def check_mla_options(
    q: Tensor, softmax_scale: float | None, causal: bool, num_splits: int, return_lse: bool
) -> MlaOptions:
    """Check the options; return them as the operator takes them."""
    check_flag("causal", causal)
    check_flag("return_lse", return_lse)
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    else:
        softmax_scale = check_scale("softmax_scale", softmax_scale)
    check_count("num_splits", num_splits, 0)
    if num_splits > MAX_SPLITS:
        raise ValueError(
            f"num_splits must be from 0 to {MAX_SPLITS}, where 0 decides by load, got {num_splits}"
        )
    return MlaOptions(softmax_scale, bool(causal), num_splits)


def check_mla_out(q: Tensor, out: Tensor | None, head_dim_v: int) -> torch.dtype:
    """Check the output; return its dtype."""
    if out is None:
        return torch.bfloat16 if q.dtype in FP8_DTYPES else q.dtype
    check_tensor("out", out)
    expected = [*q.shape[:2], head_dim_v]
    if list(out.shape) != expected:
        raise ValueError(
            f"out must be [tokens, heads, head_dim_v], {expected}, got {list(out.shape)}"
        )
    check_device("out", out, "q", q)
    if out.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"out must be torch.float16, torch.bfloat16 or torch.float32, got {out.dtype}"
        )
    return out.dtype


def check_mla_write(x: MlaWriteTensors) -> None:
    """Check the inputs of a write into a cache."""
    for name, part in (("kv_c", x.kv_c), ("k_pe", x.k_pe)):
        check_tensor(name, part)
        if part.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"{name} must be torch.float16, torch.bfloat16 or torch.float32, got {part.dtype}"
            )
        if part.ndim != 2:
            raise ValueError(f"{name} must be [tokens, columns], got {list(part.shape)}")
    kv_c, k_pe = x.kv_c, x.k_pe
    if kv_c.device.type not in DEVICES:
        raise NotImplementedError(
            f"kv_c must be on a CPU or a CUDA or HIP device, got {kv_c.device}"
        )
    if k_pe.dtype != kv_c.dtype:
        raise TypeError(f"k_pe must have the dtype of kv_c, {kv_c.dtype}, got {k_pe.dtype}")
    check_device("k_pe", k_pe, "kv_c", kv_c)
    if k_pe.shape[0] != kv_c.shape[0]:
        raise ValueError(
            f"k_pe must have the tokens of kv_c, {kv_c.shape[0]}, got {list(k_pe.shape)}"
        )
    check_cache(x.kv_cache)
    check_device("kv_cache", x.kv_cache, "kv_c", kv_c)
    if x.kv_cache.shape[2] != kv_c.shape[1] + k_pe.shape[1]:
        raise ValueError(
            f"head_dim of kv_cache must be that of kv_c and k_pe, {kv_c.shape[1]} + "
            f"{k_pe.shape[1]}, got {x.kv_cache.shape[2]}"
        )
    check_head_dims(x.kv_cache.shape[2], kv_c.shape[1])
    _check_cache_dtype(x.kv_cache, "kv_c", kv_c)
    check_indices("slot_mapping", x.slot_mapping, "kv_c", kv_c, 1)
    if x.slot_mapping.shape[0] > kv_c.shape[0]:
        raise ValueError(
            "slot_mapping must have at most as many entries as kv_c has tokens, "
            f"{kv_c.shape[0]}, got {x.slot_mapping.shape[0]}"
        )
    if x.scale is not None:
        if x.kv_cache.dtype not in FP8_DTYPES:
            raise ValueError(
                f"scale must be None unless kv_cache is FP8, which is {x.kv_cache.dtype}"
            )
        check_scale_tensor("scale", x.scale, "kv_c", kv_c, 0)


def check_mla_values(x: MlaTensors, max_seqlen_q: int, max_seqlen_k: int) -> None:
    """Check the tensor data of a call on the CPU."""
    starts, lengths = x.cu_seqlens_q.tolist(), x.seqlens_k.tolist()
    check_offset_values("cu_seqlens_q", starts, x.q.shape[0], "max_seqlen_q", max_seqlen_q)
    firsts = [0] * len(lengths)
    check_pages(
        starts,
        lengths,
        firsts,
        x.block_table,
        mla_sizes(x.kv_cache),
        has_new=False,
        max_seqlen_k=max_seqlen_k,
    )


def check_mla_slots(x: MlaWriteTensors) -> None:
    """Check that slots are in the cache and that no two tokens share one."""
    check_slots(x.kv_cache[:, :, None], x.slot_mapping)
