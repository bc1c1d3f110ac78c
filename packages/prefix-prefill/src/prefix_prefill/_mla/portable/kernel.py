"""Multi-head latent attention: one program owns a tile of rows, which share all their keys.

A row is one head of one token. A tile of keys is read once, as two panels of columns. The first
panel is also the values, so it is multiplied by queries and by probabilities. The rest is as in
``_paged/portable/attention.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import entry
from ..._linked.portable.primitives import LN2, LOG2E, NEG_INF, dot, dot_add
from ..._paged.portable.primitives import load_rows, look_up, rows_of
from ..._paged.portable.schedule import locate
from ..._paged.portable.structures import Columns, Softmax, Table, VectorLayout, Vectors
from .arguments import Numbers, Options, Tensors, Tile, WriteNumbers, WriteOptions, WriteTensors
from .structures import Block, Queries, Share, Source


@triton.jit
def _share_of(place, seqlen_k, split, splits, OPTIONS: tl.constexpr, TILE: tl.constexpr):
    """Return the ``Share`` of a split; splits have equally many tiles, the last ones fewer."""
    last = seqlen_k
    if OPTIONS.CAUSAL:
        row = tl.minimum((place.tile + 1) * TILE.BLOCK_M, place.seqlen_q * TILE.GROUP) - 1
        last = row // TILE.GROUP + (seqlen_k - place.seqlen_q) + 1
        last = tl.maximum(tl.minimum(last, seqlen_k), 0)
    tiles = tl.cdiv(last, TILE.BLOCK_N)
    most = tl.cdiv(tiles, splits)
    begin = tl.minimum(split * most, tiles)
    return Share(begin, tl.minimum(begin + most, tiles), last)


@triton.jit
def _clear(pid, tensors, numbers, OPTIONS: tl.constexpr, TILE: tl.constexpr):
    """Write out 0 and lse -inf for tokens outside every sequence; programs share them."""
    begin = tl.load(tensors.cu_seqlens_q_ptr)
    end = tl.load(tensors.cu_seqlens_q_ptr + numbers.batch)
    tokens = numbers.tokens
    padding = begin + tokens - end
    cols = tl.arange(0, TILE.BLOCK_V)  # [BLOCK_V]
    for i in range(pid, padding, tl.num_programs(0)):
        token = tl.where(i < begin, i, end + i - begin).to(tl.int64)
        for first in range(0, TILE.GROUP, TILE.BLOCK_M):
            head = (first + tl.arange(0, TILE.BLOCK_M)).to(tl.int64)  # [BLOCK_M]
            is_head = head < TILE.GROUP
            rows = token * numbers.out.token + head * numbers.out.head
            at = tensors.out_ptr + rows[:, None] + cols[None, :]  # [BLOCK_M, BLOCK_V]
            zeros = tl.zeros([TILE.BLOCK_M, TILE.BLOCK_V], tl.float32)
            inside = is_head[:, None] & (cols < OPTIONS.HEAD_DIM_V)[None, :]
            tl.store(at, zeros.to(tensors.out_ptr.dtype.element_ty), mask=inside)
            if tensors.lse_ptr is not None:
                nothing = tl.full([TILE.BLOCK_M], NEG_INF, tl.float32)
                tl.store(tensors.lse_ptr + head * tokens + token, nothing, mask=is_head)


@triton.jit
def _attend(
    softmax, queries, source, share, OPTIONS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr
):
    """Fold the keys of a share into the softmax; ``WIDE`` is the dtype of the operands."""
    VALUES: tl.constexpr = Columns(OPTIONS.HEAD_DIM_V, TILE.BLOCK_V)
    REST: tl.constexpr = Columns(OPTIONS.HEAD_DIM - OPTIONS.HEAD_DIM_V, TILE.BLOCK_R)
    LAYOUT: tl.constexpr = VectorLayout(OPTIONS.HEAD_DIM, OPTIONS.KV_UNIT, OPTIONS.KV_BYTES, 0)
    cols_v = tl.arange(0, TILE.BLOCK_V)  # [BLOCK_V]
    cols_r = tl.arange(0, TILE.BLOCK_R)  # [BLOCK_R]
    acc, l_i, m_i = softmax.acc, softmax.l_i, softmax.m_i
    for step in range(share.begin, share.end):
        begin = step * TILE.BLOCK_N
        keys = begin + tl.arange(0, TILE.BLOCK_N)  # [BLOCK_N]
        inside = keys < share.last
        if OPTIONS.PAGE % TILE.BLOCK_N == 0:
            wanted = begin < share.last
        else:
            wanted = inside
        pages = look_up(source.table, begin, wanted, OPTIONS.PAGE, TILE.BLOCK_N)
        rows = rows_of(pages, begin, source.v, OPTIONS.PAGE, TILE.BLOCK_N)  # [BLOCK_N]
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


@entry(triton.jit)
def mla_kernel(tensors: Tensors, numbers: Numbers, OPTIONS: Options, TILE: Tile):
    """``out = softmax(mask(scale * q @ k.T)) @ k[:, :HEAD_DIM_V]``, of rows or of a split of keys.

    ``k`` is in the pages of a cache.
    """
    Q: tl.constexpr = tensors.q_ptr.dtype.element_ty
    KV: tl.constexpr = tensors.kv_cache_ptr.dtype.element_ty
    # bf16 holds all numbers of 8 bits
    KEYS: tl.constexpr = KV if KV.primitive_bitwidth > 8 else tl.bfloat16
    WIDE: tl.constexpr = Q if Q.primitive_bitwidth > 8 else KEYS
    pid = tl.program_id(0)
    _clear(pid, tensors, numbers, OPTIONS, TILE)
    splits = numbers.splits
    split = pid % splits
    unit = pid // splits
    place = locate(unit, tensors.cu_seqlens_q_ptr, numbers.batch, TILE)
    if place.tile < 0:
        return
    seqlen_k = tl.load(tensors.seqlens_k_ptr + place.sequence)
    row = place.tile * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)  # [BLOCK_M]
    is_inside = row < place.seqlen_q * TILE.GROUP
    token = place.q_start.to(tl.int64) + row // TILE.GROUP
    head = (row % TILE.GROUP).to(tl.int64)
    cols_v = tl.arange(0, TILE.BLOCK_V)  # [BLOCK_V]
    cols_r = tl.arange(0, TILE.BLOCK_R)  # [BLOCK_R]
    q_rows = token * numbers.q.token + head * numbers.q.head  # [BLOCK_M]
    Q_LAYOUT: tl.constexpr = VectorLayout(OPTIONS.HEAD_DIM, True, OPTIONS.ROW_BYTES, 0)
    VALUES: tl.constexpr = Columns(OPTIONS.HEAD_DIM_V, TILE.BLOCK_V)
    REST: tl.constexpr = Columns(OPTIONS.HEAD_DIM - OPTIONS.HEAD_DIM_V, TILE.BLOCK_R)
    q_v = Vectors(tensors.q_ptr, None, None, None, None)
    q_r = Vectors(tensors.q_ptr + OPTIONS.HEAD_DIM_V, None, None, None, None)
    factor = numbers.scale * LOG2E
    if tensors.q_descale_ptr is not None:
        factor *= tl.load(tensors.q_descale_ptr)
    v_descale = 1.0
    if tensors.kv_descale_ptr is not None:
        v_descale = tl.load(tensors.kv_descale_ptr)
        factor *= v_descale
    queries = Queries(
        load_rows(q_v, q_rows, is_inside, cols_v, Q_LAYOUT, VALUES, True).to(WIDE),
        load_rows(q_r, q_rows, is_inside, cols_r, Q_LAYOUT, REST, True).to(WIDE),
        row // TILE.GROUP + (seqlen_k - place.seqlen_q),
        factor,
    )
    entries = tensors.block_table_ptr + place.sequence.to(tl.int64) * numbers.table.sequence
    kv = numbers.kv
    rest_ptr = tensors.kv_cache_ptr + tl.full([], OPTIONS.HEAD_DIM_V, tl.int64) * kv.column
    source = Source(
        Vectors(tensors.kv_cache_ptr, kv.page, kv.slot, None, kv.column),
        Vectors(rest_ptr, kv.page, kv.slot, None, kv.column),
        Table(entries, numbers.table.page),
    )
    share = _share_of(place, seqlen_k, split, splits, OPTIONS, TILE)
    softmax = Softmax(
        tl.zeros([TILE.BLOCK_M, TILE.BLOCK_V], tl.float32),
        tl.zeros([TILE.BLOCK_M], tl.float32),
        tl.full([TILE.BLOCK_M], NEG_INF, tl.float32),
    )
    softmax = _attend(softmax, queries, source, share, OPTIONS, TILE, WIDE)

    # fully masked rows: output 0, lse -inf
    l_i = softmax.l_i
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    out = softmax.acc * (v_descale / l_safe)[:, None]  # [BLOCK_M, BLOCK_V]
    lse2 = tl.where(l_i == 0.0, NEG_INF, softmax.m_i + tl.log2(l_safe))
    inside = is_inside[:, None] & (cols_v < OPTIONS.HEAD_DIM_V)[None, :]
    if tensors.part_out_ptr is not None:
        at = (unit.to(tl.int64) * splits + split) * TILE.BLOCK_M
        at += tl.arange(0, TILE.BLOCK_M)  # [BLOCK_M]
        tl.store(tensors.part_lse_ptr + at, lse2, mask=is_inside)
        where = tensors.part_out_ptr + (at * OPTIONS.HEAD_DIM_V)[:, None] + cols_v[None, :]
        tl.store(where, out, mask=inside)
    else:
        if tensors.lse_ptr is not None:
            tl.store(tensors.lse_ptr + head * numbers.tokens + token, lse2 * LN2, mask=is_inside)
        rows = token * numbers.out.token + head * numbers.out.head  # [BLOCK_M]
        where = tensors.out_ptr + rows[:, None] + cols_v[None, :]  # [BLOCK_M, BLOCK_V]
        tl.store(where, out.to(tensors.out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _store_part(
    x_ptr, stride, base, block, tensors, numbers, COLUMNS: tl.constexpr, OPTIONS: tl.constexpr
):
    """Store the columns of ``kv_c`` or ``k_pe``, whose first column in the cache is at ``base``."""
    rows = block.token * stride  # [BLOCK_T]
    cols = tl.arange(0, COLUMNS.BLOCK_D)  # [BLOCK_D]
    width = (cols < COLUMNS.HEAD_DIM)[None, :]
    BYTES: tl.constexpr = OPTIONS.ROW_BYTES
    x = tl.load(
        tl.multiple_of(x_ptr + rows[:, None], [BYTES, BYTES]) + cols[None, :],
        mask=block.exists[:, None] & width,
        other=0.0,
    )  # [BLOCK_T, BLOCK_D]
    if OPTIONS.FP8_MAX > 0:
        x = x.to(tl.float32)
        if tensors.scale_ptr is not None:
            x /= tl.load(tensors.scale_ptr)
        x = tl.clamp(x, -OPTIONS.FP8_MAX, OPTIONS.FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    where = base + block.slots[:, None] + cols.to(tl.int64)[None, :] * numbers.kv.column
    tl.store(where, x.to(base.dtype.element_ty), mask=block.inside[:, None] & width)


@entry(triton.jit)
def mla_write_kernel(tensors: WriteTensors, numbers: WriteNumbers, OPTIONS: WriteOptions):
    """``kv_cache[slot // PAGE, slot % PAGE] = [kv_c, k_pe] / scale`` for a block of tokens."""
    kv, base = numbers.kv, tensors.kv_cache_ptr
    token = tl.program_id(0) * OPTIONS.BLOCK_T + tl.arange(0, OPTIONS.BLOCK_T)  # [BLOCK_T]
    exists = token < numbers.tokens
    token = token.to(tl.int64)
    slot_at = tensors.slot_mapping_ptr + token * numbers.slot_mapping
    slot = tl.load(slot_at, mask=exists, other=-1).to(tl.int64)  # [BLOCK_T]
    inside = (slot >= 0) & (slot < numbers.slots)
    slot = tl.where(inside, slot, 0)
    slots = slot // OPTIONS.PAGE * kv.page + slot % OPTIONS.PAGE * kv.slot
    block = Block(token, exists, slots, inside)
    VALUES: tl.constexpr = Columns(OPTIONS.HEAD_DIM_V, OPTIONS.BLOCK_V)
    _store_part(tensors.kv_c_ptr, numbers.kv_c, base, block, tensors, numbers, VALUES, OPTIONS)
    if OPTIONS.ROTARY > 0:
        REST: tl.constexpr = Columns(OPTIONS.ROTARY, OPTIONS.BLOCK_R)
        base += tl.full([], OPTIONS.HEAD_DIM_V, tl.int64) * kv.column
        _store_part(tensors.k_pe_ptr, numbers.k_pe, base, block, tensors, numbers, REST, OPTIONS)
