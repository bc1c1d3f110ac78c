"""Gradients of keys and values: one program owns a tile of keys and walks the queries that keep it.

The walk is over the transposed layout, and serves every query head of the key head, so that no two
programs write one address: no atomics, and the result repeats bit for bit. Scores are transposed
([keys, queries]): the products that follow then take the accumulator as it lies, without a
transposition in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from attn_common import cdiv

from .._linked.host.forms import interpreted
from ._linked.primitives import INF, LOG2E, dot, dot_add, settle
from .common import NUMBERS, POINTERS
from .primitives import (
    NO_BLOCK,
    count_steps,
    fetch,
    keeps,
    load_tile,
    load_tile_transposed,
    lower_bound,
    tokens_of,
)
from .schedule import locate_keys


@triton.jit
def _dkdv_walk(
    dk, dv, k, v, q_ptr, dout_ptr, lse2_ptr, delta_ptr, items_ptr, members_ptr,
    first_a, count_a, first_b, count_b, first_c, count_c, head_k,
    stride_qs, stride_qh, stride_dos, stride_doh, stride_row_h,
    keys, bits, diagonal, seqlen_q, seqlen_k, scale,
    MASKED: tl.constexpr, GROUP: tl.constexpr, PER_HEAD: tl.constexpr, IS_CAUSAL: tl.constexpr,
    BLOCK_Q: tl.constexpr, COLUMN_MEMBERS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, ROW_BYTES: tl.constexpr, ROW_BYTES_V: tl.constexpr,
    BLOCK_M: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, SETTLE: tl.constexpr,
):  # fmt: skip
    """Add what the group's queries contribute to dk and dv: masked steps, or whole ones.

    The pointers stand at the sequence. One loop serves all heads of the group: a second one around
    it would cost registers, and the pipeline would drain between heads.
    """
    HAS_MEMBERS: tl.constexpr = MASKED and COLUMN_MEMBERS > 1
    # heads in an item: it names its own, or all heads of the group walk the one list in turn
    IN_ITEM: tl.constexpr = GROUP if PER_HEAD else 1
    TURNS: tl.constexpr = 1 if PER_HEAD else GROUP
    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    steps = count_steps(count_a + count_b + count_c, BLOCK_M, BLOCK_Q)
    # from a division by 0 the compiler concludes that there are steps, and loads unasked
    turn = tl.maximum(steps, 1)
    # no item: a row of blocks behind the end
    item = fetch(
        items_ptr, 0, first_a, count_a, first_b, count_b, first_c, count_c, NO_BLOCK * IN_ITEM,
        BLOCK_M, BLOCK_Q,
    )  # fmt: skip
    members = 1
    if HAS_MEMBERS:
        members = fetch(
            members_ptr, 0, first_a, count_a, first_b, count_b, first_c, count_c, 0,
            BLOCK_M, BLOCK_Q,
        )  # fmt: skip
    for step in tl.range(0, steps * TURNS):
        positions = tokens_of(item // IN_ITEM, step % turn, BLOCK_M, BLOCK_Q)
        rows = positions - diagonal
        if PER_HEAD:
            # of the step, or of each of its queries
            heads = head_k * GROUP + item % IN_ITEM
        else:
            heads = head_k * GROUP + step // turn
        heads_64 = heads.to(tl.int64)
        rows_64 = rows.to(tl.int64)
        inside = (rows >= 0) & (rows < seqlen_q)
        row_at = heads_64 * stride_row_h + rows_64
        if MASKED:
            lse2 = tl.load(lse2_ptr + row_at, mask=inside, other=INF)
            # what arrives at rows that see no key counts for nothing, NaN neither
            inside &= lse2 < INF
        q_t = load_tile_transposed(
            q_ptr, rows_64 * stride_qs + heads_64 * stride_qh, inside, cols_d,
            HEAD_DIM, BLOCK_D, ROW_BYTES, MASKED,
        )  # [D, M]  # fmt: skip
        products = dot(k, q_t, PRECISION, UPCAST)  # [N, M]
        dout = load_tile(
            dout_ptr, rows_64 * stride_dos + heads_64 * stride_doh, inside, cols_dv,
            HEAD_DIM_V, BLOCK_DV, ROW_BYTES_V, MASKED,
        )  # [M, DV]  # fmt: skip
        dp = dot(v, tl.trans(dout), PRECISION, UPCAST)  # [N, M]
        # behind the products: loaded ahead of them, these hold registers that the products need
        if MASKED:
            delta = tl.load(delta_ptr + row_at, mask=inside, other=0.0)
        else:
            lse2 = tl.load(lse2_ptr + row_at)  # whole tile inside: no mask needed
            delta = tl.load(delta_ptr + row_at)
        p = tl.exp2(products * (scale * LOG2E) - lse2[None, :])
        if MASKED:
            visible = inside[None, :] & (keys < seqlen_k)[:, None]
            if HAS_MEMBERS:
                visible &= keeps(members, bits, BLOCK_M, BLOCK_Q)
            if IS_CAUSAL:
                visible &= keys[:, None] <= positions[None, :]
            p = tl.where(visible, p, 0.0)
            # a key that nobody sees may hold NaN
            dp = tl.where(visible, dp, 0.0)
        dv = dot_add(dv, p, dout, PRECISION, UPCAST)  # [N, DV]
        ds = p * (dp - delta[None, :])
        dk = dot_add(dk, ds, tl.trans(q_t), PRECISION, UPCAST)  # [N, D]
        dk = settle(dk, SETTLE)
        item = fetch(
            items_ptr, (step + 1) % turn, first_a, count_a, first_b, count_b, first_c, count_c,
            NO_BLOCK * IN_ITEM, BLOCK_M, BLOCK_Q,
        )  # fmt: skip
        if HAS_MEMBERS:
            members = fetch(
                members_ptr, (step + 1) % turn, first_a, count_a, first_b, count_b, first_c,
                count_c, 0, BLOCK_M, BLOCK_Q,
            )  # fmt: skip
    return dk, dv


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr,
    begin_ptr, whole_ptr, items_ptr, members_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    scale, batch, heads_q, tokens_q, tokens_k, tiles, span, list_rows, extent_q,
    stride_dob, stride_dos, stride_doh,
    stride_qb, stride_qs, stride_qh,
    stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh,
    GROUP: tl.constexpr,  # query heads per key head
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ROW_BYTES_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # of the layout
    BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    PER_HEAD: tl.constexpr,  # lists of each key head, or one for all
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    SETTLE: tl.constexpr,  # wait for the products at the end of each step
):  # fmt: skip
    """Write one tile of dk and dv of one key head."""
    heads_k = heads_q // GROUP
    tile, sequence, head_k, q_start, k_start, seqlen_q, seqlen_k = locate_keys(
        tl.program_id(0), cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, heads_k, tokens_q, tokens_k,
        tiles, span, BLOCK_N, IS_CAUSAL,
    )  # fmt: skip
    if tile < 0:
        return
    batch_64 = tl.maximum(tl.minimum(sequence, batch - 1), 0).to(tl.int64)
    head_k_64 = head_k.to(tl.int64)
    keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    keys_64 = keys.to(tl.int64)
    inside = keys < seqlen_k
    k = load_tile(
        k_ptr + batch_64 * stride_kb + k_start * stride_ks + head_k_64 * stride_kh,
        keys_64 * stride_ks, inside, cols_d, HEAD_DIM, BLOCK_D, ROW_BYTES, True,
    )  # [N, D]  # fmt: skip
    v = load_tile(
        v_ptr + batch_64 * stride_vb + k_start * stride_vs + head_k_64 * stride_vh,
        keys_64 * stride_vs, inside, cols_dv, HEAD_DIM_V, BLOCK_DV, ROW_BYTES_V, True,
    )  # [N, DV]  # fmt: skip
    q_ptr += batch_64 * stride_qb + q_start * stride_qs
    dout_ptr += batch_64 * stride_dob + q_start * stride_dos
    if cu_seqlens_q_ptr is None:
        row_at = batch_64 * heads_q * tokens_q
    else:
        row_at = q_start

    # keys of an owner
    SPAN: tl.constexpr = BLOCK_N if BLOCK_N > BLOCK_K else BLOCK_K
    COLUMN_MEMBERS: tl.constexpr = BLOCK_N // BLOCK_K if BLOCK_N > BLOCK_K else 1
    PER_STEP: tl.constexpr = BLOCK_M // BLOCK_Q if BLOCK_M > BLOCK_Q else 1
    IN_ITEM: tl.constexpr = GROUP if PER_HEAD else 1
    bits = (keys % SPAN) // BLOCK_K
    list_row = tile * BLOCK_N // SPAN
    # no column behind the layout's last; the padding around the sequences faces nothing
    is_known = (list_row < list_rows) & (seqlen_q > 0)
    owner = list_row.to(tl.int64)
    if PER_HEAD:
        owner += head_k_64 * list_rows
    start = tl.load(begin_ptr + owner, mask=is_known, other=0)
    end = tl.load(begin_ptr + owner + 1, mask=is_known, other=0)
    cut = start + tl.load(whole_ptr + owner, mask=is_known, other=0)

    # rows of blocks that the queries touch, and those that they fill
    diagonal = seqlen_k - seqlen_q
    first_position = tl.maximum(diagonal, 0)
    seen = start
    whole = start
    whole_end = cut
    seen_end = cut
    cut_end = end
    if first_position > 0:
        seen = lower_bound(items_ptr, start, cut, first_position // BLOCK_Q, IN_ITEM)
        whole = lower_bound(items_ptr, seen, cut, tl.cdiv(first_position, BLOCK_Q), IN_ITEM)
        cut = lower_bound(items_ptr, cut, end, first_position // BLOCK_Q, IN_ITEM)
    if seqlen_k < extent_q:
        whole_end = lower_bound(items_ptr, whole, whole_end, seqlen_k // BLOCK_Q, IN_ITEM)
        seen_end = lower_bound(
            items_ptr, whole_end, seen_end, tl.cdiv(seqlen_k, BLOCK_Q), IN_ITEM
        )  # fmt: skip
        cut_end = lower_bound(items_ptr, cut, end, tl.cdiv(seqlen_k, BLOCK_Q), IN_ITEM)
    # keys that are not there need no mask: what they get is not stored
    count = tl.maximum(whole_end - whole, 0) // PER_STEP * PER_STEP
    rest = whole + count

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for masked in tl.static_range(2):
        if masked == 1:
            count_a, count_b, count_c = whole - seen, seen_end - rest, cut_end - cut
        else:
            count_a, count_b, count_c = count * 0, count, count * 0
        dk, dv = _dkdv_walk(
            dk, dv, k, v, q_ptr, dout_ptr, lse2_ptr + row_at, delta_ptr + row_at,
            items_ptr, members_ptr, seen, count_a, rest if masked == 1 else whole, count_b,
            cut, count_c, head_k,
            stride_qs, stride_qh, stride_dos, stride_doh, tokens_q,
            keys, bits, diagonal, seqlen_q, seqlen_k, scale,
            MASKED=masked == 1, GROUP=GROUP, PER_HEAD=PER_HEAD, IS_CAUSAL=IS_CAUSAL,
            BLOCK_Q=BLOCK_Q, COLUMN_MEMBERS=COLUMN_MEMBERS,
            HEAD_DIM=HEAD_DIM, HEAD_DIM_V=HEAD_DIM_V, BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV,
            ROW_BYTES=ROW_BYTES, ROW_BYTES_V=ROW_BYTES_V, BLOCK_M=BLOCK_M,
            PRECISION=PRECISION, UPCAST=UPCAST, SETTLE=SETTLE,
        )  # fmt: skip

    # dk and dv are contiguous: [tokens, heads_k, width]
    token = batch_64 * tokens_k if cu_seqlens_k_ptr is None else k_start
    first = (token + tile * BLOCK_N) * heads_k + head_k
    # addresses live through the walk: a scalar in 64 bits, and what a tile spans in 32
    row = (tl.arange(0, BLOCK_N) * heads_k)[:, None]
    tl.store(
        dk_ptr + first * HEAD_DIM + (row * HEAD_DIM + cols_d[None, :]),
        (dk * scale).to(dk_ptr.dtype.element_ty),
        mask=inside[:, None] & (cols_d < HEAD_DIM)[None, :],
    )
    tl.store(
        dv_ptr + first * HEAD_DIM_V + (row * HEAD_DIM_V + cols_dv[None, :]),
        dv.to(dv_ptr.dtype.element_ty),
        mask=inside[:, None] & (cols_dv < HEAD_DIM_V)[None, :],
    )


def launch_dkdv(plan, inputs, walk, dk, dv):
    """Fill ``dk`` and ``dv``."""
    tile = plan.backward_tile
    tiles = plan.tiles_k(inputs.k.shape[-3], tile.block_n)
    list_rows = cdiv(plan.extent_k, max(tile.block_n, plan.pattern.block_k))
    settle = plan.platform.is_hopper and not interpreted()
    launch = plan.launch(_dkdv_kernel, None, plan.constants, None, tile, SETTLE=settle)
    launch(
        tiles * plan.heads_k * plan.grid_batch,
        (*inputs[:6], dk, dv, *walk, *inputs.offsets),
        (
            plan.options.softmax_scale, *plan.sizes(inputs.q, inputs.k), tiles,
            plan.span_k(inputs.q.shape[-3]), list_rows, plan.extent_q, *inputs.dout_strides,
            *plan.strides,
        ),
    )  # fmt: skip
