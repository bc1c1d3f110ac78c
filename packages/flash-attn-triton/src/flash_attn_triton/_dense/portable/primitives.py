"""Functions that the forward and the backward kernels share: tiles, logits, masks, dropout.

Scores are kept in base 2 ("logits" below are natural scores times log2(e)), because the hardware
exponential is ``exp2``.
"""

import triton
import triton.language as tl

from ..._linked.portable.mask import is_visible, key_range
from ..._linked.portable.primitives import INF, LOG2E, NEG_INF, tanh
from .spans import is_in_spans, span_walk
from .structures import DropoutKey

# widest access to memory
ACCESS_BYTES = tl.constexpr(16)

# a score of -1e7: below it fp32 cannot hold the softmax of a row; see ``_reference/fixed.py``
LEAST_LOGIT = tl.constexpr(-1e7 * 1.4426950408889634)

# Philox, for dropout
ROUNDS = tl.constexpr(7)
MULTIPLIER = tl.constexpr(0xD256D193)
KEY_STEP = tl.constexpr(0x9E3779B9)


@triton.jit
def load_tile(
    base, rows, stride, first, last, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Load rows of a matrix, ``[rows, BLOCK]``; rows outside [first, last) give 0.

    Columns have unit stride. Every row begins at a multiple of ``ACCESS_BYTES``.
    """
    cols = tl.arange(0, BLOCK)  # [BLOCK]
    # int64: rows * stride may exceed 2**31 elements
    begin = tl.multiple_of(base + rows.to(tl.int64)[:, None] * stride, [ACCESS_BYTES, ACCESS_BYTES])
    pointers = begin + cols[None, :]
    if MASKED:
        mask = (rows >= first)[:, None] & (rows < last)[:, None] & (cols < WIDTH)[None, :]
        tile = tl.load(pointers, mask=mask, other=0.0)
    elif WIDTH != BLOCK:
        tile = tl.load(pointers, mask=(cols < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)  # whole tile inside: no mask needed
    return tile


@triton.jit
def load_tile_transposed(
    base, rows, stride, first, last, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Load the same tile as ``load_tile``, transposed."""
    cols = tl.arange(0, BLOCK)  # [BLOCK]
    begin = tl.multiple_of(base + rows.to(tl.int64)[None, :] * stride, [ACCESS_BYTES, ACCESS_BYTES])
    pointers = begin + cols[:, None]
    if MASKED:
        mask = (rows >= first)[None, :] & (rows < last)[None, :] & (cols < WIDTH)[:, None]
        tile = tl.load(pointers, mask=mask, other=0.0)
    elif WIDTH != BLOCK:
        tile = tl.load(pointers, mask=(cols < WIDTH)[:, None], other=0.0)
    else:
        tile = tl.load(pointers)  # whole tile inside: no mask needed
    return tile


@triton.jit
def logits_of(products, rows, cols, scores, head, OPTIONS: tl.constexpr):
    """Turn raw products into base-2 logits: scale, softcap, ALiBi, bias, in that order.

    ``rows`` and ``cols`` broadcast against ``products``, so either may run down the tile.
    """
    if OPTIONS.HAS_SOFTCAP:
        logits = tanh(products * (scores.scale / scores.numbers.softcap)) * (
            scores.numbers.softcap * LOG2E
        )
    else:
        logits = products * (scores.scale * LOG2E)
    if head.slope is not None:
        distance = tl.abs(rows + scores.mask.diagonal - cols).to(tl.float32)
        logits -= distance * (head.slope * LOG2E)
    if OPTIONS.BIAS_BYTES:
        begin = head.bias_ptr + rows.to(tl.int64) * scores.bias.row
        if OPTIONS.BIAS_BYTES == ACCESS_BYTES:
            pointers = tl.multiple_of(begin, [ACCESS_BYTES, ACCESS_BYTES]) + cols
        else:
            pointers = begin + cols.to(tl.int64) * scores.bias.col
        inside = (rows < scores.mask.seqlen_q) & (cols < scores.mask.seqlen_k)
        logits += tl.load(pointers, mask=inside, other=0.0).to(tl.float32) * LOG2E
    return logits


@triton.jit
def through_softcap(ds, products, scores, HAS_SOFTCAP: tl.constexpr):
    """Turn the gradient of logits into the gradient of raw products, without the scale."""
    if HAS_SOFTCAP:
        capped = tanh(products * (scores.scale / scores.numbers.softcap))
        # a key that no row sees may hold NaN; its gradient is 0 already
        ds = tl.where(ds == 0.0, 0.0, ds * (1.0 - capped * capped))
    return ds


@triton.jit
def load_row(base, rows, seqlen_q, other, MASKED: tl.constexpr):
    """Load one number per row of a block; rows after the end give ``other``."""
    if MASKED:
        values = tl.load(base + rows, mask=rows < seqlen_q, other=other)
    else:
        values = tl.load(base + rows)  # whole block inside: no mask needed
    return values


@triton.jit
def row_numbers(out, dout, lse, dlse):
    """Return ``(lse2, delta)``: ``lse * log2(e)``, and ``sum(out * dout) - dlse``, of rows.

    ``lse2`` is +inf for fully masked rows, so that their probabilities become 0. Their incoming
    gradient is ignored, even if it is NaN. ``dlse`` may be None.
    """
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if dlse is not None:
        # d(lse)/d(score) is p, which joins the softmax's own term
        delta -= dlse
    is_empty = lse == NEG_INF
    return tl.where(is_empty, INF, lse * LOG2E), tl.where(is_empty, 0.0, delta)


@triton.jit
def store_rows(base, row, values, inside, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Store rows, ``[rows, BLOCK_WIDTH]``, of a contiguous matrix where they are ``inside``."""
    cols = tl.arange(0, BLOCK_WIDTH)  # [BLOCK_WIDTH]
    pointers = base + (row * WIDTH)[:, None] + cols[None, :]
    mask = inside[:, None] & (cols < WIDTH)[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def count_keys(seqused_k_ptr, sequence, batch, seqlen_k):
    """Return how many keys of a sequence are used."""
    if seqused_k_ptr is not None:
        is_real = (sequence >= 0) & (sequence < batch)
        seqlen_k = tl.load(seqused_k_ptr + sequence, mask=is_real, other=0)
    return seqlen_k


@triton.jit
def dropout_key(rng_state_ptr, batch_head):
    """Return the dropout key of a head of a sequence, or None without dropout."""
    key = None
    if rng_state_ptr is not None:
        seed = tl.load(rng_state_ptr)
        offset = tl.load(rng_state_ptr + 1).to(tl.int32)
        word, row, col, _ = tl.philox(seed, batch_head, offset, offset * 0, offset * 0, ROUNDS)
        key = DropoutKey(word, row, col)
    return key


@triton.jit
def is_kept(rows, cols, scores, key):
    """Draw the dropout mask of a tile; see ``dropout_keep_mask`` in ``_reference/philox.py``.

    Four elements share a draw, but this code works in any layout, so each element draws for itself.
    """
    zeros = rows * 0 + cols * 0
    c0 = (zeros + (rows >> 4 << 3 | rows & 7)).to(tl.uint32, bitcast=True) ^ key.row
    c1 = (zeros + (cols >> 4 << 3 | cols & 7)).to(tl.uint32, bitcast=True) ^ key.col
    word = key.word
    for _ in tl.static_range(ROUNDS):
        # wraps on purpose, so TRITON_DEBUG=1 must not check it
        low = tl.mul(c0, MULTIPLIER, sanitize_overflow=False)
        c0, c1 = tl.umulhi(c0, MULTIPLIER) ^ word ^ c1, low
        word = tl.add(word, KEY_STEP, sanitize_overflow=False)
    draw = tl.where(rows & 8 == 0, c0, c1)
    draw = tl.where(cols & 8 == 0, draw & 0xFFFF, draw >> 16)
    return draw >= scores.numbers.dropout_threshold


@triton.jit
def is_seen(rows, cols, end, scores, OPTIONS: tl.constexpr):
    """Tell which keys ``cols`` before ``end`` the queries ``rows`` see; the two broadcast."""
    visible = is_visible(rows, cols, end, scores.mask, OPTIONS)
    if OPTIONS.SPANS:
        visible &= is_in_spans(cols, scores.spans)
    return visible


@triton.jit
def spans_of(tensors, sequence, q_start, tokens_q, OPTIONS: tl.constexpr):
    """Return the pointer to the spans of a sequence's rows, or None without spans."""
    spans_ptr = tensors.spans_ptr
    if OPTIONS.SPANS:
        row = q_start
        if OPTIONS.SPANS_BATCH:
            row += sequence.to(tl.int64) * tokens_q
        spans_ptr += row * (2 * OPTIONS.SPANS)
    return spans_ptr


@triton.jit
def walk_of_part(
    part: tl.constexpr,
    first_row,
    last_row,
    mask,
    hulls,
    OPTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return a part of the keys that the queries ``first_row..last_row`` see, as a ``Walk``.

    Two spans leave two parts; everything else leaves part 0.
    """
    if OPTIONS.SPANS:
        walk = span_walk(hulls, part, BLOCK)
    else:
        walk = key_range(first_row, last_row, mask, OPTIONS, BLOCK)
    return walk


@triton.jit
def score_gradient(
    products,
    dp,
    lse2,
    delta,
    rows,
    cols,
    scores,
    head,
    MASKED: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Return ``(p, ds)``: probabilities after dropout, and d(loss)/d(logit).

    Works on tiles of either orientation: ``rows``, ``cols``, ``lse2`` (the LSE in base 2) and
    ``delta`` broadcast.
    """
    logits = logits_of(products, rows, cols, scores, head, OPTIONS)
    p = tl.exp2(logits - lse2)
    if MASKED:
        visible = is_seen(rows, cols, scores.mask.seqlen_k, scores, OPTIONS)
        p = tl.where(visible, p, 0.0)
        # a key that no row sees may hold NaN
        dp = tl.where(visible, dp, 0.0)
    p_kept = p
    if scores.rng_state_ptr is not None:
        kept = is_kept(rows, cols, scores, head.dropout)
        p_kept = tl.where(kept, p * scores.numbers.keep_scale, 0.0)
        dp = tl.where(kept, dp * scores.numbers.keep_scale, 0.0)
    return p_kept, p * (dp - delta)


@triton.jit
def bias_of(tensors, strides, sequence, head):
    """Return the pointer to the bias of a head of a sequence, or None without a bias."""
    bias_ptr = tensors.bias_ptr
    if tensors.bias_ptr is not None:
        bias_ptr += sequence.to(tl.int64) * strides.bias.batch
        bias_ptr += head.to(tl.int64) * strides.bias.head
    return bias_ptr


@triton.jit
def slope_of(tensors, strides, sequence, head):
    """Return the ALiBi slope of a head of a sequence, or None without ALiBi."""
    slope = None
    if tensors.alibi_slopes_ptr is not None:
        slope = tl.load(tensors.alibi_slopes_ptr + sequence.to(tl.int64) * strides.alibi + head)
    return slope


@triton.jit
def load_queries(q_base, dout_base, inputs, row_base, rows, strides, seqlen_q, TILE: tl.constexpr):
    """Load a block of queries, and its output gradient, LSE and delta; see ``Inputs``."""
    # [BLOCK_M, BLOCK_D], [BLOCK_M, BLOCK_DV], [BLOCK_M], [BLOCK_M]
    q = load_tile(q_base, rows, strides.q.token, 0, seqlen_q, TILE.HEAD_DIM, TILE.BLOCK_D, True)
    dout = load_tile(
        dout_base, rows, strides.dout.token, 0, seqlen_q, TILE.HEAD_DIM_V, TILE.BLOCK_DV, True
    )
    lse2 = load_row(inputs.lse2_ptr + row_base, rows, seqlen_q, INF, True)
    delta = load_row(inputs.delta_ptr + row_base, rows, seqlen_q, 0.0, True)
    return q, dout, lse2, delta


@triton.jit
def load_keys_transposed(source, keys, walk, MASKED: tl.constexpr, TILE: tl.constexpr):
    """Load a tile of keys and one of values, both transposed, with tokens as columns."""
    k_t = load_tile_transposed(
        source.k_ptr,
        keys,
        source.stride_ks,
        walk.first,
        walk.last,
        TILE.HEAD_DIM,
        TILE.BLOCK_D,
        MASKED,
    )  # [BLOCK_D, BLOCK_N]
    v_t = load_tile_transposed(
        source.v_ptr,
        keys,
        source.stride_vs,
        walk.first,
        walk.last,
        TILE.HEAD_DIM_V,
        TILE.BLOCK_DV,
        MASKED,
    )  # [BLOCK_DV, BLOCK_N]
    return k_t, v_t
