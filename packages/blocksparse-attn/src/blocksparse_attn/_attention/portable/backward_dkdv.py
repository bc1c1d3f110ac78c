"""Gradients of keys and values: one program owns a tile of keys and walks the queries that keep it.

The walk follows the transposed layout and covers every query head of the key head, so no two
programs write one address: there are no atomics, and the result repeats bit for bit. Scores are
transposed ([keys, queries]), so that the next products take the accumulator without a transposition
in registers.
"""

import triton
import triton.language as tl

from ..._linked.portable.primitives import INF, LOG2E, dot, dot_add, pointer_to, settle
from .primitives import NO_BLOCK, count_steps, fetch, in_range, keeps, load_rows, tokens_of
from .schedule import locate_keys, query_walk
from .structures import Columns, Grid, Ranges, RowPointers


@triton.jit
def _dkdv_walk(
    dk, dv, queries, ranges, columns, tensors, numbers, MASKED: tl.constexpr, OPTIONS: tl.constexpr
):
    """Add the contributions of the group's queries to dk and dv, in masked or in whole steps.

    The pointers are those of the sequence. One loop covers all heads of the group: a second loop
    around it would cost registers and drain the pipeline between heads.
    """
    BLOCK_Q: tl.constexpr = OPTIONS.BLOCK_Q
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    HAS_MEMBERS: tl.constexpr = MASKED and OPTIONS.BLOCK_N > OPTIONS.BLOCK_K
    # an item names its head (PER_HEAD), or the heads of the group walk one list, one after another
    IN_ITEM: tl.constexpr = OPTIONS.GROUP if OPTIONS.PER_HEAD else 1
    TURNS: tl.constexpr = 1 if OPTIONS.PER_HEAD else OPTIONS.GROUP
    work = columns.work
    items = ranges.count_a + ranges.count_b + ranges.count_c
    steps = count_steps(items, BLOCK_M, BLOCK_Q)
    # max(steps, 1): LLVM takes division by ``steps`` as proof that steps > 0 and hoists the loads
    turn = tl.maximum(steps, 1)
    # without an item, ``fetch`` gives a row of blocks after the end
    item = fetch(tensors.items_ptr, 0, ranges, NO_BLOCK * IN_ITEM, BLOCK_M, BLOCK_Q)
    members = 1
    if HAS_MEMBERS:
        members = fetch(tensors.members_ptr, 0, ranges, 0, BLOCK_M, BLOCK_Q)
    for step in tl.range(0, steps * TURNS):
        positions = tokens_of(item // IN_ITEM, step % turn, BLOCK_M, BLOCK_Q)
        rows = positions - work.diagonal
        if OPTIONS.PER_HEAD:
            # one for the step, or one per query
            heads = work.unit * OPTIONS.GROUP + item % IN_ITEM
        else:
            heads = work.unit * OPTIONS.GROUP + step // turn
        heads_64 = heads.to(tl.int64)
        rows_64 = rows.to(tl.int64)
        inside = (rows >= 0) & (rows < work.seqlen_q)
        row_at = heads_64 * numbers.tokens_q + rows_64
        if MASKED:
            lse2 = tl.load(queries.lse2_ptr + row_at, mask=inside, other=INF)
            # dout of a fully masked row is ignored, even if it is NaN
            inside &= lse2 < INF
        q_at = rows_64 * numbers.q.token + heads_64 * numbers.q.head
        q_t = load_rows(
            queries.q_ptr, q_at, inside, OPTIONS, False, MASKED, TURNED=True
        )  # [BLOCK_D, BLOCK_M]
        products = dot(columns.k, q_t, OPTIONS.PRECISION, OPTIONS.UPCAST)  # [BLOCK_N, BLOCK_M]
        dout_at = rows_64 * numbers.dout.token + heads_64 * numbers.dout.head
        dout = load_rows(
            queries.dout_ptr, dout_at, inside, OPTIONS, True, MASKED
        )  # [BLOCK_M, BLOCK_DV]
        dp = dot(columns.v, tl.trans(dout), OPTIONS.PRECISION, OPTIONS.UPCAST)  # [BLOCK_N, BLOCK_M]
        # loaded after the products: before them, these would hold registers that the products need
        if MASKED:
            delta = tl.load(queries.delta_ptr + row_at, mask=inside, other=0.0)
        else:
            lse2 = tl.load(queries.lse2_ptr + row_at)  # whole tile inside: no mask needed
            delta = tl.load(queries.delta_ptr + row_at)
        p = tl.exp2(products * (numbers.scale * LOG2E) - lse2[None, :])  # [BLOCK_N, BLOCK_M]
        if MASKED:
            visible = inside[None, :] & (columns.keys < work.seqlen_k)[:, None]
            if HAS_MEMBERS:
                visible &= keeps(members, columns.bits, BLOCK_M, BLOCK_Q)
            if OPTIONS.IS_CAUSAL:
                visible &= columns.keys[:, None] <= positions[None, :]
            if queries.rule_ptr is not None:
                bounds = queries.rule_ptr + 2 * positions
                first = tl.load(bounds, mask=inside, other=1)
                last = tl.load(bounds + 1, mask=inside, other=0)
                visible &= in_range(columns.keys[:, None], first[None, :], last[None, :])
            p = tl.where(visible, p, 0.0)
            # a key that no query sees may hold NaN
            dp = tl.where(visible, dp, 0.0)
        dv = dot_add(dv, p, dout, OPTIONS.PRECISION, OPTIONS.UPCAST)  # [BLOCK_N, BLOCK_DV]
        ds = p * (dp - delta[None, :])
        dk = dot_add(dk, ds, tl.trans(q_t), OPTIONS.PRECISION, OPTIONS.UPCAST)  # [BLOCK_N, BLOCK_D]
        dk = settle(dk, OPTIONS.SETTLE)
        following = (step + 1) % turn
        item = fetch(tensors.items_ptr, following, ranges, NO_BLOCK * IN_ITEM, BLOCK_M, BLOCK_Q)
        if HAS_MEMBERS:
            members = fetch(tensors.members_ptr, following, ranges, 0, BLOCK_M, BLOCK_Q)
    return dk, dv


@triton.jit
def make_dkdv(tensors, numbers, OPTIONS: tl.constexpr):
    """Write dk and dv of one tile of keys, summed over all query heads of the key head."""
    q_starts, k_starts = tensors.cu_seqlens_q_ptr, tensors.cu_seqlens_k_ptr
    heads_k = numbers.heads_q // OPTIONS.GROUP
    sizes = numbers.tokens_q, numbers.tokens_k, numbers.tiles, numbers.span
    grid = Grid(q_starts, k_starts, numbers.batch, heads_k, *sizes, 1)
    work = locate_keys(tl.program_id(0), grid, OPTIONS.BLOCK_N, OPTIONS.IS_CAUSAL, OPTIONS.TOP_LEFT)
    if not work.is_alive:
        return
    batch_64 = tl.maximum(tl.minimum(work.sequence, numbers.batch - 1), 0).to(tl.int64)
    head_64 = work.unit.to(tl.int64)
    keys = work.tile * OPTIONS.BLOCK_N + tl.arange(0, OPTIONS.BLOCK_N)  # [BLOCK_N]
    keys_64 = keys.to(tl.int64)
    inside = keys < work.seqlen_k
    k_ptr = pointer_to(tensors.k_ptr, numbers.k, batch_64, work.k_start, head_64)
    v_ptr = pointer_to(tensors.v_ptr, numbers.v, batch_64, work.k_start, head_64)
    k = load_rows(k_ptr, keys_64 * numbers.k.token, inside, OPTIONS, False, True)
    v = load_rows(v_ptr, keys_64 * numbers.v.token, inside, OPTIONS, True, True)
    q_ptr = pointer_to(tensors.q_ptr, numbers.q, batch_64, work.q_start, 0)
    dout_ptr = pointer_to(tensors.dout_ptr, numbers.dout, batch_64, work.q_start, 0)
    row_at = batch_64 * numbers.heads_q * numbers.tokens_q if q_starts is None else work.q_start
    rule_ptr = tensors.rule_ptr
    if rule_ptr is not None:
        rule_ptr += batch_64 * numbers.rule_stride
    lse2_ptr, delta_ptr = tensors.lse2_ptr + row_at, tensors.delta_ptr + row_at
    queries = RowPointers(q_ptr, dout_ptr, lse2_ptr, delta_ptr, rule_ptr)
    SPAN: tl.constexpr = OPTIONS.BLOCK_N if OPTIONS.BLOCK_N > OPTIONS.BLOCK_K else OPTIONS.BLOCK_K
    bits = (keys % SPAN) // OPTIONS.BLOCK_K
    seen, whole, count, seen_end, cut, cut_end = query_walk(work, tensors, numbers, OPTIONS)
    rest = whole + count
    columns = Columns(work, k, v, keys, bits)
    dk = tl.zeros([OPTIONS.BLOCK_N, OPTIONS.BLOCK_D], tl.float32)  # [BLOCK_N, BLOCK_D]
    dv = tl.zeros([OPTIONS.BLOCK_N, OPTIONS.BLOCK_DV], tl.float32)  # [BLOCK_N, BLOCK_DV]
    for masked in tl.static_range(2):
        if masked == 1:
            ranges = Ranges(seen, whole - seen, rest, seen_end - rest, cut, cut_end - cut)
        else:
            ranges = Ranges(seen, count * 0, whole, count, cut, count * 0)
        dk, dv = _dkdv_walk(
            dk, dv, queries, ranges, columns, tensors, numbers, masked == 1, OPTIONS
        )

    token = batch_64 * numbers.tokens_k if k_starts is None else work.k_start
    first = (token + work.tile * OPTIONS.BLOCK_N) * heads_k + work.unit
    # addresses stay in registers through the walk: a 64-bit scalar and 32-bit offsets in the tile
    row = tl.arange(0, OPTIONS.BLOCK_N) * heads_k
    _store(dk * numbers.scale, tensors.out_ptr, first, row, inside, OPTIONS.HEAD_DIM)
    _store(dv, tensors.dv_ptr, first, row, inside, OPTIONS.HEAD_DIM_V)


@triton.jit
def _store(x, pointer, first, row, inside, WIDTH: tl.constexpr):
    """Write a tile of keys to a contiguous gradient ``[tokens, heads_k, WIDTH]``."""
    cols = tl.arange(0, x.shape[1])
    tl.store(
        pointer + first * WIDTH + (row[:, None] * WIDTH + cols[None, :]),
        x.to(pointer.dtype.element_ty),
        mask=inside[:, None] & (cols < WIDTH)[None, :],
    )
