"""Simple GLA with flash-linear-attention's signature, for one decay per head.

In that library ``g_gamma`` is the logarithm of the factor by which a token multiplies the state: at
most 0, while the decays of this package are at least 0.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ._linear.results import returns_state
from ._linked.host.arguments import ERRORS, check_device, check_tensor, refuse_unknown, renamed
from .api import lightning_attn_func, lightning_attn_varlen_func

__all__ = ["chunk_simple_gla"]

# arguments of earlier versions of that library
_ELSEWHERE = {
    "head_first": "leave it out: tokens come before heads",
    "decay": "use g_gamma, which is -decay",
    "offsets": "use cu_seqlens",
    "state": "use initial_state",
}


@returns_state
def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **unknown: NoReturn,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with one decay per head, by flash-linear-attention's name and conventions.

    For every head, with a state S of ``d x e`` numbers in fp32::

        S_t = exp(g_gamma) * S_(t-1) + k_t^T v_t
        o_t = scale * q_t S_t

    It calls :func:`lightning_attn.lightning_attn_func`, or for packed tensors
    :func:`lightning_attn.lightning_attn_varlen_func`, with ``decay = -g_gamma``.

    Args:
        q: queries, ``[batch, seqlen, heads, d]``, packed ``[1, tokens, heads, d]``; fp16, bf16 or
            fp32.
        k: keys, the shape and dtype of ``q``.
        v: values, ``[batch, seqlen, heads, e]``, dtype of ``q``.
        g: decays per token, which are not offered. Default: None.
        g_gamma: logarithm of the state's factor per token, ``[heads]``, any float dtype, at most 0.
            Default: None (zeros: nothing is forgotten).
        scale: factor of the queries. Default: ``d ** -0.5``.
        initial_state: S before the first tokens, fp32 ``[batch, heads, d, e]``, packed
            ``[sequences, heads, d, e]``. Default: None (zeros).
        output_final_state: return S after the last tokens. Default: False.
        cu_seqlens: starts of packed sequences, int32 or int64 ``[sequences + 1]``. Default: None.

    Returns:
        ``(o, state)``: ``o`` in the shape of ``v``, and the final states in fp32, or None. Both are
        differentiable in q, k, v, ``initial_state`` and ``g_gamma``.

    Raises:
        TypeError: if an argument has a wrong type or dtype.
        ValueError: if a shape, a device or a range is wrong.
        NotImplementedError: on ``g``, and on forward-mode differentiation.
    """
    if unknown:
        refuse_unknown(unknown, _ELSEWHERE, chunk_simple_gla)
    if g is not None:
        raise NotImplementedError(
            "g must be None: a decay of each token is not offered, got "
            f"{type(g).__name__}; g_gamma is one of each head"
        )
    check_tensor("q", q)
    if q.ndim != 4:
        raise ValueError(f"q must be [batch, seqlen, heads, d], got {list(q.shape)}")
    decay = _decay_of(q, g_gamma)
    try:
        if cu_seqlens is None:
            return lightning_attn_func(
                q,
                k,
                v,
                decay,
                scale=scale,
                initial_state=initial_state,
                output_final_state=output_final_state,
            )
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_tensor(name, x)
            if x.ndim != 4 or x.shape[0] != 1:
                raise ValueError(
                    f"{name} must be [1, tokens, heads, ...] with cu_seqlens, got {list(x.shape)}"
                )
        out, state = lightning_attn_varlen_func(
            q[0],
            k[0],
            v[0],
            decay,
            cu_seqlens,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
        )
        return out[None], state
    except ERRORS as error:
        raise renamed(error, {"decay": "the negative of g_gamma"}) from error


def _decay_of(q: Tensor, g_gamma: Tensor | None) -> Tensor:
    """Check ``g_gamma``; return it as decays."""
    heads = q.shape[2]
    if g_gamma is None:
        return q.new_zeros(heads, dtype=torch.float32)
    check_tensor("g_gamma", g_gamma)
    if not g_gamma.dtype.is_floating_point:
        raise TypeError(f"g_gamma must be of a float dtype, got {g_gamma.dtype}")
    check_device("g_gamma", g_gamma, q)
    if g_gamma.shape != (heads,):
        raise ValueError(f"g_gamma must be [heads], [{heads}], got {list(g_gamma.shape)}")
    return -g_gamma.float()
