"""Functions of flash-attn 2 that take keys and values, or all three, in one tensor.

The parts are views, so nothing is copied; autograd assembles the gradient of the packed tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch
from torch import Tensor

from ._dense.results import BEFORE, returns_parts
from ._linked.host.arguments import ERRORS, check_tensor, renamed
from .api import flash_attn_func, flash_attn_varlen_func

if TYPE_CHECKING:
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])


# argument names of the checks: names in these functions
_KV = {"k and v": "kv", "k": "kv", "v": "kv"}
_QKV = {"q, k and v": "qkv"} | dict.fromkeys("qkv", "qkv")
_VARLEN_QKV = _QKV | {
    "cu_seqlens_q": "cu_seqlens",
    "cu_seqlens_k": "cu_seqlens",
    "max_seqlen_q": "max_seqlen",
    "max_seqlen_k": "max_seqlen",
}


class Keywords(TypedDict, total=False):
    """The keyword-only arguments of :func:`flash_attn_func`."""

    bias: Tensor | None
    sinks: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    out_dtype: torch.dtype | None
    out_scale: Tensor | None
    return_lse: bool
    invariant: bool
    spans: Tensor | None


class VarlenKeywords(Keywords, total=False):
    """The keyword-only arguments of :func:`flash_attn_varlen_func`."""

    seqused_k: Tensor | None


def _with_keywords_of(function: Callable[..., Any]) -> Callable[[F], F]:
    """Show the keyword-only arguments of a function in the signature of another."""
    known = {*Keywords.__annotations__, *VarlenKeywords.__annotations__}
    of = inspect.signature(function).parameters.values()
    shown = [p for p in of if p.name in known or p.kind is p.VAR_KEYWORD]

    def decorate(wrapper: F) -> F:
        own = inspect.signature(wrapper)
        *positional, _ = own.parameters.values()
        wrapper.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[*positional, *(p for p in shown if p.kind is not p.POSITIONAL_OR_KEYWORD)]
        )
        return wrapper

    return decorate


@returns_parts(BEFORE[:8])
@_with_keywords_of(flash_attn_func)
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
    **options: Unpack[Keywords],
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]:
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
    try:
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
            **options,
        )
    except ERRORS as error:
        raise renamed(error, _QKV) from error


@returns_parts(BEFORE[:9])
@_with_keywords_of(flash_attn_func)
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
    **options: Unpack[Keywords],
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]:
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
    try:
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
            **options,
        )
    except ERRORS as error:
        raise renamed(error, _KV) from error


@returns_parts(BEFORE[:10])
@_with_keywords_of(flash_attn_varlen_func)
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
    **options: Unpack[VarlenKeywords],
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]:
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
    try:
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
            **options,
        )
    except ERRORS as error:
        raise renamed(error, _VARLEN_QKV) from error


@returns_parts(BEFORE[:13])
@_with_keywords_of(flash_attn_varlen_func)
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
    **options: Unpack[VarlenKeywords],
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]:
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
    try:
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
            **options,
        )
    except ERRORS as error:
        raise renamed(error, _KV) from error


def _unpack(name: str, packed: Tensor, form: str, ndim: int, parts: int) -> tuple[Tensor, ...]:
    """Return views of the parts, which the dimension before the heads counts."""
    check_tensor(name, packed)
    if packed.ndim != ndim or packed.shape[-3] != parts:
        raise ValueError(f"{name} must be {form}, got {list(packed.shape)}")
    return packed.unbind(dim=-3)
