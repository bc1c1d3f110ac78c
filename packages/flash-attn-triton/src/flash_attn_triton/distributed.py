"""Context parallelism: each rank holds some of the tokens of every sequence.

Queries stay on their rank. Ranks exchange keys and values, one rank's share at a time, while the
products with earlier keys run; partial results are merged by their log-sum-exp. Gradients of keys
and values are sent back in the same way. A rank has the keys of at most three ranks in memory,
including its own.

Under a causal mask the last tokens see most keys. So ``"zigzag"`` gives each rank one part from the
front of the sequence and one from its end: all ranks then have the same number of visible pairs
(Zhu 2024; Brandon et al. 2023). With a window, keys are exchanged only with the ranks in its reach.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._dense import checks
from ._dense import options as dense_options
from ._dense.call import Arguments, Options, Tensors
from ._linked.host.arguments import FLOAT_DTYPES, check_count, check_flag, kind
from ._linked.host.internals import refuse_tangents
from ._linked.host.results import returns_lse
from ._linked.parallel.agreement import check_group
from ._linked.parallel.cut import Cut, cut_alike, cut_by_plan
from ._linked.parallel.groups import Where, group_named, where
from ._linked.parallel.plan import ShardPlan
from ._linked.parallel.shards import check_shard, shard, shard_size, unshard
from ._parallel.claims import NAMES, compare
from ._parallel.heads import Heads
from ._parallel.ops import call_forward, compare_calls
from ._parallel.passes import Sharded

__all__ = ["ShardPlan", "flash_attn_func", "flash_attn_varlen_func", "shard", "unshard"]


@returns_lse
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    shard: str = "zigzag",
    seqlen: int | None = None,
    group: Any = None,
    head_group: Any = None,
    validate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over sequences that are cut across the ranks of a group.

    Every rank of the group has to call it, forward and backward, in the same order. The formula,
    and the arguments not listed here, are those of :func:`flash_attn_triton.flash_attn_func`;
    results and gradients are those of one device that holds all tokens.

    Args:
        q: queries of this rank's tokens, ``[batch, tokens, heads_q, head_dim]``, as :func:`shard`
            cuts them; fp16, bf16 or fp32.
        k: keys of the same tokens, ``[batch, tokens, heads_k, head_dim]``, dtype of ``q``.
        v: values, ``[batch, tokens, heads_k, head_dim_v]``, dtype of ``q``.
        sinks: ``[heads_q]``, the same on every rank. Their gradient is this rank's share, like that
            of any parameter: the sum over the ranks is the whole gradient. Default: None.
        shard: ``"zigzag"`` gives rank r of n the parts r and 2 n - 1 - r of 2 n parts;
            ``"contiguous"`` gives it part r of n parts. Default: ``"zigzag"``.
        seqlen: the length of the whole sequences. Part p of m has
            ``seqlen // m + (p < seqlen % m)`` tokens. Default: None (all ranks hold the same
            number).
        group: the process group. Default: None (all ranks).
        head_group: a second group, over which heads are distributed. Rank j of its m holds the
            contiguous part j of m of the tokens that a rank of ``group`` would hold, with all
            heads; between two all-to-alls it computes attention of all of those tokens and
            ``1 / m`` of the heads. m divides both numbers of heads, and ``group`` must be given: a
            group with only this rank if nothing else is cut. Default: None.
        validate: first compare shapes, dtypes, options and sinks over the ranks, and raise on all
            ranks if they differ; this waits for the device. CPU calls always compare.
            Default: False.

    Returns:
        ``out``, ``[batch, tokens, heads_q, head_dim_v]`` of this rank's tokens; or ``(out, lse)``
        with ``lse`` fp32 ``[batch, heads_q, tokens]``, over the keys of all ranks,
        differentiable.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, and if ranks differ.
        NotImplementedError: on forward-mode differentiation, and on a second derivative.
    """
    at, heads_at = _where(group, head_group)

    def checked() -> tuple[Cut, Options, Heads | None]:
        options = _check(
            (q, k, v),
            4,
            sinks,
            Arguments(
                softmax_scale=softmax_scale,
                causal=causal,
                window_size=window_size,
                softcap=softcap,
                deterministic=deterministic,
                return_lse=return_lse,
            ),
            validate,
            heads_at,
        )
        check_shard(shard)
        batch, tokens = q.shape[:2]
        if k.shape[1] != tokens:
            raise ValueError(f"k must hold the tokens of q, {tokens}, got {k.shape[1]}")
        if seqlen is not None:
            check_count("seqlen", seqlen, 0)
        ranks = at.group_size * (heads_at.group_size if heads_at else 1)
        whole = tokens * ranks if seqlen is None else seqlen
        expected = size = shard_size(whole, at.group_size, at.rank, shard)
        heads = Heads(heads_at, size, batch) if heads_at else None
        if heads is not None:
            expected = heads.own
        if tokens != expected:
            raise ValueError(
                f"q must hold {expected} of {whole} tokens on rank {at.rank} of {at.group_size}, "
                f"{shard}, got {tokens}"
            )
        window = options.window_left, options.window_right
        cut = cut_alike(batch, whole, at.group_size, window, shard, at.rank)
        return cut, options, heads

    places = at, heads_at
    cut, options, heads = _agreed(checked, (q, k, v), places, validate)
    flat = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), sinks
    scale, softcap = options.softmax_scale, options.softcap
    given = Sharded(scale, softcap, deterministic, cut.lengths, cut.numbers, at.group)
    out, lse = _apply(flat, given, heads, places, validate, return_lse)
    out = out.view(*q.shape[:2], *out.shape[1:])
    # [heads_q, batch * tokens]
    return (out, lse.view(lse.shape[0], *q.shape[:2]).transpose(0, 1)) if return_lse else out


