"""Gradients of keys and values: one program owns a block of keys and walks the queries that see it.

It serves every query head of its key head in turn, so that no two programs write one address: no
atomics, and the result repeats bit for bit. Scores are transposed ([keys, queries]): the products
that follow then take the accumulator as it lies, without a transposition in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .._configs import backward_dkdv_tile
from .._linked.host.forms import interpreted
from ._linked.primitives import INF, count_steps, dot, dot_add, settle, step_start
from .common import NUMBERS, POINTERS, BackwardInputs, Plan
from .primitives import (
    count_keys,
    load_row,
    load_tile,
    load_tile_transposed,
    query_range,
    score_gradient,
    through_softcap,
)
from .schedule import locate


@triton.jit
def _dkdv_walk(
    dk, dv, k, v, q_ptr, dout_ptr, lse2_ptr, delta_ptr, head_k, batch_id, heads_q,
    stride_qs, stride_qh, stride_dos, stride_doh, stride_row_h,
    keys, diagonal, seqlen_q, seqlen_k, start, full_start, full_end, last_row,
    scale, softcap, alibi_slopes_ptr, bias_ptr, stride_bias_h, stride_bias_m, stride_bias_n,
    window_left, window_right, rng_state_ptr, dropout_threshold, keep_scale,
    MASKED: tl.constexpr, GROUP: tl.constexpr, BIAS_BYTES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, SETTLE: tl.constexpr,
):  # fmt: skip
    """Add what the group's queries contribute to dk and dv: masked tiles, or whole ones.

    The pointers stand at the sequence. One loop serves all heads of the group: a second one around
    it would cost registers, and the pipeline would drain between heads.
    """
    HAS_ALIBI: tl.constexpr = alibi_slopes_ptr is not None
    HAS_DROPOUT: tl.constexpr = rng_state_ptr is not None
    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    # what arrives at rows that see no key counts for nothing, NaN neither
    first_live = 0
    if HAS_RIGHT:
        first_live = tl.maximum(-diagonal - window_right, 0)
    steps = count_steps(start, full_start, full_end, last_row, BLOCK_M, MASKED)
    # from a division by 0 the compiler concludes that there are steps, and loads unasked
    steps_of_head = tl.maximum(steps, 1)
    for step in tl.range(0, steps * GROUP):
        if GROUP == 1:
            head = head_k
            rows = step_start(step, start, full_start, full_end, BLOCK_M, MASKED)
        else:
            head = head_k * GROUP + step // steps_of_head
            rows = step_start(
                step % steps_of_head, start, full_start, full_end, BLOCK_M, MASKED
            )  # fmt: skip
        rows += tl.arange(0, BLOCK_M)
        head_64 = head.to(tl.int64)
        q_t = load_tile_transposed(
            q_ptr + head_64 * stride_qh, rows, stride_qs, 0, seqlen_q, cols_d,
            HEAD_DIM, BLOCK_D, MASKED,
        )  # [D, M]  # fmt: skip
        products = dot(k, q_t, PRECISION, UPCAST)  # [N, M]
        dout = load_tile(
            dout_ptr + head_64 * stride_doh, rows, stride_dos, first_live, seqlen_q, cols_dv,
            HEAD_DIM_V, BLOCK_DV, MASKED,
        )  # [M, DV]  # fmt: skip
        dp = dot(v, tl.trans(dout), PRECISION, UPCAST)  # [N, M]
        # behind the products: loaded ahead of them, these hold registers that the products need
        row_at = head_64 * stride_row_h
        lse2 = load_row(lse2_ptr + row_at, rows, seqlen_q, INF, MASKED)
        delta = load_row(delta_ptr + row_at, rows, seqlen_q, 0.0, MASKED)
        bias_base = bias_ptr
        if BIAS_BYTES:
            bias_base += head_64 * stride_bias_h
        slope = 0.0
        if HAS_ALIBI:
            slope = tl.load(alibi_slopes_ptr + head)
        p, ds = score_gradient(
            products, dp, lse2[None, :], delta[None, :],
            scale, softcap, slope, bias_base, stride_bias_m, stride_bias_n,
            rows[None, :], keys[:, None], diagonal, seqlen_q, seqlen_k,
            window_left, window_right, rng_state_ptr, batch_id * heads_q + head,
            dropout_threshold, keep_scale,
            MASKED, BIAS_BYTES, HAS_SOFTCAP, HAS_ALIBI, HAS_LEFT, HAS_RIGHT, HAS_DROPOUT,
        )  # fmt: skip
        dv = dot_add(dv, p, dout, PRECISION, UPCAST)  # [N, DV]
        ds = through_softcap(ds, products, scale, softcap, HAS_SOFTCAP)
        dk = dot_add(dk, ds, tl.trans(q_t), PRECISION, UPCAST)  # [N, D]
        dk = settle(dk, SETTLE)
    return dk, dv


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr,
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
    SETTLE: tl.constexpr,  # wait for the products at the end of each step
):  # fmt: skip
    """Write one block of dk and dv of one key head."""
    heads_k = heads_q // GROUP
    pid_n, batch_id, head_k, k_start, q_start, length_k, seqlen_q = locate(
        cu_seqlens_k_ptr, cu_seqlens_q_ptr, batch, heads_k, tokens_k, tokens_q, tiles, span,
        BLOCK_N, BALANCE=HAS_RIGHT, LAST_IS_LONGEST=False,
    )  # fmt: skip
    if pid_n < 0:
        return
    # keys past the used ones still get their zeros
    seqlen_k = count_keys(seqused_k_ptr, batch_id, batch, length_k)
    batch_id = tl.maximum(tl.minimum(batch_id, batch - 1), 0)
    batch_64 = batch_id.to(tl.int64)
    head_k_64 = head_k.to(tl.int64)
    keys = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    k_base = k_ptr + batch_64 * stride_kb + k_start * stride_ks + head_k_64 * stride_kh
    v_base = v_ptr + batch_64 * stride_vb + k_start * stride_vs + head_k_64 * stride_vh
    k = load_tile(k_base, keys, stride_ks, 0, seqlen_k, cols_d, HEAD_DIM, BLOCK_D, True)  # [N, D]
    v = load_tile(v_base, keys, stride_vs, 0, seqlen_k, cols_dv, HEAD_DIM_V, BLOCK_DV, True)

    q_ptr += batch_64 * stride_qb + q_start * stride_qs
    dout_ptr += batch_64 * stride_dob + q_start * stride_dos
    if cu_seqlens_q_ptr is None:
        row_at = batch_64 * heads_q * tokens_q
    else:
        row_at = q_start
    if bias_ptr is not None:
        bias_ptr += batch_64 * stride_bias_b
    if alibi_slopes_ptr is not None:
        alibi_slopes_ptr += batch_64 * stride_alibi_b

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    diagonal = seqlen_k - seqlen_q
    first_key = pid_n * BLOCK_N
    last_row, start, full_start, full_end = query_range(
        first_key, first_key + BLOCK_N - 1, diagonal, seqlen_q, seqlen_k,
        window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_M,
    )  # fmt: skip
    for masked in tl.static_range(2):
        dk, dv = _dkdv_walk(
            dk, dv, k, v, q_ptr, dout_ptr, lse2_ptr + row_at, delta_ptr + row_at,
            head_k, batch_id, heads_q,
            stride_qs, stride_qh, stride_dos, stride_doh, tokens_q,
            keys, diagonal, seqlen_q, seqlen_k, start, full_start, full_end, last_row,
            scale, softcap, alibi_slopes_ptr, bias_ptr,
            stride_bias_h, stride_bias_m, stride_bias_n,
            window_left, window_right, rng_state_ptr, dropout_threshold, keep_scale,
            MASKED=masked == 1, GROUP=GROUP, BIAS_BYTES=BIAS_BYTES, HAS_SOFTCAP=HAS_SOFTCAP,
            HAS_LEFT=HAS_LEFT, HAS_RIGHT=HAS_RIGHT, HEAD_DIM=HEAD_DIM, HEAD_DIM_V=HEAD_DIM_V,
            BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV, BLOCK_M=BLOCK_M,

            PRECISION=PRECISION, UPCAST=UPCAST, SETTLE=SETTLE,
        )  # fmt: skip

    # dk and dv are contiguous: [tokens, heads_k, width]
    token = batch_64 * tokens_k + keys if cu_seqlens_k_ptr is None else k_start + keys
    inside = keys < length_k
    row = (token * heads_k + head_k)[:, None]
    tl.store(
        dk_ptr + row * HEAD_DIM + cols_d[None, :],
        (dk * scale).to(dk_ptr.dtype.element_ty),
        mask=inside[:, None] & (cols_d < HEAD_DIM)[None, :],
    )
    tl.store(
        dv_ptr + row * HEAD_DIM_V + cols_dv[None, :],
        dv.to(dv_ptr.dtype.element_ty),
        mask=inside[:, None] & (cols_dv < HEAD_DIM_V)[None, :],
    )


def launch_dkdv(plan: Plan, inputs: BackwardInputs, dk: Tensor, dv: Tensor) -> None:
    """Fill ``dk`` and ``dv``."""
    tile = backward_dkdv_tile(plan.platform, plan.widest_head, plan.itemsize)
    tokens_q, tokens_k = inputs.q.shape[-3], inputs.k.shape[-3]
    tiles = plan.tiles(tokens_k, tile.block_n)
    settle = plan.platform.is_hopper and not interpreted()
    plan.tiled(_dkdv_kernel, tile, SETTLE=settle)(
        tiles * plan.heads_k * plan.grid_batch,
        inputs.with_gradients(dk, dv),
        plan.numbers(inputs.q, inputs.k, tiles, plan.span_k(tokens_q), *inputs.dout_strides),
    )
