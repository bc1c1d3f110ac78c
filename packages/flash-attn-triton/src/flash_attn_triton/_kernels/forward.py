"""Forward pass: one program owns a block of queries of one head and walks the keys once.

The online softmax of FlashAttention-2 (Dao, 2023): running maximum and sum per row, in base 2. The
walk has two parts: tiles that every row sees whole, without masks, and tiles that a window, the
diagonal or the end of the sequence cuts. Tiles that no row sees are never visited.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from attn_common import fp8_info

from .._configs import forward_tile
from ._linked.primitives import LN2, LOG2E, NEG_INF, count_steps, dot, dot_add, step_start
from .backward import run_backward
from .common import NUMBERS, POINTERS, Plan, expand_descales
from .launch.runtime import dense
from .primitives import (
    count_keys,
    is_kept,
    is_visible,
    key_range,
    load_tile,
    load_tile_transposed,
    logits_of,
)
from .schedule import locate


@triton.jit
def _attend(
    acc, l_i, m_i, q, k_base, v_base, stride_ks, stride_vs,
    rows, diagonal, seqlen_q, seqlen_k, first_key, last_key, start, full_start, full_end,
    scale, softcap, slope, bias_base, stride_bias_m, stride_bias_n, window_left, window_right,
    rng_state_ptr, batch_head, dropout_threshold,
    MASKED: tl.constexpr, FOLD: tl.constexpr, SHIFT: tl.constexpr, BIAS_BYTES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_DROPOUT: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Fold keys into the running softmax of a block of queries: masked tiles, or whole ones."""
    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    steps = count_steps(start, full_start, full_end, last_key, BLOCK_N, MASKED)
    for step in tl.range(0, steps):
        keys = step_start(step, start, full_start, full_end, BLOCK_N, MASKED)
        keys += tl.arange(0, BLOCK_N)
        k = load_tile_transposed(
            k_base, keys, stride_ks, first_key, last_key, cols_d, HEAD_DIM, BLOCK_D, MASKED,
        )  # [D, N]  # fmt: skip
        s = dot(q, k, PRECISION, UPCAST)  # [M, N]
        if FOLD and not MASKED:
            # the scale goes into the exponential's multiply-add; it is positive, so max commutes
            factor = scale * LOG2E
        else:
            factor = 1.0
            s = logits_of(
                s, scale, softcap, slope, bias_base, stride_bias_m, stride_bias_n,
                rows[:, None], keys[None, :], diagonal, seqlen_q, seqlen_k,
                HAS_SOFTCAP, HAS_ALIBI, BIAS_BYTES,
            )  # fmt: skip
        if MASKED:
            visible = is_visible(
                rows[:, None], keys[None, :], diagonal, last_key, window_left, window_right,
                HAS_LEFT, HAS_RIGHT,
            )  # fmt: skip
            s = tl.where(visible, s, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(s, 1) * factor)
        if MASKED or BIAS_BYTES:
            # a row that has seen no key yet keeps a finite pivot: -inf - -inf is NaN
            pivot = tl.where(m_new == NEG_INF, 0.0, m_new)
        else:
            pivot = m_new
        p = tl.exp2(s * factor - (pivot - SHIFT)[:, None])
        alpha = tl.exp2(m_i - pivot)
        l_i = l_i * alpha + tl.sum(p, 1)
        if HAS_DROPOUT:
            kept = is_kept(
                rng_state_ptr, batch_head, rows[:, None], keys[None, :], dropout_threshold
            )
            p = tl.where(kept, p, 0.0)
        v = load_tile(
            v_base, keys, stride_vs, first_key, last_key, cols_dv, HEAD_DIM_V, BLOCK_DV, MASKED,
        )  # [N, DV]  # fmt: skip
        acc = dot_add(acc * alpha[:, None], p, v, PRECISION, UPCAST)  # [M, DV]
        m_i = m_new
    return acc, l_i, m_i


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    bias_ptr, alibi_slopes_ptr, sinks_ptr, q_descale_ptr, k_descale_ptr, v_descale_ptr,
    out_scale_ptr, rng_state_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr,
    scale, softcap, keep_scale, dropout_threshold, window_left, window_right,
    batch, heads_q, tokens_q, tokens_k, tiles, span,
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
    FOLD: tl.constexpr,  # plain scores with a positive scale
    DESCALE_PER_HEAD: tl.constexpr,
    SHIFT: tl.constexpr,  # binary exponent added to p, so that fp8 holds it well
    OUT_MAX: tl.constexpr,  # largest finite value of an fp8 output, 0 for other outputs
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter multiplies in fp32
):  # fmt: skip
    pid_m, batch_id, head, q_start, k_start, seqlen_q, seqlen_k = locate(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads_q, tokens_q, tokens_k, tiles, span,
        BLOCK_M, BALANCE=HAS_RIGHT, LAST_IS_LONGEST=True,
    )  # fmt: skip
    if pid_m < 0:
        return
    seqlen_k = count_keys(seqused_k_ptr, batch_id, batch, seqlen_k)
    # padding around the sequences has no row in per-sequence tensors
    is_padding = (batch_id < 0) | (batch_id >= batch)
    batch_id = tl.maximum(tl.minimum(batch_id, batch - 1), 0)
    head_k = head // GROUP
    batch_64 = batch_id.to(tl.int64)
    head_64 = head.to(tl.int64)
    head_k_64 = head_k.to(tl.int64)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    q_base = q_ptr + batch_64 * stride_qb + q_start * stride_qs + head_64 * stride_qh
    k_base = k_ptr + batch_64 * stride_kb + k_start * stride_ks + head_k_64 * stride_kh
    v_base = v_ptr + batch_64 * stride_vb + k_start * stride_vs + head_k_64 * stride_vh
    q = load_tile(q_base, rows, stride_qs, 0, seqlen_q, cols_d, HEAD_DIM, BLOCK_D, True)  # [M, D]

    HAS_ALIBI: tl.constexpr = alibi_slopes_ptr is not None
    HAS_DROPOUT: tl.constexpr = rng_state_ptr is not None
    bias_base = bias_ptr
    if BIAS_BYTES:
        bias_base += batch_64 * stride_bias_b + head_64 * stride_bias_h
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(alibi_slopes_ptr + batch_64 * stride_alibi_b + head)
    descale_at = batch_64 * (heads_q // GROUP) + head_k if DESCALE_PER_HEAD else 0
    if q_descale_ptr is not None:
        scale *= tl.load(q_descale_ptr + descale_at)
    if k_descale_ptr is not None:
        scale *= tl.load(k_descale_ptr + descale_at)

    # a sink is a first key without a value
    m_i = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        sink = tl.where(is_padding, NEG_INF, sink)
        m_i = tl.zeros([BLOCK_M], tl.float32) + sink
        l_i = tl.where(m_i == NEG_INF, 0.0, 1.0 * (1 << SHIFT))
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    diagonal = seqlen_k - seqlen_q
    first_row = pid_m * BLOCK_M
    last_row = tl.minimum(first_row + BLOCK_M, seqlen_q) - 1
    first_key, last_key, start, full_start, full_end = key_range(
        first_row, last_row, diagonal, seqlen_k, window_left, window_right,
        HAS_LEFT, HAS_RIGHT, BLOCK_N,
    )  # fmt: skip
    batch_head = batch_id * heads_q + head
    for masked in tl.static_range(2):
        acc, l_i, m_i = _attend(
            acc, l_i, m_i, q, k_base, v_base, stride_ks, stride_vs,
            rows, diagonal, seqlen_q, seqlen_k, first_key, last_key, start, full_start, full_end,
            scale, softcap, slope, bias_base, stride_bias_m, stride_bias_n,
            window_left, window_right, rng_state_ptr, batch_head, dropout_threshold,
            MASKED=masked == 1, FOLD=FOLD, SHIFT=SHIFT, BIAS_BYTES=BIAS_BYTES,
            HAS_SOFTCAP=HAS_SOFTCAP, HAS_ALIBI=HAS_ALIBI, HAS_LEFT=HAS_LEFT,
            HAS_RIGHT=HAS_RIGHT, HAS_DROPOUT=HAS_DROPOUT, HEAD_DIM=HEAD_DIM,
            HEAD_DIM_V=HEAD_DIM_V, BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV, BLOCK_N=BLOCK_N,
            PRECISION=PRECISION, UPCAST=UPCAST,
        )  # fmt: skip

    # rows that saw no key: output 0, lse -inf
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    out = acc * (keep_scale / l_safe)[:, None]
    if v_descale_ptr is not None:
        out *= tl.load(v_descale_ptr + descale_at)
    if out_scale_ptr is not None:
        out /= tl.load(out_scale_ptr)
    if OUT_MAX > 0:
        out = tl.clamp(out, -OUT_MAX, OUT_MAX, propagate_nan=tl.PropagateNan.ALL)
    lse = tl.where(l_i == 0.0, NEG_INF, (m_i + tl.log2(l_safe) - SHIFT) * LN2)
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


class ForwardPlan(Plan):
    """The forward pass of the calls of one form, and what its backward pass needs to know."""

    def __init__(self, x, options, out_dtype, deterministic=False):
        super().__init__(x, options, deterministic)
        is_fp8 = self.itemsize == 1
        self._out_dtype = out_dtype
        self._tile = forward_tile(self.platform, self.widest_head, self.itemsize)
        descales = x.q_descale, x.k_descale, x.v_descale
        self._has_descales = any(d is not None for d in descales)
        # nothing between the products and the softmax but the scale
        has_scale_alone = x.bias is None and x.alibi_slopes is None and options.softcap == 0.0
        no_factor = x.q_descale is x.k_descale is None
        self._launch = self.tiled(
            _forward_kernel,
            self._tile,
            FOLD=has_scale_alone and no_factor and options.softmax_scale >= 0,
            DESCALE_PER_HEAD=any(d is not None and d.numel() != 1 for d in descales),
            # e4m3fn holds 2**8, e4m3fnuz 2**7
            SHIFT=int(math.log2(fp8_info(x.q.dtype).max)) if is_fp8 else 0,
            OUT_MAX=fp8_info(out_dtype).max if out_dtype.itemsize == 1 else 0.0,
        )

    def forward(self, x):
        """Return ``(out, lse)`` of tensors as ``readable`` leaves them."""
        q, k, v, *offsets, bias, alibi_slopes, sinks, q_descale, k_descale, v_descale = x[:12]
        tokens_q = q.shape[-3]
        out = q.new_empty((*q.shape[:-1], self.head_dim_v), dtype=self._out_dtype)
        per_head = (self.heads_q, tokens_q)
        lse_shape = per_head if self.is_packed else (self.batch, *per_head)
        lse = q.new_empty(lse_shape, dtype=torch.float32)
        if self.batch == 0:  # a packed call may hold nothing but padding
            return out.zero_(), lse.fill_(-math.inf)
        descales = q_descale, k_descale, v_descale
        if self._has_descales:
            descales = expand_descales(descales, (self.batch, self.heads_k))
        tiles = self.tiles(tokens_q, self._tile.block_m)
        self._launch(
            tiles * self.heads_q * self.grid_batch,
            (
                q, k, v, out, lse, bias, dense(alibi_slopes), dense(sinks),
                *descales, x.out_scale, x.rng_state, *map(dense, offsets),
            ),
            self.numbers(q, k, tiles, self.span_q(k.shape[-3])),
        )  # fmt: skip
        return out, lse

    backward = run_backward
