"""The numbers of each row that every tile of it needs in the backward pass."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from attn_common import cdiv
from torch import Tensor

from ._linked.primitives import INF, LOG2E, NEG_INF
from .common import Plan
from .launch.runtime import token_strides
from .primitives import load_tile

# rows per program
ROWS = 32
CONSTANTS = ("HEAD_DIM_V", "BLOCK_DV", "ROW_BYTES_V")


class Rows(NamedTuple):
    """What is known of rows, and the two tensors ``[batch, heads_q, tokens]`` to be filled."""

    out: Tensor
    dout: Tensor
    lse: Tensor
    dlse: Tensor | None
    delta: Tensor
    lse2: Tensor

    @property
    def numbers(self) -> tuple[int, ...]:
        """The sizes and strides that the kernels ask for, but for the heads."""
        return self.lse.shape[-1], self.lse.numel(), *token_strides(self.dout)

    @property
    def programs(self) -> int:
        return cdiv(self.lse.numel(), ROWS)


@triton.jit
def number_rows(
    place, out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, lse2_ptr,
    tokens, rows, stride_dob, stride_dos, stride_doh, heads_q,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, ROW_BYTES_V: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write two numbers per row of [batch, heads_q, tokens], of ``BLOCK`` rows at a place.

    ``delta = sum(out * dout) - dlse``, and ``lse2``, the LSE in base 2, which is +inf for rows that
    see no key: their probabilities then come out as 0.
    """
    row = place.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
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


@triton.jit(
    do_not_specialize=["tokens", "rows", "stride_dob", "stride_dos", "stride_doh", "heads_q"],
    do_not_specialize_on_alignment=[
        "out_ptr", "dout_ptr", "lse_ptr", "dlse_ptr", "delta_ptr", "lse2_ptr"
    ],
)  # fmt: skip
def _row_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, lse2_ptr,
    tokens, rows, stride_dob, stride_dos, stride_doh, heads_q,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, ROW_BYTES_V: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the numbers of a program's rows."""
    number_rows(
        tl.program_id(0), out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, lse2_ptr,
        tokens, rows, stride_dob, stride_dos, stride_doh, heads_q,
        HEAD_DIM_V, BLOCK_DV, ROW_BYTES_V, BLOCK,
    )  # fmt: skip


def launch_rows(plan: Plan, rows: Rows) -> None:
    """Fill what belongs to each row."""
    launch = plan.launch(
        _row_kernel, rows.dlse is not None, plan.constants, CONSTANTS, None,
        BLOCK=ROWS, num_warps=4, num_stages=1,
    )  # fmt: skip
    launch(rows.programs, rows, (*rows.numbers, plan.heads_q))
