"""Sequence parallelism: each rank holds some of the tokens of every sequence.

One state sums up all tokens before a run of tokens, and one more the gradients of all later tokens.
So a layer costs one all-gather of states forward, and one backward (LASP-2: Sun et al. 2025). Run r
starts from the state ::

    S_r = sum_{m < r} exp(-s * (n_(m+1) + ... + n_(r-1))) T_m

where T_m is the state that run m writes from zero, n_m its length and s the decay. Every factor is
at most 1.

Forward, one pass computes the states T_m, and after the exchange another computes the outputs.
Backward, the exchange overlaps with dq.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._linear import checks
from ._linear.call import Options, Tensors
from ._linear.results import returns_state
from ._linked.host.arguments import check_count, check_flag, kind
from ._linked.host.internals import refuse_tangents
from ._linked.parallel.agreement import check_group
from ._linked.parallel.cut import Cut, cut_alike, cut_by_plan
from ._linked.parallel.groups import Where, group_named, where
from ._linked.parallel.plan import ShardPlan
from ._linked.parallel.shards import check_shard, shard, shard_size, unshard
from ._parallel.ops import call_forward, compare_calls
from ._parallel.passes import NAMES, Sharded, compare

__all__ = [
    "ShardPlan",
    "lightning_attn_func",
    "lightning_attn_varlen_func",
    "shard",
    "unshard",
]


@returns_state
def lightning_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    *,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    schedule: str = "auto",
    shard: str = "zigzag",
    seqlen: int | None = None,
    group: Any = None,
    validate: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with decay over sequences that are cut across the ranks of a group.

    All ranks of the group have to call it, forward and backward, in the same order. The
    mathematics, and the arguments not listed here, are those of
    :func:`lightning_attn.lightning_attn_func`.

    Args:
        q: queries of this rank's tokens, ``[batch, tokens, heads, d]``, as :func:`shard` cuts them.
        k: keys, the shape and dtype of ``q``.
        v: values, ``[batch, tokens, heads, e]``, dtype of ``q``.
        decay: the same on every rank. Its gradient is this rank's share, like any parameter's: the
            sum over the ranks is the whole gradient.
        initial_state: the states before the first tokens. Only the rank that holds the first token,
            usually rank 0, reads it. Its gradient, too, is this rank's share. Default: None
            (zeros).
        output_final_state: return the states after the last tokens, on every rank. Their gradient
            is the sum of all ranks' gradients. Must be the same on every rank. Default: False.
        shard: ``"zigzag"`` gives rank r of n the parts r and 2 n - 1 - r of 2 n, as is usual for
            causal softmax attention; ``"contiguous"`` gives it part r of n. Default: ``"zigzag"``.
        seqlen: the length of the whole sequences. Part p of m has
            ``seqlen // m + (p < seqlen % m)`` tokens. Default: None (all ranks hold the same
            number).
        group: the process group. Default: None (all ranks).
        validate: first compare shapes, dtypes, options and decays over the ranks, and raise on all
            ranks if they differ; waits for the device. Always done for CPU tensors. Default: False.

    Returns:
        ``(o, state)``: ``o`` ``[batch, tokens, heads, e]`` of this rank's tokens; the final states
        of the whole sequences, or None.

    Raises:
        TypeError: if an argument has a wrong type or dtype.
        ValueError: if a shape, a device or a range is wrong, or if ranks differ.
        NotImplementedError: on forward-mode differentiation, and on a second derivative.
    """
    check_group("group", group)
    at = where(group)

    def checked() -> tuple[Cut, float, Tensor]:
        checks.check_qkv(q, k, v, 4)
        rates = checks.check_decay(decay, q)
        factor = checks.check_options(q, scale, output_final_state, schedule)
        check_flag("validate", validate)
        check_shard(shard)
        batch, tokens = q.shape[:2]
        whole = tokens * at.group_size if seqlen is None else seqlen
        if seqlen is not None:
            check_count("seqlen", seqlen, 0)
        expected = shard_size(whole, at.group_size, at.rank, shard)
        if tokens != expected:
            raise ValueError(
                f"q must hold {expected} of {whole} tokens on rank {at.rank} of {at.group_size}, "
                f"{shard}, got {tokens}"
            )
        if initial_state is not None:
            checks.check_initial_state("initial_state", initial_state, batch, q, v)
        cut = cut_alike(batch, whole, at.group_size, (-1, -1), shard, at.rank)
        return cut, factor, rates

    cut, factor, rates = _agreed(checked, (q, k, v), at, validate)
    refuse_tangents((q, k, v, decay, initial_state))
    # zigzag: two runs of each sequence, but one on the last rank, where both are adjacent
    has_two = shard == "zigzag" and at.rank < at.group_size - 1
    runs = 2 * q.shape[0] if has_two else q.shape[0]
    x = Tensors(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), rates, None, initial_state)
    options = Options(factor, schedule, output_final_state)
    out, state = _apply(x, cut, runs, options, at, validate)
    return out.view(*q.shape[:2], *out.shape[1:]), state


