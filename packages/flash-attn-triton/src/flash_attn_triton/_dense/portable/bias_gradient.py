"""Gradient of the additive bias: one program owns a tile of the bias.

It visits every tile of scores that the bias tile was broadcast to (sequences, heads, rows, columns)
and sums their gradients in registers. So it needs no memory beyond the bias gradient, and no
atomics. Every tile is masked: this kernel is for learning a bias, not for speed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import Pointer, entry
from ..._linked.portable.mask import Mask, key_range
from ..._linked.portable.primitives import dot, pointer_to
from .arguments import BiasCounts, Extras, GradientStrides, Inputs, Options, Scalars, Tile
from .primitives import (
    bias_of,
    count_keys,
    dropout_key,
    load_keys_transposed,
    load_queries,
    score_gradient,
    slope_of,
)
from .structures import Head, Keys, Scores


@triton.jit
def _sequence_of(extras, sequence, tokens_q, tokens_k):
    """Return ``(q_start, k_start, seqlen_q, seqlen_k)`` of a sequence."""
    if extras.cu_seqlens_q_ptr is None:
        q_start = tl.zeros([], tl.int64)
        k_start = tl.zeros([], tl.int64)
        seqlen_q = tokens_q
        seqlen_k = tokens_k
    else:
        q_begin = tl.load(extras.cu_seqlens_q_ptr + sequence)
        k_begin = tl.load(extras.cu_seqlens_k_ptr + sequence)
        seqlen_q = tl.load(extras.cu_seqlens_q_ptr + sequence + 1) - q_begin
        seqlen_k = tl.load(extras.cu_seqlens_k_ptr + sequence + 1) - k_begin
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


@entry(triton.jit)
def bias_gradient_kernel(
    inputs: Inputs,
    dbias_ptr: Pointer,
    extras: Extras,
    numbers: Scalars,
    counts: BiasCounts,
    strides: GradientStrides,
    OPTIONS: Options,
    TILE: Tile,
):
    """``dbias = sum(ds)`` over all that the bias was broadcast to, [b|1, h|1, m|1, n|1] contiguous.

    ``ds = p * (dout v^T - delta)`` and ``p = exp(s - lse)``. One program writes one tile.
    """
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(counts.bias_cols, TILE.BLOCK_N)
    tiles_m = tl.cdiv(counts.bias_rows, TILE.BLOCK_M)
    tile_n = pid % tiles_n
    tile_m = pid // tiles_n % tiles_m
    bias_head = pid // tiles_n // tiles_m % counts.bias_heads
    bias_batch = pid // tiles_n // tiles_m // counts.bias_heads

    total = tl.zeros([TILE.BLOCK_M, TILE.BLOCK_N], tl.float32)  # [BLOCK_M, BLOCK_N]
    # all tiles of scores that this tile was broadcast to
    for step_b in range(0, tl.where(counts.one_batch != 0, numbers.batch, 1)):
        sequence = bias_batch + step_b
        batch_64 = sequence.to(tl.int64)
        q_start, k_start, seqlen_q, seqlen_k = _sequence_of(
            extras, sequence, counts.tokens_q, counts.tokens_k
        )
        seqlen_k = count_keys(extras.seqused_k_ptr, sequence, numbers.batch, seqlen_k)
        diagonal = seqlen_k - seqlen_q
        mask = Mask(seqlen_q, seqlen_k, diagonal, numbers.window_left, numbers.window_right)
        scores = Scores(numbers.scale, numbers, mask, strides.bias, extras.rng_state_ptr)
        for step_h in range(0, tl.where(counts.one_head != 0, numbers.heads_q, 1)):
            head = bias_head + step_h
            head_64 = head.to(tl.int64)
            head_k_64 = head_64 // OPTIONS.GROUP
            q_base = pointer_to(inputs.q_ptr, strides.q, batch_64, q_start, head_64)
            dout_base = pointer_to(inputs.dout_ptr, strides.dout, batch_64, q_start, head_64)
            source = Keys(
                pointer_to(inputs.k_ptr, strides.k, batch_64, k_start, head_k_64),
                pointer_to(inputs.v_ptr, strides.v, batch_64, k_start, head_k_64),
                strides.k.token,
                strides.v.token,
            )
            row_base = head_64 * counts.tokens_q + q_start
            if extras.cu_seqlens_q_ptr is None:
                row_base = (batch_64 * numbers.heads_q + head) * counts.tokens_q
            own = Head(
                slope_of(extras, strides, sequence, head),
                bias_of(extras, strides, sequence, head),
                dropout_key(extras.rng_state_ptr, sequence * numbers.heads_q + head),
            )
            for step_m in range(
                0, tl.where(counts.one_row != 0, tl.cdiv(seqlen_q, TILE.BLOCK_M), 1)
            ):
                first_row = (tile_m + step_m) * TILE.BLOCK_M
                last_row = tl.minimum(first_row + TILE.BLOCK_M, seqlen_q) - 1
                walk = key_range(first_row, last_row, mask, OPTIONS, TILE.BLOCK_N)
                rows = first_row + tl.arange(0, TILE.BLOCK_M)  # [BLOCK_M]
                queries = load_queries(
                    q_base, dout_base, inputs, row_base, rows, strides, seqlen_q, TILE
                )
                columns = tl.where(counts.one_col != 0, tl.cdiv(seqlen_k, TILE.BLOCK_N), 1)
                for step_n in range(0, columns):
                    start_n = (tile_n + step_n) * TILE.BLOCK_N
                    is_live = (first_row < seqlen_q) & (start_n < walk.last)
                    if is_live & (start_n + TILE.BLOCK_N > walk.first):
                        total += _tile_gradient(
                            queries, rows, start_n, source, walk, scores, own, OPTIONS, TILE
                        )

    rows = tile_m * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)  # [BLOCK_M]
    cols = tile_n * TILE.BLOCK_N + tl.arange(0, TILE.BLOCK_N)  # [BLOCK_N]
    if counts.one_row:
        total = tl.where((rows == 0)[:, None], tl.sum(total, 0)[None, :], 0.0)
    if counts.one_col:
        total = tl.where((cols == 0)[None, :], tl.sum(total, 1)[:, None], 0.0)
    row_at = (bias_batch.to(tl.int64) * counts.bias_heads + bias_head) * counts.bias_rows + rows
    pointers = dbias_ptr + (row_at * counts.bias_cols)[:, None] + cols[None, :]
    inside = (rows < counts.bias_rows)[:, None] & (cols < counts.bias_cols)[None, :]
    tl.store(pointers, total.to(dbias_ptr.dtype.element_ty), mask=inside)
