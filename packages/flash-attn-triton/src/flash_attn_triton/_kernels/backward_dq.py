"""Gradient of the queries: one program owns a block of queries and walks the keys it sees."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .._configs import backward_dq_tile
from ._linked.primitives import INF, count_steps, dot, dot_add, step_start
from .common import NUMBERS, POINTERS, BackwardInputs, Plan
from .primitives import (
    count_keys,
    key_range,
    load_row,
    load_tile,
    load_tile_transposed,
    score_gradient,
    through_softcap,
)
from .schedule import locate


@triton.jit
def _dq_walk(
    dq, q, dout, lse2, delta, k_base, v_base, stride_ks, stride_vs,
    rows, diagonal, seqlen_q, seqlen_k, first_key, last_key, start, full_start, full_end,
    scale, softcap, slope, bias_base, stride_bias_m, stride_bias_n, window_left, window_right,
    rng_state_ptr, batch_head, dropout_threshold, keep_scale,
    MASKED: tl.constexpr, BIAS_BYTES: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Add what the keys contribute to a block of dq: masked tiles, or whole ones."""
    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    steps = count_steps(start, full_start, full_end, last_key, BLOCK_N, MASKED)
    for step in tl.range(0, steps):
        keys = step_start(step, start, full_start, full_end, BLOCK_N, MASKED)
        keys += tl.arange(0, BLOCK_N)
        k_t = load_tile_transposed(
            k_base, keys, stride_ks, first_key, last_key, cols_d, HEAD_DIM, BLOCK_D, MASKED,
        )  # [D, N]  # fmt: skip
        v_t = load_tile_transposed(
            v_base, keys, stride_vs, first_key, last_key, cols_dv, HEAD_DIM_V, BLOCK_DV, MASKED,
        )  # [DV, N]  # fmt: skip
        products = dot(q, k_t, PRECISION, UPCAST)  # [M, N]
        dp = dot(dout, v_t, PRECISION, UPCAST)  # [M, N]
        _p, ds = score_gradient(
            products, dp, lse2[:, None], delta[:, None],
            scale, softcap, slope, bias_base, stride_bias_m, stride_bias_n,
            rows[:, None], keys[None, :], diagonal, seqlen_q, seqlen_k,
            window_left, window_right, rng_state_ptr, batch_head, dropout_threshold, keep_scale,
            MASKED, BIAS_BYTES, HAS_SOFTCAP, HAS_ALIBI, HAS_LEFT, HAS_RIGHT, HAS_DROPOUT,
        )  # fmt: skip
        ds = through_softcap(ds, products, scale, softcap, HAS_SOFTCAP)
        dq = dot_add(dq, ds, tl.trans(k_t), PRECISION, UPCAST)  # [M, D]
    return dq


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dq_ptr,
    bias_ptr, alibi_slopes_ptr, rng_state_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr,
    scale, softcap, keep_scale, dropout_threshold, window_left, window_right,
    batch, heads_q, tokens_q, tokens_k, tiles, span,
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
    """Write one block of dq of one query head."""
    pid_m, batch_id, head, q_start, k_start, seqlen_q, seqlen_k = locate(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads_q, tokens_q, tokens_k, tiles, span,
        BLOCK_M, BALANCE=HAS_RIGHT, LAST_IS_LONGEST=True,
    )  # fmt: skip
    if pid_m < 0:
        return
    seqlen_k = count_keys(seqused_k_ptr, batch_id, batch, seqlen_k)
    batch_id = tl.maximum(tl.minimum(batch_id, batch - 1), 0)
    batch_64 = batch_id.to(tl.int64)
    head_64 = head.to(tl.int64)
    head_k_64 = head_64 // GROUP
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    if cu_seqlens_q_ptr is None:
        row_base = (batch_64 * heads_q + head) * tokens_q
        token = batch_64 * tokens_q + rows
    else:
        row_base = head_64 * tokens_q + q_start
        token = q_start + rows
    q_base = q_ptr + batch_64 * stride_qb + q_start * stride_qs + head_64 * stride_qh
    dout_base = dout_ptr + batch_64 * stride_dob + q_start * stride_dos + head_64 * stride_doh
    k_base = k_ptr + batch_64 * stride_kb + k_start * stride_ks + head_k_64 * stride_kh
    v_base = v_ptr + batch_64 * stride_vb + k_start * stride_vs + head_k_64 * stride_vh
    q = load_tile(q_base, rows, stride_qs, 0, seqlen_q, cols_d, HEAD_DIM, BLOCK_D, True)  # [M, D]
    dout = load_tile(
        dout_base, rows, stride_dos, 0, seqlen_q, cols_dv, HEAD_DIM_V, BLOCK_DV, True
    )  # [M, DV]
    lse2 = load_row(lse2_ptr + row_base, rows, seqlen_q, INF, True)
    delta = load_row(delta_ptr + row_base, rows, seqlen_q, 0.0, True)

    HAS_ALIBI: tl.constexpr = alibi_slopes_ptr is not None
    HAS_DROPOUT: tl.constexpr = rng_state_ptr is not None
    bias_base = bias_ptr
    if BIAS_BYTES:
        bias_base += batch_64 * stride_bias_b + head_64 * stride_bias_h
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(alibi_slopes_ptr + batch_64 * stride_alibi_b + head)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    diagonal = seqlen_k - seqlen_q
    first_row = pid_m * BLOCK_M
    last_row = tl.minimum(first_row + BLOCK_M, seqlen_q) - 1
    first_key, last_key, start, full_start, full_end = key_range(
        first_row, last_row, diagonal, seqlen_k, window_left, window_right,
        HAS_LEFT, HAS_RIGHT, BLOCK_N,
    )  # fmt: skip
    for masked in tl.static_range(2):
        dq = _dq_walk(
            dq, q, dout, lse2, delta, k_base, v_base, stride_ks, stride_vs,
            rows, diagonal, seqlen_q, seqlen_k, first_key, last_key, start, full_start, full_end,
            scale, softcap, slope, bias_base, stride_bias_m, stride_bias_n,
            window_left, window_right,
            rng_state_ptr, batch_id * heads_q + head, dropout_threshold, keep_scale,
            MASKED=masked == 1, BIAS_BYTES=BIAS_BYTES, HAS_SOFTCAP=HAS_SOFTCAP,
            HAS_ALIBI=HAS_ALIBI, HAS_LEFT=HAS_LEFT, HAS_RIGHT=HAS_RIGHT,
            HAS_DROPOUT=HAS_DROPOUT, HEAD_DIM=HEAD_DIM, HEAD_DIM_V=HEAD_DIM_V,
            BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV, BLOCK_N=BLOCK_N,
            PRECISION=PRECISION, UPCAST=UPCAST,
        )  # fmt: skip
    # dq is contiguous: [tokens, heads_q, HEAD_DIM]
    dq_ptrs = dq_ptr + ((token * heads_q + head) * HEAD_DIM)[:, None] + cols_d[None, :]
    mask = (rows < seqlen_q)[:, None] & (cols_d < HEAD_DIM)[None, :]
    tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=mask)


def launch_dq(plan: Plan, inputs: BackwardInputs, dq: Tensor) -> None:
    """Fill ``dq``."""
    has_bias = inputs.optional[0] is not None
    tile = backward_dq_tile(plan.platform, plan.widest_head, plan.itemsize, has_bias)
    tokens_q, tokens_k = inputs.q.shape[-3], inputs.k.shape[-3]
    tiles = plan.tiles(tokens_q, tile.block_m)
    plan.tiled(_dq_kernel, tile)(
        tiles * plan.heads_q * plan.grid_batch,
        inputs.with_gradients(dq),
        plan.numbers(inputs.q, inputs.k, tiles, plan.span_q(tokens_k), *inputs.dout_strides),
    )
