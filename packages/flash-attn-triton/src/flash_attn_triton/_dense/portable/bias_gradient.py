"""Gradient of the additive bias: one program owns a tile of the bias.

It visits every tile of scores that the bias tile was broadcast to (sequences, heads, rows, columns)
and sums their gradients in registers. So it needs no memory beyond the bias gradient, and no
atomics. Every tile is masked: this kernel is for learning a bias, not for speed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.portable.primitives import dot
from .primitives import (
    count_keys,
    dropout_key,
    key_range,
    load_keys_transposed,
    load_queries,
    score_gradient,
)
from .structures import (
    FOREIGN,
    BiasCounts,
    GradientStrides,
    Head,
    Keys,
    Options,
    Scalars,
    Scores,
    Strides,
    Tile,
)


@triton.jit
def _sequence_of(cu_seqlens_q_ptr, cu_seqlens_k_ptr, sequence, tokens_q, tokens_k):
    """Return ``(q_start, k_start, seqlen_q, seqlen_k)`` of a sequence."""
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
    return q_start, k_start, seqlen_q, seqlen_k


@triton.jit
def _tile_gradient(
    queries, rows, start_n, source, walk, scores, head, OPTIONS: tl.constexpr, TILE: tl.constexpr
):
    """Return d(loss)/d(logit) of one tile of scores."""
    q, dout, lse2, delta = queries
    keys = start_n + tl.arange(0, TILE.BLOCK_N)  # [BLOCK_N]
    # [BLOCK_D, BLOCK_N], [BLOCK_DV, BLOCK_N]
    k_t, v_t = load_keys_transposed(source, keys, walk, True, TILE)
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
        True,
        OPTIONS,
    )  # [BLOCK_M, BLOCK_N]
    return ds


@triton.jit(
    do_not_specialize=(
        *Scalars._fields,
        *BiasCounts._fields,
        *GradientStrides._fields,
        *Strides._fields,
    ),
    do_not_specialize_on_alignment=FOREIGN,
)
def bias_gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    dbias_ptr,
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
    bias_heads,
    bias_rows,
    bias_cols,
    one_batch,
    one_head,
    one_row,
    one_col,
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
    """``dbias = sum(ds)`` over all that the bias was broadcast to, [b|1, h|1, m|1, n|1] contiguous.

    ``ds = p * (dout v^T - delta)`` and ``p = exp(s - lse)``. One program writes one tile. The
    parameters are the fields of ``Inputs``, ``dbias_ptr``, and the fields of ``Extras``,
    ``Scalars``, ``BiasCounts``, ``GradientStrides``, ``Strides``, ``Options`` and ``Tile``.
    """
    OPTIONS: tl.constexpr = Options(GROUP, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, BIAS_BYTES)
    TILE: tl.constexpr = Tile(
        HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PRECISION, UPCAST
    )
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(bias_cols, BLOCK_N)
    tiles_m = tl.cdiv(bias_rows, BLOCK_M)
    tile_n = pid % tiles_n
    tile_m = pid // tiles_n % tiles_m
    bias_head = pid // tiles_n // tiles_m % bias_heads
    bias_batch = pid // tiles_n // tiles_m // bias_heads

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # [BLOCK_M, BLOCK_N]
    # all tiles of scores that this tile was broadcast to
    for step_b in range(0, tl.where(one_batch != 0, batch, 1)):
        sequence = bias_batch + step_b
        sequence_64 = sequence.to(tl.int64)
        q_start, k_start, seqlen_q, seqlen_k = _sequence_of(
            cu_seqlens_q_ptr, cu_seqlens_k_ptr, sequence, tokens_q, tokens_k
        )
        seqlen_k = count_keys(seqused_k_ptr, sequence, batch, seqlen_k)
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
            slope = None
            if alibi_slopes_ptr is not None:
                slope = tl.load(alibi_slopes_ptr + sequence_64 * stride_alibi_b + head)
            own = Head(slope, bias_base, dropout_key(rng_state_ptr, sequence * heads_q + head))
            source = Keys(k_base, v_base, stride_ks, stride_vs)
            for step_m in range(0, tl.where(one_row != 0, tl.cdiv(seqlen_q, BLOCK_M), 1)):
                first_row = (tile_m + step_m) * BLOCK_M
                last_row = tl.minimum(first_row + BLOCK_M, seqlen_q) - 1
                walk = key_range(first_row, last_row, scores, OPTIONS, BLOCK_N)
                rows = first_row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
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
                for step_n in range(0, tl.where(one_col != 0, tl.cdiv(seqlen_k, BLOCK_N), 1)):
                    start_n = (tile_n + step_n) * BLOCK_N
                    is_live = (first_row < seqlen_q) & (start_n < walk.last)
                    if is_live & (start_n + BLOCK_N > walk.first):
                        total += _tile_gradient(
                            queries,
                            rows,
                            start_n,
                            source,
                            walk,
                            scores,
                            own,
                            OPTIONS,
                            TILE,
                        )

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    if one_row:
        total = tl.where((rows == 0)[:, None], tl.sum(total, 0)[None, :], 0.0)
    if one_col:
        total = tl.where((cols == 0)[None, :], tl.sum(total, 1)[:, None], 0.0)
    row_at = (bias_batch.to(tl.int64) * bias_heads + bias_head) * bias_rows + rows
    pointers = dbias_ptr + (row_at * bias_cols)[:, None] + cols[None, :]
    mask = (rows < bias_rows)[:, None] & (cols < bias_cols)[None, :]
    tl.store(pointers, total.to(dbias_ptr.dtype.element_ty), mask=mask)
