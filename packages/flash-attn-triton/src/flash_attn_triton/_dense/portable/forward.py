"""Forward pass: one program owns a block of queries of one head and walks the keys once.

It uses the online softmax of FlashAttention-2 (Dao, 2023): running maximum and sum per row, in base
2. The walk has two parts: tiles that every row sees whole, without masks, and tiles that a window,
the diagonal or the end of the sequence cuts. Tiles that no row sees are never visited.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import entry
from ..._linked.portable.mask import Mask, count_steps, step_start
from ..._linked.portable.primitives import LN2, LOG2E, NEG_INF, dot, dot_add, pointer_to
from .arguments import Counts, ForwardTensors, InputStrides, Options, Scalars, Tile
from .primitives import (
    LEAST_LOGIT,
    bias_of,
    count_keys,
    dropout_key,
    is_kept,
    is_seen,
    load_tile,
    load_tile_transposed,
    logits_of,
    slope_of,
    spans_of,
    store_rows,
    walk_of_part,
)
from .schedule import locate
from .spans import hulls_of, load_spans, spans_down
from .structures import Head, Keys, Scores


@triton.jit
def start_softmax(sinks_ptr, head, is_padding, SHIFT: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return sum and maximum before the first key; a sink acts as a key without a value."""
    m_i = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        sink = tl.where(is_padding, NEG_INF, sink)
        m_i = tl.zeros([BLOCK_M], tl.float32) + sink
        l_i = tl.where(m_i == NEG_INF, 0.0, 1.0 * (1 << SHIFT))
    return l_i, m_i


