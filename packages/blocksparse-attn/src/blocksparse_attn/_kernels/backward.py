"""Backward pass: recompute the probabilities from the saved LSE, in one kernel per gradient.

First two numbers per row; then dk and dv by tiles of keys, which walk the transposed layout, and dq
by tiles of queries, which walk the layout. The method is FlashAttention-2's (Dao, 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attn_common import cdiv
from torch import Tensor

from .. import _configs
from .._call import Options, Pattern, Tensors, Walks
from .backward_dkdv import launch_dkdv
from .backward_dq import launch_dq
from .launch import BackwardInputs, Plan, readable, token_strides
from .primitives import INF, LOG2E, NEG_INF, load_tile
from .runtime import aligned, dense, first_columns, widened

# rows per program of the row kernel
ROWS = 32


@triton.jit(
    do_not_specialize=["tokens", "rows", "heads_q", "stride_dob", "stride_dos", "stride_doh"],
    do_not_specialize_on_alignment=[
        "out_ptr", "dout_ptr", "lse_ptr", "dlse_ptr", "delta_ptr", "lse2_ptr"
    ],
)  # fmt: skip
def _row_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, lse2_ptr,
    tokens, rows, heads_q, stride_dob, stride_dos, stride_doh,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, ROW_BYTES_V: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write two numbers per row of [batch, heads_q, tokens] that every tile of the row needs.

    ``delta = sum(out * dout) - dlse``, and ``lse2``, the LSE in base 2, which is +inf for rows that
    see no key: their probabilities then come out as 0.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    batch_head = row // tokens
    token = row % tokens
    batch_id = batch_head // heads_q
    head = batch_head % heads_q
    cols = tl.arange(0, BLOCK_DV)
    # out is contiguous: [batch, tokens, heads_q, HEAD_DIM_V]
    out_at = ((batch_id * tokens + token) * heads_q + head) * HEAD_DIM_V
    dout_at = batch_id * stride_dob + token * stride_dos + head * stride_doh
    out = load_tile(out_ptr, out_at, inside, cols, HEAD_DIM_V, BLOCK_DV, ROW_BYTES_V, True)
    dout = load_tile(dout_ptr, dout_at, inside, cols, HEAD_DIM_V, BLOCK_DV, ROW_BYTES_V, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if dlse_ptr is not None:
        # d(lse)/d(score) is p, which joins the softmax's own term
        delta -= tl.load(dlse_ptr + row, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + row, mask=inside, other=0.0)
    # what arrives at a row without keys counts for nothing, NaN neither
    tl.store(delta_ptr + row, tl.where(lse == NEG_INF, 0.0, delta), mask=inside)
    tl.store(lse2_ptr + row, tl.where(lse == NEG_INF, INF, lse * LOG2E), mask=inside)


def _row_numbers(
    plan: Plan, out: Tensor, dout: Tensor, dlse: Tensor | None, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``(delta, lse2)``, shaped like the LSE."""
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    rows = lse.numel()
    names = ("HEAD_DIM_V", "BLOCK_DV", "ROW_BYTES_V")
    launch = plan.launch(
        _row_kernel, dlse is not None, plan.constants, names, None,
        BLOCK=ROWS, num_warps=4, num_stages=1,
    )  # fmt: skip
    launch(
        cdiv(rows, ROWS),
        (out, dout, lse, dense(dlse), delta, lse2),
        (lse.shape[-1], rows, plan.heads_q, *token_strides(dout)),
    )
    return delta, lse2


def launch_gradients(
    plan: Plan, inputs: BackwardInputs, walks: Walks, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Fill ``dq``, ``dk`` and ``dv`` by the kernels that serve the call."""
    if walks.pairs:
        from .hopper_backward_launch import is_worth_it, launch_backward_hopper

        must_repeat = _configs.repeats()
        if must_repeat and not walks.by_key:
            raise NotImplementedError(
                "gradients that repeat are asked for, but were not before the forward pass: call "
                "torch.use_deterministic_algorithms(True) ahead of it"
            )
        if not must_repeat and (not walks.by_key or is_worth_it(plan, inputs)):
            launch_backward_hopper(plan, inputs, walks.pairs, dq, dk, dv)
            return
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
    delta, lse2 = _row_numbers(plan, out, dout, dlse, lse)
    inputs = BackwardInputs(q, k, v, dout, lse2, delta, (x.cu_seqlens_q, x.cu_seqlens_k))
    launch_gradients(plan, inputs, walks, dq, dk, dv)
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
