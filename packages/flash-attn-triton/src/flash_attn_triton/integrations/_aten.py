"""The operators of ``aten`` that ``torch.py`` replaces, with PyTorch's signatures."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor

# the operators, not their Python names: calls from here stay below autograd
from .._dense import ops
from .._linked.host.arguments import FP8_DTYPES


def _scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Tensors are ``[batch, heads, seqlen, head_dim]``, only in ``_scaled_dot_product_*``."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out, lse, seed, unused, debug_mask = _flash_attention_forward(
        q,
        k,
        v,
        None,
        None,
        q.shape[1],
        k.shape[1],
        dropout_p,
        is_causal,
        return_debug_mask,
        scale=scale,
    )
    return (out.transpose(1, 2), lse, None, None, q.shape[1], k.shape[1], seed, unused, debug_mask)


def _scaled_dot_product_flash_attention_quantized(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Tensors are ``[batch, heads, seqlen, head_dim]``; the output is bf16 for FP8 inputs."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out, lse, seed, unused, debug_mask = _flash_attention_forward_quantized(
        q,
        k,
        v,
        None,
        None,
        q.shape[1],
        k.shape[1],
        dropout_p,
        is_causal,
        return_debug_mask,
        q_descale,
        k_descale,
        v_descale,
        scale=scale,
    )
    return (out.transpose(1, 2), lse, None, None, q.shape[1], k.shape[1], seed, unused, debug_mask)


def _scaled_dot_product_flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, o = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    grads = _flash_attention_backward(
        dout,
        q,
        k,
        v,
        o,
        logsumexp,
        None,
        None,
        q.shape[1],
        k.shape[1],
        dropout_p,
        is_causal,
        philox_seed,
        philox_offset,
        scale=scale,
    )
    dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
    return dq, dk, dv


def _flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``num_splits`` is ignored: it affects only speed, and these kernels do not split keys."""
    if block_table is not None:
        _refuse(
            "block_table; paged keys and values are served by the package prefix-prefill: call "
            "prefix_prefill.integrations.torch.register(), too"
        )
    return _forward(
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        return_debug_mask,
        (None, None, None),
        scale,
        window_size_left,
        window_size_right,
        seqused_k,
        alibi_slopes,
    )


