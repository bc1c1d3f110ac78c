"""Gradient of the queries: one program owns a tile of queries and walks the keys it keeps."""

import triton
import triton.language as tl

from ..._linked.portable.primitives import INF, LOG2E, dot, dot_add
from .merge import store_tile
from .primitives import count_steps, fetch_keys, live_keys, load_rows, sees, tokens_of
from .structures import Ranges, RowValues


@triton.jit
def _dq_walk(
    dq, values, keys_at, ranges, rows, tensors, numbers, MASKED: tl.constexpr, OPTIONS: tl.constexpr
):
    """Add the contributions of the keys to a tile of dq, in masked or in whole steps."""
    HAS_MEMBERS: tl.constexpr = MASKED and OPTIONS.ROW_MEMBERS > 1
    BLOCK_K: tl.constexpr = OPTIONS.BLOCK_K
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    PRECISION: tl.constexpr = OPTIONS.PRECISION
    UPCAST: tl.constexpr = OPTIONS.UPCAST
    block, members = fetch_keys(0, ranges, tensors, HAS_MEMBERS, OPTIONS)
    for step in tl.range(0, count_steps(ranges.count_a + ranges.count_b, BLOCK_N, BLOCK_K)):
        keys = tokens_of(block, step, BLOCK_N, BLOCK_K)
        live = keys >= 0
        if MASKED:
            live = live_keys(keys, members, rows, tensors, HAS_MEMBERS, OPTIONS)
        keys_64 = keys.to(tl.int64)
        k_t = load_rows(
            keys_at.k_base, keys_64 * numbers.stride_ks, live, OPTIONS, False, MASKED, TURNED=True
        )  # [BLOCK_D, BLOCK_N]
        v_t = load_rows(
            keys_at.v_base, keys_64 * numbers.stride_vs, live, OPTIONS, True, MASKED, TURNED=True
        )  # [BLOCK_DV, BLOCK_N]
        products = dot(values.q, k_t, PRECISION, UPCAST)  # [BLOCK_M, BLOCK_N]
        dp = dot(values.dout, v_t, PRECISION, UPCAST)  # [BLOCK_M, BLOCK_N]
        p = tl.exp2(products * (numbers.scale * LOG2E) - values.lse2[:, None])
        if MASKED:
            visible = sees(keys, members, rows, tensors, HAS_MEMBERS, OPTIONS)
            p = tl.where(visible, p, 0.0)
        ds = p * (dp - values.delta[:, None])  # [BLOCK_M, BLOCK_N]
        dq = dot_add(dq, ds, tl.trans(k_t), PRECISION, UPCAST)  # [BLOCK_M, BLOCK_D]
        block, members = fetch_keys(step + 1, ranges, tensors, HAS_MEMBERS, OPTIONS)
    return dq


@triton.jit
def make_dq(work, rows, walk, keys_at, standing, tensors, numbers, OPTIONS: tl.constexpr):
    """Write dq of a tile of queries."""
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_D: tl.constexpr = OPTIONS.BLOCK_D
    heads = rows.head.to(tl.int64)
    rows_64 = rows.row.to(tl.int64)
    if tensors.cu_seqlens_q_ptr is None:
        row_at = (rows.batch * numbers.heads_q + heads) * numbers.tokens_q + rows.row
    else:
        row_at = heads * numbers.tokens_q + work.q_start + rows.row
    lse2 = tl.load(tensors.lse2_ptr + row_at, mask=rows.inside, other=INF)
    delta = tl.load(tensors.delta_ptr + row_at, mask=rows.inside, other=0.0)
    # dout of a fully masked row is ignored, even if it is NaN
    sees = rows.inside & (lse2 < INF)
    q_at = rows_64 * numbers.stride_qs + heads * numbers.stride_qh
    q_ptr = tensors.q_ptr + rows.batch * numbers.stride_qb + work.q_start * numbers.stride_qs
    q = load_rows(q_ptr, q_at, sees, OPTIONS, False, True)  # [BLOCK_M, BLOCK_D]
    dout_at = rows_64 * numbers.stride_dos + heads * numbers.stride_doh
    dout_ptr = tensors.dout_ptr + rows.batch * numbers.stride_dob
    dout_ptr += work.q_start * numbers.stride_dos
    dout = load_rows(dout_ptr, dout_at, sees, OPTIONS, True, True)  # [BLOCK_M, BLOCK_DV]
    values = RowValues(q, dout, lse2, delta)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]
    for masked in tl.static_range(2):
        if masked == 1:
            ranges = Ranges(walk.rest, walk.rests, walk.cut, walk.cuts, walk.cut, 0)
        else:
            ranges = Ranges(walk.start, walk.whole, walk.start, walk.cuts * 0, walk.start, 0)
        dq = _dq_walk(dq, values, keys_at, ranges, standing, tensors, numbers, masked == 1, OPTIONS)
    store_tile(dq * numbers.scale, work, rows, tensors, numbers, OPTIONS.HEAD_DIM, OPTIONS)
