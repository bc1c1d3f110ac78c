"""Argument checks of the public functions; messages name the argument, what is expected and found.

The checks read types, shapes, dtypes, strides and devices, never tensor data, so they neither wait
for the device nor break a graph capture.
"""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._cache.checks import check_caches, check_fp8_cache, check_quantised
from .._cache.layout import CacheSizes, head_dim_of_values
from .._linked.host import arguments
from .._linked.host.arguments import (
    DEVICES,
    FLOAT_DTYPES,
    FP8_DTYPES,
    check_fp8_hardware,
    check_groups,
    check_tensor,
    is_symbol,
    kind,
    warn_once,
)
from .tensor_checks import check_device, check_indices, check_lengths, check_scale_tensor

MAX_HEAD_DIM = 512
# limit of ``invariant=True``
MAX_INVARIANT_HEAD_DIM = 256
HEAD_DIM_UNIT = 8
# new tokens of a sequence with a tree: bits of an entry of tree_mask
TREE_BITS = 64

# argument names of other attention functions: what to use here
_ELSEWHERE = {
    "b_loc": "use block_table",
    "b_seq_len": "use seqlens_k",
    "b_start_loc": "use cu_seqlens_q",
    "block_tables": "use block_table",
    "cache_seqlens": "use seqlens_k, which counts new keys too",
    "cu_seqlens_k": "use seqlens_k: how many keys each sequence has",
    "dropout_p": "leave it out: there is no dropout here",
    "is_causal": "use causal",
    "k_scale": "use k_descale",
    "kv_cache_dtype": "leave it out: the dtype of k_cache says it",
    "pack_gqa": "leave it out: it changes no result",
    "page_table": "use block_table",
    "query_start_loc": "use cu_seqlens_q",
    "return_softmax_lse": "use return_lse",
    "s_aux": "use sinks",
    "scale": "use softmax_scale",
    "seq_lens": "use seqlens_k",
    "seqused_k": "use seqlens_k",
    "sliding_window": "use window_size: a window of W tokens is (W - 1, 0)",
    "sm_scale": "use softmax_scale",
    "v_scale": "use v_descale",
}


def refuse_unknown(names: Iterable[str], function: Callable[..., Any]) -> NoReturn:
    """Raise for unknown keyword arguments; the message names the argument to use instead."""
    arguments.refuse_unknown(names, _ELSEWHERE, function)


def check_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv_dtype: str | None = None,
) -> None:
    """Check queries, caches and new keys and values."""
    check_tensor("q", q)
    dtype, device = q.dtype, q.device
    if dtype not in FLOAT_DTYPES:
        _check_fp8_input("q", q)
    if device.type not in DEVICES:
        raise NotImplementedError(f"q must be on a CPU or a CUDA or HIP device, got {device}")
    _check_q_shape(q)
    sizes = check_caches(k_cache, v_cache)
    check_device("k_cache", k_cache, "q", q)
    if kv_dtype is not None:
        check_quantised(k_cache, kv_dtype)
        if k_cache.dtype == dtype:
            raise NotImplementedError(
                f"q must be torch.float16, torch.bfloat16 or torch.float32 for kv_dtype "
                f"{kv_dtype!r}, got {dtype}"
            )
    elif k_cache.dtype in FP8_DTYPES:
        check_fp8_cache(k_cache)
    elif k_cache.dtype not in FLOAT_DTYPES or (dtype in FLOAT_DTYPES and k_cache.dtype != dtype):
        raise TypeError(
            f"k_cache must have the dtype of q, {dtype}, or be FP8 or torch.uint8, "
            f"got {k_cache.dtype}"
        )
    _check_sizes(q, sizes)
    head_dim_v = head_dim_of_values(k_cache, v_cache)
    check_head_dim(head_dim_v, "v_cache")
    check_new(q, k, v, sizes, head_dim_v)


