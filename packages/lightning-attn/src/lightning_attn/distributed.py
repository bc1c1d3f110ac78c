"""Sequence parallelism: each rank holds a slice of the tokens, in the order of the ranks.

What a rank has to know of all earlier tokens is one state, and what it has to know of all later
gradients is one more. So a layer costs one all-gather of states forward, and one backward (LASP-2:
Sun et al. 2025). With the state T_r that the slice of rank r writes by itself, its length n_r, and
the decay s::

    S_r = sum_{m < r} exp(-s * (n_(m+1) + ... + n_(r-1))) T_m

arrives at rank r. Every factor is at most 1. The slices may differ in length, and may be empty.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from einops import pack, rearrange, unpack
from torch import Tensor

from . import _checks, _ops
from ._call import LARGEST_RATE, Options, Tensors
from ._linked.host.internals import refuse_tangents

__all__ = ["lightning_attn_func"]


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
    group: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with decay over sequences that are cut across the ranks of a group.

    Every rank of the group has to call it, forward and backward, in the same order. The
    mathematics, and the arguments not listed here, are those of
    :func:`lightning_attn.lightning_attn_func`.

    Args:
        q: queries of this rank's slice, ``[batch, seqlen, heads, d]``. ``seqlen`` may differ from
            rank to rank; all else must not.
        k: keys, the shape and dtype of ``q``.
        v: values, ``[batch, seqlen, heads, e]``, dtype of ``q``.
        decay: the same on every rank. Its gradient is this rank's share, as that of any parameter:
            the sum over the ranks is the whole.
        initial_state: the state before the first token of the first rank. Other ranks ignore it.
            Default: None (zeros).
        output_final_state: return the state behind the last token of this rank's slice; that of the
            last rank is the final state. Must be the same on every rank. Default: False.
        group: the process group. Default: None (all ranks).

    Returns:
        ``(o, state)`` of this rank's slice, as :func:`lightning_attn.lightning_attn_func` does.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range.
        NotImplementedError: on forward-mode differentiation.
    """
    _checks.check_qkv(q, k, v, 4)
    rates = _checks.check_decay(decay, q)
    scale = _checks.check_options(q, scale, output_final_state, schedule)
    if initial_state is not None:
        _checks.check_initial_state("initial_state", initial_state, q.shape[0], q, v)
    refuse_tangents((q, k, v, decay, initial_state))
    if dist.get_rank(group) > 0:
        initial_state = None
    x = Tensors(q, k, v, rates, None, initial_state)
    options = Options(scale, schedule, output_final_state)
    out, state = _SequenceParallel.apply(*x, options, group)  # type: ignore[no-untyped-call]
    return out, state if output_final_state else None


class _Gathering:
    """An all-gather of one state per rank, with the decay over that rank's slice, under way."""

    def __init__(self, state: Tensor, total_decay: Tensor, group: Any) -> None:
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        # one message: the states, and a number per head
        message, self._shapes = pack([state, total_decay], "*")
        self._all = message.new_empty((self._ranks, message.shape[0]))
        # PyTorch 2.13 has renamed it
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._work: Any = gather(self._all.view(-1), message, group=group, async_op=True)

    def sum_of(self, *, earlier: bool) -> Tensor | None:
        """Wait, and return what arrives from the earlier ranks, or the later; None: there are none.

        The nearest comes as it is; one further off decays over the slices between.
        """
        self._work.wait()
        others = range(self._rank - 1, -1, -1) if earlier else range(self._rank + 1, self._ranks)
        arrived, between = None, None
        for other in others:
            state, total_decay = unpack(self._all[other], self._shapes, "*")
            if arrived is None or between is None:
                arrived, between = state, total_decay
                continue
            arrived = arrived + rearrange(torch.exp(-between), "h -> h 1 1") * state
            between = between + total_decay
        return arrived


class _SequenceParallel(torch.autograd.Function):
    """The operators of one rank, with an all-gather of states in each direction."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Take the fields of ``Tensors``, then the options and the group."""
        *inputs, _, arrived, options, group = arguments
        _, k, v, decay = inputs
        written = _ops.final_state(k, v, decay, arrived, 1.0, False, options.schedule)
        gathering = _Gathering(written, _total(decay, k), group)
        if dist.get_rank(group) == 0:
            # nothing arrives: the output is computed while the states travel
            out, final = _ops.forward(*inputs, None, arrived, *options)
            gathering.sum_of(earlier=True)
        else:
            arrived = gathering.sum_of(earlier=True)
            out, final = _ops.forward(*inputs, None, arrived, *options)
        ctx.save_for_backward(*inputs, arrived)
        ctx.options, ctx.group = options, group
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "second derivatives are not offered across ranks: differentiate without "
                "create_graph=True"
            )
        *inputs, arrived = ctx.saved_tensors
        q, k, v, decay = inputs
        scale, schedule, has_final = ctx.options
        _, _, _, needs_ddecay, _, needs_dinitial, *_ = ctx.needs_input_grad
        if dout is None:
            dout = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        if not has_final:
            dfinal = None
        written = _ops.final_state(q, dout, decay, dfinal, scale, True, schedule)
        gathering = _Gathering(written, _total(decay, k), ctx.group)
        # dq needs earlier states alone: it is computed while the gradients of later ones travel
        dq = _ops.read_gradient(dout, k, v, decay, None, arrived, scale, schedule)
        later = gathering.sum_of(earlier=False)
        if later is None:
            later = dfinal
        elif dfinal is not None:
            later = later + dfinal
        dk, dv, dinitial = _ops.write_gradients(
            dout, *inputs, None, later, scale, schedule, needs_dinitial
        )
        ddecay = None
        if needs_ddecay:
            ddecay = _ops.decay_gradient(dout, *inputs, None, arrived, later, scale)
        return dq, dk, dv, ddecay, None, dinitial if needs_dinitial else None, None, None


def _total(decay: Tensor, k: Tensor) -> Tensor:
    """Return the decay over a slice; an infinite one is 0 over no tokens."""
    return decay.clamp(max=LARGEST_RATE) * k.shape[1]
