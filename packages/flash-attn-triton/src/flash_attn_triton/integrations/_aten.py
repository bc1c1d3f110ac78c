"""The operators of ``aten`` that ``torch.py`` replaces, with PyTorch's signatures."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

# the operators, not their Python names: calls from here stay below autograd
from .._dense import ops
from .._dense.call import BackwardCall, Options, Tensors
from .._linked.host.arguments import FP8_DTYPES
from .._linked.host.overlap import check_no_overlap


class Forward(NamedTuple):
    """The arguments that the overloads of ``_flash_attention_forward`` share."""

    query: Tensor
    key: Tensor
    value: Tensor
    cum_seq_q: Tensor | None
    cum_seq_k: Tensor | None
    max_q: int
    max_k: int
    dropout_p: float
    is_causal: bool
    return_debug_mask: bool
    scale: float | None = None
    window_size_left: int | None = None
    window_size_right: int | None = None
    seqused_k: Tensor | None = None
    alibi_slopes: Tensor | None = None

    @classmethod
    def of_heads_first(cls, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Forward:
        """Return a call on tensors ``[batch, heads, seqlen, head_dim]``."""
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        return cls(q, k, v, None, None, q.shape[1], k.shape[1], *rest)


# output, LSE, state of the generator, an unused tensor, probabilities
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


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
    options = dropout_p, is_causal, return_debug_mask, scale
    call = Forward.of_heads_first(query, key, value, *options)
    return _heads_first(call, _forward(call))


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
    options = dropout_p, is_causal, return_debug_mask, scale
    call = Forward.of_heads_first(query, key, value, *options)
    return _heads_first(call, _forward_quantized(call, q_descale, k_descale, v_descale))


def _heads_first(call: Forward, results: Results) -> tuple[Any, ...]:
    out, lse, *rest = results
    return out.transpose(1, 2), lse, None, None, call.max_q, call.max_k, *rest


def _scaled_dot_product_flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    _cum_seq_q: None,
    _cum_seq_k: None,
    max_q: int,
    max_k: int,
    *rest: Any,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    tensors = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    lengths = None, None, query.shape[2], key.shape[2]
    given: Any = *tensors, logsumexp, *lengths, *rest
    grads = _flash_attention_backward(*given, scale=scale)
    return tuple(grad.transpose(1, 2) for grad in grads)


def _flash_attention_forward(
    *given: Any, block_table: Tensor | None = None, num_splits: int | None = None, **options: Any
) -> Results:
    """``num_splits`` is ignored: it affects only speed, and these kernels do not split keys."""
    if block_table is not None:
        _refuse(
            "block_table; paged keys and values are served by the package prefix-prefill: call "
            "prefix_prefill.integrations.torch.register(), too"
        )
    return _forward(Forward(*given, **options))


def _flash_attention_forward_quantized(*given: Any, **options: Any) -> Results:
    *shared, q_descale, k_descale, v_descale = given
    return _forward_quantized(Forward(*shared, **options), q_descale, k_descale, v_descale)


def _forward_quantized(x: Forward, *descales: Tensor | None) -> Results:
    """Descales are fp32, one element or ``[batch, heads_k]``, for FP8 inputs only."""
    heads_k = x.key.shape[-2]
    batch = x.query.shape[0] if x.cum_seq_q is None else x.cum_seq_q.shape[0] - 1
    is_fp8 = x.query.dtype in FP8_DTYPES
    if is_fp8 and x.dropout_p > 0.0:
        _refuse("dropout with FP8 inputs")
    for name, descale in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if descale is None:
            continue
        if not is_fp8:
            _refuse(f"{name} for inputs of {x.query.dtype}")
        if descale.dtype != torch.float32:
            raise TypeError(f"{name} must be torch.float32, got {descale.dtype}")
        if descale.numel() != 1 and descale.shape != (batch, heads_k):
            raise ValueError(
                f"{name} must have one element or shape [{batch}, {heads_k}], "
                f"got {list(descale.shape)}"
            )
    return _forward(x, *descales)


def _forward(x: Forward, *descales: Tensor | None) -> Results:
    """Compute the result of both overloads of ``_flash_attention_forward``."""
    if x.return_debug_mask:
        _refuse("return_debug_mask=True")
    query, key = x.query, x.key
    needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, x.value))
    if x.cum_seq_q is not None and x.cum_seq_k is None and key.ndim == 4:
        # packed queries, and equally many keys for each sequence, of which seqused_k are valid
        if needs_gradient:
            _refuse("gradient with cum_seq_k=None")
        batch, max_k = key.shape[:2]
        starts = torch.arange(batch + 1, dtype=torch.int32, device=key.device) * max_k
        x = x._replace(key=key.flatten(0, 1), value=x.value.flatten(0, 1))
        x = x._replace(cum_seq_k=starts, max_k=max_k)
    if (x.cum_seq_q is None) != (x.cum_seq_k is None):
        _refuse("cumulative lengths of queries or keys without those of the other")
    if x.cum_seq_q is None and x.seqused_k is not None:
        _refuse("seqused_k without cumulative lengths")
    if needs_gradient:
        # PyTorch's backward operator does not get them
        if x.seqused_k is not None:
            _refuse("gradient with seqused_k")
        if x.alibi_slopes is not None:
            _refuse("gradient with alibi_slopes")
    rng_state = None
    if x.dropout_p > 0.0:
        high = torch.iinfo(torch.int64).max
        rng_state = torch.randint(0, high, (2,), dtype=torch.int64, device=query.device)
    tensors = Tensors(
        query,
        x.key,
        x.value,
        x.cum_seq_q,
        x.cum_seq_k,
        x.seqused_k,
        alibi_slopes=x.alibi_slopes,
        rng_state=rng_state,
    )
    if descales:
        q_descale, k_descale, v_descale = descales
        tensors = tensors._replace(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    windows = x.is_causal, x.window_size_left, x.window_size_right
    options = _options(query, x.scale, *windows, x.dropout_p)
    out, lse = ops.forward(*tensors, x.max_q, x.max_k, *options, None)
    # tracing expects the shapes and dtypes of PyTorch's own kernel
    if rng_state is None:
        rng_state = torch.empty(2, dtype=torch.int64, device=query.device)
    unused = torch.empty((), dtype=torch.int64, device=query.device)
    debug_mask = torch.empty(0, dtype=out.dtype, device=query.device)
    out = _strided_like(out, query)
    return out, lse, rng_state.view(torch.uint64), unused.view(torch.uint64), debug_mask


def _flash_attention_forward_no_dropout_inplace(out: Tensor, *given: Any, **options: Any) -> Tensor:
    if Forward(*given).dropout_p > 0.0:
        _refuse("dropout into a given output")
    check_no_overlap("out", out)
    result, lse, *_ = _flash_attention_forward(*given, **options)
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
    call = BackwardCall(
        grad_out,
        query,
        key,
        value,
        out.contiguous(),
        logsumexp.contiguous(),
        None,
        cum_seq_q,
        cum_seq_k,
        *(None,) * 5,
        rng_state.view(torch.int64) if dropout_p > 0.0 else None,
        max_q,
        max_k,
        _options(query, scale, is_causal, window_size_left, window_size_right, dropout_p),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        needs_dbias=False,
    )
    *before, options, deterministic, needs_dbias = call
    dq, dk, dv, _, _ = ops.backward(*before, *options, deterministic, needs_dbias)
    return _strided_like(dq, query), _strided_like(dk, key), _strided_like(dv, value)


def _options(
    query: Tensor,
    scale: float | None,
    is_causal: bool,
    left: int | None,
    right: int | None,
    dropout_p: float,
) -> Options:
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    left = -1 if left is None or left < 0 else left
    right = -1 if right is None or right < 0 else right
    return Options(scale, left, 0 if is_causal else right, 0.0, dropout_p)


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
