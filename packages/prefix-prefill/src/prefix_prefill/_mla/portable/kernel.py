"""Multi-head latent attention: one program owns a tile of rows, which share all their keys.

A row is one head of one token. A tile of keys is read once, as two panels of columns. The first
panel is also the values, so it is multiplied by queries and by probabilities. The rest is as in
``_paged/portable/attention.py``.
"""

import triton
import triton.language as tl

from ..._linked.portable.primitives import LN2, LOG2E, NEG_INF, dot, dot_add
from ..._paged.portable.parameters import Schedule, pointers_of_callers
from ..._paged.portable.primitives import load_rows, look_up, rows_of
from ..._paged.portable.schedule import locate
from ..._paged.portable.structures import (
    Columns,
    Packed,
    Results,
    Softmax,
    Table,
    VectorLayout,
    Vectors,
)
from .parameters import (
    MlaCounts,
    MlaOptions,
    MlaPointers,
    MlaQueries,
    MlaSource,
    MlaStrides,
    MlaTile,
    MlaWriteNumbers,
    MlaWritePointers,
    MlaWriteTile,
    Share,
)

# no specialisation on values or alignment: see ``_paged/portable/attention.py``
NUMBERS = MlaCounts._fields + MlaStrides._fields
POINTERS = pointers_of_callers(MlaPointers._fields)


