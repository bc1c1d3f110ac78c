"""Gradients of keys and values: one program owns a block of keys and walks the queries that see it.

The program walks all query heads of its key head, so no two programs write the same address: there
are no atomics, and the result repeats bit for bit. Scores are transposed ([keys, queries]), so that
the next products use the accumulator without a transposition in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.portable.primitives import INF, count_steps, dot, dot_add, settle, step_start
from .primitives import (
    count_keys,
    dropout_key,
    load_row,
    load_tile,
    load_tile_transposed,
    query_range,
    row_numbers,
    score_gradient,
    through_softcap,
)
from .schedule import locate
from .structures import FOREIGN, NUMBERS, Head, Options, Queries, Scores, Tile


@triton.jit
def dkdv_walk(
    dk,
    dv,
    k,
    v,
    keys,
    queries,
    walk,
    scores,
    MASKED: tl.constexpr,
    OPTIONS: tl.constexpr,
    TILE: tl.constexpr,
    SETTLE: tl.constexpr,
):
    """Add the part of the group's queries to dk and dv: over masked tiles, or over whole ones.

    One loop runs over all heads of the group: a second loop around it would cost registers, and
    the pipeline would drain between heads.
    """
    cols_d = tl.arange(0, TILE.BLOCK_D)  # [BLOCK_D]
    cols_dv = tl.arange(0, TILE.BLOCK_DV)  # [BLOCK_DV]
    # the incoming gradient of fully masked rows is ignored, even if it is NaN
    first_live = 0
    if OPTIONS.HAS_RIGHT:
        first_live = tl.maximum(-scores.diagonal - scores.window_right, 0)
    steps = count_steps(walk.start, walk.full_start, walk.full_end, walk.last, TILE.BLOCK_M, MASKED)
    # max(steps, 1): LLVM takes division by `steps` as proof that steps > 0 and hoists the loads
    steps_of_head = tl.maximum(steps, 1)
    for step in tl.range(0, steps * OPTIONS.GROUP):
        head = queries.head_k
        turn = step
        if OPTIONS.GROUP > 1:
            head = queries.head_k * OPTIONS.GROUP + step // steps_of_head
            turn = step % steps_of_head
        rows = step_start(turn, walk.start, walk.full_start, walk.full_end, TILE.BLOCK_M, MASKED)
        rows += tl.arange(0, TILE.BLOCK_M)  # [BLOCK_M]
        head_64 = head.to(tl.int64)
        q_t = load_tile_transposed(
            queries.q_ptr + head_64 * queries.stride_qh,
            rows,
            queries.stride_qs,
            0,
            scores.seqlen_q,
            cols_d,
            TILE.HEAD_DIM,
            TILE.BLOCK_D,
            MASKED,
        )  # [BLOCK_D, BLOCK_M]
        products = dot(k, q_t, TILE.PRECISION, TILE.UPCAST)  # [BLOCK_N, BLOCK_M]
        dout = load_tile(
            queries.dout_ptr + head_64 * queries.stride_doh,
            rows,
            queries.stride_dos,
            first_live,
            scores.seqlen_q,
            cols_dv,
            TILE.HEAD_DIM_V,
            TILE.BLOCK_DV,
            MASKED,
        )  # [BLOCK_M, BLOCK_DV]
        dp = dot(v, tl.trans(dout), TILE.PRECISION, TILE.UPCAST)  # [BLOCK_N, BLOCK_M]
        # [BLOCK_M]; loaded after the products, which need the registers
        row_at = head_64 * queries.stride_row_h
        lse2 = load_row(queries.lse2_ptr + row_at, rows, scores.seqlen_q, INF, MASKED)
        delta = None
        if queries.delta_ptr is not None:
            delta = load_row(queries.delta_ptr + row_at, rows, scores.seqlen_q, 0.0, MASKED)
        if queries.out_ptr is not None:
            out = load_tile(
                queries.out_ptr + head_64 * TILE.HEAD_DIM_V,
                rows,
                queries.heads_q * TILE.HEAD_DIM_V,
                first_live,
                scores.seqlen_q,
                cols_dv,
                TILE.HEAD_DIM_V,
                TILE.BLOCK_DV,
                MASKED,
            )  # [BLOCK_M, BLOCK_DV]
            lse2, delta = row_numbers(out, dout, lse2, delta)
        bias_base = queries.bias_ptr
        if queries.bias_ptr is not None:
            bias_base += head_64 * queries.stride_bias_h
        slope = None
        if queries.alibi_slopes_ptr is not None:
            slope = tl.load(queries.alibi_slopes_ptr + head)
        key = dropout_key(scores.rng_state_ptr, queries.batch_id * queries.heads_q + head)
        p, ds = score_gradient(
            products,
            dp,
            lse2[None, :],
            delta[None, :],
            rows[None, :],
            keys[:, None],
            scores,
            Head(slope, bias_base, key),
            MASKED,
            OPTIONS,
        )  # [BLOCK_N, BLOCK_M]
        dv = dot_add(dv, p, dout, TILE.PRECISION, TILE.UPCAST)  # [BLOCK_N, BLOCK_DV]
        ds = through_softcap(ds, products, scores, OPTIONS.HAS_SOFTCAP)
        dk = dot_add(dk, ds, tl.trans(q_t), TILE.PRECISION, TILE.UPCAST)  # [BLOCK_N, BLOCK_D]
        dk = settle(dk, SETTLE)
    return dk, dv


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=FOREIGN)
def dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    bias_ptr,
    alibi_slopes_ptr,
    rng_state_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_k_ptr,
    scale,
    softcap,
    keep_scale,
    dropout_threshold,
    window_left,
    window_right,
    batch,
    heads_q,
    tokens_q,
    tokens_k,
    tiles,
    span,
    stride_dob,
    stride_dos,
    stride_doh,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_bias_b,
    stride_bias_h,
    stride_bias_m,
    stride_bias_n,
    stride_alibi_b,
    GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BIAS_BYTES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    SETTLE: tl.constexpr,  # wait for the products at the end of each step
):
    """``dv = p^T dout`` and ``dk = scale * ds^T q``, with ``ds = p * (dout v^T - delta)``.

    One program writes one block of keys of one key head. The parameters are the fields of
    ``Inputs``, the gradients, the fields of ``Extras``, ``Scalars``, ``Counts``,
    ``GradientStrides``, ``Strides``, ``Options`` and ``Tile``, and ``SETTLE``.
    """
    OPTIONS: tl.constexpr = Options(GROUP, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, BIAS_BYTES)
    TILE: tl.constexpr = Tile(
        HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, UPCAST
    )
    heads_k = heads_q // GROUP
    pid_n, batch_id, head_k, k_start, q_start, length_k, seqlen_q = locate(
        cu_seqlens_k_ptr,
        cu_seqlens_q_ptr,
        batch,
        heads_k,
        tokens_k,
        tokens_q,
        tiles,
        span,
        BLOCK_N,
        BALANCE=HAS_RIGHT,
        LAST_IS_LONGEST=False,
    )
    if pid_n < 0:
        return
    # unused keys get gradients of 0
    seqlen_k = count_keys(seqused_k_ptr, batch_id, batch, length_k)
    batch_id = tl.maximum(tl.minimum(batch_id, batch - 1), 0)
    batch_64 = batch_id.to(tl.int64)
    head_k_64 = head_k.to(tl.int64)
    keys = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    cols_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    cols_dv = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    k_base = k_ptr + batch_64 * stride_kb + k_start * stride_ks + head_k_64 * stride_kh
    v_base = v_ptr + batch_64 * stride_vb + k_start * stride_vs + head_k_64 * stride_vh
    # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
    k = load_tile(k_base, keys, stride_ks, 0, seqlen_k, cols_d, HEAD_DIM, BLOCK_D, True)
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

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)  # [BLOCK_N, BLOCK_D]
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)  # [BLOCK_N, BLOCK_DV]
    scores = Scores(
        scale,
        softcap,
        stride_bias_m,
        stride_bias_n,
        seqlen_k - seqlen_q,
        seqlen_q,
        seqlen_k,
        window_left,
        window_right,
        rng_state_ptr,
        dropout_threshold,
        keep_scale,
    )
    first_key = pid_n * BLOCK_N
    walk = query_range(first_key, first_key + BLOCK_N - 1, scores, OPTIONS, BLOCK_M)
    queries = Queries(
        q_ptr,
        dout_ptr,
        lse2_ptr + row_at,
        delta_ptr + row_at,
        alibi_slopes_ptr,
        bias_ptr,
        stride_qs,
        stride_qh,
        stride_dos,
        stride_doh,
        tokens_q,
        stride_bias_h,
        batch_id,
        head_k,
        heads_q,
        None,
    )
    for masked in tl.static_range(2):
        dk, dv = dkdv_walk(
            dk, dv, k, v, keys, queries, walk, scores, masked == 1, OPTIONS, TILE, SETTLE
        )

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
