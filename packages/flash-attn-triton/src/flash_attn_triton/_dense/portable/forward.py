"""Forward pass: one program owns a block of queries of one head and walks the keys once.

It uses the online softmax of FlashAttention-2 (Dao, 2023): running maximum and sum per row, in base
2. The walk has two parts: tiles that every row sees whole, without masks, and tiles that a window,
the diagonal or the end of the sequence cuts. Tiles that no row sees are never visited.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.portable.primitives import (
    LN2,
    LOG2E,
    NEG_INF,
    count_steps,
    dot,
    dot_add,
    step_start,
)
from .primitives import (
    LEAST_LOGIT,
    count_keys,
    dropout_key,
    is_kept,
    is_visible,
    key_range,
    load_tile,
    load_tile_transposed,
    logits_of,
)
from .schedule import locate
from .structures import FOREIGN, NUMBERS, ForwardOptions, Head, Keys, Scores, Tile


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
    cols_d = tl.arange(0, TILE.BLOCK_D)  # [BLOCK_D]
    cols_dv = tl.arange(0, TILE.BLOCK_DV)  # [BLOCK_DV]
    steps = count_steps(walk.start, walk.full_start, walk.full_end, walk.last, TILE.BLOCK_N, MASKED)
    for step in tl.range(0, steps):
        keys = step_start(step, walk.start, walk.full_start, walk.full_end, TILE.BLOCK_N, MASKED)
        keys += tl.arange(0, TILE.BLOCK_N)  # [BLOCK_N]
        k = load_tile_transposed(
            source.k_ptr,
            keys,
            source.stride_ks,
            walk.first,
            walk.last,
            cols_d,
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
            visible = is_visible(rows[:, None], keys[None, :], walk.last, scores, OPTIONS)
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
            cols_dv,
            TILE.HEAD_DIM_V,
            TILE.BLOCK_DV,
            MASKED,
        )  # [BLOCK_N, BLOCK_DV]
        # [BLOCK_M, BLOCK_DV]
        acc = dot_add(acc * alpha[:, None], p, v, TILE.PRECISION, TILE.UPCAST)
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def finish_softmax(
    acc, l_i, m_i, keep_scale, v_descale_ptr, descale_at, out_scale_ptr, OPTIONS: tl.constexpr
):
    """Return the output and the LSE of a block of rows."""
    # fully masked rows: output 0, lse -inf
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    out = acc * (keep_scale / l_safe)[:, None]  # [BLOCK_M, BLOCK_DV]
    if v_descale_ptr is not None:
        out *= tl.load(v_descale_ptr + descale_at)
    if out_scale_ptr is not None:
        out /= tl.load(out_scale_ptr)
    if OPTIONS.OUT_MAX > 0:
        out = tl.clamp(out, -OPTIONS.OUT_MAX, OPTIONS.OUT_MAX, propagate_nan=tl.PropagateNan.ALL)
    lse = tl.where(l_i == 0.0, NEG_INF, (m_i + tl.log2(l_safe) - OPTIONS.SHIFT) * LN2)
    return out, lse


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=FOREIGN)
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    bias_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    q_descale_ptr,
    k_descale_ptr,
    v_descale_ptr,
    out_scale_ptr,
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
    FOLD: tl.constexpr,
    DESCALE_PER_HEAD: tl.constexpr,
    SHIFT: tl.constexpr,
    OUT_MAX: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``out = softmax(s) v`` and ``lse = log(sum(exp(s)))`` over keys, where ``s`` are the scores.

    One program writes one block of rows of one query head. The parameters are the fields of
    ``ForwardTensors``, ``Scalars``, ``Counts``, ``Strides``, ``ForwardOptions`` and ``Tile``.
    """
    OPTIONS: tl.constexpr = ForwardOptions(
        GROUP, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, BIAS_BYTES, FOLD, DESCALE_PER_HEAD, SHIFT, OUT_MAX
    )
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
    # padding has no row in per-sequence tensors
    is_padding = (batch_id < 0) | (batch_id >= batch)
    batch_id = tl.maximum(tl.minimum(batch_id, batch - 1), 0)
    head_k = head // GROUP
    batch_64 = batch_id.to(tl.int64)
    head_64 = head.to(tl.int64)
    head_k_64 = head_k.to(tl.int64)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    cols_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    cols_dv = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    q_base = q_ptr + batch_64 * stride_qb + q_start * stride_qs + head_64 * stride_qh
    k_base = k_ptr + batch_64 * stride_kb + k_start * stride_ks + head_k_64 * stride_kh
    v_base = v_ptr + batch_64 * stride_vb + k_start * stride_vs + head_k_64 * stride_vh
    # [BLOCK_M, BLOCK_D]
    q = load_tile(q_base, rows, stride_qs, 0, seqlen_q, cols_d, HEAD_DIM, BLOCK_D, True)

    bias_base = bias_ptr
    if bias_ptr is not None:
        bias_base += batch_64 * stride_bias_b + head_64 * stride_bias_h
    slope = None
    if alibi_slopes_ptr is not None:
        slope = tl.load(alibi_slopes_ptr + batch_64 * stride_alibi_b + head)
    descale_at = batch_64 * (heads_q // GROUP) + head_k if DESCALE_PER_HEAD else 0
    if q_descale_ptr is not None:
        scale *= tl.load(q_descale_ptr + descale_at)
    if k_descale_ptr is not None:
        scale *= tl.load(k_descale_ptr + descale_at)

    l_i, m_i = start_softmax(sinks_ptr, head, is_padding, SHIFT, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # [BLOCK_M, BLOCK_DV]

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
        acc, l_i, m_i = attend(
            acc,
            l_i,
            m_i,
            q,
            rows,
            source,
            walk,
            scores,
            own,
            masked == 1,
            OPTIONS,
            TILE,
        )

    out, lse = finish_softmax(
        acc, l_i, m_i, keep_scale, v_descale_ptr, descale_at, out_scale_ptr, OPTIONS
    )
    inside = rows < seqlen_q
    if cu_seqlens_q_ptr is None:
        lse_base = lse_ptr + (batch_64 * heads_q + head) * tokens_q
        out_rows = batch_64 * tokens_q + rows
    else:
        lse_base = lse_ptr + head_64 * tokens_q + q_start
        out_rows = q_start + rows
    tl.store(lse_base + rows, lse, mask=inside)
    # out is contiguous: [tokens, heads_q, HEAD_DIM_V]
    out_ptrs = out_ptr + ((out_rows * heads_q + head) * HEAD_DIM_V)[:, None] + cols_dv[None, :]
    out_mask = inside[:, None] & (cols_dv < HEAD_DIM_V)[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=out_mask)
