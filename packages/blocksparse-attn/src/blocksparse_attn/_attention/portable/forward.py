"""Forward pass: one program owns a tile of queries and walks the blocks of keys that it keeps.

The online softmax is that of FlashAttention-2 (Dao, 2023): running maximum and sum per row, in base
2. The list of a tile has two parts. Blocks that every row sees whole are walked without masks. A
mask is needed for blocks that the diagonal or the end of the sequence cuts, or that only some of
the tile's rows of blocks or heads keep. Blocks that no row keeps are never visited. Each step loads
the next step's list entry, so that the loads of keys need not wait for it.
"""

import triton
import triton.language as tl

from ..._linked.portable.primitives import LOG2E, NEG_INF, dot, dot_add, pointer_to
from .merge import store_rows
from .primitives import count_steps, fetch_keys, key_offsets, live_keys, load_rows, sees, tokens_of
from .schedule import ranges_of
from .structures import Softmax


@triton.jit
def _attend(softmax, q, rows, walk, tensors, numbers, MASKED: tl.constexpr, OPTIONS: tl.constexpr):
    """Fold keys into the running softmax of a tile of queries, in masked or in whole steps."""
    HAS_MEMBERS: tl.constexpr = MASKED and (OPTIONS.ROW_MEMBERS > 1 or OPTIONS.HEAD_MEMBERS > 1)
    acc, l_i, m_i = softmax
    scale = numbers.scale
    ranges = ranges_of(walk, MASKED)
    steps = count_steps(ranges.count_a + ranges.count_b, OPTIONS.BLOCK_N, OPTIONS.BLOCK_K)
    first_step = steps * 0
    if OPTIONS.IS_SHORT:
        split = rows.work.split
        first_step = (steps.to(tl.int64) * split // numbers.splits).to(tl.int32)
        steps = (steps.to(tl.int64) * (split + 1) // numbers.splits).to(tl.int32)
    block, members = fetch_keys(first_step, ranges, tensors, HAS_MEMBERS, OPTIONS)
    for step in tl.range(first_step, steps):
        keys = tokens_of(block, step, OPTIONS.BLOCK_N, OPTIONS.BLOCK_K)
        live = keys >= 0
        if MASKED:
            live = live_keys(keys, members, rows, tensors, HAS_MEMBERS, OPTIONS)
        k_at = key_offsets(keys, live, numbers.k, rows.table_ptr, MASKED, OPTIONS.PAGE)
        v_at = key_offsets(keys, live, numbers.v, rows.table_ptr, MASKED, OPTIONS.PAGE)
        # [BLOCK_D, BLOCK_N]
        k = load_rows(rows.k_ptr, k_at, live, OPTIONS, False, MASKED, TURNED=True)
        s = dot(q, k, OPTIONS.PRECISION, OPTIONS.UPCAST)  # [BLOCK_M, BLOCK_N]
        if OPTIONS.FOLD and not MASKED:
            # fold the scale into the exponential's multiply-add; it is not negative: max commutes
            factor = scale * LOG2E
        else:
            factor = 1.0
            s = s * (scale * LOG2E)
        if MASKED:
            visible = sees(keys, members, rows, tensors, HAS_MEMBERS, OPTIONS)
            s = tl.where(visible, s, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(s, 1) * factor)  # [BLOCK_M]
        if MASKED:
            # a row that has not seen a key yet needs a finite pivot: -inf - -inf is NaN
            pivot = tl.where(m_new == NEG_INF, 0.0, m_new)
        else:
            pivot = m_new
        p = tl.exp2(s * factor - pivot[:, None])  # [BLOCK_M, BLOCK_N]
        alpha = tl.exp2(m_i - pivot)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = load_rows(rows.v_ptr, v_at, live, OPTIONS, True, MASKED)  # [BLOCK_N, BLOCK_DV]
        acc = dot_add(acc * alpha[:, None], p, v, OPTIONS.PRECISION, OPTIONS.UPCAST)
        m_i = m_new
        block, members = fetch_keys(step + 1, ranges, tensors, HAS_MEMBERS, OPTIONS)
    return Softmax(acc, l_i, m_i)


@triton.jit
def _fill(first, last, work, tensors, numbers, OPTIONS: tl.constexpr):
    """Write the results of padding: output 0, lse -inf."""
    m = tl.arange(0, OPTIONS.BLOCK_M)  # [BLOCK_M]
    cols_dv = tl.arange(0, OPTIONS.BLOCK_DV)  # [BLOCK_DV]
    in_group = work.unit % OPTIONS.PACKS * OPTIONS.HEADS + m % OPTIONS.HEADS
    head = work.unit // OPTIONS.PACKS * OPTIONS.GROUP + in_group
    for begin in range(first, last, OPTIONS.POSITIONS):
        token = (begin + m // OPTIONS.HEADS).to(tl.int64)  # [BLOCK_M]
        inside = (token < last) & (in_group < OPTIONS.GROUP)
        tl.store(
            tensors.lse_ptr + head.to(tl.int64) * numbers.tokens_q + token,
            tl.full([OPTIONS.BLOCK_M], NEG_INF, tl.float32),
            mask=inside,
        )
        out_at = (token * numbers.heads_q + head) * OPTIONS.HEAD_DIM_V
        out_ptrs = tensors.out_ptr + out_at[:, None] + cols_dv[None, :]
        nothing = tl.zeros([OPTIONS.BLOCK_M, OPTIONS.BLOCK_DV], tensors.out_ptr.dtype.element_ty)
        tl.store(out_ptrs, nothing, mask=inside[:, None] & (cols_dv < OPTIONS.HEAD_DIM_V)[None, :])


@triton.jit
def fill_padding(work, tensors, numbers, OPTIONS: tl.constexpr):
    """Write the results of padding around the sequences, if no other grid does.

    The first program of the first sequence and the first program of the last sequence do it.
    """
    units = numbers.heads_q // OPTIONS.GROUP * OPTIONS.PACKS
    place = tl.program_id(0) // (numbers.splits * units) % numbers.tiles
    is_first = (place + work.split == 0) & (numbers.fills != 0)
    starts = tensors.cu_seqlens_q_ptr
    if is_first & (work.sequence == 0):
        _fill(0, tl.load(starts), work, tensors, numbers, OPTIONS)
    if is_first & (work.sequence == numbers.batch - 1):
        end = tl.load(starts + numbers.batch)
        _fill(end, numbers.tokens_q, work, tensors, numbers, OPTIONS)


@triton.jit
def _store_part(out, lse2, tensors, OPTIONS: tl.constexpr):
    """Store the result of one split, for the merge; every row is written.

    The buffers are [program without split, split, OPTIONS.BLOCK_M].
    """
    HEAD_DIM_V: tl.constexpr = OPTIONS.HEAD_DIM_V
    m = tl.arange(0, OPTIONS.BLOCK_M)  # [BLOCK_M]
    cols_dv = tl.arange(0, OPTIONS.BLOCK_DV)  # [BLOCK_DV]
    first = tl.program_id(0).to(tl.int64) * OPTIONS.BLOCK_M
    tl.store(tensors.part_lse_ptr + first + m, lse2)
    at = first * HEAD_DIM_V + (m[:, None] * HEAD_DIM_V + cols_dv[None, :])  # [BLOCK_M, BLOCK_DV]
    tl.store(tensors.part_out_ptr + at, out, mask=(cols_dv < HEAD_DIM_V)[None, :])


@triton.jit
def make_output(rows, walk, tensors, numbers, OPTIONS: tl.constexpr):
    """Write the output and the LSE of a tile of queries, or the result of one split of its keys."""
    row_at = rows.row.to(tl.int64) * numbers.q.token + rows.head.to(tl.int64) * numbers.q.head
    q_ptr = pointer_to(tensors.q_ptr, numbers.q, rows.batch, rows.work.q_start, 0)
    q = load_rows(q_ptr, row_at, rows.inside, OPTIONS, False, True)  # [BLOCK_M, BLOCK_D]
    m_i = tl.full([OPTIONS.BLOCK_M], NEG_INF, tl.float32)  # [BLOCK_M]
    l_i = tl.zeros([OPTIONS.BLOCK_M], tl.float32)  # [BLOCK_M]
    acc = tl.zeros([OPTIONS.BLOCK_M, OPTIONS.BLOCK_DV], tl.float32)  # [BLOCK_M, BLOCK_DV]
    softmax = Softmax(acc, l_i, m_i)
    for masked in tl.static_range(2):
        softmax = _attend(softmax, q, rows, walk, tensors, numbers, masked == 1, OPTIONS)
    acc, l_i, m_i = softmax

    # fully masked rows: output 0, lse -inf
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    out = acc / l_safe[:, None]
    lse2 = tl.where(l_i == 0.0, NEG_INF, m_i + tl.log2(l_safe))
    if tensors.part_out_ptr is not None:
        _store_part(out, lse2, tensors, OPTIONS)
    else:
        store_rows(out, lse2, rows, tensors, numbers, OPTIONS)
