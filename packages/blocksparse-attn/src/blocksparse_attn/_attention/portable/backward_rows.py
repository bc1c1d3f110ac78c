"""What surrounds the backward: numbers of each row that every tile of it needs, and sums.

Ahead of the backward for Hopper places are gone through from the last to the first: what it reads
first was then written last, while the cache has it.
"""

import triton
import triton.language as tl

from ..._linked.portable.primitives import INF, LOG2E, NEG_INF
from .primitives import load_rows
from .structures import RowNumbers, RowTensors
from .sums import clear_sums, expect_walks, round_sums


@triton.jit
def _number_rows(place, tensors, numbers, OPTIONS: tl.constexpr):
    """Write two numbers per row of [batch, heads_q, tokens], of some rows at a place.

    ``delta = sum(out * dout) - dlse``, and ``lse2``, the LSE in base 2, which is +inf for rows that
    see no key: their probabilities then come out as 0.
    """
    HEAD_DIM_V: tl.constexpr = OPTIONS.HEAD_DIM_V
    BLOCK: tl.constexpr = OPTIONS.BLOCK
    tokens, heads_q = numbers.tokens_q, numbers.heads_q
    row = place.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = row < numbers.rows
    batch_head = row // tokens
    token = row % tokens
    batch_id = batch_head // heads_q
    head = batch_head % heads_q
    # out is contiguous: [batch, tokens, heads_q, HEAD_DIM_V]
    out_at = ((batch_id * tokens + token) * heads_q + head) * HEAD_DIM_V
    dout_at = batch_id * numbers.stride_dob + token * numbers.stride_dos + head * numbers.stride_doh
    out = load_rows(tensors.out_ptr, out_at, inside, OPTIONS, True, True)
    dout = load_rows(tensors.dout_ptr, dout_at, inside, OPTIONS, True, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if tensors.dlse_ptr is not None:
        # d(lse)/d(score) is p, which joins the softmax's own term
        delta -= tl.load(tensors.dlse_ptr + row, mask=inside, other=0.0)
    lse = tl.load(tensors.lse_ptr + row, mask=inside, other=0.0)
    # what arrives at a row without keys counts for nothing, NaN neither
    tl.store(tensors.delta_ptr + row, tl.where(lse == NEG_INF, 0.0, delta), mask=inside)
    tl.store(tensors.lse2_ptr + row, tl.where(lse == NEG_INF, INF, lse * LOG2E), mask=inside)


@triton.jit(
    do_not_specialize=RowNumbers._fields, do_not_specialize_on_alignment=RowTensors._fields[:10]
)
def row_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    lse2_ptr,
    parts_ptr,
    owners_ptr,
    real_ptr,
    cu_seqlens_ptr,
    counters_ptr,
    dq_sums_ptr,
    dk_sums_ptr,
    dv_sums_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    tokens_q,
    rows,
    stride_dob,
    stride_dos,
    stride_doh,
    heads_q,
    scale,
    batch,
    heads_k,
    tokens_k,
    tiles_q,
    tiles_k,
    list_pieces,
    slots_q,
    slots_k,
    share,
    pieces,
    OPTIONS: tl.constexpr,
):
    """``delta = sum(out * dout) - dlse`` and ``lse2 = lse * log2(e)`` of a program's rows.

    With sums of gradients, a share of them becomes 0. Or, with ``ROUNDS``, they become gradients.
    """
    tensors = RowTensors(
        out_ptr,
        dout_ptr,
        lse_ptr,
        dlse_ptr,
        delta_ptr,
        lse2_ptr,
        parts_ptr,
        owners_ptr,
        real_ptr,
        cu_seqlens_ptr,
        counters_ptr,
        dq_sums_ptr,
        dk_sums_ptr,
        dv_sums_ptr,
        dq_ptr,
        dk_ptr,
        dv_ptr,
    )
    numbers = RowNumbers(
        tokens_q,
        rows,
        stride_dob,
        stride_dos,
        stride_doh,
        heads_q,
        scale,
        batch,
        heads_k,
        tokens_k,
        tiles_q,
        tiles_k,
        list_pieces,
        slots_q,
        slots_k,
        share,
        pieces,
    )
    place = tl.program_id(0)
    if OPTIONS.ROUNDS:
        round_sums(place, tensors, numbers, OPTIONS)
    else:
        if dq_sums_ptr is not None:
            place = tl.num_programs(0) - 1 - place
        _number_rows(place, tensors, numbers, OPTIONS)
        if dq_sums_ptr is not None:
            clear_sums(place, tensors, numbers, OPTIONS)
        if counters_ptr is not None:
            expect_walks(place, tensors, numbers, OPTIONS)
