"""Gradient of the queries: one program owns a block of queries and walks the keys that it sees."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import Pointer, entry
from ..._linked.portable.mask import Mask, count_steps, step_start
from ..._linked.portable.primitives import dot, dot_add, pointer_to
from .arguments import Counts, Extras, GradientStrides, Inputs, Options, Scalars, Tile
from .primitives import (
    bias_of,
    count_keys,
    dropout_key,
    load_keys_transposed,
    load_queries,
    score_gradient,
    slope_of,
    spans_of,
    store_rows,
    through_softcap,
    walk_of_part,
)
from .schedule import locate
from .spans import hulls_of, load_spans, spans_down
from .structures import Head, Keys, Scores


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
    steps = count_steps(walk, TILE.BLOCK_N, MASKED)
    for step in tl.range(0, steps):
        keys = step_start(step, walk, TILE.BLOCK_N, MASKED)
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


@entry(triton.jit)
def dq_kernel(
    inputs: Inputs,
    dq_ptr: Pointer,
    extras: Extras,
    numbers: Scalars,
    counts: Counts,
    strides: GradientStrides,
    OPTIONS: Options,
    TILE: Tile,
):
    """``dq = scale * ds k`` where ``ds = p * (dout v^T - delta)`` and ``p = exp(s - lse)``.

    One program writes one block of rows of one query head.
    """
    block, sequence, head, q_start, k_start, seqlen_q, seqlen_k = locate(
        extras.cu_seqlens_q_ptr,
        extras.cu_seqlens_k_ptr,
        numbers.batch,
        numbers.heads_q,
        counts.tokens_q,
        counts.tokens_k,
        counts.tiles,
        counts.span,
        TILE.BLOCK_M,
        BALANCE=OPTIONS.HAS_RIGHT or OPTIONS.SPANS > 0,
        LAST_IS_LONGEST=True,
    )
    if block < 0:
        return
    seqlen_k = count_keys(extras.seqused_k_ptr, sequence, numbers.batch, seqlen_k)
    sequence = tl.maximum(tl.minimum(sequence, numbers.batch - 1), 0)
    batch_64, head_64 = sequence.to(tl.int64), head.to(tl.int64)
    head_k_64 = head_64 // OPTIONS.GROUP

    # load
    rows = block * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)  # [BLOCK_M]
    if extras.cu_seqlens_q_ptr is None:
        row_base = (batch_64 * numbers.heads_q + head) * counts.tokens_q
        token = batch_64 * counts.tokens_q + rows
    else:
        row_base = head_64 * counts.tokens_q + q_start
        token = q_start + rows
    source = Keys(
        pointer_to(inputs.k_ptr, strides.k, batch_64, k_start, head_k_64),
        pointer_to(inputs.v_ptr, strides.v, batch_64, k_start, head_k_64),
        strides.k.token,
        strides.v.token,
    )
    queries = load_queries(
        pointer_to(inputs.q_ptr, strides.q, batch_64, q_start, head_64),
        pointer_to(inputs.dout_ptr, strides.dout, batch_64, q_start, head_64),
        inputs,
        row_base,
        rows,
        strides,
        seqlen_q,
        TILE,
    )
    own = Head(
        slope_of(extras, strides, sequence, head),
        bias_of(extras, strides, sequence, head),
        dropout_key(extras.rng_state_ptr, sequence * numbers.heads_q + head),
    )

    # compute
    dq = tl.zeros([TILE.BLOCK_M, TILE.BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]
    diagonal = seqlen_k - seqlen_q
    mask = Mask(seqlen_q, seqlen_k, diagonal, numbers.window_left, numbers.window_right)
    spans, hulls = None, None
    if OPTIONS.SPANS:
        spans_ptr = spans_of(extras, sequence, q_start, counts.tokens_q, OPTIONS)
        spans = load_spans(spans_ptr, rows, seqlen_q, seqlen_k, OPTIONS.SPANS)
        hulls = hulls_of(spans, rows, seqlen_q, seqlen_k)
        spans = spans_down(spans)
    scores = Scores(numbers.scale, numbers, mask, strides.bias, extras.rng_state_ptr, spans)
    first_row = block * TILE.BLOCK_M
    last_row = tl.minimum(first_row + TILE.BLOCK_M, seqlen_q) - 1
    for part in tl.static_range(2 if OPTIONS.SPANS == 2 else 1):
        walk = walk_of_part(part, first_row, last_row, mask, hulls, OPTIONS, TILE.BLOCK_N)
        for masked in tl.static_range(2):
            dq = dq_walk(dq, queries, rows, source, walk, scores, own, masked == 1, OPTIONS, TILE)

    # finish
    row = token * numbers.heads_q + head
    inside = rows < seqlen_q
    store_rows(dq_ptr, row, dq * numbers.scale, inside, TILE.HEAD_DIM, TILE.BLOCK_D)
