"""Backward pass: recompute the probabilities from the saved LSE, in one kernel per gradient.

First two numbers per row; then dk and dv by tiles of keys, which walk the transposed layout, and dq
by tiles of queries, which walk the layout. The method is FlashAttention-2's (Dao, 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _configs
from .._call import Options, Pattern, Tensors, Walks
from .backward_dkdv import launch_dkdv
from .backward_dq import launch_dq
from .backward_rows import Rows, launch_rows
from .common import BackwardInputs, Plan, readable
from .launch.runtime import aligned, dense, first_columns, widened


def launch_gradients(
    plan: Plan,
    inputs: BackwardInputs,
    rows: Rows,
    walks: Walks,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Fill ``dq``, ``dk`` and ``dv``, and what they need of each row, by the kernels that serve."""
    if walks.pairs:
        from .hopper.backward_plan import is_worth_it, launch_backward_hopper

        must_repeat = _configs.repeats()
        if must_repeat and not walks.by_key:
            raise NotImplementedError(
                "gradients that repeat are asked for, but were not before the forward pass: call "
                "torch.use_deterministic_algorithms(True) ahead of it"
            )
        if not must_repeat and (not walks.by_key or is_worth_it(plan, inputs)):
            launch_backward_hopper(plan, inputs, rows, walks.pairs, dq, dk, dv)
            return
    launch_rows(plan, rows)
    launch_dkdv(plan, inputs, walks.by_key, dk, dv)
    launch_dq(plan, inputs, walks.by_query, dq)


def run_backward(
    plan: Plan,
    x: Tensors,
    walks: Walks,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(dq, dk, dv)``; the tensors of ``x`` fit the plan."""
    q, k, v = x.q, x.k, x.v
    dout, out, lse = aligned(dout), aligned(out.contiguous()), lse.contiguous()
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    if plan.batch == 0 or q.numel() == 0 or k.numel() == 0:  # nobody sees a key
        return dq.zero_(), dk.zero_(), dv.zero_()
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    rows = Rows(out, dout, lse, dense(dlse), delta, lse2)
    inputs = BackwardInputs(q, k, v, dout, lse2, delta, (x.cu_seqlens_q, x.cu_seqlens_k))
    launch_gradients(plan, inputs, rows, walks, dq, dk, dv)
    return dq, dk, dv


def launch_backward(
    dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k, by_query, by_key, pairs, crow, col,
    cols, block_q, block_k, rows_alike, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
):  # fmt: skip
    """Run the backward operator on checked inputs; see ``_ops.py`` for its schema."""
    x = readable(Tensors(q, k, v, cu_seqlens_q, cu_seqlens_k))
    pattern = Pattern(
        crow.shape[0] == 1, crow.shape[1] - 1, cols, block_q, block_k, rows_alike, cols
    )
    plan = Plan(x, pattern, Options(softmax_scale, causal, 1))
    walks = Walks(by_query=tuple(by_query), by_key=tuple(by_key), pairs=tuple(pairs))
    # as wide as the values
    wide = x.v.shape[-1]
    grads = run_backward(plan, x, walks, widened(out, wide), lse, widened(dout, wide), dlse)
    widths = q.shape[-1], k.shape[-1], v.shape[-1]
    return tuple(map(first_columns, grads, widths))
