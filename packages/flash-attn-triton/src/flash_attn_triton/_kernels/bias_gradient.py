"""Gradient of the additive bias: one program owns a tile of the bias.

It visits every tile of scores that the bias tile was broadcast to (sequences, heads, rows, columns)
and sums their gradients in registers, so the cost in memory is that of the bias and there are no
atomics. Masks are always applied: this pass is for learning a bias, not for speed records.
"""

from __future__ import annotations

import triton
import triton.language as tl
from attn_common import cdiv
from torch import Tensor

from .._configs import bias_gradient_tile
from ._linked.primitives import INF, dot
from .common import NUMBERS, POINTERS, BackwardInputs, Plan
from .primitives import (
    count_keys,
    key_range,
    load_row,
    load_tile,
    load_tile_transposed,
    score_gradient,
)


@triton.jit(
    do_not_specialize=(
        *NUMBERS, "bias_heads", "bias_rows", "bias_cols", "one_batch", "one_head", "one_row",
        "one_col",
    ),
    do_not_specialize_on_alignment=POINTERS,
)  # fmt: skip
def _bias_gradient_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dbias_ptr,
    bias_ptr, alibi_slopes_ptr, rng_state_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr,
    scale, softcap, keep_scale, dropout_threshold, window_left, window_right,
    batch, heads_q, tokens_q, tokens_k,
    bias_heads, bias_rows, bias_cols,
    one_batch, one_head, one_row, one_col,  # which dimensions of the bias are broadcast
    stride_dob, stride_dos, stride_doh,
    stride_qb, stride_qs, stride_qh,
    stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh,
    stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, stride_alibi_b,
    GROUP: tl.constexpr,  # query heads per key head
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BIAS_BYTES: tl.constexpr,  # of a row of the bias, read at once; 0 without a bias
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Write one tile of the bias gradient, [b|1, h|1, m|1, n|1] contiguous."""
    HAS_ALIBI: tl.constexpr = alibi_slopes_ptr is not None
    HAS_DROPOUT: tl.constexpr = rng_state_ptr is not None
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(bias_cols, BLOCK_N)
    tiles_m = tl.cdiv(bias_rows, BLOCK_M)
    tile_n = pid % tiles_n
    tile_m = pid // tiles_n % tiles_m
    bias_head = pid // tiles_n // tiles_m % bias_heads
    bias_batch = pid // tiles_n // tiles_m // bias_heads

    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # what this tile was broadcast to
    for step_b in range(0, tl.where(one_batch != 0, batch, 1)):
        sequence = bias_batch + step_b
        sequence_64 = sequence.to(tl.int64)
        if cu_seqlens_q_ptr is None:
            q_start = tl.zeros([], tl.int64)
            k_start = tl.zeros([], tl.int64)
            seqlen_q = tokens_q
            seqlen_k = tokens_k
        else:
            q_begin = tl.load(cu_seqlens_q_ptr + sequence)
            k_begin = tl.load(cu_seqlens_k_ptr + sequence)
            seqlen_q = tl.load(cu_seqlens_q_ptr + sequence + 1) - q_begin
            seqlen_k = tl.load(cu_seqlens_k_ptr + sequence + 1) - k_begin
            q_start = q_begin.to(tl.int64)
            k_start = k_begin.to(tl.int64)
        seqlen_k = count_keys(seqused_k_ptr, sequence, batch, seqlen_k)
        diagonal = seqlen_k - seqlen_q
        for step_h in range(0, tl.where(one_head != 0, heads_q, 1)):
            head = bias_head + step_h
            head_64 = head.to(tl.int64)
            head_k_64 = head_64 // GROUP
            q_base = q_ptr + sequence_64 * stride_qb + q_start * stride_qs + head_64 * stride_qh
            k_base = k_ptr + sequence_64 * stride_kb + k_start * stride_ks + head_k_64 * stride_kh
            v_base = v_ptr + sequence_64 * stride_vb + k_start * stride_vs + head_k_64 * stride_vh
            dout_base = dout_ptr + sequence_64 * stride_dob + q_start * stride_dos
            dout_base += head_64 * stride_doh
            bias_base = bias_ptr + sequence_64 * stride_bias_b + head_64 * stride_bias_h
            if cu_seqlens_q_ptr is None:
                row_base = (sequence_64 * heads_q + head) * tokens_q
            else:
                row_base = head_64 * tokens_q + q_start
            slope = 0.0
            if HAS_ALIBI:
                slope = tl.load(alibi_slopes_ptr + sequence_64 * stride_alibi_b + head)
            for step_m in range(0, tl.where(one_row != 0, tl.cdiv(seqlen_q, BLOCK_M), 1)):
                first_row = (tile_m + step_m) * BLOCK_M
                last_row = tl.minimum(first_row + BLOCK_M, seqlen_q) - 1
                first_key, last_key, _start, _full_start, _full_end = key_range(
                    first_row, last_row, diagonal, seqlen_k, window_left, window_right,
                    HAS_LEFT, HAS_RIGHT, BLOCK_N,
                )  # fmt: skip
                rows = first_row + tl.arange(0, BLOCK_M)
                q = load_tile(
                    q_base, rows, stride_qs, 0, seqlen_q, cols_d, HEAD_DIM, BLOCK_D, True
                )  # [M, D]
                dout = load_tile(
                    dout_base, rows, stride_dos, 0, seqlen_q, cols_dv, HEAD_DIM_V, BLOCK_DV, True,
                )  # [M, DV]  # fmt: skip
                lse2 = load_row(lse2_ptr + row_base, rows, seqlen_q, INF, True)
                delta = load_row(delta_ptr + row_base, rows, seqlen_q, 0.0, True)
                for step_n in range(0, tl.where(one_col != 0, tl.cdiv(seqlen_k, BLOCK_N), 1)):
                    start_n = (tile_n + step_n) * BLOCK_N
                    is_live = (first_row < seqlen_q) & (start_n < last_key)
                    if is_live & (start_n + BLOCK_N > first_key):
                        keys = start_n + tl.arange(0, BLOCK_N)
                        k_t = load_tile_transposed(
                            k_base, keys, stride_ks, first_key, last_key, cols_d,
                            HEAD_DIM, BLOCK_D, True,
                        )  # [D, N]  # fmt: skip
                        v_t = load_tile_transposed(
                            v_base, keys, stride_vs, first_key, last_key, cols_dv,
                            HEAD_DIM_V, BLOCK_DV, True,
                        )  # [DV, N]  # fmt: skip
                        products = dot(q, k_t, PRECISION, UPCAST)
                        dp = dot(dout, v_t, PRECISION, UPCAST)
                        _p, ds = score_gradient(
                            products, dp, lse2[:, None], delta[:, None],
                            scale, softcap, slope, bias_base, stride_bias_m, stride_bias_n,
                            rows[:, None], keys[None, :], diagonal, seqlen_q, seqlen_k,
                            window_left, window_right, rng_state_ptr, sequence * heads_q + head,
                            dropout_threshold, keep_scale,
                            True, BIAS_BYTES, HAS_SOFTCAP, HAS_ALIBI,
                            HAS_LEFT, HAS_RIGHT, HAS_DROPOUT,
                        )  # fmt: skip
                        total += ds

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if one_row:
        total = tl.where((rows == 0)[:, None], tl.sum(total, 0)[None, :], 0.0)
    if one_col:
        total = tl.where((cols == 0)[None, :], tl.sum(total, 1)[:, None], 0.0)
    row_at = (bias_batch.to(tl.int64) * bias_heads + bias_head) * bias_rows + rows
    pointers = dbias_ptr + (row_at * bias_cols)[:, None] + cols[None, :]
    mask = (rows < bias_rows)[:, None] & (cols < bias_cols)[None, :]
    tl.store(pointers, total.to(dbias_ptr.dtype.element_ty), mask=mask)


def launch_bias_gradient(plan: Plan, inputs: BackwardInputs, dbias: Tensor) -> None:
    """Fill ``dbias``, which is contiguous and shaped like the bias."""
    tile = bias_gradient_tile(plan.platform, plan.widest_head, plan.itemsize)
    bias_batch, bias_heads, bias_rows, bias_cols = dbias.shape
    tiles_m, tiles_n = cdiv(bias_rows, tile.block_m), cdiv(bias_cols, tile.block_n)
    sizes = bias_heads, bias_rows, bias_cols
    broadcast = (int(size == 1) for size in dbias.shape)
    plan.tiled(_bias_gradient_kernel, tile)(
        bias_batch * bias_heads * tiles_m * tiles_n,
        inputs.with_gradients(dbias),
        plan.numbers(inputs.q, inputs.k, *sizes, *broadcast, *inputs.dout_strides),
    )
