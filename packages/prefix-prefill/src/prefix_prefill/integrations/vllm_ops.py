"""vLLM's Triton entry points on these kernels: the signatures of vLLM 0.33, by position too.

For code that calls them past vLLM's attention backends::

    from prefix_prefill.integrations.vllm_ops import unified_attention

``context_attention_fwd`` and ``chunked_prefill_paged_decode`` are in :mod:`prefix_prefill`. Scratch
tensors, and options that only say how vLLM's kernels divide their work, are accepted and not used.
What changes a result is served or raises ``NotImplementedError`` with its name. In a process with
``VLLM_BATCH_INVARIANT=1``, :func:`unified_attention` computes with ``invariant=True``.

``import`` needs no vLLM; only caches of "int4_per_token_head" do, for the rotation of keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._linked.host.arguments import ERRORS, check_tensor, is_flag, is_int, kind, renamed, shown
from .._mla.api import mla_attn_func
from .._paged import checks, ops
from .._paged.merge import check_states
from ..api import paged_attn_func, reshape_and_cache
from ..dropin import as_stored

__all__ = [
    "decode_attention_fwd",
    "merge_attn_states",
    "triton_reshape_and_cache_flash",
    "triton_reshape_and_cache_flash_per_token_head_quant",
    "unified_attention",
]

# vLLM reads its variable when it is imported, too
BATCH_INVARIANT = os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")

# of vLLM's KVQuantMode, an IntEnum; None: the dtype of the cache tells
_MODES: dict[int, str | None] = {0: None, 1: None}
_MODES |= {2: "int8_per_token_head", 3: "fp8_per_token_head", 4: "int4_per_token_head"}
_INT4 = "int4_per_token_head"
_OF_MODEL = ("auto", "float16", "bfloat16", "float32", "half", "float")

# argument names of the checks: names in these functions
_UNIFIED = {
    "k_cache": "k",
    "v_cache": "v",
    "seqlens_k": "seqused_k",
    "out_scale": "output_scale",
    "invariant=True": "VLLM_BATCH_INVARIANT=1",
}
_WRITE = {"k": "key", "v": "value", "k_cache": "key_cache", "v_cache": "value_cache"}
_MERGE = {
    "out_a": "prefix_output",
    "lse_a": "prefix_lse",
    "out_b": "suffix_output",
    "lse_b": "suffix_lse",
    "out_scale": "output_scale",
    "out": "output",
    "lse": "output_lse",
}
_DECODE = {
    "k_cache": "k_buffer",
    "v_cache": "v_buffer",
    "kv_cache": "k_buffer",
    "block_table": "req_to_token",
    "seqlens_k": "b_seq_len",
    "softmax_scale": "sm_scale",
    "softcap": "logit_cap",
    "num_splits": "num_kv_splits",
    "k_descale": "k_scale",
    "v_descale": "v_scale",
    "kv_descale": "k_scale",
    "out": "o",
}


def unified_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool | Tensor,
    window_size: tuple[int, int],
    block_table: Tensor,
    softcap: float,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    seq_threshold_3D: int | None = None,
    num_par_softmax_segments: int | None = None,
    softmax_segm_output: Tensor | None = None,
    softmax_segm_max: Tensor | None = None,
    softmax_segm_expsum: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    output_scale: Tensor | None = None,
    qq_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    mm_prefix_range: Tensor | None = None,
    rswa_prefix_lens: Tensor | None = None,
    rswa_window: int | None = None,
    use_alibi_sqrt: bool = False,
    kv_quant_mode: int = 0,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    chunk_lookback: int = -1,
    use_td: bool = False,
    mm_prefix_clamp_sliding_window: bool = False,
) -> None:
    """Attend to the pages of a cache, prefill and decode in one call; write ``out``.

    Args:
        q: queries, ``[tokens, heads_q, head_dim]``; fp16, bf16, fp32 or FP8 (e4m3).
        k: keys, ``[num_blocks, block_size, heads_k, head_dim]``, any strides; dtype of ``q``, FP8
            or, by ``kv_quant_mode``, int8 or uint8 (two numbers of 4 bits).
        v: values, like ``k``.
        out: output tensor, ``[tokens, heads_q, head_dim]``; FP8 with ``output_scale``. Rows outside
            every sequence become 0.
        cu_seqlens_q: offsets of the sequences, int32 ``[batch + 1]``.
        max_seqlen_q: the most queries of a sequence.
        seqused_k: keys of each sequence, int32 ``[batch]``.
        max_seqlen_k: the most keys of a sequence.
        softmax_scale: factor of the scores.
        causal: hide later keys. One flag of each sequence, a tensor, is not served.
        window_size: ``(left, right)``: a query sees ``left`` keys before its own, and as many after
            it if not ``causal``; ``right`` is not read. -1: no window.
        block_table: the pages of each sequence, int32 or int64 ``[batch, max_blocks]``.
        softcap: cap of the scores; 0.0 is none.
        q_descale: factor of FP8 ``q``, fp32; not read for another ``q``.
        k_descale: factor of keys in an FP8 cache, fp32, one element, ``[heads_k]`` or
            ``[batch, heads_k]``; not read for other caches.
        v_descale: the same for values.
        seq_threshold_3D: not read, as the next four: scratch of vLLM's kernels.
        num_par_softmax_segments: not read.
        softmax_segm_output: not read.
        softmax_segm_max: not read.
        softmax_segm_expsum: not read.
        alibi_slopes: fp32 ``[heads_q]``; only with ``causal``. Default: None.
        output_scale: fp32, one element: an FP8 ``out`` stores ``out / output_scale``, saturated.
            Default: None.
        qq_bias: not served: must be None.
        sinks: an extra logit per head in the denominator, ``[heads_q]``. Default: None.
        mm_prefix_range: not served: must be None.
        rswa_prefix_lens: not served beside ``rswa_window``: one of them must be None.
        rswa_window: see ``rswa_prefix_lens``.
        use_alibi_sqrt: not served: must be False.
        kv_quant_mode: vLLM's ``KVQuantMode``: NONE, FP8_PER_TENSOR, INT8_PER_TOKEN_HEAD,
            FP8_PER_TOKEN_HEAD or INT4_PER_TOKEN_HEAD, whose queries and outputs are rotated here.
        k_scale_cache: the scale of each cached key, fp32 ``[num_blocks, block_size, heads_k]``, for
            the last three modes.
        v_scale_cache: the same for values.
        chunk_lookback: not served beside a window: must be -1.
        use_td: how vLLM's kernel loads; not read.
        mm_prefix_clamp_sliding_window: says something of ``mm_prefix_range`` alone; not read.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, or if ``out`` shares memory.
        NotImplementedError: on what is not served; on FP8 if the hardware lacks it; under
            ``VLLM_BATCH_INVARIANT=1`` on what ``invariant=True`` excludes.
    """
    _refuse("qq_bias", qq_bias, None)
    _refuse("mm_prefix_range", mm_prefix_range, None)
    if rswa_window is not None:
        _refuse("rswa_prefix_lens", rswa_prefix_lens, None)
    _refuse("use_alibi_sqrt", bool(use_alibi_sqrt), False)
    if not is_flag(causal):
        raise NotImplementedError(
            f"causal must be one bool for all sequences: no more is offered, got {kind(causal)}"
        )
    if alibi_slopes is not None and not causal:
        raise NotImplementedError("alibi_slopes must be None unless causal, got Tensor")
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be a tuple of two ints, got {shown(window_size)}")
    left = window_size[0]
    if is_int(left) and left >= 0:
        _refuse("chunk_lookback", chunk_lookback, -1)
    kv_dtype = _kv_dtype(kv_quant_mode)
    check_tensor("q", q)
    check_tensor("k", k)
    given: dict[str, Any] = {}
    if kv_dtype is not None:
        scales = {"k_scale_cache": k_scale_cache, "v_scale_cache": v_scale_cache}
        given |= {"kv_dtype": kv_dtype, **scales}
    elif k.element_size() == 1:
        given |= {"k_descale": k_descale, "v_descale": v_descale}
    if q.element_size() == 1:
        given["q_descale"] = q_descale
    target, factor = out, 1
    if kv_dtype == _INT4:
        _refuse("output_scale", output_scale, None)
        rotate, factor = _rotation(), q.shape[-1] & -q.shape[-1]
        q = rotate(q.float()).to(q.dtype)
        target = torch.empty_like(q)
    try:
        paged_attn_func(
            q,
            k,
            v,
            block_table,
            cu_seqlens_q,
            seqused_k,
            max_seqlen_q,
            max_seqlen_k,
            softmax_scale=softmax_scale / factor,
            causal=bool(causal),
            window_size=(left, -1 if causal else left),
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            out=target,
            out_scale=output_scale,
            invariant=BATCH_INVARIANT,
            **given,
        )
    except ERRORS as error:
        raise renamed(error, _UNIFIED) from error
    if kv_dtype == _INT4:
        out.copy_(rotate(target.float(), inverse=True) / factor)


def triton_reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    interleaved_v_pack_factor: int = 0,
) -> None:
    """Write keys and values of new tokens into the pages of a cache.

    Args:
        key: ``[tokens, heads_k, head_dim]``; fp16, bf16 or fp32.
        value: ``[tokens, heads_k, head_dim]``, dtype of ``key``.
        key_cache: ``[num_blocks, block_size, heads_k, head_dim]``, or
            ``[num_blocks, heads_k, head_dim // x, block_size, x]``; dtype of ``key``, or as
            ``kv_cache_dtype`` says, FP8 or uint8.
        value_cache: ``[num_blocks, block_size, heads_k, head_dim]``, or
            ``[num_blocks, heads_k, head_dim, block_size]``; dtype of ``key_cache``.
        slot_mapping: int32 or int64 ``[tokens]``; tokens with a negative slot are not written.
        kv_cache_dtype: "fp8", "fp8_e4m3" or "fp8_e5m2"; for a cache in the dtype of ``key`` "auto",
            "float16", "bfloat16", "float32", "half" or "float".
        k_scale: fp32, one element or ``[heads_k]``: an FP8 cache stores ``key / k_scale``,
            saturated. Not read for other caches.
        v_scale: the same for values.
        interleaved_v_pack_factor: not served: must be 0.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, or if what is written shares memory.
        NotImplementedError: on FP8 if the hardware lacks it; on what is not served.
    """
    _refuse("interleaved_v_pack_factor", interleaved_v_pack_factor, 0)
    if isinstance(kv_cache_dtype, str) and kv_cache_dtype in _OF_MODEL:
        kv_cache_dtype = "auto"
    try:
        for name, x in (("k_cache", key_cache), ("v_cache", value_cache)):
            check_tensor(name, x)
        key_cache = as_stored("k_cache", key_cache, kv_cache_dtype)
        value_cache = as_stored("v_cache", value_cache, kv_cache_dtype)
        if key_cache.element_size() != 1:
            k_scale = v_scale = None
        caches = key_cache, value_cache
        reshape_and_cache(key, value, *caches, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    except ERRORS as error:
        raise renamed(error, _WRITE) from error


def triton_reshape_and_cache_flash_per_token_head_quant(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    k_scale_cache: Tensor,
    v_scale_cache: Tensor,
    slot_mapping: Tensor,
    kv_quant_mode: int,
) -> None:
    """Write keys and values with a scale of each token and head, bit for bit as vLLM does.

    Args:
        key: ``[tokens, heads_k, head_dim]``; fp16, bf16 or fp32. For INT4_PER_TOKEN_HEAD it is
            rotated here.
        value: ``[tokens, heads_k, head_dim_v]``, dtype of ``key``.
        key_cache: ``[num_blocks, block_size, heads_k, head_dim]``, int8 or FP8 (e4m3); half as wide
            in uint8 for int4.
        value_cache: ``[num_blocks, block_size, heads_k, head_dim_v]``, likewise.
        k_scale_cache: fp32 ``[num_blocks, block_size, heads_k]``.
        v_scale_cache: fp32 ``[num_blocks, block_size, heads_k]``.
        slot_mapping: int32 or int64 ``[tokens]``; tokens with a negative slot are not written.
        kv_quant_mode: as in :func:`unified_attention`, one of the last three.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, or if what is written shares memory.
        NotImplementedError: on FP8 if the hardware lacks it; on another mode.
    """
    kv_dtype = _kv_dtype(kv_quant_mode)
    if kv_dtype is None:
        raise NotImplementedError(
            f"kv_quant_mode must be one of a scale per token and head, got {kv_quant_mode!r}"
        )
    if kv_dtype == _INT4:
        rotate = _rotation()
        key, value = (rotate(x.float()).to(x.dtype) for x in (key, value))
    scales = {"k_scale_cache": k_scale_cache, "v_scale_cache": v_scale_cache}
    try:
        caches = key_cache, value_cache
        reshape_and_cache(key, value, *caches, slot_mapping, kv_dtype=kv_dtype, **scales)
    except ERRORS as error:
        raise renamed(error, _WRITE) from error


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: Tensor | None = None,
) -> None:
    """Merge attention over two parts of the keys into ``output``.

    Args:
        output: ``[tokens, heads, head_dim]``; fp16, bf16, fp32, or FP8 with ``output_scale``.
        prefix_output: output over the first keys, shape of ``output``; fp16, bf16 or fp32.
        prefix_lse: its log-sum-exp, fp32 ``[heads, tokens]``, any strides. -inf and +inf mark a row
            without keys.
        suffix_output: output over the other keys, like ``prefix_output``.
        suffix_lse: its log-sum-exp, like ``prefix_lse``.
        output_lse: written, fp32 ``[heads, tokens]``. Default: None.
        prefill_tokens_with_context: tokens from this one on have no first part: theirs is not read.
            Default: None, all have one.
        output_scale: fp32, one element: an FP8 ``output`` stores ``out / output_scale``, saturated.
            Default: None.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, or if what is written shares memory.
        NotImplementedError: on FP8 if the hardware lacks it; on an input that requires a gradient.
    """
    count = prefill_tokens_with_context
    if count is not None and (not is_int(count) or count < 0):
        raise ValueError(
            "prefill_tokens_with_context must be None or an int of at least 0, got "
            f"{shown(count) if is_int(count) else kind(count)}"
        )
    try:
        check_states(prefix_output, prefix_lse, suffix_output, suffix_lse)
        checks.check_out(prefix_output, prefix_output.shape[2], output, output_scale)
        lse = output_lse
        if output_lse is not None:
            check_states(prefix_output, output_lse, suffix_output, suffix_lse)
            if not output_lse.is_contiguous():
                lse = torch.empty_like(output_lse, memory_format=torch.contiguous_format)
        if count is not None and count < len(output):
            token = torch.arange(len(output), device=output.device)
            prefix_lse = prefix_lse.masked_fill(token >= count, -torch.inf)
        parts = prefix_output, prefix_lse, suffix_output, suffix_lse
        ops.merge_states(*parts, output_scale, output, lse)
    except ERRORS as error:
        raise renamed(error, _MERGE) from error
    if output_lse is not None and lse is not None and lse is not output_lse:
        output_lse.copy_(lse)


def decode_attention_fwd(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    o: Tensor,
    lse: Tensor,
    req_to_token: Tensor,
    b_seq_len: Tensor,
    attn_logits: Tensor,
    num_kv_splits: int,
    sm_scale: float,
    page_size: int = 1,
    logit_cap: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    is_mla: bool = False,
) -> None:
    """Attend with one query of each sequence; write ``o`` and ``lse``.

    Args:
        q: queries, ``[batch, heads_q, head_dim]``; fp16, bf16, fp32 or FP8 (e4m3).
        k_buffer: keys, ``[num_pages, page_size, heads_k, head_dim]`` or
            ``[num_pages * page_size, heads_k, head_dim]``; dtype of ``q`` or FP8.
        v_buffer: values, likewise, ``head_dim_v`` wide. With ``is_mla``, a view of the first
            columns of ``k_buffer``.
        o: output tensor, ``[batch, heads_q, head_dim_v]``; fp16, bf16 or fp32.
        lse: fp32 ``[batch, heads_q]``: natural logarithm of the denominator.
        req_to_token: the pages of each sequence, int32 or int64 ``[batch, max_pages]``.
        b_seq_len: keys of each sequence, int32 or int64 ``[batch]``.
        attn_logits: scratch of vLLM's kernels; not read.
        num_kv_splits: number of parts into which keys are cut. The bits of a sequence do not depend
            on the other sequences.
        sm_scale: factor of the scores.
        page_size: keys of a page. Default: 1.
        logit_cap: cap of the scores; 0.0 is none. Not with ``is_mla``.
        k_scale: factor of FP8 keys, fp32, one element; not read for others. Default: None (1.0).
        v_scale: factor of FP8 values; with ``is_mla`` that of keys counts. Default: None (1.0).
        is_mla: multi-head latent attention: one KV head, whose values are columns of the keys.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, or if what is written shares memory.
        NotImplementedError: on FP8 if the hardware lacks it; on an input that requires a gradient;
            on what multi-head latent attention does not serve.
    """
    for name, x in (("q", q), ("k_buffer", k_buffer), ("v_buffer", v_buffer), ("lse", lse)):
        check_tensor(name, x)
    check_tensor("req_to_token", req_to_token)
    if not is_int(page_size) or page_size < 1:
        raise ValueError(f"page_size must be an int of at least 1, got {shown(page_size)}")
    pages = []
    for name, x in (("k_buffer", k_buffer), ("v_buffer", v_buffer)):
        if x.ndim == 3 and x.shape[0] % page_size == 0:
            x = x.unflatten(0, (x.shape[0] // page_size, page_size))
        if x.ndim != 4 or x.shape[1] != page_size:
            raise ValueError(
                f"{name} must be [num_pages, page_size, heads_k, head_dim] or [num_pages * "
                f"page_size, heads_k, head_dim] with page_size {page_size}, got {list(x.shape)}"
            )
        pages.append(x)
    if lse.dtype != torch.float32 or lse.shape != q.shape[:2]:
        raise ValueError(
            f"lse must be torch.float32 [batch, heads_q], {list(q.shape[:2])}, got {lse.dtype} "
            f"{list(lse.shape)}"
        )
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    most = req_to_token.shape[-1] * page_size
    table = req_to_token, starts, b_seq_len
    is_fp8 = k_buffer.element_size() == 1
    asked: dict[str, Any] = {"out": o, "softmax_scale": sm_scale, "num_splits": num_kv_splits}
    asked["return_lse"] = True
    try:
        if is_mla:
            _refuse("logit_cap", logit_cap, 0.0)
            if pages[0].shape[2] != 1:
                raise ValueError(
                    f"k_buffer must have one head beside is_mla, got {pages[0].shape[2]}"
                )
            if v_buffer.data_ptr() != k_buffer.data_ptr():
                raise ValueError("v_buffer must be the first columns of k_buffer beside is_mla")
            asked["kv_descale"] = k_scale if is_fp8 else None
            asked["head_dim_v"] = v_buffer.shape[-1]
            _, found = mla_attn_func(q, pages[0][:, :, 0], *table, 1, most, **asked)
        else:
            if is_fp8:
                asked |= {"k_descale": k_scale, "v_descale": v_scale}
            asked["softcap"] = logit_cap
            _, found = paged_attn_func(q, pages[0], pages[1], *table, 1, most, **asked)
    except ERRORS as error:
        raise renamed(error, _DECODE) from error
    lse.copy_(found.T)


def _refuse(name: str, given: object, offered: object) -> None:
    """Raise unless an argument has the only value that is served."""
    if given is not offered and (isinstance(given, Tensor) or given != offered):
        found = kind(given) if isinstance(given, Tensor) else shown(given)
        raise NotImplementedError(f"{name} must be {offered}: no more is offered, got {found}")


def _kv_dtype(mode: int) -> str | None:
    """Return the format of a cache with scales of tokens; None: another."""
    if not is_int(mode) or mode not in _MODES:
        raise NotImplementedError(
            "kv_quant_mode must be NONE, FP8_PER_TENSOR, INT8_PER_TOKEN_HEAD, FP8_PER_TOKEN_HEAD "
            f"or INT4_PER_TOKEN_HEAD of vLLM's KVQuantMode, 0 to 4, got {shown(mode)}"
        )
    return _MODES[mode]


def _rotation() -> Callable[..., Tensor]:
    """Return the rotation of queries, keys and values of int4: vLLM's own."""
    from vllm.v1.attention.ops.int4_per_token_head import single_rht

    rotation: Callable[..., Tensor] = single_rht
    return rotation
