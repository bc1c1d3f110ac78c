"""Gradient of the queries: one program owns a tile of queries and walks the keys it keeps."""

from __future__ import annotations

import triton
import triton.language as tl

from ._linked.primitives import INF, LOG2E, dot, dot_add
from .common import NUMBERS, POINTERS
from .primitives import (
    NO_BLOCK,
    count_steps,
    fetch,
    keeps,
    live_keys,
    load_tile,
    load_tile_transposed,
    tokens_of,
)
from .schedule import key_walk, locate_queries


@triton.jit
def _dq_walk(
    dq, q, dout, lse2, delta, k_base, v_base, stride_ks, stride_vs, items_ptr, members_ptr,
    first_a, count_a, first_b, count_b,
    positions, bits, first_position, last_position, span_start, seqlen_k, scale,
    MASKED: tl.constexpr, IS_CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    ROW_MEMBERS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROW_BYTES: tl.constexpr,
    ROW_BYTES_V: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Add what the keys contribute to a tile of dq: masked steps, or whole ones."""
    HAS_MEMBERS: tl.constexpr = MASKED and ROW_MEMBERS > 1
    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    block = fetch(
        items_ptr, 0, first_a, count_a, first_b, count_b, first_b, 0, NO_BLOCK,
        BLOCK_N, BLOCK_K,
    )  # fmt: skip
    members = 1
    if HAS_MEMBERS:
        members = fetch(
            members_ptr, 0, first_a, count_a, first_b, count_b, first_b, 0, 0, BLOCK_N, BLOCK_K
        )
    for step in tl.range(0, count_steps(count_a + count_b, BLOCK_N, BLOCK_K)):
        keys = tokens_of(block, step, BLOCK_N, BLOCK_K)
        live = keys >= 0
        if MASKED:
            live = live_keys(
                keys, members, first_position, last_position, span_start, seqlen_k,
                IS_CAUSAL, BLOCK_Q, ROW_MEMBERS,
            )  # fmt: skip
        keys_64 = keys.to(tl.int64)
        k_t = load_tile_transposed(
            k_base, keys_64 * stride_ks, live, cols_d, HEAD_DIM, BLOCK_D, ROW_BYTES, MASKED
        )  # [D, N]
        v_t = load_tile_transposed(
            v_base, keys_64 * stride_vs, live, cols_dv, HEAD_DIM_V, BLOCK_DV, ROW_BYTES_V, MASKED
        )  # [DV, N]
        products = dot(q, k_t, PRECISION, UPCAST)  # [M, N]
        dp = dot(dout, v_t, PRECISION, UPCAST)  # [M, N]
        p = tl.exp2(products * (scale * LOG2E) - lse2[:, None])
        if MASKED:
            if IS_CAUSAL:
                visible = keys[None, :] <= positions[:, None]
            else:
                visible = (keys < seqlen_k)[None, :] & (positions >= 0)[:, None]
            if HAS_MEMBERS:
                visible &= keeps(members, bits, BLOCK_N, BLOCK_K)
            p = tl.where(visible, p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = dot_add(dq, ds, tl.trans(k_t), PRECISION, UPCAST)  # [M, D]
        block = fetch(
            items_ptr, step + 1, first_a, count_a, first_b, count_b, first_b, 0, NO_BLOCK,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if HAS_MEMBERS:
            members = fetch(
                members_ptr, step + 1, first_a, count_a, first_b, count_b, first_b, 0, 0,
                BLOCK_N, BLOCK_K,
            )  # fmt: skip
    return dq


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dq_ptr,
    begin_ptr, whole_ptr, items_ptr, members_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    scale, batch, heads_q, tokens_q, tokens_k, tiles, span, list_rows, extent_k,
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
    PER_HEAD: tl.constexpr,  # lists of each head, or one for all
    POSITIONS: tl.constexpr,  # of a tile
    HEADS: tl.constexpr,  # of a tile, from one group
    PACKS: tl.constexpr,  # tiles that hold all heads of a group
    SPAN: tl.constexpr,  # positions of a list's owner
    ROW_MEMBERS: tl.constexpr,  # rows of blocks in a tile
    HEAD_MEMBERS: tl.constexpr,  # here 1
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Write one tile of dq."""
    units = heads_q // GROUP * PACKS
    tile, is_alive, sequence, unit, _split, q_start, k_start, seqlen_q, seqlen_k = locate_queries(
        tl.program_id(0), cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, units, tokens_q, tokens_k,
        tiles, span, 1, POSITIONS, False, IS_CAUSAL, 0,
    )  # fmt: skip
    if not is_alive:
        return
    # padding around the sequences has no row in per-sequence tensors
    batch_64 = tl.maximum(tl.minimum(sequence, batch - 1), 0).to(tl.int64)
    head_k = unit // PACKS
    m = tl.arange(0, BLOCK_M)
    in_group = unit % PACKS * HEADS + m % HEADS
    positions = tile * POSITIONS + m // HEADS
    rows = positions - (seqlen_k - seqlen_q)
    heads = (head_k * GROUP + in_group).to(tl.int64)
    inside = (rows >= 0) & (rows < seqlen_q) & (in_group < GROUP)
    rows_64 = rows.to(tl.int64)
    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    if cu_seqlens_q_ptr is None:
        row_at = (batch_64 * heads_q + heads) * tokens_q + rows
        token = batch_64 * tokens_q
    else:
        row_at = heads * tokens_q + q_start + rows
        token = q_start
    lse2 = tl.load(lse2_ptr + row_at, mask=inside, other=INF)
    delta = tl.load(delta_ptr + row_at, mask=inside, other=0.0)
    # what arrives at a row without keys counts for nothing, NaN neither
    sees = inside & (lse2 < INF)
    q = load_tile(
        q_ptr + batch_64 * stride_qb + q_start * stride_qs,
        rows_64 * stride_qs + heads * stride_qh, sees, cols_d, HEAD_DIM, BLOCK_D, ROW_BYTES, True,
    )  # [M, D]  # fmt: skip
    dout = load_tile(
        dout_ptr + batch_64 * stride_dob + q_start * stride_dos,
        rows_64 * stride_dos + heads * stride_doh, sees, cols_dv, HEAD_DIM_V, BLOCK_DV,
        ROW_BYTES_V, True,
    )  # [M, DV]  # fmt: skip
    head_k_64 = head_k.to(tl.int64)
    k_base = k_ptr + batch_64 * stride_kb + k_start * stride_ks + head_k_64 * stride_kh
    v_base = v_ptr + batch_64 * stride_vb + k_start * stride_vs + head_k_64 * stride_vh

    first_position = tl.maximum(tl.maximum(seqlen_k - seqlen_q, 0), tile * POSITIONS)
    last_position = tl.minimum(seqlen_k, (tile + 1) * POSITIONS) - 1
    span_start = tile * POSITIONS // SPAN * SPAN
    bits = tl.maximum(positions - span_start, 0) // BLOCK_Q
    PER_STEP: tl.constexpr = BLOCK_N // BLOCK_K if BLOCK_N > BLOCK_K else 1
    start, whole, rest, rests, cut, cuts = key_walk(
        begin_ptr, whole_ptr, items_ptr, unit, tile, list_rows, last_position, seqlen_k, extent_k,
        POSITIONS, SPAN, BLOCK_K, PER_STEP, IS_CAUSAL, PER_HEAD,
    )  # fmt: skip
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for masked in tl.static_range(2):
        if masked == 1:
            first_a, count_a, first_b, count_b = rest, rests, cut, cuts
        else:
            first_a, count_a, first_b, count_b = start, whole, start, cuts * 0
        dq = _dq_walk(
            dq, q, dout, lse2, delta, k_base, v_base, stride_ks, stride_vs, items_ptr, members_ptr,
            first_a, count_a, first_b, count_b,
            positions, bits, first_position, last_position, span_start, seqlen_k, scale,
            MASKED=masked == 1, IS_CAUSAL=IS_CAUSAL, BLOCK_Q=BLOCK_Q, BLOCK_K=BLOCK_K,
            ROW_MEMBERS=ROW_MEMBERS, HEAD_DIM=HEAD_DIM, HEAD_DIM_V=HEAD_DIM_V, BLOCK_D=BLOCK_D,
            BLOCK_DV=BLOCK_DV, ROW_BYTES=ROW_BYTES, ROW_BYTES_V=ROW_BYTES_V, BLOCK_N=BLOCK_N,
            PRECISION=PRECISION, UPCAST=UPCAST,
        )  # fmt: skip
    # dq is contiguous: [tokens, heads_q, HEAD_DIM]
    first_row = tile * POSITIONS - (seqlen_k - seqlen_q)
    first_head = head_k * GROUP + unit % PACKS * HEADS
    # addresses live through the walk: a scalar in 64 bits, and what a tile spans in 32
    dq_ptr += ((token + first_row) * heads_q + first_head) * HEAD_DIM
    at = (m // HEADS * heads_q + m % HEADS) * HEAD_DIM
    tl.store(
        dq_ptr + (at[:, None] + cols_d[None, :]), (dq * scale).to(dq_ptr.dtype.element_ty),
        mask=inside[:, None] & (cols_d < HEAD_DIM)[None, :],
    )  # fmt: skip


def launch_dq(plan, inputs, walk, dq):
    """Fill ``dq``."""
    queries = plan.backward_tiles
    tokens_q, tokens_k = inputs.q.shape[-3], inputs.k.shape[-3]
    tiles = queries.count(tokens_q, tokens_k)
    launch = plan.launch(_dq_kernel, None, queries.constants, None, queries.tile)
    launch(
        queries.programs(tiles),
        (*inputs[:6], dq, *walk, *inputs.offsets),
        (
            plan.options.softmax_scale, *plan.sizes(inputs.q, inputs.k), tiles,
            queries.span(tokens_k), queries.list_rows, plan.extent_k, *inputs.dout_strides,
            *plan.strides,
        ),
    )  # fmt: skip