@triton.jit
def _share_of(
    place,
    seqlen_k,
    split,
    splits,
    CAUSAL: tl.constexpr,
    SCHEDULE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the ``Share`` of a split; splits have equally many tiles, the last ones fewer."""
    last = seqlen_k
    if CAUSAL:
        row = tl.minimum((place.tile + 1) * SCHEDULE.BLOCK_M, place.seqlen_q * SCHEDULE.GROUP) - 1
        last = row // SCHEDULE.GROUP + (seqlen_k - place.seqlen_q) + 1
        last = tl.maximum(tl.minimum(last, seqlen_k), 0)
    tiles = tl.cdiv(last, TILE.BLOCK_N)
    most = tl.cdiv(tiles, splits)
    begin = tl.minimum(split * most, tiles)
    return Share(begin, tl.minimum(begin + most, tiles), last)


@triton.jit
def _clear(pid, cu_seqlens_q_ptr, batch, results, SCHEDULE: tl.constexpr, TILE: tl.constexpr):
    """Write out 0 and lse -inf for tokens outside every sequence; programs share them."""
    begin = tl.load(cu_seqlens_q_ptr)
    end = tl.load(cu_seqlens_q_ptr + batch)
    tokens, target = results.tokens, results.out
    padding = begin + tokens - end
    cols = tl.arange(0, TILE.BLOCK_V)  # [BLOCK_V]
    for i in range(pid, padding, tl.num_programs(0)):
        token = tl.where(i < begin, i, end + i - begin).to(tl.int64)
        for first in range(0, SCHEDULE.GROUP, SCHEDULE.BLOCK_M):
            head = (first + tl.arange(0, SCHEDULE.BLOCK_M)).to(tl.int64)  # [BLOCK_M]
            is_head = head < SCHEDULE.GROUP
            rows = token * target.stride_token + head * target.stride_head
            at = target.ptr + rows[:, None] + cols[None, :]  # [BLOCK_M, BLOCK_V]
            zeros = tl.zeros([SCHEDULE.BLOCK_M, TILE.BLOCK_V], tl.float32)
            inside = is_head[:, None] & (cols < TILE.HEAD_DIM_V)[None, :]
            tl.store(at, zeros.to(target.ptr.dtype.element_ty), mask=inside)
            if results.lse_ptr is not None:
                nothing = tl.full([SCHEDULE.BLOCK_M], NEG_INF, tl.float32)
                tl.store(results.lse_ptr + head * tokens + token, nothing, mask=is_head)


@triton.jit
def _attend(
    softmax, queries, source, share, OPTIONS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr
):
    """Fold the keys of a share into the softmax; ``WIDE`` is the dtype of the operands."""
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    HEAD_DIM_V: tl.constexpr = TILE.HEAD_DIM_V
    VALUES: tl.constexpr = Columns(HEAD_DIM_V, TILE.BLOCK_V)
    REST: tl.constexpr = Columns(TILE.HEAD_DIM - HEAD_DIM_V, TILE.BLOCK_R)
    LAYOUT: tl.constexpr = VectorLayout(TILE.HEAD_DIM, OPTIONS.KV_UNIT, OPTIONS.KV_BYTES, 0)
    cols_v = tl.arange(0, TILE.BLOCK_V)  # [BLOCK_V]
    cols_r = tl.arange(0, TILE.BLOCK_R)  # [BLOCK_R]
    acc, l_i, m_i = softmax.acc, softmax.l_i, softmax.m_i
    for step in range(share.begin, share.end):
        begin = step * BLOCK_N
        keys = begin + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        inside = keys < share.last
        if OPTIONS.PAGE % BLOCK_N == 0:
            wanted = begin < share.last
        else:
            wanted = inside
        pages = look_up(source.table, begin, wanted, OPTIONS.PAGE, BLOCK_N)
        rows = rows_of(pages, begin, source.v, OPTIONS.PAGE, BLOCK_N)  # [BLOCK_N]
        v = load_rows(source.v, rows, inside, cols_v, LAYOUT, VALUES, True)  # [BLOCK_N, BLOCK_V]
        r = load_rows(source.r, rows, inside, cols_r, LAYOUT, REST, True)  # [BLOCK_N, BLOCK_R]
        v, r = v.to(WIDE), r.to(WIDE)
        s = dot(queries.v, tl.trans(v), TILE.PRECISION, TILE.UPCAST)  # [BLOCK_M, BLOCK_N]
        s = dot_add(s, queries.r, tl.trans(r), TILE.PRECISION, TILE.UPCAST) * queries.factor
        visible = inside[None, :]
        if OPTIONS.CAUSAL:
            visible = visible & (keys[None, :] <= queries.position[:, None])
        s = tl.where(visible, s, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(s, 1))  # [BLOCK_M]
        # a row without keys so far needs a finite pivot: -inf - -inf is NaN
        pivot = tl.where(m_new == NEG_INF, 0.0, m_new)
        p = tl.exp2(s - pivot[:, None])  # [BLOCK_M, BLOCK_N]
        alpha = tl.exp2(m_i - pivot)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = dot_add(acc * alpha[:, None], p, v, TILE.PRECISION, TILE.UPCAST)
        m_i = m_new
    return Softmax(acc, l_i, m_i)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def mla_kernel(
    q_ptr,
    kv_cache_ptr,
    block_table_ptr,
    cu_seqlens_q_ptr,
    seqlens_k_ptr,
    q_descale_ptr,
    kv_descale_ptr,
    out_ptr,
    lse_ptr,
    part_out_ptr,
    part_lse_ptr,
    scale,
    batch,
    tokens,
    splits,
    stride_qs,
    stride_qh,
    stride_os,
    stride_oh,
    stride_kvp,
    stride_kvs,
    stride_kvd,
    stride_table_b,
    stride_table_p,
    PAGE: tl.constexpr,
    KV_UNIT: tl.constexpr,
    KV_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``out = softmax(mask(scale * q @ k.T)) @ k[:, :HEAD_DIM_V]``, of rows or of a split of keys.

    ``k`` is in the pages of a cache.
    """
    OPTIONS: tl.constexpr = MlaOptions(PAGE, KV_UNIT, KV_BYTES, ROW_BYTES, CAUSAL)
    SCHEDULE: tl.constexpr = Schedule(GROUP, MIN_TOKENS, MAX_TOKENS, TILES, BLOCK_M)
    TILE: tl.constexpr = MlaTile(HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_V, BLOCK_R, PRECISION, UPCAST)
    Q: tl.constexpr = q_ptr.dtype.element_ty
    KV: tl.constexpr = kv_cache_ptr.dtype.element_ty
    # bf16 holds all numbers of 8 bits
    KEYS: tl.constexpr = KV if KV.primitive_bitwidth > 8 else tl.bfloat16
    WIDE: tl.constexpr = Q if Q.primitive_bitwidth > 8 else KEYS
    pid = tl.program_id(0)
    results = Results(Packed(out_ptr, stride_os, stride_oh), lse_ptr, None, tokens)
    _clear(pid, cu_seqlens_q_ptr, batch, results, SCHEDULE, TILE)
    split = pid % splits
    unit = pid // splits
    place = locate(unit, cu_seqlens_q_ptr, batch, SCHEDULE)
    if place.tile < 0:
        return
    seqlen_k = tl.load(seqlens_k_ptr + place.sequence)
    row = place.tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    is_inside = row < place.seqlen_q * GROUP
    token = place.q_start.to(tl.int64) + row // GROUP
    head = (row % GROUP).to(tl.int64)
    cols_v = tl.arange(0, BLOCK_V)  # [BLOCK_V]
    cols_r = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    q_rows = token * stride_qs + head * stride_qh  # [BLOCK_M]
    Q_LAYOUT: tl.constexpr = VectorLayout(HEAD_DIM, True, ROW_BYTES, 0)
    VALUES: tl.constexpr = Columns(HEAD_DIM_V, BLOCK_V)
    REST: tl.constexpr = Columns(HEAD_DIM - HEAD_DIM_V, BLOCK_R)
    q_v = Vectors(q_ptr, None, None, None, None)
    q_r = Vectors(q_ptr + HEAD_DIM_V, None, None, None, None)
    factor = scale * LOG2E
    if q_descale_ptr is not None:
        factor *= tl.load(q_descale_ptr)
    v_descale = 1.0
    if kv_descale_ptr is not None:
        v_descale = tl.load(kv_descale_ptr)
        factor *= v_descale
    queries = MlaQueries(
        load_rows(q_v, q_rows, is_inside, cols_v, Q_LAYOUT, VALUES, True).to(WIDE),
        load_rows(q_r, q_rows, is_inside, cols_r, Q_LAYOUT, REST, True).to(WIDE),
        row // GROUP + (seqlen_k - place.seqlen_q),
        factor,
    )
    entries = block_table_ptr + place.sequence.to(tl.int64) * stride_table_b
    rest_ptr = kv_cache_ptr + tl.full([], HEAD_DIM_V, tl.int64) * stride_kvd
    source = MlaSource(
        Vectors(kv_cache_ptr, stride_kvp, stride_kvs, None, stride_kvd),
        Vectors(rest_ptr, stride_kvp, stride_kvs, None, stride_kvd),
        Table(entries, stride_table_p),
    )
    share = _share_of(place, seqlen_k, split, splits, CAUSAL, SCHEDULE, TILE)
    softmax = Softmax(
        tl.zeros([BLOCK_M, BLOCK_V], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.full([BLOCK_M], NEG_INF, tl.float32),
    )
    softmax = _attend(softmax, queries, source, share, OPTIONS, TILE, WIDE)

    # fully masked rows: output 0, lse -inf
    l_i = softmax.l_i
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    out = softmax.acc * (v_descale / l_safe)[:, None]  # [BLOCK_M, BLOCK_V]
    lse2 = tl.where(l_i == 0.0, NEG_INF, softmax.m_i + tl.log2(l_safe))
    inside = is_inside[:, None] & (cols_v < HEAD_DIM_V)[None, :]
    if part_out_ptr is not None:
        at = (unit.to(tl.int64) * splits + split) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        tl.store(part_lse_ptr + at, lse2, mask=is_inside)
        tl.store(part_out_ptr + (at * HEAD_DIM_V)[:, None] + cols_v[None, :], out, mask=inside)
    else:
        if lse_ptr is not None:
            tl.store(lse_ptr + head * tokens + token, lse2 * LN2, mask=is_inside)
        rows = token * stride_os + head * stride_oh  # [BLOCK_M]
        where = out_ptr + rows[:, None] + cols_v[None, :]  # [BLOCK_M, BLOCK_V]
        tl.store(where, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _store_part(
    x_ptr,
    rows,
    exists,
    base,
    slots,
    inside,
    stride_column,
    scale_ptr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store the columns of ``kv_c`` or ``k_pe``; ``rows`` and ``slots`` are offsets."""
    cols = tl.arange(0, COLUMNS.BLOCK_D)  # [BLOCK_D]
    width = (cols < COLUMNS.HEAD_DIM)[None, :]
    BYTES: tl.constexpr = TILE.ROW_BYTES
    x = tl.load(
        tl.multiple_of(x_ptr + rows[:, None], [BYTES, BYTES]) + cols[None, :],
        mask=exists[:, None] & width,
        other=0.0,
    )  # [BLOCK_T, BLOCK_D]
    if TILE.FP8_MAX > 0:
        x = x.to(tl.float32)
        if scale_ptr is not None:
            x /= tl.load(scale_ptr)
        x = tl.clamp(x, -TILE.FP8_MAX, TILE.FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    where = base + slots[:, None] + cols.to(tl.int64)[None, :] * stride_column
    tl.store(where, x.to(base.dtype.element_ty), mask=inside[:, None] & width)


@triton.jit(
    do_not_specialize=MlaWriteNumbers._fields,
    do_not_specialize_on_alignment=MlaWritePointers._fields,
)
def mla_write_kernel(
    kv_c_ptr,
    k_pe_ptr,
    kv_cache_ptr,
    slot_mapping_ptr,
    scale_ptr,
    tokens,
    slots,
    stride_slot,
    stride_cs,
    stride_ps,
    stride_kvp,
    stride_kvs,
    stride_kvd,
    PAGE: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    ROTARY: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    FP8_MAX: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """``kv_cache[slot // PAGE, slot % PAGE] = [kv_c, k_pe] / scale`` for a block of tokens."""
    TILE: tl.constexpr = MlaWriteTile(
        PAGE, HEAD_DIM_V, ROTARY, ROW_BYTES, FP8_MAX, BLOCK_T, BLOCK_V, BLOCK_R
    )
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    exists = token < tokens
    token = token.to(tl.int64)
    slot_at = slot_mapping_ptr + token * stride_slot
    slot = tl.load(slot_at, mask=exists, other=-1).to(tl.int64)  # [BLOCK_T]
    inside = (slot >= 0) & (slot < slots)
    slot = tl.where(inside, slot, 0)
    rows = slot // PAGE * stride_kvp + slot % PAGE * stride_kvs
    VALUES: tl.constexpr = Columns(HEAD_DIM_V, BLOCK_V)
    new, step = token * stride_cs, stride_kvd
    _store_part(kv_c_ptr, new, exists, kv_cache_ptr, rows, inside, step, scale_ptr, VALUES, TILE)
    if ROTARY > 0:
        REST: tl.constexpr = Columns(ROTARY, BLOCK_R)
        rest_ptr = kv_cache_ptr + tl.full([], HEAD_DIM_V, tl.int64) * stride_kvd
        new = token * stride_ps
        _store_part(k_pe_ptr, new, exists, rest_ptr, rows, inside, step, scale_ptr, REST, TILE)
