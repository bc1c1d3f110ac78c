"""Attention over a paged cache whose keys are spread over several ranks."""

from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from attn_common import round_up
from torch import Tensor

from ._cache import checks as cache_checks
from ._cache.layout import cache_sizes, head_dim_of_values
from ._linked.host.arguments import as_int32, as_length, check_tensor, is_symbol
from ._linked.host.forms import ACCESS_BYTES
from ._linked.host.results import returns_lse
from ._paged import checks as paged_checks
from ._paged import ops
from ._paged import options as paged_options
from ._paged.call import Options, Tensors


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend as :func:`prefix_prefill.paged_attn_func` does to keys that are spread over ranks.

    Rank r of n holds the keys whose position p has ``p % n == r``. Key p of a sequence is in page
    ``block_table[b, p // n // block_size]``, slot ``p // n % block_size`` of the rank's cache. So
    the ranks hold equally many keys of a sequence, but for one, and a new key goes to one rank.
    Each rank attends to its own keys; results are gathered and merged by their log-sum-exps in the
    order of ranks. Every rank returns the whole result, with the same bits.

    Args:
        q: queries, ``[tokens, heads_q, head_dim]``; the same on every rank, as are all arguments
            except the caches and ``block_table``.
        k_cache: this rank's keys, in either layout of :func:`prefix_prefill.paged_attn_func`.
        v_cache: this rank's values, in the same layout.
        block_table: this rank's pages, int32 or int64 ``[batch, max_blocks]``.
        cu_seqlens_q: as in :func:`prefix_prefill.paged_attn_func`.
        seqlens_k: number of keys of each sequence on all ranks together, int32 ``[batch]``.
        max_seqlen_q: the most queries of a sequence; an upper bound will do.
        max_seqlen_k: the most keys of a sequence on all ranks together; an upper bound will do.
        softmax_scale: this and all arguments not listed here are as in
            :func:`prefix_prefill.paged_attn_func`.
        window_size: a window that is limited on both sides (with ``causal``: on the left) must show
            a multiple of as many keys as there are ranks.
        alibi_slopes: only with ``causal``.
        group: the ranks: NCCL, or gloo for CPU tensors. Default: None, all.

    Returns:
        ``out``, ``[tokens, heads_q, head_dim_v]``; or ``(out, lse)``, ``lse`` fp32
        ``[heads_q, tokens]``.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range.
        NotImplementedError: on a combination that is not supported; on an input that requires a
            gradient.
    """
    if unknown:
        paged_checks.refuse_unknown(unknown, paged_attn_func)
    check_tensor("q", q)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    cu_seqlens_q, seqlens_k = as_int32(cu_seqlens_q), as_int32(seqlens_k)
    k_cache, v_cache = cache_checks.fp8_view(q, k_cache), cache_checks.fp8_view(q, v_cache)
    paged_checks.check_paged(q, k_cache, v_cache, None, None)
    options = paged_options.check_options(
        q, softmax_scale, causal, window_size, softcap, num_splits, return_lse
    )
    batch = paged_checks.check_table(q, block_table, cu_seqlens_q, seqlens_k)
    max_seqlen_q = as_length("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = as_length("max_seqlen_k", max_seqlen_k)
    heads_k = cache_sizes(k_cache).heads_k
    paged_checks.check_extras(
        q, batch, heads_k, alibi_slopes, sinks, q_descale, k_descale, v_descale
    )
    paged_checks.check_descales(k_cache, k_descale, v_descale)
    head_dim_v = head_dim_of_values(k_cache, v_cache)
    dtype = paged_checks.check_out(q, head_dim_v, None, None)
    paged_checks.check_no_gradients(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    if alibi_slopes is not None and not causal:
        raise NotImplementedError(
            "alibi_slopes must be None over several ranks unless causal, got Tensor; pass "
            "causal=True"
        )
    has_one_query = not is_symbol(max_seqlen_q) and max_seqlen_q <= 1
    if has_one_query and options.window_left < 0 and alibi_slopes is None:
        # a sequence's only query sees all keys
        options = options._replace(window_right=-1)
    local = _of_rank(options, ranks)
    tokens, heads_q, _ = q.shape
    slopes = shift = sink = positions = None
    if options.window_left >= 0 or options.window_right >= 0:
        # the position of each row is the last key of this rank that it sees
        token = torch.arange(tokens, dtype=torch.int32, device=q.device)
        owner = torch.searchsorted(cu_seqlens_q, token, right=True) - 1
        owner = owner.clamp(0, max(batch - 1, 0))
        at = token
        if batch:
            at = token + (seqlens_k - cu_seqlens_q[1:])[owner]
        if options.window_right < 0:
            # without a right limit it is the first one
            at = at - options.window_left + ranks - 1
        else:
            at = at + options.window_right
        positions = torch.div(at - rank, ranks, rounding_mode="floor").to(torch.int32)
        if alibi_slopes is not None:
            is_own = alibi_slopes.ndim == 2 and batch > 0
            slopes = alibi_slopes[owner] if is_own else alibi_slopes.expand(tokens, heads_q)
            # the row's true position is less than one step of `ranks` keys after `positions`
            shift = slopes * (at - rank - positions * ranks)[:, None]
            slopes = slopes * ranks
            if sinks is not None:
                # the shift does not apply to the sink, so it is merged separately
                inside = (token >= cu_seqlens_q[0]) & (token < cu_seqlens_q[-1])
                sink = sinks.float()[:, None].masked_fill(~inside, -torch.inf)
    lengths = torch.div(seqlens_k + (ranks - 1 - rank), ranks, rounding_mode="floor")
    message = _Message(tokens, heads_q, head_dim_v)
    own = message.empty(q, 1)
    part, lse = message.parts(own)[0]
    x = Tensors.of(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        cu_seqlens_q=cu_seqlens_q,
        seqlens_k=lengths,
        alibi_slopes=slopes,
        # only one rank counts the sink
        sinks=sinks if rank == 0 and shift is None else None,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        positions=positions,
        out=part,
        lse=lse,
    )
    ops.attention(*x, max_seqlen_q, -(-max_seqlen_k // ranks), *local)
    if shift is not None:
        lse -= shift.T
    every = message.empty(q, ranks)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(every, own, group=group)
    states = message.parts(every)
    if sink is not None:
        states.append((torch.zeros_like(part), sink))
    out, lse = _merged(states, dtype)
    return (out, lse) if return_lse else out


class _Message(NamedTuple):
    """The message of a rank: its output and then its log-sum-exp, in fp32."""

    tokens: int
    heads_q: int
    head_dim_v: int

    @property
    def places(self) -> tuple[int, int]:
        """Return where the log-sum-exp begins and where the message ends, in aligned numbers."""
        rows = self.tokens * self.heads_q
        begin = round_up(rows * self.head_dim_v, ACCESS_BYTES // 4)
        return begin, begin + round_up(rows, ACCESS_BYTES // 4)

    def empty(self, q: Tensor, count: int) -> Tensor:
        """Return ``count`` empty messages on the device of the queries."""
        return q.new_empty((count, self.places[1]), dtype=torch.float32)

    def parts(self, messages: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return output and log-sum-exp of each message as views."""
        begin, _ = self.places
        rows = self.tokens * self.heads_q
        return [
            (
                one[: rows * self.head_dim_v].view(self),
                one[begin : begin + rows].view(self.heads_q, self.tokens),
            )
            for one in messages.unbind()
        ]


def _merged(states: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge results by their log-sum-exps, in this order."""
    out, lse = states[0]
    if len(states) == 1:
        return out.to(dtype), lse.clone()
    for i, (other, other_lse) in enumerate(states[1:], 2):
        last = i == len(states)
        target = torch.empty_like(out, dtype=dtype if last else None)
        total = torch.empty_like(lse)
        ops.merge_states(out, lse, other, other_lse, None, target, total)
        out, lse = target, total
    return out, lse


def _of_rank(options: Options, ranks: int) -> Options:
    """Return the options with the window over the keys of one rank."""
    left, right = options.window_left, options.window_right
    if left >= 0 and right >= 0 and (left + right + 1) % ranks:
        raise NotImplementedError(
            f"window_size must show a multiple of {ranks} keys over {ranks} ranks, got "
            f"{left + right + 1}; {round_up(left + right + 1, ranks)} is one"
        )
    if left >= 0:
        left = (left + right + 1) // ranks - 1 if right >= 0 else 0
    return options._replace(window_left=left, window_right=min(right, 0))
