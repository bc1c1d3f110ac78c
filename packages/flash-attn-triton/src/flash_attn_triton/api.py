"""The two main public functions: check the arguments, then call the operator."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NoReturn

import torch
from torch import Tensor

from ._dense import checks, ops
from ._dense import options as dense_options
from ._dense.call import Arguments, Checked, Given, Options, Tensors
from ._dense.results import BEFORE, returns_parts
from ._linked.host import arguments
from ._linked.host.arguments import as_int32, one_of
from ._linked.host.forms import Memory, form_of

_known: Memory[Checked] = Memory()


@returns_parts(BEFORE[:10])
def flash_attn_func(
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
    invariant: bool = False,
    spans: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]:
    """Softmax attention over sequences of one length, forward and backward.

    Tiles of the score matrix are computed, used and discarded (FlashAttention: Dao et al. 2022,
    Dao 2023), so memory is linear in the sequence length. For query i at position
    ``i' = i + seqlen_k - seqlen_q`` and key j the score is::

        s = softmax_scale * q_i . k_j
        s = softcap * tanh(s / softcap)                    if softcap > 0
        s = s - alibi_slope * |i' - j| + bias_ij           each term if it is given
        s = -inf                                           if i does not see j

    and the output is ``sum_j exp(s_ij) v_j / (sum_j exp(s_ij) + exp(sink))``.

    Args:
        q: queries, ``[batch, seqlen_q, heads_q, head_dim]``; fp16, bf16, fp32, or FP8 (e4m3,
            forward only). ``head_dim`` is from 1 to 256. Any strides.
        k: keys, ``[batch, seqlen_k, heads_k, head_dim]``, dtype of ``q``. ``heads_q`` is a multiple
            of ``heads_k``: query head h reads KV head ``h // (heads_q // heads_k)``.
        v: values, ``[batch, seqlen_k, heads_k, head_dim_v]``, dtype of ``q``; ``head_dim_v`` is
            from 1 to 256.
        dropout_p: probability of dropping an element of the softmax, in ``[0, 1)``; kept elements
            are scaled by ``1 / (1 - dropout_p)``. It is rounded to the nearest multiple of
            ``2**-16`` below 1: from ``2**-17`` down nothing is dropped. The draw depends only on
            torch's generator and the element's (batch, head, row, column) (Philox, Salmon et al.
            2011). Default: 0.0.
        softmax_scale: factor of the scores, any number that is finite in fp32.
            Default: ``head_dim ** -0.5``.
        causal: hide key j from query i unless ``j <= i'`` (aligned bottom-right). Default: False.
        window_size: ``(left, right)``: key j is visible iff ``i' - left <= j <= i' + right``; -1 or
            None: unlimited. ``causal`` makes ``right`` 0. Default: ``(-1, -1)``.
        softcap: cap of the scores; 0.0 is none. Default: 0.0.
        alibi_slopes: slopes of the linear bias (Press et al. 2021), fp32 ``[heads_q]`` or
            ``[batch, heads_q]``; without a gradient. Default: None.
        deterministic: make gradients repeat bit for bit. Otherwise, on Hopper, parts of dq, of the
            gradient of a shared bias and, with grouped heads, of dk and dv are added in the order
            in which they arrive; output and LSE repeat anyway. Default: False.
        return_attn_probs: return ``(out, lse, probabilities)``, for tests. The third is None
            without dropout; with dropout it is ``[batch, heads_q, seqlen_q, seqlen_k]`` in the
            dtype of ``q``, negative where dropped. It is computed separately and takes memory for
            the whole matrix. Default: False.
        bias: added to the scores, dtype of ``q`` or fp32; broadcasts to
            ``[batch, heads_q, seqlen_q, seqlen_k]``; -inf hides a key, and so does a number like
            ``torch.finfo(dtype).min``: a row whose scores are all at most -1e7 sees no key, and has
            output 0 (``scaled_dot_product_attention`` takes a mean over all keys). Has a gradient.
            Default: None.
        sinks: one more logit per head in the softmax denominator, not scaled and without a value
            (Xiao et al. 2023, as in gpt-oss): ``[heads_q]``, fp16, bf16 or fp32. Has a gradient.
            Default: None.
        q_descale: factor of FP8 ``q``: fp32, one element or ``[batch, heads_k]``.
            Default: None (1.0).
        k_descale: factor of FP8 ``k``, as ``q_descale``.
        v_descale: factor of FP8 ``v``, as ``q_descale``.
        out_dtype: dtype of the output: fp16, bf16, fp32, or FP8 with ``out_scale``.
            Default: the dtype of ``q``, bf16 for FP8 inputs.
        out_scale: fp32, one element: an FP8 output stores ``out / out_scale``, saturated at the
            largest number of the dtype. Default: None.
        return_lse: return ``(out, lse)``. Default: False.
        invariant: make the output and the lse of a query depend, bit for bit, only on the query and
            the keys that it sees: not on other queries, the batch, or how a sequence is cut into
            calls. They equal those of ``paged_attn_func(..., invariant=True)`` of the package
            prefix-prefill on the same keys. Gradients are computed as usual, from that output and
            lse. Default: False.
        spans: which keys each query sees, in place of ``causal`` and ``window_size``: int32
            ``[batch, seqlen_q, n, 2]`` or ``[1, seqlen_q, n, 2]``, ``n`` 1 or 2. Query i sees key j
            iff ``start <= j < end`` for one of its spans ``(start, end)``; keys count from the
            sequence's first. Any value is legal: a span is cut to the keys there are, one with
            ``start >= end`` sees nothing, and what two see counts once. New values neither compile
            nor wait for the host. Tiles of keys outside of each n's [least start, greatest end)
            over a tile's queries are skipped; NaN in keys before the least start and from the
            greatest end of a sequence changes nothing, and keys between must be finite.
            :func:`attention_spans` makes them. Default: None.
        s_aux: FlashAttention-3's name of ``sinks``. Default: None.
        learnable_sink: FlashAttention-4's name of ``sinks``. Default: None.

    Returns:
        ``out``, ``[batch, seqlen_q, heads_q, head_dim_v]``; or ``(out, lse)``, where ``lse`` is the
        natural logarithm of the whole softmax denominator, fp32 ``[batch, heads_q, seqlen_q]``,
        differentiable; or ``(out, lse, probabilities)``. A query that sees no key has output 0 and
        lse -inf, or the sink if there are sinks.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range; on ``causal`` or ``window_size`` beside
            ``spans``.
        NotImplementedError: on FP8 if the hardware lacks it, with a gradient or with dropout; on a
            gradient of slopes or scales; on forward-mode differentiation; with ``invariant``, on
            FP8, dropout, ``bias`` and ``alibi_slopes``; with ``spans``, on FP8, ``bias``,
            ``alibi_slopes`` and ``invariant``.
    """
    if unknown:
        dense_options.refuse_unknown(unknown, flash_attn_func)
    if s_aux is not None or learnable_sink is not None:
        sinks = one_of(sinks=sinks, s_aux=s_aux, learnable_sink=learnable_sink)
    given = Arguments(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        return_attn_probs,
        return_lse,
        invariant,
        out_dtype,
    )
    extras = bias, alibi_slopes, sinks, q_descale, k_descale, v_descale, out_scale, spans
    form = form_of((q, k, v), extras, given, packed=False)
    x = Tensors(q, k, v, None, None, None, *extras)
    known = None if form is None else _known.get(form)
    if known is None:
        checks.check_qkv(q, k, v, 4)
        options = dense_options.check_options(q, given)
        sizes = q.shape[0], q.shape[1], k.shape[1]
        known = _check(x, options, given, *sizes, form, s_aux, learnable_sink)
    x = _completed(x, known.options)
    out, lse = ops.attention(x, q.shape[1], k.shape[1], known)
    if return_attn_probs:
        return out, lse, ops.marked_probabilities(x, lse, q.shape[1], k.shape[1], known.options)
    return (out, lse) if return_lse else out


@returns_parts(BEFORE)
def flash_attn_varlen_func(
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
    block_table: Tensor | None = None,
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
    spans: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]:
    """Softmax attention over packed sequences of different lengths, forward and backward.

    The formula, and the arguments not listed here, are those of :func:`flash_attn_func`, with the
    lengths of each sequence in place of ``seqlen_q`` and ``seqlen_k``.

    Args:
        q: queries, ``[tokens_q, heads_q, head_dim]``: sequence b has the rows ``cu_seqlens_q[b]``
            to ``cu_seqlens_q[b + 1]``. Rows after the last sequence are padding, with output 0, lse
            -inf and gradient 0.
        k: keys, ``[tokens_k, heads_k, head_dim]``.
        v: values, ``[tokens_k, heads_k, head_dim_v]``.
        cu_seqlens_q: offsets of the sequences of queries, int32 ``[batch + 1]``, contiguous; int64
            is converted. On a GPU the values are not checked; :func:`validate_varlen` checks them.
        cu_seqlens_k: offsets of the sequences of keys, as ``cu_seqlens_q``.
        max_seqlen_q: the longest sequence of queries: an int, or what ``operator.index`` takes,
            such as a tensor without dimensions, which waits for a GPU. ``bias`` and the
            probabilities have this size; without them an upper bound will do.
        max_seqlen_k: the longest sequence of keys, as ``max_seqlen_q``.
        alibi_slopes: fp32 ``[heads_q]`` or ``[batch, heads_q]``. Default: None.
        return_attn_probs: as in :func:`flash_attn_func`; the probabilities are
            ``[batch, heads_q, max_seqlen_q, max_seqlen_k]``, and with dropout the call waits for
            the device. Default: False.
        block_table: must be None: use the package prefix-prefill for paged keys and values.
            Default: None.
        bias: broadcasts to ``[batch, heads_q, max_seqlen_q, max_seqlen_k]``, indexed by row and
            column within the sequence. Default: None.
        q_descale: fp32, one element or ``[batch, heads_k]``. Default: None (1.0).
        k_descale: as ``q_descale``.
        v_descale: as ``q_descale``.
        return_lse: return ``(out, lse)``. Default: False.
        seqused_k: int32 ``[batch]``, how many of the first keys of each sequence are used, at most
            its length. Default: None (all).
        invariant: as in :func:`flash_attn_func`; keys are numbered from a sequence's first key.
            Default: False.
        spans: as in :func:`flash_attn_func`, int32 ``[tokens_q, n, 2]``; a row's keys count from
            the first of its sequence. :func:`varlen_attention_spans` makes them. Default: None.
        s_aux: another name of ``sinks``. Default: None.
        learnable_sink: another name of ``sinks``. Default: None.

    Returns:
        ``out``, ``[tokens_q, heads_q, head_dim_v]``; or ``(out, lse)`` with ``lse`` fp32
        ``[heads_q, tokens_q]``; or ``(out, lse, probabilities)``.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range.
        NotImplementedError: on a block table, and as :func:`flash_attn_func` does.
    """
    if block_table is not None:
        raise NotImplementedError(
            "block_table must be None: paged keys and values are served by paged_attn_func of the "
            f"package prefix-prefill, got {type(block_table).__name__}"
        )
    if unknown:
        dense_options.refuse_unknown(unknown, flash_attn_varlen_func)
    if s_aux is not None or learnable_sink is not None:
        sinks = one_of(sinks=sinks, s_aux=s_aux, learnable_sink=learnable_sink)
    cu_seqlens_q, cu_seqlens_k = as_int32(cu_seqlens_q), as_int32(cu_seqlens_k)
    if seqused_k is not None:
        seqused_k = as_int32(seqused_k)
    given = Arguments(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        return_attn_probs,
        return_lse,
        invariant,
        out_dtype,
    )
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_k
    extras = bias, alibi_slopes, sinks, q_descale, k_descale, v_descale, out_scale
    max_seqlen_q = arguments.as_length("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = arguments.as_length("max_seqlen_k", max_seqlen_k)
    # a bias is as large as the longest sequences
    bounds = None if bias is None else (max_seqlen_q, max_seqlen_k)
    # tensors with a row per token; their number is no part of the signature
    tokens = (q, k, v) if spans is None else (q, k, v, spans)
    form = form_of(tokens, (*lengths, *extras), (*given, bounds), packed=True)
    if form is not None and k.shape[:1] != v.shape[:1]:
        form = None
    if spans is not None and form is not None and spans.shape[:1] != q.shape[:1]:
        form = None
    x = Tensors(q, k, v, *lengths, *extras, spans)
    known = None if form is None else _known.get(form)
    if known is None:
        checks.check_qkv(q, k, v, 3)
        options = dense_options.check_options(q, given)
        batch = checks.check_packed(q, cu_seqlens_q, cu_seqlens_k, seqused_k)
    if known is None:
        sizes = batch, max_seqlen_q, max_seqlen_k
        known = _check(x, options, given, *sizes, form, s_aux, learnable_sink)
    x = _completed(x, known.options)
    out, lse = ops.attention(x, max_seqlen_q, max_seqlen_k, known)
    if return_attn_probs:
        return out, lse, ops.marked_probabilities(x, lse, max_seqlen_q, max_seqlen_k, known.options)
    return (out, lse) if return_lse else out


def _check(
    x: Tensors,
    options: Options,
    given: Arguments,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    form: Hashable | None,
    s_aux: Tensor | None,
    learnable_sink: Tensor | None,
) -> Checked:
    """Run the checks that fixed and packed calls share, and keep their result by signature."""
    try:
        if x.bias is not None or x.alibi_slopes is not None or x.sinks is not None:
            checks.check_extras(x, batch, seqlen_q, seqlen_k)
        if x.spans is not None:
            checks.check_spans(x.spans, x, given, options)
        out_dtype = checks.check_low_precision(x, batch, given.out_dtype)
    except arguments.ERRORS as error:
        if s_aux is None and learnable_sink is None:
            raise
        name = "learnable_sink" if s_aux is None else "s_aux"
        raise arguments.renamed(error, {"sinks": name}) from error
    deterministic, invariant = bool(given.deterministic), bool(given.invariant)
    if invariant:
        checks.check_invariant(x, options, out_dtype)
    if form is None:
        return Checked(options, out_dtype, deterministic, invariant)
    x = x._replace(bias=_four_dimensional(x.bias))
    needs_gradient, given_tensors = ops.needs_gradient(x), None
    if needs_gradient:
        *present, _ = (t is not None for t in x)
        # rng_state is drawn for each call
        given_tensors = Given((*present, options.dropout_p > 0.0))
    plan = ops.plan_of(
        x, options, out_dtype, deterministic, invariant, needs_gradient=needs_gradient
    )
    returns_lse = bool(given.return_lse or given.return_attn_probs)
    results = options, out_dtype, deterministic, invariant
    return _known.keep(form, Checked(*results, plan, given_tensors, returns_lse))


def _four_dimensional(bias: Tensor | None) -> Tensor | None:
    return bias if bias is None or bias.ndim == 4 else bias[(None,) * (4 - bias.ndim)]


def _completed(x: Tensors, options: Options) -> Tensors:
    """Return the tensors for the operators: with a four-dimensional bias, and ``rng_state``."""
    if x.bias is not None and x.bias.ndim != 4:
        x = x._replace(bias=_four_dimensional(x.bias))
    if options.dropout_p > 0.0:
        # drawn on the device: obeys torch.manual_seed, and a CUDA graph draws again in each replay
        state = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=x.q.device)
        x = x._replace(rng_state=state)
    return x