@returns_state
def lightning_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    plan: ShardPlan,
    *,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    schedule: str = "auto",
    group: Any = None,
    validate: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with decay over packed sequences, of which each rank holds some tokens.

    The arguments not listed here are those of :func:`lightning_attn_func`. Only sequences that the
    plan cuts cost communication, or all sequences if final states are returned.

    Args:
        q: queries of this rank's tokens, ``[tokens, heads, d]``, as ``plan.shard`` cuts them.
        k: keys, the shape and dtype of ``q``.
        v: values, ``[tokens, heads, e]``, dtype of ``q``.
        decay: the same on every rank.
        plan: which tokens each rank holds. The plan of another package serves, too: of its mask
            nothing but the cut is taken, so that layers of both kinds share their shards.
        initial_state: ``[sequences, heads, d, e]``, read on the rank that holds the first token of
            a sequence. Default: None (zeros).
        output_final_state: return the states of all sequences, on every rank. Default: False.

    Returns:
        ``(o, state)``: ``o`` ``[tokens, heads, e]`` of this rank's tokens; the final states of all
        sequences, ``[sequences, heads, d, e]``, or None.

    Raises:
        TypeError: if an argument has a wrong type or dtype.
        ValueError: if a shape, a device or a range is wrong, or if ranks differ.
        NotImplementedError: on forward-mode differentiation, and on a second derivative.
    """
    check_group("group", group)
    at = where(group)

    def checked() -> tuple[Cut, float, Tensor]:
        checks.check_qkv(q, k, v, 3)
        rates = checks.check_decay(decay, q)
        factor = checks.check_options(q, scale, output_final_state, schedule)
        check_flag("validate", validate)
        if type(plan).__name__ != "ShardPlan" or not hasattr(plan, "host_lengths"):
            raise TypeError(f"plan must be a ShardPlan, got {kind(plan)}")
        if plan.group_size != at.group_size:
            raise ValueError(
                f"plan must be of {at.group_size} ranks, as the group is, got {plan.group_size}"
            )
        expected = plan.counts[at.rank]
        if q.shape[0] != expected:
            raise ValueError(
                f"q must hold the {expected} tokens of rank {at.rank}, got {q.shape[0]}"
            )
        if initial_state is not None:
            batch = plan.host_lengths.shape[0]
            checks.check_initial_state("initial_state", initial_state, batch, q, v)
        return cut_by_plan(plan, at.rank), factor, rates

    cut, factor, rates = _agreed(checked, (q, k, v), at, validate)
    refuse_tangents((q, k, v, decay, initial_state))
    x = Tensors(q, k, v, rates, None, initial_state)
    options = Options(factor, schedule, output_final_state)
    return _apply(x, cut, plan.run_counts[at.rank], options, at, validate)


def _agreed(checked: Callable[[], Any], x: tuple[Any, ...], at: Where, validate: Any) -> Any:
    """Check this rank's arguments; if ranks compare arguments, all raise if one does."""
    if torch.compiler.is_compiling():
        return checked()
    try:
        return checked()
    except (TypeError, ValueError, NotImplementedError) as error:
        device = next((one.device for one in x if isinstance(one, Tensor)), None)
        if device is None and "gloo" in str(dist.get_backend_config(group_named(at.group))):
            device = torch.device("cpu")
        if device is not None and (validate or device.type == "cpu"):
            compare([""] * len(NAMES), None, at.group, device, error)
        raise


def _apply(
    x: Tensors, cut: Cut, runs: int, options: Options, at: Where, validate: bool
) -> tuple[Tensor, Tensor | None]:
    """Call the operators."""
    q, k, v, decay, _, initial_state = x
    scale, schedule, has_final = options
    # states that are differentiated need the same precision as returned states
    is_exact = has_final or initial_state is not None or decay.requires_grad
    given = Sharded(scale, schedule, is_exact, has_final, cut.lengths, cut.numbers, runs, at.group)
    compared = None
    if validate or q.is_cpu:
        has_gradient = torch.is_grad_enabled() and any(
            one is not None and one.requires_grad for one in x
        )
        of_values = q.detach(), v.detach(), decay.detach()
        compared = compare_calls(*of_values, *given, has_gradient)
    out, _, final = call_forward(q, k, v, decay, initial_state, *given, compared)
    return out, final if has_final else None
