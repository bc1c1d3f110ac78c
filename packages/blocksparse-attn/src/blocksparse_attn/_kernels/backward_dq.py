"""Gradient of the queries: one program owns a tile of queries and walks the keys it keeps."""

import triton
import triton.language as tl

from ._linked.primitives import INF, LOG2E, dot, dot_add
from .entries import entry
from .primitives import (
    NO_BLOCK,
    count_steps,
    fetch,
    live_keys,
    load_rows,
    sees,
    tokens_of,
)
from .schedule import key_ranges, key_walk, locate_queries, rows_of
from .structures import (
    GradientNumbers,
    GradientTensors,
    Grid,
    Options,
    QueryOptions,
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


@entry(triton.jit, GradientTensors, GradientNumbers, Options, QueryOptions, TileOptions)
def _dq_kernel(tensors, numbers, OPTIONS: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr):
    """``dq = scale * (p * (dout v^T - delta)) k`` of one tile of queries.

    ``p = exp(scale * q k^T - lse)`` over the kept blocks.
    """
    batch, heads_q, tokens_q = numbers.batch, numbers.heads_q, numbers.tokens_q
    grid = Grid(
        tensors.cu_seqlens_q_ptr,
        tensors.cu_seqlens_k_ptr,
        batch,
        heads_q // OPTIONS.GROUP * QUERIES.PACKS,
        tokens_q,
        numbers.tokens_k,
        numbers.tiles,
        numbers.span,
        1,
    )
    work = locate_queries(
        tl.program_id(0), grid, QUERIES.POSITIONS, False, OPTIONS.IS_CAUSAL, 0, OPTIONS.TOP_LEFT
    )
    tile, is_alive, sequence, unit, _, q_start, k_start, seqlen_q, _, diagonal = work
    if not is_alive:
        return
    # padding around the sequences has no row in per-sequence tensors
    batch_64 = tl.maximum(tl.minimum(sequence, batch - 1), 0).to(tl.int64)
    head_k = unit // QUERIES.PACKS
    m = tl.arange(0, TILE.BLOCK_M)  # [BLOCK_M]
    in_group = unit % QUERIES.PACKS * QUERIES.HEADS + m % QUERIES.HEADS
    positions = tile * QUERIES.POSITIONS + m // QUERIES.HEADS
    rows = positions - diagonal
    heads = (head_k * OPTIONS.GROUP + in_group).to(tl.int64)
    inside = (rows >= 0) & (rows < seqlen_q) & (in_group < OPTIONS.GROUP)
    rows_64 = rows.to(tl.int64)
    cols_d = tl.arange(0, OPTIONS.BLOCK_D)  # [BLOCK_D]
    if tensors.cu_seqlens_q_ptr is None:
        row_at = (batch_64 * heads_q + heads) * tokens_q + rows
        token = batch_64 * tokens_q
    else:
        row_at = heads * tokens_q + q_start + rows
        token = q_start
    lse2 = tl.load(tensors.lse2_ptr + row_at, mask=inside, other=INF)
    delta = tl.load(tensors.delta_ptr + row_at, mask=inside, other=0.0)
    # what arrives at a row without keys counts for nothing, NaN neither
    sees = inside & (lse2 < INF)
    q = load_rows(
        tensors.q_ptr + batch_64 * numbers.stride_qb + q_start * numbers.stride_qs,
        rows_64 * numbers.stride_qs + heads * numbers.stride_qh,
        sees,
        OPTIONS,
        False,
        True,
    )  # [BLOCK_M, BLOCK_D]
    dout = load_rows(
        tensors.dout_ptr + batch_64 * numbers.stride_dob + q_start * numbers.stride_dos,
        rows_64 * numbers.stride_dos + heads * numbers.stride_doh,
        sees,
        OPTIONS,
        True,
        True,
    )  # [BLOCK_M, BLOCK_DV]
    head_k_64 = head_k.to(tl.int64)
    k_base = tensors.k_ptr + batch_64 * numbers.stride_kb + k_start * numbers.stride_ks
    k_base += head_k_64 * numbers.stride_kh
    v_base = tensors.v_ptr + batch_64 * numbers.stride_vb + k_start * numbers.stride_vs
    v_base += head_k_64 * numbers.stride_vh

    standing = rows_of(work, positions, tensors, numbers, OPTIONS, QUERIES)
    walk = key_walk(work, standing.last_position, tensors, numbers, OPTIONS, QUERIES, TILE)
    values = RowValues(q, dout, lse2, delta)
    dq = tl.zeros([TILE.BLOCK_M, OPTIONS.BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]
    for masked in tl.static_range(2):
        dq = _dq_walk(
            dq,
            values,
            k_base,
            v_base,
            key_ranges(walk, masked == 1),
            standing,
            tensors,
            numbers,
            masked == 1,
            OPTIONS,
            QUERIES,
            TILE,
        )
    # dq is contiguous: [tokens, heads_q, HEAD_DIM]
    first_row = tile * QUERIES.POSITIONS - diagonal
    first_head = head_k * OPTIONS.GROUP + unit % QUERIES.PACKS * QUERIES.HEADS
    # addresses live through the walk: a scalar in 64 bits, and what a tile spans in 32
    dq_ptr = tensors.dq_ptr + ((token + first_row) * heads_q + first_head) * OPTIONS.HEAD_DIM
    at = (m // QUERIES.HEADS * heads_q + m % QUERIES.HEADS) * OPTIONS.HEAD_DIM
    tl.store(
        dq_ptr + (at[:, None] + cols_d[None, :]),
        (dq * numbers.scale).to(dq_ptr.dtype.element_ty),
        mask=inside[:, None] & (cols_d < OPTIONS.HEAD_DIM)[None, :],
    )