def check_new(
    q: Tensor, k: Tensor | None, v: Tensor | None, sizes: CacheSizes, head_dim_v: int
) -> None:
    """Check the dense keys and values of new tokens."""
    if k is None and v is None:
        return
    if k is None or v is None:
        raise ValueError(
            f"k and v must be given together or not at all, got k {kind(k)} and v {kind(v)}"
        )
    for name, x, width, size in (
        ("k", k, "head_dim", sizes.head_dim),
        ("v", v, "head_dim_v", head_dim_v),
    ):
        check_tensor(name, x)
        if x.dtype not in FLOAT_DTYPES or (q.dtype in FLOAT_DTYPES and x.dtype != q.dtype):
            raise TypeError(
                f"{name} must have the dtype of q, {q.dtype}, or be torch.float16, torch.bfloat16 "
                f"or torch.float32 where q is FP8, got {x.dtype}"
            )
        check_device(name, x, "q", q)
        form = (q.shape[0], sizes.heads_k, size)
        if x.shape != form:
            raise ValueError(
                f"{name} must be [tokens, heads_k, {width}], {list(form)}, got {list(x.shape)}"
            )
    if v.dtype != k.dtype:
        raise TypeError(f"v must have the dtype of k, {k.dtype}, got {v.dtype}")


def check_table(
    q: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
) -> int:
    """Check offsets, lengths and page table; return the number of sequences."""
    check_lengths("cu_seqlens_q", cu_seqlens_q, q)
    if cu_seqlens_q.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q must be [batch + 1], got {list(cu_seqlens_q.shape)}")
    batch: int = cu_seqlens_q.shape[0] - 1
    check_lengths("seqlens_k", seqlens_k, q)
    if seqlens_k.shape[0] != batch:
        raise ValueError(f"seqlens_k must be [{batch}], got {list(seqlens_k.shape)}")
    check_indices("block_table", block_table, "q", q, 2)
    if block_table.shape[0] != batch:
        raise ValueError(
            f"block_table must be [{batch}, max_blocks], got {list(block_table.shape)}"
        )
    return batch


def check_extras(
    q: Tensor,
    batch: int,
    heads_k: int,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
) -> None:
    """Check ALiBi slopes, sinks and descales."""
    heads_q = q.shape[1]
    if alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes)
        if alibi_slopes.dtype != torch.float32:
            raise TypeError(f"alibi_slopes must be torch.float32, got {alibi_slopes.dtype}")
        check_device("alibi_slopes", alibi_slopes, "q", q)
        if alibi_slopes.shape != (heads_q,) and alibi_slopes.shape != (batch, heads_q):
            raise ValueError(
                f"alibi_slopes must be [heads_q] or [batch, heads_q], [{heads_q}] or "
                f"[{batch}, {heads_q}], got {list(alibi_slopes.shape)}"
            )
    if sinks is not None:
        check_tensor("sinks", sinks)
        if sinks.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"sinks must be torch.float16, torch.bfloat16 or torch.float32, got {sinks.dtype}"
            )
        check_device("sinks", sinks, "q", q)
        if sinks.shape != (heads_q,):
            raise ValueError(f"sinks must be [heads_q], [{heads_q}], got {list(sinks.shape)}")
    if q_descale is not None and q.dtype not in FP8_DTYPES:
        raise ValueError(f"q_descale must be None unless q is FP8, which is {q.dtype}")
    for name, scale in (
        ("q_descale", q_descale),
        ("k_descale", k_descale),
        ("v_descale", v_descale),
    ):
        if scale is not None:
            check_scale_tensor(name, scale, "q", q, heads_k, batch)


def check_tree(
    q: Tensor,
    tree_mask: Tensor,
    max_seqlen_q: int,
    causal: bool,
    alibi_slopes: Tensor | None,
) -> None:
    """Check a tree over the new tokens, and the arguments that exclude one."""
    check_tensor("tree_mask", tree_mask)
    if tree_mask.dtype != torch.int64:
        raise TypeError(f"tree_mask must be torch.int64, got {tree_mask.dtype}")
    check_device("tree_mask", tree_mask, "q", q)
    if tree_mask.shape != q.shape[:1]:
        raise ValueError(f"tree_mask must be [tokens], [{q.shape[0]}], got {list(tree_mask.shape)}")
    if not causal:
        raise ValueError("causal must be True beside tree_mask, which takes its place, got False")
    if alibi_slopes is not None:
        raise NotImplementedError(
            "alibi_slopes must be None beside tree_mask: the depth in a tree is no distance, "
            "got Tensor; give each branch a call of its own"
        )
    check_tree_size(max_seqlen_q)


