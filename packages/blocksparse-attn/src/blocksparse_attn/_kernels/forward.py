"""Forward pass: one program owns a tile of queries and walks the blocks of keys that it keeps.

The online softmax of FlashAttention-2 (Dao, 2023): running maximum and sum per row, in base 2. The
list of a tile has two parts: blocks that every row sees whole, walked without masks, and blocks
that the diagonal or the end of the sequence cuts, or that only some of the tile's rows of blocks,
or of its heads, keep. What no row keeps is never visited. The next step's entry of the list is
loaded a step ahead, so that the loads of keys wait for nothing.
"""

import triton
import triton.language as tl

from ._linked.primitives import LOG2E, NEG_INF, dot, dot_add
from .merge import store_rows
from .primitives import (
    NO_BLOCK,
    count_steps,
    fetch,
    key_offsets,
    live_keys,
    load_rows,
    sees,
    tokens_of,
)
from .schedule import key_walk, locate_queries, rows_of
from .structures import (
    ForwardNumbers,
    ForwardOptions,
    ForwardTensors,
    Grid,
    Keys,
    Options,
    QueryOptions,
    Ranges,
    Softmax,
    TileOptions,
)


@triton.jit
def _attend(
    softmax,
    q,
    keys_at,
    ranges,
    rows,
    tensors,
    numbers,
    MASKED: tl.constexpr,
    OPTIONS: tl.constexpr,
    QUERIES: tl.constexpr,
    FORWARD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Fold keys into the running softmax of a tile of queries: masked steps, or whole ones."""
    HAS_MEMBERS: tl.constexpr = MASKED and (QUERIES.ROW_MEMBERS > 1 or QUERIES.HEAD_MEMBERS > 1)
    PAGE: tl.constexpr = FORWARD.PAGE
    BLOCK_K: tl.constexpr = OPTIONS.BLOCK_K
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    acc, l_i, m_i = softmax
    scale = numbers.scale
    block = fetch(tensors.items_ptr, keys_at.first_step, ranges, NO_BLOCK, BLOCK_N, BLOCK_K)
    members = 1
    if HAS_MEMBERS:
        members = fetch(tensors.members_ptr, keys_at.first_step, ranges, 0, BLOCK_N, BLOCK_K)
    for step in tl.range(keys_at.first_step, keys_at.last_step):
        keys = tokens_of(block, step, BLOCK_N, BLOCK_K)
        live = keys >= 0
        if MASKED:
            live = live_keys(
                keys, members, rows, tensors, OPTIONS, QUERIES.ROW_MEMBERS, HAS_MEMBERS, BLOCK_N
            )
        k_at = key_offsets(
            keys, live, keys_at.table_ptr, numbers.stride_kb, numbers.stride_ks, PAGE, MASKED
        )
        v_at = key_offsets(
            keys, live, keys_at.table_ptr, numbers.stride_vb, numbers.stride_vs, PAGE, MASKED
        )
        k = load_rows(
            keys_at.k_base, k_at, live, OPTIONS, False, MASKED, TURNED=True
        )  # [BLOCK_D, BLOCK_N]
        s = dot(q, k, TILE.PRECISION, TILE.UPCAST)  # [BLOCK_M, BLOCK_N]
        if FORWARD.FOLD and not MASKED:
            # the scale goes into the exponential's multiply-add; it is positive, so max commutes
            factor = scale * LOG2E
        else:
            factor = 1.0
            s = s * (scale * LOG2E)
        if MASKED:
            visible = sees(keys, members, rows, tensors, OPTIONS, HAS_MEMBERS, BLOCK_N)
            s = tl.where(visible, s, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(s, 1) * factor)  # [BLOCK_M]
        if MASKED:
            # a row that has seen no key yet keeps a finite pivot: -inf - -inf is NaN
            pivot = tl.where(m_new == NEG_INF, 0.0, m_new)
        else:
            pivot = m_new
        p = tl.exp2(s * factor - pivot[:, None])  # [BLOCK_M, BLOCK_N]
        alpha = tl.exp2(m_i - pivot)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = load_rows(keys_at.v_base, v_at, live, OPTIONS, True, MASKED)  # [BLOCK_N, BLOCK_DV]
        acc = dot_add(acc * alpha[:, None], p, v, TILE.PRECISION, TILE.UPCAST)
        m_i = m_new
        block = fetch(tensors.items_ptr, step + 1, ranges, NO_BLOCK, BLOCK_N, BLOCK_K)
        if HAS_MEMBERS:
            members = fetch(tensors.members_ptr, step + 1, ranges, 0, BLOCK_N, BLOCK_K)
    return Softmax(acc, l_i, m_i)


@triton.jit
def _fill(
    first,
    last,
    head_base,
    in_group,
    tensors,
    numbers,
    OPTIONS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write what padding gives: output 0, lse -inf."""
    out_ptr, lse_ptr = tensors.out_ptr, tensors.lse_ptr
    HEAD_DIM_V: tl.constexpr = OPTIONS.HEAD_DIM_V
    cols_dv = tl.arange(0, OPTIONS.BLOCK_DV)  # [BLOCK_DV]
    head = head_base + in_group
    for begin in range(first, last, QUERIES.POSITIONS):
        token = (begin + tl.arange(0, BLOCK_M) // QUERIES.HEADS).to(tl.int64)  # [BLOCK_M]
        inside = (token < last) & (in_group < OPTIONS.GROUP)
        tl.store(
            lse_ptr + head.to(tl.int64) * numbers.tokens_q + token,
            tl.full([BLOCK_M], NEG_INF, tl.float32),
            mask=inside,
        )
        out_at = (token * numbers.heads_q + head) * HEAD_DIM_V
        out_ptrs = out_ptr + out_at[:, None] + cols_dv[None, :]
        nothing = tl.zeros([BLOCK_M, OPTIONS.BLOCK_DV], out_ptr.dtype.element_ty)
        tl.store(out_ptrs, nothing, mask=inside[:, None] & (cols_dv < HEAD_DIM_V)[None, :])


@triton.jit
def _fill_padding(
    work,
    in_group,
    tensors,
    numbers,
    OPTIONS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Fill the padding around the sequences, if no other grid does.

    The first program of the first sequence and that of the last one do it.
    """
    units = numbers.heads_q // OPTIONS.GROUP * QUERIES.PACKS
    head = work.unit // QUERIES.PACKS * OPTIONS.GROUP
    place = tl.program_id(0) // (numbers.splits * units) % numbers.tiles
    is_first = (place + work.split == 0) & (numbers.fills != 0)
    starts = tensors.cu_seqlens_q_ptr
    if is_first & (work.sequence == 0):
        ahead = tl.load(starts)
        _fill(0, ahead, head, in_group, tensors, numbers, OPTIONS, QUERIES, BLOCK_M)
    if is_first & (work.sequence == numbers.batch - 1):
        end, tokens = tl.load(starts + numbers.batch), numbers.tokens_q
        _fill(end, tokens, head, in_group, tensors, numbers, OPTIONS, QUERIES, BLOCK_M)


@triton.jit
def _key_bases(batch_64, k_start, head_k, tensors, numbers, PAGE: tl.constexpr):
    """Return where the keys and values of a head begin: of the sequence, or of all pages."""
    k_base, v_base = tensors.k_ptr, tensors.v_ptr
    if not PAGE:
        k_base += batch_64 * numbers.stride_kb + k_start * numbers.stride_ks
        v_base += batch_64 * numbers.stride_vb + k_start * numbers.stride_vs
    head = head_k.to(tl.int64)
    return k_base + head * numbers.stride_kh, v_base + head * numbers.stride_vh


@triton.jit
def _store_part(out, lse2, tensors, OPTIONS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Store the result over a part of the keys, to be merged; every row is written.

    The parts are [program without split, split, BLOCK_M].
    """
    HEAD_DIM_V: tl.constexpr = OPTIONS.HEAD_DIM_V
    m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    cols_dv = tl.arange(0, OPTIONS.BLOCK_DV)  # [BLOCK_DV]
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    tl.store(tensors.part_lse_ptr + first + m, lse2)
    at = first * HEAD_DIM_V + (m[:, None] * HEAD_DIM_V + cols_dv[None, :])  # [BLOCK_M, BLOCK_DV]
    tl.store(tensors.part_out_ptr + at, out, mask=(cols_dv < HEAD_DIM_V)[None, :])


@triton.jit(
    do_not_specialize=ForwardNumbers._fields,
    do_not_specialize_on_alignment=ForwardTensors._fields,
)
def _forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    part_out_ptr,
    part_lse_ptr,
    begin_ptr,
    whole_ptr,
    items_ptr,
    members_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    block_table_ptr,
    rule_ptr,
    scale,
    batch,
    heads_q,
    tokens_q,
    tokens_k,
    tiles,
    span,
    splits,
    fills,
    list_rows,
    list_stride,
    extent,
    stride_table,
    rule_stride,
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
    PAGE: tl.constexpr,
    IS_SHORT: tl.constexpr,
    SHORT: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``out = softmax(scale * q k^T) v`` over the kept blocks, and ``lse`` of each row.

    A program writes one tile of queries, or what a split of its keys gives.
    """
    tensors = ForwardTensors(
        q_ptr,
        k_ptr,
        v_ptr,
        out_ptr,
        lse_ptr,
        part_out_ptr,
        part_lse_ptr,
        begin_ptr,
        whole_ptr,
        items_ptr,
        members_ptr,
        cu_seqlens_q_ptr,
        cu_seqlens_k_ptr,
        block_table_ptr,
        rule_ptr,
    )
    numbers = ForwardNumbers(
        scale,
        batch,
        heads_q,
        tokens_q,
        tokens_k,
        tiles,
        span,
        splits,
        fills,
        list_rows,
        list_stride,
        extent,
        stride_table,
        rule_stride,
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
    FORWARD: tl.constexpr = ForwardOptions(PAGE, IS_SHORT, SHORT, FOLD)
    TILE: tl.constexpr = TileOptions(BLOCK_M, BLOCK_N, PRECISION, UPCAST)
    units = heads_q // GROUP * PACKS
    grid = Grid(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, units, tokens_q, tokens_k, tiles, span, splits
    )
    work = locate_queries(tl.program_id(0), grid, POSITIONS, IS_SHORT, IS_CAUSAL, SHORT, TOP_LEFT)
    tile, is_alive, sequence, unit, split, q_start, k_start, seqlen_q, _, diagonal = work
    head_k = unit // PACKS
    pack = unit % PACKS
    m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    in_group = pack * HEADS + m % HEADS
    if IS_SHORT and cu_seqlens_q_ptr is not None:
        _fill_padding(work, in_group, tensors, numbers, OPTIONS, QUERIES, BLOCK_M)
    if not is_alive:
        return
    # padding around the sequences has no row in per-sequence tensors
    batch_64 = tl.maximum(tl.minimum(sequence, batch - 1), 0).to(tl.int64)
    positions = tile * POSITIONS + m // HEADS  # [BLOCK_M]
    rows = positions - diagonal
    heads = head_k * GROUP + in_group
    inside = (rows >= 0) & (rows < seqlen_q) & (in_group < GROUP)
    q_at = rows.to(tl.int64) * stride_qs + heads.to(tl.int64) * stride_qh
    q = load_rows(
        q_ptr + batch_64 * stride_qb + q_start * stride_qs, q_at, inside, OPTIONS, False, True
    )  # [BLOCK_M, BLOCK_D]
    k_base, v_base = _key_bases(batch_64, k_start, head_k, tensors, numbers, PAGE)
    table_ptr = block_table_ptr
    if PAGE:
        table_ptr += batch_64 * stride_table

    standing = rows_of(work, positions, tensors, numbers, OPTIONS, QUERIES)
    PER_STEP: tl.constexpr = BLOCK_N // BLOCK_K if BLOCK_N > BLOCK_K else 1
    walk = key_walk(work, standing.last_position, tensors, numbers, OPTIONS, QUERIES, PER_STEP)
    m_i = tl.full([BLOCK_M], NEG_INF, tl.float32)  # [BLOCK_M]
    l_i = tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    softmax = Softmax(tl.zeros([BLOCK_M, BLOCK_DV], tl.float32), l_i, m_i)  # [BLOCK_M, BLOCK_DV]
    for masked in tl.static_range(2):
        if masked == 1:
            ranges = Ranges(walk.rest, walk.rests, walk.cut, walk.cuts, walk.cut, 0)
        else:
            ranges = Ranges(walk.start, walk.whole, walk.start, walk.cuts * 0, walk.start, 0)
        steps = count_steps(ranges.count_a + ranges.count_b, BLOCK_N, BLOCK_K)
        first_step = steps * 0
        if IS_SHORT:
            first_step = (steps.to(tl.int64) * split // splits).to(tl.int32)
            steps = (steps.to(tl.int64) * (split + 1) // splits).to(tl.int32)
        keys = Keys(k_base, v_base, table_ptr, first_step, steps)
        softmax = _attend(
            softmax,
            q,
            keys,
            ranges,
            standing,
            tensors,
            numbers,
            masked == 1,
            OPTIONS,
            QUERIES,
            FORWARD,
            TILE,
        )
    acc, l_i, m_i = softmax

    # rows that saw no key: output 0, lse -inf
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    out = acc / l_safe[:, None]
    lse2 = tl.where(l_i == 0.0, NEG_INF, m_i + tl.log2(l_safe))
    if part_out_ptr is not None:
        _store_part(out, lse2, tensors, OPTIONS, BLOCK_M)
    else:
        store_rows(
            out,
            lse2,
            batch_64,
            q_start,
            tile * POSITIONS - diagonal,
            head_k * GROUP + pack * HEADS,
            inside,
            tensors,
            numbers,
            HEADS,
            HEAD_DIM_V,
        )
