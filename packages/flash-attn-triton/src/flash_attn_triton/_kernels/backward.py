"""Backward pass: recompute the probabilities from the saved LSE, in one kernel per gradient.

First two numbers per row; then dk and dv by blocks of keys, dq by blocks of queries, and the bias
gradient, if asked for, by blocks of the bias. The method is FlashAttention-2's (Dao, 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attn_common import cdiv
from torch import Tensor

from .._call import Options, Tensors
from ._linked.primitives import INF, LOG2E, NEG_INF
from .backward_dkdv import launch_dkdv
from .backward_dq import launch_dq
from .bias_gradient import launch_bias_gradient
from .common import BackwardInputs, Plan, readable
from .launch.runtime import aligned, dense, first_columns, row_bytes, token_strides, widened

# rows per program of the row kernel, and numbers that it sets to 0 at a time
ROWS = 32
PIECE = 2048


@triton.jit(
    do_not_specialize=[
        "tokens", "rows", "heads_q", "stride_dob", "stride_dos", "stride_doh", "share", "pieces",
    ],
    do_not_specialize_on_alignment=["out_ptr", "dout_ptr", "lse_ptr", "dlse_ptr"],
)  # fmt: skip
def _row_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, lse2_ptr, sums_ptr,
    tokens, rows, heads_q, stride_dob, stride_dos, stride_doh, share, pieces,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, ROW_BYTES: tl.constexpr, BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Write two numbers per row of [batch, heads_q, tokens] that every tile of the row needs.

    ``delta = sum(out * dout) - dlse``, and ``lse2``, the LSE in base 2, which is +inf for rows that
    see no key: their probabilities then come out as 0. Besides, a program sets its ``share`` of
    the ``pieces`` of ``sums`` to 0, to which the kernel for Hopper adds what goes to dq.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    batch_head = row // tokens
    token = row % tokens
    batch_id = batch_head // heads_q
    head = batch_head % heads_q
    cols = tl.arange(0, BLOCK_DV)
    mask = inside[:, None] & (cols < HEAD_DIM_V)[None, :]
    # out is contiguous: [batch, tokens, heads_q, HEAD_DIM_V]
    out_at = ((batch_id * tokens + token) * heads_q + head) * HEAD_DIM_V
    dout_at = batch_id * stride_dob + token * stride_dos + head * stride_doh
    # an output of a narrower dtype than that of q need not have whole rows
    out_rows = tl.multiple_of(out_ptr + out_at[:, None], [ROW_BYTES, ROW_BYTES])
    dout_rows = tl.multiple_of(dout_ptr + dout_at[:, None], [ROW_BYTES, ROW_BYTES])
    out = tl.load(out_rows + cols[None, :], mask=mask, other=0.0)
    dout = tl.load(dout_rows + cols[None, :], mask=mask, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if dlse_ptr is not None:
        # d(lse)/d(score) is p, which joins the softmax's own term
        delta -= tl.load(dlse_ptr + row, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + row, mask=inside, other=0.0)
    # what arrives at a row without keys counts for nothing, NaN neither
    tl.store(delta_ptr + row, tl.where(lse == NEG_INF, 0.0, delta), mask=inside)
    tl.store(lse2_ptr + row, tl.where(lse == NEG_INF, INF, lse * LOG2E), mask=inside)
    if sums_ptr is not None:
        first = tl.program_id(0) * share
        sums = sums_ptr + first.to(tl.int64) * PIECE + tl.arange(0, PIECE)
        for _ in range(first, tl.minimum(first + share, pieces)):
            tl.store(sums, tl.zeros([PIECE], tl.float32))
            sums += PIECE


def _row_numbers(
    plan: Plan,
    out: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    lse: Tensor,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``(delta, lse2)``, shaped like the LSE, and set ``sums`` to 0."""
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    rows = lse.numel()
    programs = cdiv(rows, ROWS)
    pieces = 0 if sums is None else sums.numel() // PIECE
    launch = plan.launch(
        _row_kernel,
        (dlse is not None, sums is not None),
        HEAD_DIM_V=plan.constants["HEAD_DIM_V"],
        BLOCK_DV=plan.constants["BLOCK_DV"],
        ROW_BYTES=row_bytes(out),
        BLOCK=ROWS,
        PIECE=PIECE,
        num_warps=4,
    )
    launch(
        programs,
        (out, dout, lse, dense(dlse), delta, lse2, sums),
        (
            lse.shape[-1], rows, plan.heads_q, *token_strides(dout), cdiv(pieces, programs), pieces,
        ),
    )  # fmt: skip
    return delta, lse2


