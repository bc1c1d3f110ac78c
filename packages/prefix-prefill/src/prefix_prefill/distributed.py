"""Attention over a paged cache that several ranks hold together, each a share of every sequence."""

from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from . import _cache_checks, _checks, _ops, _options
from ._call import Options, Tensors
from ._layout import cache_sizes
from ._linked.host.arguments import as_int32, check_length, check_tensor
from .api import Result


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
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
    group: dist.ProcessGroup | None = None,
    **unknown: NoReturn,
) -> Result:
    """Attend as :func:`prefix_prefill.paged_attn_func` does to keys that are spread over ranks.

    Rank r of n holds the keys whose position p has ``p % n == r``: key p of a sequence lies in page
    ``block_table[b, p // n // block_size]``, slot ``p // n % block_size`` of its cache. So every
    step of decoding finds the same number of keys on each rank, and a new key goes to one of them.
    Each rank attends to its own, and the results are exchanged and merged by their log-sum-exps, in
    the order of ranks: every rank returns the whole result, the same bits on each.

    Args:
        q: queries, ``[tokens, heads_q, head_dim]``, the same on every rank, as are all arguments
            but the caches and ``block_table``.
        k_cache: this rank's keys, in either layout of :func:`prefix_prefill.paged_attn_func`.
        v_cache: this rank's values, likewise.
        block_table: this rank's pages, int32 or int64 ``[batch, max_blocks]``.
        cu_seqlens_q: as in :func:`prefix_prefill.paged_attn_func`.
        seqlens_k: how many keys each sequence has on all ranks together, int32 ``[batch]``.
        max_seqlen_q: the most queries of a sequence; an upper bound is as good.
        max_seqlen_k: the most keys of a sequence on all ranks together, likewise.
        softmax_scale: this and all others as in :func:`prefix_prefill.paged_attn_func`, but for:
        window_size: a window that ends on both sides, under ``causal`` on the left, shows as many
            keys as are a multiple of the number of ranks.
        alibi_slopes: under ``causal`` alone.
        group: the ranks: NCCL, or gloo for CPU tensors. Default: None, all.

    Returns:
        ``out``; or ``(out, lse)``, fp32 ``[heads_q, tokens]``.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range.
        NotImplementedError: on a combination that is not offered; on an input that requires a
            gradient.
    """
    if unknown:
        _checks.refuse_unknown(unknown)
    check_tensor("q", q)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    cu_seqlens_q, seqlens_k = as_int32(cu_seqlens_q), as_int32(seqlens_k)
    k_cache, v_cache = _cache_checks.fp8_view(q, k_cache), _cache_checks.fp8_view(q, v_cache)
    _checks.check_paged(q, k_cache, v_cache, None, None)
    options = _options.check_options(
        q, softmax_scale, causal, window_size, softcap, num_splits, return_lse
    )
    batch = _checks.check_table(q, block_table, cu_seqlens_q, seqlens_k)
    check_length("max_seqlen_q", max_seqlen_q)
    check_length("max_seqlen_k", max_seqlen_k)
    heads_k = cache_sizes(k_cache).heads_k
    _checks.check_extras(q, batch, heads_k, alibi_slopes, sinks, q_descale, k_descale, v_descale)
    _checks.check_descales(k_cache, k_descale, v_descale)
    dtype = _checks.check_out(q, None, None)
    _checks.check_no_gradients(q, k_cache, v_cache, alibi_slopes, sinks)
    if alibi_slopes is not None and not causal:
        raise NotImplementedError(
            "alibi_slopes must be None over several ranks unless causal, got Tensor"
        )
    local = _of_rank(options, ranks)
    tokens, heads_q, _ = q.shape
    slopes = shift = sink = None
    # where the rows of each sequence stand: at the last key of this rank that they see
    token = torch.arange(tokens, dtype=torch.int32, device=q.device)
    owner = torch.searchsorted(cu_seqlens_q, token, right=True) - 1
    owner = owner.clamp(0, max(batch - 1, 0))
    at = token
    if batch:
        at = token + (seqlens_k - cu_seqlens_q[1:])[owner]
    if options.window_right < 0 <= options.window_left:
        # the first key to the right of where the window ends
        at = at - options.window_left + ranks - 1
    else:
        at = at + max(options.window_right, 0)
    positions = torch.div(at - rank, ranks, rounding_mode="floor").to(torch.int32)
    if alibi_slopes is not None:
        is_own = alibi_slopes.ndim == 2 and batch > 0
        slopes = alibi_slopes[owner] if is_own else alibi_slopes.expand(tokens, heads_q)
        # a row stands beyond the key at which it is put by less than a step
        shift = slopes * (at - rank - positions * ranks)[:, None]
        slopes = slopes * ranks
    lengths = torch.div(seqlens_k - rank + ranks - 1, ranks, rounding_mode="floor").to(torch.int32)
    part = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty((heads_q, tokens), dtype=torch.float32, device=q.device)
    x = Tensors.of(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        cu_seqlens_q=cu_seqlens_q,
        seqlens_k=lengths,
        alibi_slopes=slopes,
        # a key without a value, which one of the ranks counts
        sinks=sinks if rank == 0 and shift is None else None,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        positions=positions,
        out=part,
        lse=lse,
    )
    _ops.attention(*x, max_seqlen_q, -(-max_seqlen_k // ranks), *local)
    if shift is not None:
        lse = lse - shift.T
        if sinks is not None:
            # not shifted, and so not among what the ranks have
            inside = (token >= cu_seqlens_q[0]) & (token < cu_seqlens_q[-1])
            sink = sinks.float()[:, None].masked_fill(~inside, -torch.inf)
    out, lse = _merged(part, lse, sink, group)
    out = out.to(dtype)
    return (out, lse) if return_lse else out


def _of_rank(options: Options, ranks: int) -> Options:
    """Return the window as it is over the keys of one rank."""
    left, right = options.window_left, options.window_right
    if left >= 0 and right >= 0 and (left + right + 1) % ranks:
        raise NotImplementedError(
            f"window_size must show a multiple of {ranks} keys over {ranks} ranks, got "
            f"{left + right + 1}"
        )
    if left >= 0:
        left = (left + right + 1) // ranks - 1 if right >= 0 else 0
    return options._replace(window_left=left, window_right=min(right, 0))


def _merged(
    part: Tensor, lse: Tensor, sink: Tensor | None, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Exchange the results of all ranks, and merge them in the order of ranks."""
    ranks = dist.get_world_size(group)
    parts = [torch.empty_like(part) for _ in range(ranks)]
    lses = [torch.empty_like(lse) for _ in range(ranks)]
    dist.all_gather(parts, part, group=group)
    dist.all_gather(lses, lse.contiguous(), group=group)
    every = torch.stack(lses)
    if sink is not None:
        every = torch.cat([every, sink[None]])
    total = torch.logsumexp(every, 0)
    # of rows without a key nothing is weighed
    weights = torch.exp(every - total.masked_fill(total == -torch.inf, 0.0))
    out = torch.zeros_like(part)
    for one, weight in zip(parts, weights[:ranks], strict=True):
        out += one * weight.T.unsqueeze(-1)
    return out, total
