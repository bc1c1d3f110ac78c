"""Gradient of the queries: one program owns a tile of queries and walks the keys it keeps."""

import triton
import triton.language as tl

from ._linked.primitives import INF, LOG2E, dot, dot_add
from .primitives import (
    NO_BLOCK,
    count_steps,
    fetch,
    live_keys,
    load_rows,
    sees,
    tokens_of,
)
from .schedule import key_walk, locate_queries, rows_of
from .structures import (
    GradientNumbers,
    Grid,
    Options,
    QueryOptions,
    QueryTensors,
    Ranges,
    RowValues,
    TileOptions,
)


@triton.jit
def _dq_walk(
    dq,
    values,
    k_base,
    v_base,
    ranges,
    rows,
    tensors,
    numbers,
    MASKED: tl.constexpr,
    OPTIONS: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add what the keys contribute to a tile of dq: masked steps, or whole ones."""
    HAS_MEMBERS: tl.constexpr = MASKED and QUERIES.ROW_MEMBERS > 1
    BLOCK_K: tl.constexpr = OPTIONS.BLOCK_K
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    PRECISION: tl.constexpr = TILE.PRECISION
    UPCAST: tl.constexpr = TILE.UPCAST
    block = fetch(tensors.items_ptr, 0, ranges, NO_BLOCK, BLOCK_N, BLOCK_K)
    members = 1
    if HAS_MEMBERS:
        members = fetch(tensors.members_ptr, 0, ranges, 0, BLOCK_N, BLOCK_K)
    for step in tl.range(0, count_steps(ranges.count_a + ranges.count_b, BLOCK_N, BLOCK_K)):
        keys = tokens_of(block, step, BLOCK_N, BLOCK_K)
        live = keys >= 0
        if MASKED:
            live = live_keys(
                keys, members, rows, tensors, OPTIONS, QUERIES.ROW_MEMBERS, HAS_MEMBERS, BLOCK_N
            )
        keys_64 = keys.to(tl.int64)
        k_t = load_rows(
            k_base, keys_64 * numbers.stride_ks, live, OPTIONS, False, MASKED, TURNED=True
        )  # [BLOCK_D, BLOCK_N]
        v_t = load_rows(
            v_base, keys_64 * numbers.stride_vs, live, OPTIONS, True, MASKED, TURNED=True
        )  # [BLOCK_DV, BLOCK_N]
        products = dot(values.q, k_t, PRECISION, UPCAST)  # [BLOCK_M, BLOCK_N]
        dp = dot(values.dout, v_t, PRECISION, UPCAST)  # [BLOCK_M, BLOCK_N]
        p = tl.exp2(products * (numbers.scale * LOG2E) - values.lse2[:, None])
        if MASKED:
            visible = sees(keys, members, rows, tensors, OPTIONS, HAS_MEMBERS, BLOCK_N)
            p = tl.where(visible, p, 0.0)
        ds = p * (dp - values.delta[:, None])  # [BLOCK_M, BLOCK_N]
        dq = dot_add(dq, ds, tl.trans(k_t), PRECISION, UPCAST)  # [BLOCK_M, BLOCK_D]
        block = fetch(tensors.items_ptr, step + 1, ranges, NO_BLOCK, BLOCK_N, BLOCK_K)
        if HAS_MEMBERS:
            members = fetch(tensors.members_ptr, step + 1, ranges, 0, BLOCK_N, BLOCK_K)
    return dq


@triton.jit(
    do_not_specialize=GradientNumbers._fields,
    do_not_specialize_on_alignment=QueryTensors._fields,
)
def _dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    dq_ptr,
    begin_ptr,
    whole_ptr,
    items_ptr,
    members_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    rule_ptr,
    scale,
    batch,
    heads_q,
    tokens_q,
    tokens_k,
    tiles,
    span,
    list_rows,
    list_stride,
    extent,
    rule_stride,
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
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ROW_BYTES_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    PER_HEAD: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    POSITIONS: tl.constexpr,
    HEADS: tl.constexpr,
    PACKS: tl.constexpr,
    SPAN: tl.constexpr,
    ROW_MEMBERS: tl.constexpr,
    HEAD_MEMBERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``dq = scale * (p * (dout v^T - delta)) k`` of one tile of queries.

    ``p = exp(scale * q k^T - lse)`` over the kept blocks.
    """
    tensors = QueryTensors(
        q_ptr,
        k_ptr,
        v_ptr,
        dout_ptr,
        lse2_ptr,
        delta_ptr,
        dq_ptr,
        begin_ptr,
        whole_ptr,
        items_ptr,
        members_ptr,
        cu_seqlens_q_ptr,
        cu_seqlens_k_ptr,
        rule_ptr,
    )
    numbers = GradientNumbers(
        scale,
        batch,
        heads_q,
        tokens_q,
        tokens_k,
        tiles,
        span,
        list_rows,
        list_stride,
        extent,
        rule_stride,
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
    )
    OPTIONS: tl.constexpr = Options(
        GROUP,
        HEAD_DIM,
        HEAD_DIM_V,
        BLOCK_D,
        BLOCK_DV,
        ROW_BYTES,
        ROW_BYTES_V,
        BLOCK_Q,
        BLOCK_K,
        IS_CAUSAL,
        PER_HEAD,
        TOP_LEFT,
    )
    QUERIES: tl.constexpr = QueryOptions(POSITIONS, HEADS, PACKS, SPAN, ROW_MEMBERS, HEAD_MEMBERS)
    TILE: tl.constexpr = TileOptions(BLOCK_M, BLOCK_N, PRECISION, UPCAST)
    units = heads_q // GROUP * PACKS
    grid = Grid(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, units, tokens_q, tokens_k, tiles, span, 1
    )
    work = locate_queries(tl.program_id(0), grid, POSITIONS, False, IS_CAUSAL, 0, TOP_LEFT)
    tile, is_alive, sequence, unit, _, q_start, k_start, seqlen_q, _, diagonal = work
    if not is_alive:
        return
    # padding around the sequences has no row in per-sequence tensors
    batch_64 = tl.maximum(tl.minimum(sequence, batch - 1), 0).to(tl.int64)
    head_k = unit // PACKS
    m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    in_group = unit % PACKS * HEADS + m % HEADS
    positions = tile * POSITIONS + m // HEADS
    rows = positions - diagonal
    heads = (head_k * GROUP + in_group).to(tl.int64)
    inside = (rows >= 0) & (rows < seqlen_q) & (in_group < GROUP)
    rows_64 = rows.to(tl.int64)
    cols_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
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
    q = load_rows(
        q_ptr + batch_64 * stride_qb + q_start * stride_qs,
        rows_64 * stride_qs + heads * stride_qh,
        sees,
        OPTIONS,
        False,
        True,
    )  # [BLOCK_M, BLOCK_D]
    dout = load_rows(
        dout_ptr + batch_64 * stride_dob + q_start * stride_dos,
        rows_64 * stride_dos + heads * stride_doh,
        sees,
        OPTIONS,
        True,
        True,
    )  # [BLOCK_M, BLOCK_DV]
    head_k_64 = head_k.to(tl.int64)
    k_base = k_ptr + batch_64 * stride_kb + k_start * stride_ks + head_k_64 * stride_kh
    v_base = v_ptr + batch_64 * stride_vb + k_start * stride_vs + head_k_64 * stride_vh

    standing = rows_of(work, positions, tensors, numbers, OPTIONS, QUERIES)
    PER_STEP: tl.constexpr = BLOCK_N // BLOCK_K if BLOCK_N > BLOCK_K else 1
    walk = key_walk(work, standing.last_position, tensors, numbers, OPTIONS, QUERIES, PER_STEP)
    values = RowValues(q, dout, lse2, delta)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]
    for masked in tl.static_range(2):
        if masked == 1:
            ranges = Ranges(walk.rest, walk.rests, walk.cut, walk.cuts, walk.cut, 0)
        else:
            ranges = Ranges(walk.start, walk.whole, walk.start, walk.cuts * 0, walk.start, 0)
        dq = _dq_walk(
            dq,
            values,
            k_base,
            v_base,
            ranges,
            standing,
            tensors,
            numbers,
            masked == 1,
            OPTIONS,
            QUERIES,
            TILE,
        )
    # dq is contiguous: [tokens, heads_q, HEAD_DIM]
    first_row = tile * POSITIONS - diagonal
    first_head = head_k * GROUP + unit % PACKS * HEADS
    # addresses live through the walk: a scalar in 64 bits, and what a tile spans in 32
    dq_ptr += ((token + first_row) * heads_q + first_head) * HEAD_DIM
    at = (m // HEADS * heads_q + m % HEADS) * HEAD_DIM
    tl.store(
        dq_ptr + (at[:, None] + cols_d[None, :]),
        (dq * scale).to(dq_ptr.dtype.element_ty),
        mask=inside[:, None] & (cols_d < HEAD_DIM)[None, :],
    )