def _sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Sum ``-p * delta`` over rows: a sink is a key whose value is 0."""
    share = torch.exp(sinks.float()[:, None] - lse)
    # rows of -inf, padding among them, have no denominator to share
    per_row = torch.where(lse == float("-inf"), 0.0, -share * delta)
    return per_row.sum(tuple(d for d in range(lse.ndim) if d != lse.ndim - 2)).to(sinks.dtype)


def _sums_of_dq(plan: Plan, q: Tensor) -> Tensor | None:
    """Return the memory in which the kernel for Hopper sums dq, if it serves the call."""
    if not plan.is_for_hopper:
        return None
    from .hopper.backward_plan import is_worth_it, new_sums

    return new_sums(plan, q) if is_worth_it(plan, q.shape[-3]) else None


def launch_gradients(
    plan: Plan, inputs: BackwardInputs, dq: Tensor, dk: Tensor, dv: Tensor, sums: Tensor | None
) -> None:
    """Fill ``dq``, ``dk`` and ``dv`` by the kernels that serve the call."""
    if sums is not None:
        from .hopper.backward_plan import launch_backward_hopper

        launch_backward_hopper(plan, inputs, dq, dk, dv, sums)
        return
    launch_dkdv(plan, inputs, dk, dv)
    launch_dq(plan, inputs, dq)


def run_backward(
    plan: Plan,
    x: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    needs_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``(dq, dk, dv, dbias, dsinks)``; the tensors of ``x`` fit the plan."""
    q, k, v, bias, sinks = x.q, x.k, x.v, x.bias, dense(x.sinks)
    dout, out, lse = aligned(dout), aligned(out.contiguous()), lse.contiguous()
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    dbias = None
    if bias is not None and needs_dbias:
        dbias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    dsinks = None
    if plan.batch == 0 or q.numel() == 0 or k.numel() == 0:  # nobody sees a key
        for gradient in (dq, dk, dv, dbias):
            if gradient is not None:
                gradient.zero_()
    if plan.batch != 0 and q.numel() != 0:
        sums = _sums_of_dq(plan, q)
        delta, lse2 = _row_numbers(plan, out, dout, dlse, lse, sums)
        if sinks is not None:
            dsinks = _sink_gradient(sinks, lse, delta)
        if k.numel() != 0:
            # the output may have had a dtype of its own; products want one
            dout = dout if dout.dtype == q.dtype else aligned(dout.to(q.dtype))
            optional = (bias, dense(x.alibi_slopes), x.rng_state, *map(dense, x[3:6]))
            inputs = BackwardInputs(q, k, v, dout, lse2, delta, optional)
            launch_gradients(plan, inputs, dq, dk, dv, sums)
            if dbias is not None:
                launch_bias_gradient(plan, inputs, dbias)
    elif sinks is not None:
        dsinks = torch.zeros_like(sinks)
    # two empty tensors, not one: outputs of an operator may not alias
    dbias = q.new_empty(0) if dbias is None else dbias
    dsinks = q.new_empty(0) if dsinks is None else dsinks
    return dq, dk, dv, dbias, dsinks


def launch_backward(
    dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k, seqused_k, bias, alibi_slopes,
    sinks, rng_state, max_seqlen_q, max_seqlen_k, softmax_scale, window_left, window_right,
    softcap, dropout_p, deterministic, needs_dbias,
):  # fmt: skip
    """Run the backward operator on checked inputs; see ``_ops.py`` for its schema."""
    x = Tensors(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, bias, alibi_slopes, sinks,
        rng_state=rng_state,
    )  # fmt: skip
    x = readable(x)
    options = Options(softmax_scale, window_left, window_right, softcap, dropout_p)
    plan = Plan(x, options, deterministic)
    # as wide as the values, whatever dtype the output has
    wide = x.v.shape[-1]
    dq, dk, dv, *rest = run_backward(
        plan, x, widened(out, wide), lse, widened(dout, wide), dlse, needs_dbias
    )
    widths = q.shape[-1], k.shape[-1], v.shape[-1]
    return *map(first_columns, (dq, dk, dv), widths), *rest