def check_invariant(
    q: Tensor,
    head_dim_v: int,
    out_dtype: torch.dtype,
    kv_dtype: str | None,
    alibi_slopes: Tensor | None,
    tree_mask: Tensor | None = None,
    rounds_new: bool = False,
) -> None:
    """Check that ``invariant=True`` supports the call: see the law in docs/numerics.md.

    ``rounds_new``: the call has new keys, and the cache holds keys in fewer bits.
    """
    for name, head_dim in (("q", q.shape[-1]), ("v_cache", head_dim_v)):
        if head_dim > MAX_INVARIANT_HEAD_DIM:
            raise NotImplementedError(
                f"head_dim of {name} must be at most {MAX_INVARIANT_HEAD_DIM} beside "
                f"invariant=True, got {head_dim}; leave invariant out"
            )
    if q.dtype in FP8_DTYPES:
        raise NotImplementedError(
            "q must not be FP8 beside invariant=True: tensor cores add products of FP8 with fewer "
            f"bits than the sums have, so that a tile of zeros would round them, got {q.dtype}; "
            "pass q in bfloat16, which an FP8 cache serves"
        )
    if out_dtype in FP8_DTYPES:
        raise NotImplementedError(
            f"out must not be FP8 beside invariant=True, got {out_dtype}; quantise it afterwards"
        )
    if kv_dtype is not None:
        raise NotImplementedError(
            "kv_dtype must be None beside invariant=True: a training forward has no scale for "
            f"each key, got {kv_dtype!r}; use an FP8 cache"
        )
    if alibi_slopes is not None:
        raise NotImplementedError(
            "alibi_slopes must be None beside invariant=True: the law has no term for it, "
            "got Tensor; leave invariant out"
        )
    if tree_mask is not None:
        raise NotImplementedError(
            "tree_mask must be None beside invariant=True: keys of a branch do not count from "
            "the first of a sequence, got Tensor; leave invariant out"
        )
    if rounds_new:
        raise NotImplementedError(
            "k and v must be None beside an FP8 cache and invariant=True: this call would see them "
            "as they are, and later ones rounded; write them into the cache first, got Tensor"
        )


def check_tree_size(max_seqlen_q: int) -> None:
    """Check that an entry of ``tree_mask`` has a bit for every new token."""
    if not is_symbol(max_seqlen_q) and max_seqlen_q > TREE_BITS:
        raise ValueError(
            f"max_seqlen_q must be at most {TREE_BITS}, the bits of tree_mask, got {max_seqlen_q}"
        )


def check_descales(
    k_cache: Tensor,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    kv_dtype: str | None = None,
) -> None:
    """Check that descales come only with an FP8 cache; warn where it has no scale at all."""
    for name, scale in (("k_descale", k_descale), ("v_descale", v_descale)):
        if scale is not None and k_cache.dtype not in FP8_DTYPES:
            raise ValueError(
                f"{name} must be None unless k_cache and v_cache are FP8, which are {k_cache.dtype}"
            )
    is_fp8 = k_cache.dtype in FP8_DTYPES and kv_dtype is None
    if is_fp8 and k_descale is None and v_descale is None:
        warn_once(
            "descales",
            "k_descale and v_descale are None beside an FP8 cache, so its numbers are taken as "
            "they are; if k_scale and v_scale wrote it, pass these, otherwise a tensor of 1.0",
        )


def check_shared_scales(*descales: Tensor | None) -> None:
    """Check that no descale is per sequence, because sequences share keys."""
    for name, scale in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if scale is not None and scale.numel() != 1 and scale.ndim == 2:
            raise NotImplementedError(
                f"{name} must have one element or be [heads_k] where sequences share keys, "
                f"got {list(scale.shape)}; paged_attn_func takes one for each sequence"
            )


