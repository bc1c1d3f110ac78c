"""Functions of flash-attn 2 that take keys and values, or all three, in one tensor.

The parts are views, so nothing is copied; autograd assembles the gradient of the packed tensor.
"""

from typing import NoReturn

import torch
from torch import Tensor

from ._linked.host.arguments import check_tensor
from .api import Result, flash_attn_func, flash_attn_varlen_func


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    return_lse: bool = False,
    invariant: bool = False,
    **unknown: NoReturn,
) -> Result:
    """Call :func:`flash_attn_func` on queries, keys and values in one tensor.

    Args:
        qkv: ``[batch, seqlen, 3, heads, head_dim]``.
        dropout_p: as in :func:`flash_attn_func`; so are all further arguments.

    Returns:
        What :func:`flash_attn_func` returns.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range.
        NotImplementedError: as :func:`flash_attn_func` does.
    """
    q, k, v = _unpack("qkv", qkv, "[batch, seqlen, 3, heads, head_dim]", 5, 3)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        bias=bias,
        sinks=sinks,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        out_dtype=out_dtype,
        out_scale=out_scale,
        return_lse=return_lse,
        invariant=invariant,
        **unknown,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    return_lse: bool = False,
    invariant: bool = False,
    **unknown: NoReturn,
) -> Result:
    """Call :func:`flash_attn_func` on keys and values in one tensor.

    Args:
        q: queries, ``[batch, seqlen_q, heads_q, head_dim]``.
        kv: ``[batch, seqlen_k, 2, heads_k, head_dim]``.
        dropout_p: as in :func:`flash_attn_func`; so are all further arguments.

    Returns:
        What :func:`flash_attn_func` returns.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range.
        NotImplementedError: as :func:`flash_attn_func` does.
    """
    k, v = _unpack("kv", kv, "[batch, seqlen_k, 2, heads_k, head_dim]", 5, 2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        bias=bias,
        sinks=sinks,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        out_dtype=out_dtype,
        out_scale=out_scale,
        return_lse=return_lse,
        invariant=invariant,
        **unknown,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    return_lse: bool = False,
    seqused_k: Tensor | None = None,
    invariant: bool = False,
    **unknown: NoReturn,
) -> Result:
    """Call :func:`flash_attn_varlen_func` on queries, keys and values in one tensor.

    Args:
        qkv: ``[tokens, 3, heads, head_dim]``.
        cu_seqlens: offsets of the sequences, of queries and of keys, int32 ``[batch + 1]``.
        max_seqlen: the longest sequence.
        dropout_p: as in :func:`flash_attn_varlen_func`; so are all further arguments.

    Returns:
        What :func:`flash_attn_varlen_func` returns.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range.
        NotImplementedError: as :func:`flash_attn_func` does.
    """
    q, k, v = _unpack("qkv", qkv, "[tokens, 3, heads, head_dim]", 4, 3)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        bias=bias,
        sinks=sinks,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        out_dtype=out_dtype,
        out_scale=out_scale,
        return_lse=return_lse,
        seqused_k=seqused_k,
        invariant=invariant,
        **unknown,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    return_lse: bool = False,
    seqused_k: Tensor | None = None,
    invariant: bool = False,
    **unknown: NoReturn,
) -> Result:
    """Call :func:`flash_attn_varlen_func` on keys and values in one tensor.

    Args:
        q: queries, ``[tokens_q, heads_q, head_dim]``.
        kv: ``[tokens_k, 2, heads_k, head_dim]``.
        cu_seqlens_q: as in :func:`flash_attn_varlen_func`; so are all further arguments.

    Returns:
        What :func:`flash_attn_varlen_func` returns.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range.
        NotImplementedError: as :func:`flash_attn_func` does.
    """
    k, v = _unpack("kv", kv, "[tokens_k, 2, heads_k, head_dim]", 4, 2)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        bias=bias,
        sinks=sinks,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        out_dtype=out_dtype,
        out_scale=out_scale,
        return_lse=return_lse,
        seqused_k=seqused_k,
        invariant=invariant,
        **unknown,
    )


def _unpack(name: str, packed: Tensor, form: str, ndim: int, parts: int) -> tuple[Tensor, ...]:
    """Return views of the parts, which the dimension before the heads counts."""
    check_tensor(name, packed)
    if packed.ndim != ndim or packed.shape[-3] != parts:
        raise ValueError(f"{name} must be {form}, got {list(packed.shape)}")
    return packed.unbind(dim=-3)
