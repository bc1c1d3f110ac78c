"""Backward pass: recompute the probabilities from the saved LSE, in one kernel per gradient.

First two numbers per row; then dk and dv by tiles of keys, which walk the transposed layout, and dq
by tiles of queries, which walk the layout. The method is FlashAttention-2's (Dao, 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attn_common import cdiv, detect
from torch import Tensor

from .backward_dkdv import launch_dkdv
from .backward_dq import launch_dq
from .launch import Problem, token_strides
from .primitives import INF, LOG2E, NEG_INF, load_tile
from .runtime import Launch, dense, first_columns, whole_rows

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
    problem: Problem, out: Tensor, dout: Tensor, dlse: Tensor | None, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``(delta, lse2)``, shaped like the LSE."""
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    rows = lse.numel()
    constants = {
        **{name: problem.constants[name] for name in ("HEAD_DIM_V", "BLOCK_DV", "ROW_BYTES_V")},
        "BLOCK": ROWS,
        "num_warps": 4,
        "num_stages": 1,
    }
    Launch(_row_kernel, constants)(
        cdiv(rows, ROWS),
        (out, dout, lse, dense(dlse), delta, lse2),
        (problem.tokens_q, rows, problem.heads_q, *token_strides(dout)),
    )
    return delta, lse2


def launch_backward(
    dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k, by_query, by_key, crow, col, cols,
    block_q, block_k, rows_alike, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
):  # fmt: skip
    """Run the backward operator on checked inputs; see ``_ops.py`` for its schema."""
    widths = q.shape[-1], k.shape[-1], v.shape[-1]
    dout, q, k, v = whole_rows(dout), whole_rows(q), whole_rows(k), whole_rows(v)
    out, lse = whole_rows(out.contiguous()), lse.contiguous()
    problem = Problem(
        q, k, v, dense(cu_seqlens_q), dense(cu_seqlens_k), None, crow, cols, (block_q, block_k),
        rows_alike, causal,
    )  # fmt: skip
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if problem.batch == 0 or q.numel() == 0 or k.numel() == 0:  # nobody sees a key
        for gradient in (dq, dk, dv):
            gradient.zero_()
        return tuple(map(first_columns, (dq, dk, dv), widths))
    inputs = (q, k, v, dout, *reversed(_row_numbers(problem, out, dout, dlse, lse)))
    strides = token_strides(dout)
    platform = detect(q.device)
    launch_dkdv(problem, platform, inputs, strides, by_key, softmax_scale, dk, dv)
    launch_dq(problem, platform, inputs, strides, by_query, softmax_scale, dq)
    return tuple(map(first_columns, (dq, dk, dv), widths))