@returns_lse
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ShardPlan,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    group: Any = None,
    head_group: Any = None,
    validate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over packed sequences, of which each rank holds some tokens.

    The arguments not listed here are those of :func:`flash_attn_func`. The plan contains the mask.
    Only sequences that the plan cuts cost communication.

    Args:
        q: queries of this rank's tokens, ``[tokens, heads_q, head_dim]``, as ``plan.shard`` cuts
            them.
        k: keys, ``[tokens, heads_k, head_dim]``.
        v: values, ``[tokens, heads_k, head_dim_v]``.
        plan: the tokens of each rank, and the mask.

    Returns:
        ``out``, ``[tokens, heads_q, head_dim_v]`` of this rank's tokens; or ``(out, lse)`` with
        ``lse`` fp32 ``[heads_q, tokens]``.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range, and if ranks differ.
        NotImplementedError: on forward-mode differentiation, and on a second derivative.
    """
    at, heads_at = _where(group, head_group)

    def checked() -> tuple[Cut, Options, Heads | None]:
        if not isinstance(plan, ShardPlan):
            raise TypeError(f"plan must be a ShardPlan, got {kind(plan)}")
        left, right = plan.window
        options = _check(
            (q, k, v),
            3,
            sinks,
            Arguments(
                softmax_scale=softmax_scale,
                window_size=(left, right),
                softcap=softcap,
                deterministic=deterministic,
                return_lse=return_lse,
            ),
            validate,
            heads_at,
        )
        if plan.group_size != at.group_size:
            raise ValueError(
                f"plan must be of {at.group_size} ranks, as the group is, got {plan.group_size}"
            )
        expected = plan.counts[at.rank]
        heads = Heads(heads_at, expected, 1) if heads_at else None
        if heads is not None:
            expected = heads.own
        for name, x in (("q", q), ("k", k)):
            if x.shape[0] != expected:
                raise ValueError(
                    f"{name} must hold the {expected} tokens of rank {at.rank}, got {x.shape[0]}"
                )
        return cut_by_plan(plan, at.rank), options, heads

    places = at, heads_at
    cut, options, heads = _agreed(checked, (q, k, v), places, validate)
    scale, softcap = options.softmax_scale, options.softcap
    given = Sharded(scale, softcap, deterministic, cut.lengths, cut.numbers, at.group)
    out, lse = _apply((q, k, v, sinks), given, heads, places, validate, return_lse)
    return (out, lse) if return_lse else out


def _check(
    qkv: tuple[Tensor, Tensor, Tensor],
    ndim: int,
    sinks: Tensor | None,
    given: Arguments,
    validate: bool,
    heads_at: Where | None,
) -> Options:
    """Run the checks that fixed and packed calls share."""
    q, k, v = qkv
    checks.check_qkv(q, k, v, ndim)
    if q.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"q must be torch.float16, torch.bfloat16 or torch.float32 across ranks, got {q.dtype}"
        )
    check_flag("validate", validate)
    options = dense_options.check_options(q, given)
    if sinks is not None:
        checks.check_extras(Tensors(q, k, v, sinks=sinks), 1, q.shape[-3], k.shape[-3])
    if heads_at is not None:
        for name, x in (("heads_q", q), ("heads_k", k)):
            if x.shape[-2] % heads_at.group_size:
                raise ValueError(
                    f"{name} must be a multiple of the ranks of head_group, "
                    f"{heads_at.group_size}, got {x.shape[-2]}"
                )
    return options


def _where(group: Any, head_group: Any) -> tuple[Where, Where | None]:
    """Check the groups; return this rank's place in each."""
    check_group("group", group)
    if head_group is None:
        return where(group), None
    check_group("head_group", head_group)
    if group is None:
        raise ValueError("group must be given with head_group, got None")
    return where(group), where(head_group)


def _agreed(
    checked: Callable[[], Any],
    x: tuple[Any, ...],
    places: tuple[Where, Where | None],
    validate: Any,
) -> Any:
    """Check this rank's arguments; if ranks compare their calls, all raise if one does."""
    if torch.compiler.is_compiling():
        return checked()
    try:
        return checked()
    except (TypeError, ValueError, NotImplementedError) as error:
        device = next((one.device for one in x if isinstance(one, Tensor)), None)
        if device is None and "gloo" in str(dist.get_backend_config(group_named(places[0].group))):
            device = torch.device("cpu")
        if device is not None and (validate or device.type == "cpu"):
            compare([""] * len(NAMES), None, _names(places), device, error)
        raise


def _names(places: tuple[Where | None, ...]) -> list[str]:
    return [at.group for at in places if at is not None]


def _apply(
    x: tuple[Tensor, Tensor, Tensor, Tensor | None],
    given: Sharded,
    heads: Heads | None,
    places: tuple[Where, Where | None],
    validate: bool,
    needs_lse: bool,
) -> tuple[Tensor, Tensor]:
    refuse_tangents(x)
    q, k, v, sinks = x
    compared = None
    if validate or q.is_cpu:
        has_gradient = torch.is_grad_enabled() and any(
            one is not None and one.requires_grad for one in x
        )
        of_values = [one if one is None else one.detach() for one in x]
        compared = compare_calls(*of_values, *given, has_gradient, _names(places))
    if heads is None:
        return call_forward(*x, *given, compared)
    of_heads = *heads.gather(q, k, v, compared), heads.part_of(sinks)
    out, lse = call_forward(*of_heads, *given, compared)
    if needs_lse:
        lse = heads.scatter(lse.T.unsqueeze(-1)).squeeze(-1).T
    return heads.scatter(out), lse