def _flash_attention_forward_quantized(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Descales are fp32, one element or ``[batch, heads_k]``, for FP8 inputs only."""
    descales = q_descale, k_descale, v_descale
    heads_k = key.shape[-2]
    batch = query.shape[0] if cum_seq_q is None else cum_seq_q.shape[0] - 1
    is_fp8 = query.dtype in FP8_DTYPES
    if is_fp8 and dropout_p > 0.0:
        _refuse("dropout with FP8 inputs")
    for name, descale in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if descale is None:
            continue
        if not is_fp8:
            _refuse(f"{name} for inputs of {query.dtype}")
        if descale.dtype != torch.float32:
            raise TypeError(f"{name} must be torch.float32, got {descale.dtype}")
        if descale.numel() != 1 and descale.shape != (batch, heads_k):
            raise ValueError(
                f"{name} must have one element or shape [{batch}, {heads_k}], "
                f"got {list(descale.shape)}"
            )
    return _forward(
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        return_debug_mask,
        descales,
        scale,
        window_size_left,
        window_size_right,
        seqused_k,
        alibi_slopes,
    )


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    descales: tuple[Tensor | None, Tensor | None, Tensor | None],
    scale: float | None,
    window_size_left: int | None,
    window_size_right: int | None,
    seqused_k: Tensor | None,
    alibi_slopes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the result of both overloads of ``_flash_attention_forward``."""
    if return_debug_mask:
        _refuse("return_debug_mask=True")
    needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if cum_seq_q is not None and cum_seq_k is None and key.ndim == 4:
        # packed queries, and equally many keys for each sequence, of which seqused_k are valid
        if needs_gradient:
            _refuse("gradient with cum_seq_k=None")
        batch, max_k = key.shape[:2]
        cum_seq_k = torch.arange(batch + 1, dtype=torch.int32, device=key.device) * max_k
        key, value = key.flatten(0, 1), value.flatten(0, 1)
    if (cum_seq_q is None) != (cum_seq_k is None):
        _refuse("cumulative lengths of queries or keys without those of the other")
    if cum_seq_q is None and seqused_k is not None:
        _refuse("seqused_k without cumulative lengths")
    if needs_gradient:
        # PyTorch's backward operator does not get them
        if seqused_k is not None:
            _refuse("gradient with seqused_k")
        if alibi_slopes is not None:
            _refuse("gradient with alibi_slopes")
    rng_state = None
    if dropout_p > 0.0:
        high = torch.iinfo(torch.int64).max
        rng_state = torch.randint(0, high, (2,), dtype=torch.int64, device=query.device)
    out, lse = ops.forward(
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        seqused_k,
        None,
        alibi_slopes,
        None,
        *descales,
        None,
        rng_state,
        max_q,
        max_k,
        _scale(query, scale),
        *_window(is_causal, window_size_left, window_size_right),
        0.0,
        dropout_p,
        None,
    )
    # tracing expects the shapes and dtypes of PyTorch's own kernel
    if rng_state is None:
        rng_state = torch.empty(2, dtype=torch.int64, device=query.device)
    unused = torch.empty((), dtype=torch.int64, device=query.device)
    debug_mask = torch.empty(0, dtype=out.dtype, device=query.device)
    out = _strided_like(out, query)
    return out, lse, rng_state.view(torch.uint64), unused.view(torch.uint64), debug_mask


def _flash_attention_forward_no_dropout_inplace(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> Tensor:
    if dropout_p > 0.0:
        _refuse("dropout into a given output")
    result, lse, *_ = _flash_attention_forward(
        query,
        key,
        value,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        0.0,
        is_causal,
        return_debug_mask,
        **options,
    )
    out.copy_(result)
    return lse


def _flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    seed = rng_state.view(torch.int64) if dropout_p > 0.0 else None
    dq, dk, dv, _, _ = ops.backward(
        grad_out,
        query,
        key,
        value,
        out.contiguous(),
        logsumexp.contiguous(),
        None,
        cum_seq_q,
        cum_seq_k,
        None,
        None,
        None,
        None,
        seed,
        max_q,
        max_k,
        _scale(query, scale),
        *_window(is_causal, window_size_left, window_size_right),
        0.0,
        dropout_p,
        torch.are_deterministic_algorithms_enabled(),
        False,
    )
    return _strided_like(dq, query), _strided_like(dk, key), _strided_like(dv, value)


def _scale(query: Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def _window(is_causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    left = -1 if left is None or left < 0 else left
    right = -1 if right is None or right < 0 else right
    return left, 0 if is_causal else right


def _strided_like(result: Tensor, like: Tensor) -> Tensor:
    """Return ``result`` with the strides of ``torch.empty_like(like)``, as compiled graphs expect.

    A copy is needed if ``like`` is stored head by head.
    """
    if result.stride() == like.stride() or result.shape != like.shape:
        return result
    return torch.empty_like(like, dtype=result.dtype).copy_(result)


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"flash_attn_triton as PyTorch's flash attention: no {what}")


# the kernels for PyTorch's dispatcher
OVERRIDES = {
    "_flash_attention_forward": _flash_attention_forward,
    "_flash_attention_forward.quantized": _flash_attention_forward_quantized,
    "_flash_attention_forward_no_dropout_inplace": _flash_attention_forward_no_dropout_inplace,
    "_flash_attention_backward": _flash_attention_backward,
    "_scaled_dot_product_flash_attention": _scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention.quantized": _scaled_dot_product_flash_attention_quantized,
    "_scaled_dot_product_flash_attention_backward": _scaled_dot_product_flash_attention_backward,
}
