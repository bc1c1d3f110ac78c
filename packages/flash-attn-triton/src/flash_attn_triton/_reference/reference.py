"""The reference of attention: eager PyTorch, any float dtype, differentiable by plain autograd.

The kernels are tested against it, and CPU tensors run the same code.
"""

from typing import NoReturn

import torch
from torch import Tensor

from .._dense.call import Arguments, Tensors
from .._dense.checks import (
    check_given_tensors,
    check_packed,
    check_reference,
    check_spans,
    check_values,
)
from .._dense.options import check_options, refuse_unknown
from .._dense.results import BEFORE, returns_parts
from .._linked.host.arguments import as_int32, as_length, check_readable
from .fixed import dense_attention, round_output
from .sequences import dropout_marked_probabilities, packed_attention


@returns_parts(BEFORE[:10])
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
    spans: Tensor | None = None,
    rng_state: Tensor | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]:
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
        refuse_unknown(unknown, attention_reference)
    given = Arguments(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        return_attn_probs,
        return_lse,
        out_dtype=out_dtype,
    )
    scales = q_descale, k_descale, v_descale, out_scale
    extras = bias, alibi_slopes, sinks, *scales, spans, rng_state
    return _attend(Tensors(q, k, v, None, None, None, *extras), given)


@returns_parts(BEFORE)
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
    spans: Tensor | None = None,
    rng_state: Tensor | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]:
    """Compute what :func:`flash_attn_varlen_func` computes, one sequence after the other.

    The arguments are those of :func:`flash_attn_varlen_func`, with the same exceptions, dtypes,
    ``rng_state`` and results as in :func:`attention_reference`. Offsets are read on the host.
    """
    if unknown:
        refuse_unknown(unknown, varlen_attention_reference)
    given = Arguments(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        return_attn_probs,
        return_lse,
        out_dtype=out_dtype,
    )
    scales = q_descale, k_descale, v_descale, out_scale
    extras = bias, alibi_slopes, sinks, *scales, spans, rng_state
    max_seqlen_q = as_length("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = as_length("max_seqlen_k", max_seqlen_k)
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_k
    return _attend(Tensors(q, k, v, *lengths, *extras), given, max_seqlen_q, max_seqlen_k)


def _attend(
    x: Tensors,
    given: Arguments,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]:
    """Check, resolve defaults, compute attention, and return what was asked for."""
    q, k, v, *_ = x
    is_fixed = max_seqlen_q is None
    others = {name: t for name, t in x._asdict().items() if name not in ("q", "k", "v")}
    check_reference(q, k, v, 4 if is_fixed else 3, **others)
    options = check_options(q, given)
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    if not is_fixed:
        starts_q, starts_k, used = map(as_int32, (x.cu_seqlens_q, x.cu_seqlens_k, x.seqused_k))
        batch = check_packed(q, starts_q, starts_k, used)
        check_readable(cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, seqused_k=used)
        x = x._replace(cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, seqused_k=used)
        seqlen_q, seqlen_k = max_seqlen_q or 0, max_seqlen_k or 0
    check_given_tensors(x, batch, seqlen_q, seqlen_k, given.out_dtype)
    if x.spans is not None:
        check_spans(x.spans, x, given, options)
    if max_seqlen_q is not None and max_seqlen_k is not None:
        check_values(x, max_seqlen_q, max_seqlen_k)
    if x.rng_state is None and options.dropout_p > 0.0:
        state = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
        x = x._replace(rng_state=state)
    scales = x.q_descale, x.k_descale, x.v_descale
    rest = x.bias, x.alibi_slopes, x.sinks, *scales, x.rng_state, *options
    lengths = x.cu_seqlens_q, x.cu_seqlens_k, x.seqused_k
    if is_fixed:
        out, lse = dense_attention(q, k, v, *rest, spans=x.spans)
    else:
        out, lse = packed_attention(q, k, v, *lengths, *rest, x.spans)  # type: ignore[arg-type]
    out = round_output(out, q.dtype, given.out_dtype, x.out_scale)
    if not given.return_attn_probs:
        return (out, lse) if given.return_lse else out
    if x.rng_state is None or options.dropout_p == 0.0:
        return out, lse, None
    marked = dropout_marked_probabilities(x, lse, max_seqlen_q, max_seqlen_k, options)
    return out, lse, marked
