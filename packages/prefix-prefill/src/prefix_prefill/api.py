"""The two main public functions: check the arguments, then call the operator."""

from typing import NoReturn

import torch
from torch import Tensor

from ._cache import checks as cache_checks
from ._cache.layout import cache_sizes, head_dim_of_values
from ._cache.scales import check_scale_caches
from ._linked.host.arguments import as_int32, as_length, check_tensor
from ._linked.host.forms import Memory, form_of
from ._linked.host.operators import check_written
from ._linked.host.results import returns_lse
from ._paged import checks as paged_checks
from ._paged import ops
from ._paged import options as paged_options
from ._paged.call import Checked, Tensors, WritePlan, WriteTensors

_known: Memory[Checked] = Memory()
_writes: Memory[WritePlan] = Memory()


@returns_lse
def paged_attn_func(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
    tree_mask: Tensor | None = None,
    kv_dtype: str | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    invariant: bool = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of packed queries over keys and values in the pages of a cache.

    Key j of sequence b is in page ``block_table[b, j // block_size]``, slot ``j % block_size``
    (PagedAttention: Kwon et al. 2023). For query i of a sequence, at position
    ``i' = i + seqlen_k - seqlen_q``, the score of key j is::

        s = softmax_scale * q_i . k_j
        s = softcap * tanh(s / softcap)                    if softcap > 0
        s = s - alibi_slope * |i' - j|                     if given
        s = -inf                                           where i does not see j

    and the output is ``sum_j exp(s_ij) v_j / (sum_j exp(s_ij) + exp(sink))``. A call may mix
    sequences with one query (decoding), with a few, and with many (prefill).

    Args:
        q: queries, ``[tokens, heads_q, head_dim]``; fp16, bf16, fp32 or FP8 (e4m3). Sequence b is
            the rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``; rows outside every sequence are
            padding, with output 0 and lse -inf. ``head_dim`` is a multiple of 8 up to 512. Any
            strides.
        k_cache: keys, ``[num_blocks, block_size, heads_k, head_dim]``, or packed,
            ``[num_blocks, heads_k, head_dim // x, block_size, x]``; dtype of ``q``, FP8 (e4m3 or
            e5m2), or uint8, which is read as e4m3. ``heads_q`` is a multiple of ``heads_k``: query
            head h reads KV head ``h // (heads_q // heads_k)``. Any ``block_size``, any strides.
        v_cache: values, in the same layout, ``[num_blocks, block_size, heads_k, head_dim_v]``, or
            packed, ``[num_blocks, heads_k, head_dim_v, block_size]``; dtype of ``k_cache``.
            ``head_dim_v`` is a multiple of 8 up to 512; it may differ from ``head_dim``.
        block_table: the pages of each sequence, int32 or int64 ``[batch, max_blocks]``. Entries
            after a sequence's last page, and of pages before its window, are not read. On a GPU its
            values are the caller's duty: :func:`validate_paged` checks them.
        cu_seqlens_q: offsets of the sequences, int32 ``[batch + 1]``; int64 is converted.
        seqlens_k: number of keys of each sequence, new tokens included, int32 ``[batch]``; int64 is
            converted.
        max_seqlen_q: the most queries of a sequence; an upper bound will do. An int, or what
            ``operator.index`` takes, such as a tensor without dimensions, which waits for a GPU.
        max_seqlen_k: the most keys of a sequence, from which ``num_splits`` is chosen; an upper
            bound will do.
        k: keys of the tokens of ``q``, ``[tokens, heads_k, head_dim]``, dtype of ``q`` (fp16, bf16
            or fp32 for FP8 ``q``). The cache then holds only earlier keys. Default: None, all keys
            are in the cache.
        v: values of the tokens of ``q``, ``[tokens, heads_k, head_dim_v]``, dtype of ``k``; given
            if ``k`` is. Default: None.
        softmax_scale: factor of the scores, any number that is finite in fp32.
            Default: ``head_dim ** -0.5``.
        causal: hide key j from query i unless ``j <= i'``. Default: True.
        window_size: ``(left, right)``: key j is visible iff ``i' - left <= j <= i' + right``; -1 is
            unlimited, as is None. ``causal`` makes ``right`` 0. Default: ``(-1, -1)``.
        softcap: cap of the scores; 0.0 is none. Default: 0.0.
        alibi_slopes: slopes of the linear bias (Press et al. 2021), fp32 ``[heads_q]`` or
            ``[batch, heads_q]``. Default: None.
        sinks: an extra logit per head in the denominator, not scaled, without a value (Xiao et al.
            2023, as in gpt-oss): ``[heads_q]``, fp16, bf16 or fp32. Default: None.
        q_descale: factor of FP8 ``q``: fp32, one element, ``[heads_k]`` or ``[batch, heads_k]``.
            Default: None (1.0).
        k_descale: factor of the keys in an FP8 cache, not of ``k``; shaped like ``q_descale``.
            Default: None (1.0).
        v_descale: factor of the values in an FP8 cache, not of ``v``; shaped like ``q_descale``.
            Default: None (1.0).
        out: output tensor, ``[tokens, heads_q, head_dim_v]``, fp16, bf16, fp32, or FP8 with
            ``out_scale``. Default: None, a new tensor in the dtype of ``q``, in bf16 for FP8 ``q``,
            in FP8 with ``out_scale``.
        out_scale: fp32, one element: an FP8 output stores ``out / out_scale``, saturated at the
            largest number of the dtype. Default: None.
        num_splits: number of parts into which the keys of each sequence are cut; parts are computed
            in parallel and merged. With any number but 0, the bits of a sequence's result do not
            depend on the other sequences of the batch. Default: 0, by load.
        return_lse: return ``(out, lse)``. Default: False.
        tree_mask: int64 ``[tokens]``, for a drafted tree of at most 64 queries per sequence: bit j
            of an entry lets its token see the j-th new token of its sequence. It replaces the
            causal mask among the new tokens; all of them see the earlier keys. Windows count
            positions, not depths. Excludes ``alibi_slopes``. Default: None.
        kv_dtype: numbers of an integer cache: "int8", stored as int8; or "int4", stored as uint8,
            ``[num_blocks, block_size, heads_k, head_dim // 2]``, with element 2 i of ``head_dim``
            in the low bits of byte i, in two's complement. vLLM's formats are
            "int8_per_token_head"; "fp8_per_token_head", e4m3 stored as such or as uint8; and
            "int4_per_token_head", numbers from 0 to 15 less a zero point, which the lowest four
            bits of the fp32 scale hold. Not with packed caches. Default: None, the dtype of
            ``k_cache`` tells.
        k_scale_cache: the scale of each cached key, ``[num_blocks, block_size, heads_k]``; fp16,
            bf16 or fp32, any strides. Required with ``kv_dtype``, instead of ``k_descale``.
        v_scale_cache: the scale of each cached value, shape and dtype of ``k_scale_cache``.
        invariant: the bits of a token's output and lse depend only on its query and the keys that
            it sees: not on other tokens, on how a prompt is cut into calls, on pages, on the batch
            or on the load. They equal those of flash-attn-triton's ``invariant=True`` on the same
            keys; keys of an FP8 cache are multiplied by their scale and rounded to the dtype of
            ``q`` first. Default: False.

    Returns:
        ``out``, ``[tokens, heads_q, head_dim_v]``; or ``(out, lse)``, where ``lse`` is the natural
        logarithm of the whole denominator, fp32 ``[heads_q, tokens]``. A fully masked row has
        output 0 and lse -inf, or with sinks its head's sink.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, or if what is written shares memory.
        NotImplementedError: on FP8 if the hardware lacks it; on an input that requires a gradient;
            with ``invariant`` on FP8 queries and outputs, ``kv_dtype``, ``alibi_slopes``,
            ``tree_mask``, ``num_splits`` other than 0, head dimensions over 256, and ``k`` and
            ``v`` with an FP8 cache.
    """
    if unknown:
        paged_checks.refuse_unknown(unknown, paged_attn_func)
    check_tensor("q", q)
    cu_seqlens_q, seqlens_k = as_int32(cu_seqlens_q), as_int32(seqlens_k)
    rows = [x for x in (q, k, v, out, tree_mask) if x is not None]
    table = block_table, cu_seqlens_q, seqlens_k
    descales = q_descale, k_descale, v_descale, k_scale_cache, v_scale_cache
    extras = alibi_slopes, sinks, *descales, out_scale
    asked = softmax_scale, causal, window_size, softcap, num_splits, return_lse, kv_dtype, invariant
    missing = k is None, v is None, out is None, tree_mask is None
    form = form_of(rows, (k_cache, v_cache, *table, *extras), asked + missing, packed=True)
    if form is not None and len(rows) > 1 and any(x.shape[:1] != q.shape[:1] for x in rows):
        form = None
    known = None if form is None else _known.get(form)
    if known is None:
        cache_checks.check_kv_dtype(kv_dtype)
    if kv_dtype in cache_checks.OF_FP8 and (known is None or k_cache.dtype is torch.uint8):
        k_cache, v_cache = cache_checks.fp8_view(q, k_cache), cache_checks.fp8_view(q, v_cache)
    if known is None:
        paged_checks.check_paged(q, k_cache, v_cache, k, v, kv_dtype)
        options = paged_options.check_options(
            q, softmax_scale, causal, window_size, softcap, num_splits, return_lse, invariant
        )
        options = options._replace(zero_points=kv_dtype == "int4_per_token_head")
        batch = paged_checks.check_table(q, *table)
    max_seqlen_q = as_length("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = as_length("max_seqlen_k", max_seqlen_k)
    if known is None:
        heads_k = cache_sizes(k_cache).heads_k
        paged_checks.check_extras(
            q, batch, heads_k, alibi_slopes, sinks, q_descale, k_descale, v_descale
        )
        check_scale_caches(k_cache, k_scale_cache, v_scale_cache, kv_dtype, k_descale, v_descale)
        paged_checks.check_descales(k_cache, k_descale, v_descale, kv_dtype)
        head_dim_v = head_dim_of_values(k_cache, v_cache)
        dtype = paged_checks.check_out(q, head_dim_v, out, out_scale)
        paged_checks.check_no_gradients(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            k=k,
            v=v,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            out=out,
            out_scale=out_scale,
            k_scale_cache=k_scale_cache,
            v_scale_cache=v_scale_cache,
        )
        if tree_mask is not None:
            paged_checks.check_tree(q, tree_mask, max_seqlen_q, causal, alibi_slopes)
            # the tree replaces the causal mask
            options = options._replace(window_right=-1)
        if invariant:
            rounds_new = k is not None and k_cache.dtype != k.dtype
            paged_checks.check_invariant(
                q, head_dim_v, dtype, kv_dtype, alibi_slopes, tree_mask, rounds_new
            )
        known = Checked(options, dtype, head_dim_v)
    elif tree_mask is not None:
        paged_checks.check_tree_size(max_seqlen_q)
    is_given = out is not None
    if out is None and known.head_dim_v != q.shape[2]:
        shape = *q.shape[:2], known.head_dim_v
        out = torch.empty(shape, dtype=known.out_dtype, device=q.device)
    elif out is None:
        # faster than torch.empty
        out = torch.empty_like(q, dtype=known.out_dtype, memory_format=torch.contiguous_format)
    lse = None
    if return_lse:
        lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    x = Tensors(q, k_cache, v_cache, k, v, *table, *extras, None, tree_mask, out, lse)
    if known.plan is None and form is not None and _known.get(form) is None:
        known = _known.keep(form, known._replace(plan=ops.plan_of(x, known.options)))
    if known.plan is None:
        ops.attention(*x, max_seqlen_q, max_seqlen_k, *known.options)
    else:
        if is_given:
            check_written(x)
        known.plan.run(x, max_seqlen_q, max_seqlen_k)
    return out if lse is None else (out, lse)


def reshape_and_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_dtype: str | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens into the pages of a cache.

    Token t goes to page ``slot_mapping[t] // block_size``, slot ``slot_mapping[t] % block_size``.

    Args:
        k: keys, ``[tokens, heads_k, head_dim]``; fp16, bf16 or fp32. There may be more tokens than
            in ``slot_mapping``: the rest is padding.
        v: values, ``[tokens, heads_k, head_dim_v]``, dtype of ``k``.
        k_cache: cache of keys, in either layout of :func:`paged_attn_func`; dtype of ``k``, FP8 or
            uint8, which holds e4m3.
        v_cache: cache of values, in the same layout and dtype.
        slot_mapping: int32 or int64 ``[tokens]``. A token with a negative slot is not written.
            No two tokens may have the same slot.
        k_scale: fp32, one element or ``[heads_k]``: an FP8 cache stores ``k / k_scale``, saturated
            at the largest number of the dtype. Default: None (1.0).
        v_scale: the same for values.
        kv_dtype: as in :func:`paged_attn_func`. For "int8" and "int4" the scale of a token and head
            is ``max(abs(k)) / 127`` (int4: ``/ 7``), rounded to the dtype of ``k_scale_cache``; the
            cache stores ``k / scale``, rounded to the nearest integer, ties to even. A row of zeros
            gives zeros. With vLLM's formats the bits are those that vLLM writes, in fp32 by
            ``k * (1 / scale)``: the scale is ``max(abs(k)) / 127``, in FP8 ``/ 448`` (the largest
            number of e4m3), in int4 ``(max(k) - min(k)) / 15``, and at least 1e-6; integers are
            rounded with halves away from zero. vLLM rotates keys and values of int4 before it
            writes them, which is the caller's to do. Default: None.
        k_scale_cache: cache of these scales, ``[num_blocks, block_size, heads_k]``; fp16, bf16 or
            fp32. Required with ``kv_dtype``, instead of ``k_scale``.
        v_scale_cache: the same for values.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, or if what is written shares memory.
        NotImplementedError: on FP8 if the hardware lacks it; on an input that requires a gradient.
    """
    others = k_cache, v_cache, k_scale, v_scale, k_scale_cache, v_scale_cache
    form = form_of((k, v, slot_mapping), others, (kv_dtype,), packed=True)
    if form is not None and not len(k) == len(v) >= len(slot_mapping):
        form = None
    plan = None if form is None else _writes.get(form)
    if plan is None:
        cache_checks.check_kv_dtype(kv_dtype)
    if kv_dtype in cache_checks.OF_FP8 and (plan is None or k_cache.dtype is torch.uint8):
        k_cache, v_cache = cache_checks.fp8_view(k, k_cache), cache_checks.fp8_view(k, v_cache)
    scales = k_scale, v_scale, k_scale_cache, v_scale_cache
    x = WriteTensors(k, v, k_cache, v_cache, slot_mapping, *scales)
    if plan is None:
        names = "k_scale", "v_scale"
        cache_checks.check_cache_inputs(*x[:7], kv_dtype)
        check_scale_caches(k_cache, *scales[2:], kv_dtype, *scales[:2], names=names)
        paged_checks.check_no_gradients(**x._asdict())
        per_token_head = kv_dtype in cache_checks.PER_TOKEN_HEAD
        plan = None if form is None else ops.write_plan_of(x, per_token_head)
        if plan is None:
            ops.reshape_and_cache(*x, per_token_head)
            return
        _writes.keep(form, plan)
    check_written(x)
    plan.run(x)
