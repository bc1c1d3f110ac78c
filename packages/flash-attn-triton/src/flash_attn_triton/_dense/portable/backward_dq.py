"""Gradient of the queries: one program owns a block of queries and walks the keys that it sees."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.portable.primitives import count_steps, dot, dot_add, step_start
from .primitives import (
    count_keys,
    dropout_key,
    key_range,
    load_keys_transposed,
    load_queries,
    score_gradient,
    through_softcap,
)
from .schedule import locate
from .structures import FOREIGN, NUMBERS, Head, Keys, Options, Scores, Tile


@triton.jit
def dq_walk(
    dq,
    queries,
    rows,
    source,
    walk,
    scores,
    head,
    MASKED: tl.constexpr,
    OPTIONS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add the part of the keys to a block of dq: over masked tiles, or over whole ones."""
    q, dout, lse2, delta = queries
    steps = count_steps(walk.start, walk.full_start, walk.full_end, walk.last, TILE.BLOCK_N, MASKED)
    for step in tl.range(0, steps):
        keys = step_start(step, walk.start, walk.full_start, walk.full_end, TILE.BLOCK_N, MASKED)
        keys += tl.arange(0, TILE.BLOCK_N)  # [BLOCK_N]
        # [BLOCK_D, BLOCK_N], [BLOCK_DV, BLOCK_N]
        k_t, v_t = load_keys_transposed(source, keys, walk, MASKED, TILE)
        products = dot(q, k_t, TILE.PRECISION, TILE.UPCAST)  # [BLOCK_M, BLOCK_N]
        dp = dot(dout, v_t, TILE.PRECISION, TILE.UPCAST)  # [BLOCK_M, BLOCK_N]
        _p, ds = score_gradient(
            products,
            dp,
            lse2[:, None],
            delta[:, None],
            rows[:, None],
            keys[None, :],
            scores,
            head,
            MASKED,
            OPTIONS,
        )  # [BLOCK_M, BLOCK_N]
        ds = through_softcap(ds, products, scores, OPTIONS.HAS_SOFTCAP)
        dq = dot_add(dq, ds, tl.trans(k_t), TILE.PRECISION, TILE.UPCAST)  # [BLOCK_M, BLOCK_D]
    return dq


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=FOREIGN)
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    dq_ptr,
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
):
    """``dq = scale * ds k`` where ``ds = p * (dout v^T - delta)`` and ``p = exp(s - lse)``.

    One program writes one block of rows of one query head. The parameters are the fields of
    ``Inputs``, ``dq_ptr``, and the fields of ``Extras``, ``Scalars``, ``Counts``,
    ``GradientStrides``, ``Strides``, ``Options`` and ``Tile``.
    """
    OPTIONS: tl.constexpr = Options(GROUP, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, BIAS_BYTES)
    TILE: tl.constexpr = Tile(
        HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, UPCAST
    )
    pid_m, batch_id, head, q_start, k_start, seqlen_q, seqlen_k = locate(
        cu_seqlens_q_ptr,
        cu_seqlens_k_ptr,
        batch,
        heads_q,
        tokens_q,
        tokens_k,
        tiles,
        span,
        BLOCK_M,
        BALANCE=HAS_RIGHT,
        LAST_IS_LONGEST=True,
    )
    if pid_m < 0:
        return
    seqlen_k = count_keys(seqused_k_ptr, batch_id, batch, seqlen_k)
    batch_id = tl.maximum(tl.minimum(batch_id, batch - 1), 0)
    batch_64 = batch_id.to(tl.int64)
    head_64 = head.to(tl.int64)
    head_k_64 = head_64 // GROUP
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    cols_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
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
    queries = load_queries(
        q_base,
        dout_base,
        lse2_ptr,
        delta_ptr,
        row_base,
        rows,
        stride_qs,
        stride_dos,
        seqlen_q,
        TILE,
    )

    bias_base = bias_ptr
    if bias_ptr is not None:
        bias_base += batch_64 * stride_bias_b + head_64 * stride_bias_h
    slope = None
    if alibi_slopes_ptr is not None:
        slope = tl.load(alibi_slopes_ptr + batch_64 * stride_alibi_b + head)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]
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
    first_row = pid_m * BLOCK_M
    last_row = tl.minimum(first_row + BLOCK_M, seqlen_q) - 1
    walk = key_range(first_row, last_row, scores, OPTIONS, BLOCK_N)
    own = Head(slope, bias_base, dropout_key(rng_state_ptr, batch_id * heads_q + head))
    source = Keys(k_base, v_base, stride_ks, stride_vs)
    for masked in tl.static_range(2):
        dq = dq_walk(dq, queries, rows, source, walk, scores, own, masked == 1, OPTIONS, TILE)
    # dq is contiguous: [tokens, heads_q, HEAD_DIM]
    dq_ptrs = dq_ptr + ((token * heads_q + head) * HEAD_DIM)[:, None] + cols_d[None, :]
    mask = (rows < seqlen_q)[:, None] & (cols_d < HEAD_DIM)[None, :]
    tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=mask)