@triton.jit
def attend(
    acc,
    l_i,
    m_i,
    q,
    rows,
    source,
    walk,
    scores,
    head,
    MASKED: tl.constexpr,
    OPTIONS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Fold keys into the running softmax of a block of queries: masked tiles, or whole ones."""
    steps = count_steps(walk, TILE.BLOCK_N, MASKED)
    for step in tl.range(0, steps):
        keys = step_start(step, walk, TILE.BLOCK_N, MASKED)
        keys += tl.arange(0, TILE.BLOCK_N)  # [BLOCK_N]
        k = load_tile_transposed(
            source.k_ptr,
            keys,
            source.stride_ks,
            walk.first,
            walk.last,
            TILE.HEAD_DIM,
            TILE.BLOCK_D,
            MASKED,
        )  # [BLOCK_D, BLOCK_N]
        s = dot(q, k, TILE.PRECISION, TILE.UPCAST)  # [BLOCK_M, BLOCK_N]
        if OPTIONS.FOLD and not MASKED:
            # the exponential's multiply-add applies the scale; it is positive, so max commutes
            factor = scores.scale * LOG2E
        else:
            factor = 1.0
            s = logits_of(s, rows[:, None], keys[None, :], scores, head, OPTIONS)
        if MASKED:
            visible = is_seen(rows[:, None], keys[None, :], walk.last, scores, OPTIONS)
            s = tl.where(visible, s, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(s, 1) * factor)  # [BLOCK_M]
        # a row that has seen no key yet keeps a finite pivot: -inf - -inf is NaN
        if OPTIONS.BIAS_BYTES:
            pivot = tl.where(m_new <= LEAST_LOGIT, 0.0, m_new)
        elif MASKED:
            pivot = tl.where(m_new == NEG_INF, 0.0, m_new)
        else:
            pivot = m_new
        p = tl.exp2(s * factor - (pivot - OPTIONS.SHIFT)[:, None])  # [BLOCK_M, BLOCK_N]
        alpha = tl.exp2(m_i - pivot)  # [BLOCK_M]
        l_i = l_i * alpha + tl.sum(p, 1)
        if scores.rng_state_ptr is not None:
            kept = is_kept(rows[:, None], keys[None, :], scores, head.dropout)
            p = tl.where(kept, p, 0.0)
        v = load_tile(
            source.v_ptr,
            keys,
            source.stride_vs,
            walk.first,
            walk.last,
            TILE.HEAD_DIM_V,
            TILE.BLOCK_DV,
            MASKED,
        )  # [BLOCK_N, BLOCK_DV]
        # [BLOCK_M, BLOCK_DV]
        acc = dot_add(acc * alpha[:, None], p, v, TILE.PRECISION, TILE.UPCAST)
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def normalise(acc, l_i, keep_scale):
    """Return the output of a block of rows; 0 for rows that saw no key."""
    return acc * (keep_scale / tl.where(l_i == 0.0, 1.0, l_i))[:, None]  # [BLOCK_M, BLOCK_DV]


@triton.jit
def lse_of(l_i, m_i, SHIFT: tl.constexpr):
    """Return the LSE of a block of rows; -inf for rows that saw no key."""
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    return tl.where(l_i == 0.0, NEG_INF, (m_i + tl.log2(l_safe) - SHIFT) * LN2)


@triton.jit
def scale_output(out, tensors, descale_at, OUT_MAX: tl.constexpr):
    """Apply the descale of FP8 values, and the scale and the range of an FP8 output."""
    if tensors.v_descale_ptr is not None:
        out *= tl.load(tensors.v_descale_ptr + descale_at)
    if tensors.out_scale_ptr is not None:
        out /= tl.load(tensors.out_scale_ptr)
    if OUT_MAX > 0:
        out = tl.clamp(out, -OUT_MAX, OUT_MAX, propagate_nan=tl.PropagateNan.ALL)
    return out


@entry(triton.jit)
def forward_kernel(
    tensors: ForwardTensors,
    numbers: Scalars,
    counts: Counts,
    strides: InputStrides,
    OPTIONS: Options,
    TILE: Tile,
):
    """``out = softmax(s) v`` and ``lse = log(sum(exp(s)))`` over keys, where ``s`` are the scores.

    One program writes one block of rows of one query head.
    """
    block, sequence, head, q_start, k_start, seqlen_q, seqlen_k = locate(
        tensors.cu_seqlens_q_ptr,
        tensors.cu_seqlens_k_ptr,
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
    seqlen_k = count_keys(tensors.seqused_k_ptr, sequence, numbers.batch, seqlen_k)
    # padding has no row in per-sequence tensors
    is_padding = (sequence < 0) | (sequence >= numbers.batch)
    sequence = tl.maximum(tl.minimum(sequence, numbers.batch - 1), 0)
    head_k = head // OPTIONS.GROUP
    batch_64, head_64, head_k_64 = sequence.to(tl.int64), head.to(tl.int64), head_k.to(tl.int64)

    # load
    rows = block * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)  # [BLOCK_M]
    q_base = pointer_to(tensors.q_ptr, strides.q, batch_64, q_start, head_64)
    source = Keys(
        pointer_to(tensors.k_ptr, strides.k, batch_64, k_start, head_k_64),
        pointer_to(tensors.v_ptr, strides.v, batch_64, k_start, head_k_64),
        strides.k.token,
        strides.v.token,
    )
    # [BLOCK_M, BLOCK_D]
    q = load_tile(q_base, rows, strides.q.token, 0, seqlen_q, TILE.HEAD_DIM, TILE.BLOCK_D, True)
    own = Head(
        slope_of(tensors, strides, sequence, head),
        bias_of(tensors, strides, sequence, head),
        dropout_key(tensors.rng_state_ptr, sequence * numbers.heads_q + head),
    )
    scale = numbers.scale
    descale_at = 0
    if OPTIONS.DESCALE_PER_HEAD:
        descale_at = batch_64 * (numbers.heads_q // OPTIONS.GROUP) + head_k
    if tensors.q_descale_ptr is not None:
        scale *= tl.load(tensors.q_descale_ptr + descale_at)
    if tensors.k_descale_ptr is not None:
        scale *= tl.load(tensors.k_descale_ptr + descale_at)

    # compute
    l_i, m_i = start_softmax(tensors.sinks_ptr, head, is_padding, OPTIONS.SHIFT, TILE.BLOCK_M)
    acc = tl.zeros([TILE.BLOCK_M, TILE.BLOCK_DV], tl.float32)  # [BLOCK_M, BLOCK_DV]
    diagonal = seqlen_k - seqlen_q
    mask = Mask(seqlen_q, seqlen_k, diagonal, numbers.window_left, numbers.window_right)
    spans, hulls = None, None
    if OPTIONS.SPANS:
        spans_ptr = spans_of(tensors, sequence, q_start, counts.tokens_q, OPTIONS)
        spans = load_spans(spans_ptr, rows, seqlen_q, seqlen_k, OPTIONS.SPANS)
        hulls = hulls_of(spans, rows, seqlen_q, seqlen_k)
        spans = spans_down(spans)
    scores = Scores(scale, numbers, mask, strides.bias, tensors.rng_state_ptr, spans)
    first_row = block * TILE.BLOCK_M
    last_row = tl.minimum(first_row + TILE.BLOCK_M, seqlen_q) - 1
    for part in tl.static_range(2 if OPTIONS.SPANS == 2 else 1):
        walk = walk_of_part(part, first_row, last_row, mask, hulls, OPTIONS, TILE.BLOCK_N)
        for masked in tl.static_range(2):
            acc, l_i, m_i = attend(
                acc, l_i, m_i, q, rows, source, walk, scores, own, masked == 1, OPTIONS, TILE
            )

    # finish
    out = normalise(acc, l_i, numbers.keep_scale)
    out = scale_output(out, tensors, descale_at, OPTIONS.OUT_MAX)
    lse = lse_of(l_i, m_i, OPTIONS.SHIFT)
    inside = rows < seqlen_q
    if tensors.cu_seqlens_q_ptr is None:
        lse_base = tensors.lse_ptr + (batch_64 * numbers.heads_q + head) * counts.tokens_q
        token = batch_64 * counts.tokens_q + rows
    else:
        lse_base = tensors.lse_ptr + head_64 * counts.tokens_q + q_start
        token = q_start + rows
    tl.store(lse_base + rows, lse, mask=inside)
    row = token * numbers.heads_q + head
    store_rows(tensors.out_ptr, row, out, inside, TILE.HEAD_DIM_V, TILE.BLOCK_DV)
