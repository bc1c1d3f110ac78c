"""The reference of attention: eager PyTorch, any float dtype, differentiable by plain autograd.

The kernels are tested against it, and CPU tensors run the same code.
"""

from typing import NoReturn

import torch
from torch import Tensor

from .._dense.checks import check_reference
from .._dense.options import check_options, refuse_unknown
from .fixed import dense_attention, round_output
from .sequences import dropout_marked_probabilities, packed_attention

Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    rng_state: Tensor | None = None,
    **unknown: NoReturn,
) -> Result:
    """Compute what :func:`flash_attn_func` computes, in plain PyTorch.

    The arguments are those of :func:`flash_attn_func` without ``invariant``, ``s_aux`` and
    ``learnable_sink``, plus ``rng_state``:

    Args:
        q: queries, ``[batch, seqlen_q, heads_q, head_dim]``; any float dtype, float64 included.
        k: keys, ``[batch, seqlen_k, heads_k, head_dim]``.
        v: values, ``[batch, seqlen_k, heads_k, head_dim_v]``.
        dropout_p: as in :func:`flash_attn_func`; so are all further arguments.
        rng_state: ``(seed, offset)`` of dropout, int64 ``[2]``. Default: drawn from torch's
            generator, as :func:`flash_attn_func` does.

    Returns:
        ``out``, ``(out, lse)`` or ``(out, lse, probabilities)`` as :func:`flash_attn_func` does;
        the log-sum-exp is float64 for float64 inputs, else float32.

    Raises:
        TypeError: on an argument's type, or a dtype that is not a float.
        ValueError: on a shape of ``q``, ``k`` or ``v``, or a range.
    """
    if unknown:
        refuse_unknown(unknown)
    return _attend(
        q,
        k,
        v,
        None,
        None,
        None,
        bias,
        alibi_slopes,
        sinks,
        q_descale,
        k_descale,
        v_descale,
        rng_state,
        None,
        None,
        softmax_scale,
        causal,
        window_size,
        softcap,
        dropout_p,
        out_dtype,
        out_scale,
        deterministic,
        return_lse,
        return_attn_probs,
    )


def varlen_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    rng_state: Tensor | None = None,
    **unknown: NoReturn,
) -> Result:
    """Compute what :func:`flash_attn_varlen_func` computes, one sequence after the other.

    The arguments are those of :func:`flash_attn_varlen_func`, with the same exceptions, dtypes,
    ``rng_state`` and results as in :func:`attention_reference`. Offsets are read on the host.
    """
    if unknown:
        refuse_unknown(unknown)
    return _attend(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        bias,
        alibi_slopes,
        sinks,
        q_descale,
        k_descale,
        v_descale,
        rng_state,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size,
        softcap,
        dropout_p,
        out_dtype,
        out_scale,
        deterministic,
        return_lse,
        return_attn_probs,
    )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    rng_state: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    dropout_p: float,
    out_dtype: torch.dtype | None,
    out_scale: Tensor | None,
    deterministic: bool,
    return_lse: bool,
    return_attn_probs: bool,
) -> Result:
    """Check, resolve defaults, compute attention, and return what was asked for."""
    check_reference(
        q,
        k,
        v,
        4 if cu_seqlens_q is None else 3,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        out_scale=out_scale,
        rng_state=rng_state,
    )
    options = check_options(
        q,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        return_attn_probs,
        return_lse,
    )
    if rng_state is None and dropout_p > 0.0:
        rng_state = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    rest = bias, alibi_slopes, sinks, q_descale, k_descale, v_descale, rng_state, *options
    if cu_seqlens_q is None or cu_seqlens_k is None:
        out, lse = dense_attention(q, k, v, *rest)
    else:
        out, lse = packed_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, *rest)
    out = round_output(out, q.dtype, out_dtype, out_scale)
    if not return_attn_probs:
        return (out, lse) if return_lse else out
    if rng_state is None or dropout_p == 0.0:
        return out, lse, None
    return (
        out,
        lse,
        dropout_marked_probabilities(
            q,
            k,
            lse,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_k,
            bias,
            alibi_slopes,
            rng_state,
            max_seqlen_q,
            max_seqlen_k,
            *options,
        ),
    )
