"""Cascade attention: a prefix that all sequences share is attended once for all of them."""

from typing import NoReturn

import torch
from torch import Tensor

from ._cache import checks as cache_checks
from ._cache.layout import cache_sizes, head_dim_of_values
from ._cache.scales import check_scale_caches
from ._linked.host.arguments import as_int32, as_length, is_symbol
from ._linked.host.results import returns_lse
from ._paged import checks as paged_checks
from ._paged import ops, tensor_checks
from ._paged import options as paged_options
from ._paged.call import Tensors


@returns_lse
def shared_prefix_attn_func(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    shared_pages: Tensor,
    shared_len: int,
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
    kv_dtype: str | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend as :func:`paged_attn_func` does, where all sequences begin with the same keys.

    The shared keys are read once for the queries of all sequences, each sequence's own keys for its
    own queries, and the two results are merged by their log-sum-exps (cascade attention). The
    result is that of :func:`paged_attn_func` with the shared pages before each sequence's own.

    Args:
        q: queries; this and all arguments not listed here are as in :func:`paged_attn_func`.
        shared_pages: the pages of the shared keys, int32 or int64 ``[shared_blocks]``.
        shared_len: number of shared keys; the last page need not be full.
        block_table: the pages of each sequence's own keys, which follow the shared ones.
        seqlens_k: number of each sequence's own keys, its new tokens included; at least the number
            of its queries. Masks and ALiBi count positions from the first shared key.
        max_seqlen_k: the most own keys of a sequence.
        q_descale: fp32, one element or ``[heads_k]``. So are ``k_descale`` and ``v_descale``,
            because the shared keys belong to no sequence. Default: None (1.0).

    Returns:
        ``out`` or ``(out, lse)``.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range.
        NotImplementedError: as :func:`paged_attn_func` does.
    """
    if unknown:
        paged_checks.refuse_unknown(unknown, shared_prefix_attn_func)
    cu_seqlens_q, seqlens_k = as_int32(cu_seqlens_q), as_int32(seqlens_k)
    cache_checks.check_kv_dtype(kv_dtype)
    k_cache = cache_checks.stored_view(q, k_cache, kv_dtype)
    v_cache = cache_checks.stored_view(q, v_cache, kv_dtype)
    paged_checks.check_paged(q, k_cache, v_cache, k, v, kv_dtype)
    options = paged_options.check_options(
        q, softmax_scale, causal, window_size, softcap, num_splits, return_lse
    )
    options = options._replace(zero_points=kv_dtype == "int4_per_token_head")
    batch = paged_checks.check_table(q, block_table, cu_seqlens_q, seqlens_k)
    max_seqlen_q = as_length("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = as_length("max_seqlen_k", max_seqlen_k)
    sizes = cache_sizes(k_cache)
    tensor_checks.check_indices("shared_pages", shared_pages, "q", q, 1)
    shared_len = as_length("shared_len", shared_len)
    if not is_symbol(shared_len) and shared_len > shared_pages.shape[0] * sizes.block_size:
        raise ValueError(
            "shared_len must be at most what shared_pages hold, "
            f"{shared_pages.shape[0] * sizes.block_size}, got {shared_len}"
        )
    paged_checks.check_extras(
        q, batch, sizes.heads_k, alibi_slopes, sinks, q_descale, k_descale, v_descale
    )
    check_scale_caches(k_cache, k_scale_cache, v_scale_cache, kv_dtype, k_descale, v_descale)
    paged_checks.check_descales(k_cache, k_descale, v_descale, kv_dtype)
    paged_checks.check_shared_scales(q_descale, k_descale, v_descale)
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
    tokens, heads_q, _ = q.shape
    device, shape = q.device, (tokens, heads_q, head_dim_v)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)

    # in fp32, so that only the merged result is rounded to the dtype of out
    parts = [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2)]
    form = heads_q, tokens
    lses = [torch.empty(form, dtype=torch.float32, device=device) for _ in range(2)]
    lse = torch.empty(form, dtype=torch.float32, device=device) if return_lse else None
    # For the shared keys all queries form one sequence. Positions are needed for windows and ALiBi.
    ends = torch.stack([cu_seqlens_q[0], cu_seqlens_q[-1]])
    positions = slopes = None
    # the right side of a window never hides a shared key
    if batch and (options.window_left >= 0 or alibi_slopes is not None):
        token = torch.arange(tokens, dtype=torch.int32, device=device)
        owner = torch.searchsorted(cu_seqlens_q, token, right=True) - 1
        owner = owner.clamp(0, batch - 1)
        last = seqlens_k - cu_seqlens_q[1:] + shared_len
        positions = token + last[owner]
        slopes = alibi_slopes
        if slopes is not None and slopes.ndim == 1:
            slopes = slopes.expand(tokens, heads_q)
        elif slopes is not None:
            slopes = slopes[owner]
    shared_lens = torch.full((1,), shared_len, dtype=torch.int32, device=device)
    x = Tensors.of(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        k=k,
        v=v,
        block_table=block_table,
        cu_seqlens_q=cu_seqlens_q,
        seqlens_k=seqlens_k,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        k_scale_cache=k_scale_cache,
        v_scale_cache=v_scale_cache,
        out=parts[1],
        lse=lses[1],
    )
    shared = x._replace(
        k=None,
        v=None,
        block_table=shared_pages[None],
        cu_seqlens_q=ends,
        seqlens_k=shared_lens,
        alibi_slopes=slopes,
        sinks=None,
        positions=positions,
        out=parts[0],
        lse=lses[0],
    )
    seen = options._replace(window_right=-1, long_only=num_splits != 0)
    # a query without an own key would not see all shared keys
    own = options._replace(own_keys=True)
    ops.attention(*x, max_seqlen_q, max_seqlen_k, *own)
    try:
        ops.attention(*shared, tokens, shared_len, *seen)
    except ValueError as error:  # on the CPU
        raise ValueError(str(error).replace("block_table[0, ", "shared_pages[")) from None
    ops.merge_states(parts[0], lses[0], parts[1], lses[1], out_scale, out, lse)
    return out if lse is None else (out, lse)
