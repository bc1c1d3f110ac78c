"""Gradient of the queries: one program owns a tile of queries and walks the keys it keeps."""

import triton
import triton.language as tl

from ..._linked.portable.primitives import INF, LOG2E, dot, dot_add, pointer_to
from .merge import store_tile
from .primitives import count_steps, fetch_keys, live_keys, load_rows, sees, tokens_of
from .schedule import ranges_of
from .structures import RowValues


@triton.jit
def _dq_walk(dq, values, rows, walk, tensors, numbers, MASKED: tl.constexpr, OPTIONS: tl.constexpr):
    """Add the contributions of the keys to a tile of dq, in masked or in whole steps."""
    HAS_MEMBERS: tl.constexpr = MASKED and OPTIONS.ROW_MEMBERS > 1
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    ranges = ranges_of(walk, MASKED)
    block, members = fetch_keys(0, ranges, tensors, HAS_MEMBERS, OPTIONS)
    for step in tl.range(0, count_steps(ranges.count_a + ranges.count_b, BLOCK_N, OPTIONS.BLOCK_K)):
        keys = tokens_of(block, step, BLOCK_N, OPTIONS.BLOCK_K)
        live = keys >= 0
        if MASKED:
            live = live_keys(keys, members, rows, tensors, HAS_MEMBERS, OPTIONS)
        keys_64 = keys.to(tl.int64)
        k_t = load_rows(
            rows.k_ptr, keys_64 * numbers.k.token, live, OPTIONS, False, MASKED, TURNED=True
        )  # [BLOCK_D, BLOCK_N]
        v_t = load_rows(
            rows.v_ptr, keys_64 * numbers.v.token, live, OPTIONS, True, MASKED, TURNED=True
        )  # [BLOCK_DV, BLOCK_N]
        products = dot(values.q, k_t, OPTIONS.PRECISION, OPTIONS.UPCAST)  # [BLOCK_M, BLOCK_N]
        dp = dot(values.dout, v_t, OPTIONS.PRECISION, OPTIONS.UPCAST)  # [BLOCK_M, BLOCK_N]
        p = tl.exp2(products * (numbers.scale * LOG2E) - values.lse2[:, None])
        if MASKED:
            visible = sees(keys, members, rows, tensors, HAS_MEMBERS, OPTIONS)
            p = tl.where(visible, p, 0.0)
        ds = p * (dp - values.delta[:, None])  # [BLOCK_M, BLOCK_N]
        dq = dot_add(dq, ds, tl.trans(k_t), OPTIONS.PRECISION, OPTIONS.UPCAST)  # [BLOCK_M, BLOCK_D]
        block, members = fetch_keys(step + 1, ranges, tensors, HAS_MEMBERS, OPTIONS)
    return dq


@triton.jit
def make_dq(rows, walk, tensors, numbers, OPTIONS: tl.constexpr):
    """Write dq of a tile of queries."""
    heads = rows.head.to(tl.int64)
    rows_64 = rows.row.to(tl.int64)
    if tensors.cu_seqlens_q_ptr is None:
        row_at = (rows.batch * numbers.heads_q + heads) * numbers.tokens_q + rows.row
    else:
        row_at = heads * numbers.tokens_q + rows.work.q_start + rows.row
    lse2 = tl.load(tensors.lse2_ptr + row_at, mask=rows.inside, other=INF)
    delta = tl.load(tensors.delta_ptr + row_at, mask=rows.inside, other=0.0)
    # dout of a fully masked row is ignored, even if it is NaN
    sees = rows.inside & (lse2 < INF)
    q_at = rows_64 * numbers.q.token + heads * numbers.q.head
    q_ptr = pointer_to(tensors.q_ptr, numbers.q, rows.batch, rows.work.q_start, 0)
    q = load_rows(q_ptr, q_at, sees, OPTIONS, False, True)  # [BLOCK_M, BLOCK_D]
    dout_at = rows_64 * numbers.dout.token + heads * numbers.dout.head
    dout_ptr = pointer_to(tensors.dout_ptr, numbers.dout, rows.batch, rows.work.q_start, 0)
    dout = load_rows(dout_ptr, dout_at, sees, OPTIONS, True, True)  # [BLOCK_M, BLOCK_DV]
    values = RowValues(q, dout, lse2, delta)
    dq = tl.zeros([OPTIONS.BLOCK_M, OPTIONS.BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]
    for masked in tl.static_range(2):
        dq = _dq_walk(dq, values, rows, walk, tensors, numbers, masked == 1, OPTIONS)
    store_tile(dq * numbers.scale, rows, tensors, numbers, OPTIONS.HEAD_DIM, OPTIONS)
