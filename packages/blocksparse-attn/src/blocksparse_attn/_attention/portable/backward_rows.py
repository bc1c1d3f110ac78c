"""The launches before and after the backward: delta and LSE of each row, and sums of gradients.

Before the Hopper backward, programs work from the last rows to the first: the rows that the
backward reads first are then written last and are still in the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import entry
from ..._linked.portable.primitives import INF, LOG2E, NEG_INF
from .arguments import RowNumbers, RowOptions, RowTensors
from .primitives import load_rows
from .sums import clear_sums, expect_walks, round_sums


@triton.jit
def _number_rows(place, tensors, numbers, OPTIONS: tl.constexpr):
    """Write delta and lse2 of a program's rows, each ``[batch, heads_q, tokens]``.

    ``delta = sum(out * dout) - dlse``. ``lse2`` is the LSE in base 2; for fully masked rows it is
    +inf, which makes their probabilities 0.
    """
    tokens, heads_q = numbers.tokens_q, numbers.heads_q
    row = place.to(tl.int64) * OPTIONS.BLOCK + tl.arange(0, OPTIONS.BLOCK)  # [BLOCK]
    inside = row < numbers.rows
    batch_head = row // tokens
    token = row % tokens
    batch_id = batch_head // heads_q
    head = batch_head % heads_q
    # out is contiguous: [batch, tokens, heads_q, HEAD_DIM_V]
    out_at = ((batch_id * tokens + token) * heads_q + head) * OPTIONS.HEAD_DIM_V
    strides = numbers.dout
    dout_at = batch_id * strides.batch + token * strides.token + head * strides.head
    out = load_rows(tensors.out_ptr, out_at, inside, OPTIONS, True, True)
    dout = load_rows(tensors.dout_ptr, dout_at, inside, OPTIONS, True, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if tensors.dlse_ptr is not None:
        # d(lse)/d(score) is p, so dlse joins the softmax's term
        delta -= tl.load(tensors.dlse_ptr + row, mask=inside, other=0.0)
    lse = tl.load(tensors.lse_ptr + row, mask=inside, other=0.0)
    # dout of a fully masked row is ignored, even if it is NaN
    tl.store(tensors.delta_ptr + row, tl.where(lse == NEG_INF, 0.0, delta), mask=inside)
    tl.store(tensors.lse2_ptr + row, tl.where(lse == NEG_INF, INF, lse * LOG2E), mask=inside)


@entry(triton.jit)
def row_kernel(tensors: RowTensors, numbers: RowNumbers, OPTIONS: RowOptions):
    """``delta = sum(out * dout) - dlse`` and ``lse2 = lse * log2(e)`` of a program's rows.

    If there are sums of gradients, each program also sets a share of them to 0. With ``ROUNDS`` the
    kernel writes the gradients from the sums instead.
    """
    place = tl.program_id(0)
    if OPTIONS.ROUNDS:
        round_sums(place, tensors, numbers, OPTIONS)
    else:
        if tensors.dq_sums_ptr is not None:
            place = tl.num_programs(0) - 1 - place
        _number_rows(place, tensors, numbers, OPTIONS)
        if tensors.dq_sums_ptr is not None:
            clear_sums(place, tensors, numbers, OPTIONS)
        if tensors.counters_ptr is not None:
            expect_walks(place, tensors, numbers, OPTIONS)
