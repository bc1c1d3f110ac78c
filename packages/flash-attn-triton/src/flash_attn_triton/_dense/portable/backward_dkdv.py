"""Gradients of keys and values: one program owns a block of keys and walks the queries that see it.

The program walks all query heads of its key head, so no two programs write the same address: there
are no atomics, and the result repeats bit for bit. Scores are transposed ([keys, queries]), so that
the next products use the accumulator without a transposition in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import Pointer, entry
from ..._linked.portable.mask import Mask, count_steps, query_range, step_start
from ..._linked.portable.primitives import INF, dot, dot_add, pointer_to, settle
from .arguments import Counts, Extras, GradientStrides, Inputs, Options, Scalars, Tile
from .primitives import (
    count_keys,
    dropout_key,
    load_row,
    load_tile,
    load_tile_transposed,
    row_numbers,
    score_gradient,
    spans_of,
    store_rows,
    through_softcap,
)
from .schedule import locate
from .spans import (
    HULL,
    load_spans,
    run_of_tiles,
    sees_any,
    spans_along,
    walk_of_run,
)
from .structures import Head, Queries, Scores


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
):
    """Add the part of the group's queries to dk and dv: over masked tiles, or over whole ones.

    One loop runs over all heads of the group: a second loop around it would cost registers, and
    the pipeline would drain between heads.
    """
    # the incoming gradient of fully masked rows is ignored, even if it is NaN
    first_live = 0
    if OPTIONS.HAS_RIGHT:
        first_live = tl.maximum(-scores.mask.diagonal - scores.mask.right, 0)
    steps = count_steps(walk, TILE.BLOCK_M, MASKED)
    # max(steps, 1): LLVM takes division by `steps` as proof that steps > 0 and hoists the loads
    steps_of_head = tl.maximum(steps, 1)
    for step in tl.range(0, steps * OPTIONS.GROUP):
        head = queries.head_k
        turn = step
        if OPTIONS.GROUP > 1:
            head = queries.head_k * OPTIONS.GROUP + step // steps_of_head
            turn = step % steps_of_head
        rows = step_start(turn, walk, TILE.BLOCK_M, MASKED)
        rows += tl.arange(0, TILE.BLOCK_M)  # [BLOCK_M]
        live, own = rows, scores
        if OPTIONS.SPANS and MASKED:
            spans = load_spans(
                scores.spans, rows, scores.mask.seqlen_q, scores.mask.seqlen_k, OPTIONS.SPANS
            )
            live = tl.where(sees_any(spans), rows, -1)
            own = Scores(
                scores.scale,
                scores.numbers,
                scores.mask,
                scores.bias,
                scores.rng_state_ptr,
                spans_along(spans),
            )
        head_64 = head.to(tl.int64)
        q_t = load_tile_transposed(
            queries.q_ptr + head_64 * queries.q.head,
            rows,
            queries.q.token,
            0,
            scores.mask.seqlen_q,
            TILE.HEAD_DIM,
            TILE.BLOCK_D,
            MASKED,
        )  # [BLOCK_D, BLOCK_M]
        products = dot(k, q_t, TILE.PRECISION, TILE.UPCAST)  # [BLOCK_N, BLOCK_M]
        dout = load_tile(
            queries.dout_ptr + head_64 * queries.dout.head,
            live,
            queries.dout.token,
            first_live,
            scores.mask.seqlen_q,
            TILE.HEAD_DIM_V,
            TILE.BLOCK_DV,
            MASKED,
        )  # [BLOCK_M, BLOCK_DV]
        dp = dot(v, tl.trans(dout), TILE.PRECISION, TILE.UPCAST)  # [BLOCK_N, BLOCK_M]
        # [BLOCK_M]; loaded after the products, which need the registers
        row_at = head_64 * queries.rows
        lse2 = load_row(queries.lse2_ptr + row_at, rows, scores.mask.seqlen_q, INF, MASKED)
        delta = None
        if queries.delta_ptr is not None:
            delta = load_row(queries.delta_ptr + row_at, rows, scores.mask.seqlen_q, 0.0, MASKED)
        if queries.out_ptr is not None:
            out = load_tile(
                queries.out_ptr + head_64 * TILE.HEAD_DIM_V,
                rows,
                queries.heads_q * TILE.HEAD_DIM_V,
                first_live,
                scores.mask.seqlen_q,
                TILE.HEAD_DIM_V,
                TILE.BLOCK_DV,
                MASKED,
            )  # [BLOCK_M, BLOCK_DV]
            lse2, delta = row_numbers(out, dout, lse2, delta)
        bias_base = queries.bias_ptr
        if queries.bias_ptr is not None:
            bias_base += head_64 * queries.bias_head
        slope = None
        if queries.alibi_slopes_ptr is not None:
            slope = tl.load(queries.alibi_slopes_ptr + head)
        key = dropout_key(scores.rng_state_ptr, queries.sequence * queries.heads_q + head)
        p, ds = score_gradient(
            products,
            dp,
            lse2[None, :],
            delta[None, :],
            rows[None, :],
            keys[:, None],
            own,
            Head(slope, bias_base, key),
            MASKED,
            OPTIONS,
        )  # [BLOCK_N, BLOCK_M]
        dv = dot_add(dv, p, dout, TILE.PRECISION, TILE.UPCAST)  # [BLOCK_N, BLOCK_DV]
        ds = through_softcap(ds, products, scores, OPTIONS.HAS_SOFTCAP)
        dk = dot_add(dk, ds, tl.trans(q_t), TILE.PRECISION, TILE.UPCAST)  # [BLOCK_N, BLOCK_D]
        dk = settle(dk, TILE.SETTLE)
    return dk, dv


@entry(triton.jit)
def dkdv_kernel(
    inputs: Inputs,
    dk_ptr: Pointer,
    dv_ptr: Pointer,
    extras: Extras,
    hulls_ptr: Pointer,
    numbers: Scalars,
    counts: Counts,
    strides: GradientStrides,
    OPTIONS: Options,
    TILE: Tile,
):
    """``dv = p^T dout`` and ``dk = scale * ds^T q``, with ``ds = p * (dout v^T - delta)``.

    One program writes one block of keys of one key head.
    """
    heads_k = numbers.heads_q // OPTIONS.GROUP
    block, sequence, head_k, k_start, q_start, length_k, seqlen_q = locate(
        extras.cu_seqlens_k_ptr,
        extras.cu_seqlens_q_ptr,
        numbers.batch,
        heads_k,
        counts.tokens_k,
        counts.tokens_q,
        counts.tiles,
        counts.span,
        TILE.BLOCK_N,
        BALANCE=OPTIONS.HAS_RIGHT or OPTIONS.SPANS > 0,
        LAST_IS_LONGEST=False,
    )
    if block < 0:
        return
    # unused keys get gradients of 0
    seqlen_k = count_keys(extras.seqused_k_ptr, sequence, numbers.batch, length_k)
    sequence = tl.maximum(tl.minimum(sequence, numbers.batch - 1), 0)
    batch_64, head_k_64 = sequence.to(tl.int64), head_k.to(tl.int64)

    # load
    keys = block * TILE.BLOCK_N + tl.arange(0, TILE.BLOCK_N)  # [BLOCK_N]
    k_base = pointer_to(inputs.k_ptr, strides.k, batch_64, k_start, head_k_64)
    v_base = pointer_to(inputs.v_ptr, strides.v, batch_64, k_start, head_k_64)
    # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
    k = load_tile(k_base, keys, strides.k.token, 0, seqlen_k, TILE.HEAD_DIM, TILE.BLOCK_D, True)
    v = load_tile(v_base, keys, strides.v.token, 0, seqlen_k, TILE.HEAD_DIM_V, TILE.BLOCK_DV, True)
    row_at = q_start
    if extras.cu_seqlens_q_ptr is None:
        row_at = batch_64 * numbers.heads_q * counts.tokens_q
    bias_ptr = extras.bias_ptr
    if extras.bias_ptr is not None:
        bias_ptr += batch_64 * strides.bias.batch
    alibi_slopes_ptr = extras.alibi_slopes_ptr
    if extras.alibi_slopes_ptr is not None:
        alibi_slopes_ptr += batch_64 * strides.alibi
    queries = Queries(
        inputs.q_ptr + batch_64 * strides.q.batch + q_start * strides.q.token,
        inputs.dout_ptr + batch_64 * strides.dout.batch + q_start * strides.dout.token,
        inputs.lse2_ptr + row_at,
        inputs.delta_ptr + row_at,
        None,
        strides.q,
        strides.dout,
        counts.tokens_q,
        alibi_slopes_ptr,
        bias_ptr,
        strides.bias.head,
        sequence,
        head_k,
        numbers.heads_q,
    )

    # compute
    dk = tl.zeros([TILE.BLOCK_N, TILE.BLOCK_D], tl.float32)  # [BLOCK_N, BLOCK_D]
    dv = tl.zeros([TILE.BLOCK_N, TILE.BLOCK_DV], tl.float32)  # [BLOCK_N, BLOCK_DV]
    diagonal = seqlen_k - seqlen_q
    mask = Mask(seqlen_q, seqlen_k, diagonal, numbers.window_left, numbers.window_right)
    spans_ptr = spans_of(extras, sequence, q_start, counts.tokens_q, OPTIONS)
    scores = Scores(numbers.scale, numbers, mask, strides.bias, extras.rng_state_ptr, spans_ptr)
    first_key = block * TILE.BLOCK_N
    if OPTIONS.SPANS:
        tiles = tl.cdiv(seqlen_q, TILE.BLOCK_M)
        slot = q_start
        if extras.cu_seqlens_q_ptr is not None:
            slot = q_start // TILE.BLOCK_M + sequence + 1
        elif OPTIONS.SPANS_BATCH:
            slot = batch_64 * tiles
        hulls_ptr += slot * (OPTIONS.SPANS * HULL)
        for masked in tl.static_range(2):
            begin = tiles * 0
            while begin < tiles:
                start, begin = run_of_tiles(
                    hulls_ptr,
                    begin,
                    tiles,
                    first_key,
                    seqlen_q,
                    masked == 1,
                    OPTIONS.SPANS,
                    TILE.BLOCK_M,
                    TILE.BLOCK_N,
                )
                walk = walk_of_run(start, begin, masked == 1, TILE.BLOCK_M)
                dk, dv = dkdv_walk(
                    dk, dv, k, v, keys, queries, walk, scores, masked == 1, OPTIONS, TILE
                )
    else:
        walk = query_range(first_key, first_key + TILE.BLOCK_N - 1, mask, OPTIONS, TILE.BLOCK_M)
        for masked in tl.static_range(2):
            dk, dv = dkdv_walk(
                dk, dv, k, v, keys, queries, walk, scores, masked == 1, OPTIONS, TILE
            )

    # finish
    token = k_start + keys
    if extras.cu_seqlens_k_ptr is None:
        token = batch_64 * counts.tokens_k + keys
    row = token * heads_k + head_k
    inside = keys < length_k
    store_rows(dk_ptr, row, dk * numbers.scale, inside, TILE.HEAD_DIM, TILE.BLOCK_D)
    store_rows(dv_ptr, row, dv, inside, TILE.HEAD_DIM_V, TILE.BLOCK_DV)