def check_out(
    q: Tensor, head_dim_v: int, out: Tensor | None, out_scale: Tensor | None
) -> torch.dtype:
    """Check the output and its scale; return its dtype."""
    if out_scale is not None:
        check_scale_tensor("out_scale", out_scale, "q", q, 0)
    if out is None:
        if out_scale is not None:
            return check_fp8_hardware("out_scale", q.device)
        return torch.bfloat16 if q.dtype in FP8_DTYPES else q.dtype
    check_tensor("out", out)
    form = [*q.shape[:2], head_dim_v]
    if list(out.shape) != form:
        raise ValueError(
            f"out must be [tokens, heads_q, head_dim_v], {form}, got {list(out.shape)}"
        )
    check_device("out", out, "q", q)
    if out.dtype in FP8_DTYPES:
        expected = check_fp8_hardware("out", q.device)
        if out.dtype != expected:
            raise TypeError(f"out must be {expected} to be FP8 on this platform, got {out.dtype}")
        if out_scale is None:
            raise ValueError(f"out_scale must be given for an out of {out.dtype}, got None")
    elif out.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"out must be torch.float16, torch.bfloat16, torch.float32 or FP8, got {out.dtype}"
        )
    elif out_scale is not None:
        raise ValueError(f"out_scale must be None unless out is FP8, which is {out.dtype}")
    return out.dtype


def check_no_gradients(**arguments: Any) -> None:
    """Check that no tensor requires a gradient, because no function here has a backward.

    Arguments that are ignored may be anything else.
    """
    if not torch.is_grad_enabled():
        return
    for name, x in arguments.items():
        if isinstance(x, Tensor) and x.requires_grad:
            raise NotImplementedError(
                f"attention over a paged cache has no gradient: {name} must not require one, got "
                "requires_grad=True; use torch.no_grad(), or flash_attn_triton to train"
            )


def check_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv_dtype: str | None,
) -> None:
    """Check the main tensors of the reference, which takes any float dtype and head dimension."""
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        if x is None and name in ("k", "v"):
            continue
        check_tensor(name, x)
        if x is not None:
            check_device(name, x, "q", q)
        if x is not None and not x.dtype.is_floating_point and not (kv_dtype and "cache" in name):
            raise TypeError(f"{name} must be of a float dtype, got {x.dtype}")
    if q.ndim != 3:
        raise ValueError(f"q must be [tokens, heads_q, head_dim], got {list(q.shape)}")
    sizes = check_caches(k_cache, v_cache)
    if kv_dtype is not None:
        check_quantised(k_cache, kv_dtype)
    _check_sizes(q, sizes)
    if (k is None) != (v is None):
        raise ValueError(
            f"k and v must be given together or not at all, got k {kind(k)} and v {kind(v)}"
        )


def _check_q_shape(q: Tensor) -> None:
    if q.ndim != 3:
        hint = "; q.flatten(0, 1) packs sequences of one length" if q.ndim == 4 else ""
        raise ValueError(f"q must be [tokens, heads_q, head_dim], got {list(q.shape)}{hint}")
    check_head_dim(q.shape[2])


def check_head_dim(head_dim: int, name: str = "q") -> None:
    """Check the head dimension of queries or of values."""
    if not HEAD_DIM_UNIT <= head_dim <= MAX_HEAD_DIM or head_dim % HEAD_DIM_UNIT != 0:
        raise ValueError(
            f"head_dim of {name} must be a multiple of {HEAD_DIM_UNIT} from {HEAD_DIM_UNIT} to "
            f"{MAX_HEAD_DIM}, got {head_dim}"
        )


def _check_sizes(q: Tensor, sizes: CacheSizes) -> None:
    if sizes.head_dim != q.shape[2]:
        raise ValueError(
            f"head_dim of k_cache must be that of q, {q.shape[2]}, got {sizes.head_dim}"
        )
    check_groups(q.shape[1], sizes.heads_k)


def _check_fp8_input(name: str, x: Tensor) -> None:
    if x.dtype not in FP8_DTYPES:
        raise TypeError(
            f"{name} must be torch.float16, torch.bfloat16, torch.float32 or FP8 (e4m3), "
            f"got {x.dtype}; paged_attention_reference takes torch.float64"
        )
    expected = check_fp8_hardware(name, x.device)
    if x.dtype != expected:
        raise TypeError(f"{name} must be {expected} to be FP8 on this platform, got {x.dtype}")
