"""Kernels that append to a cache, with rotary embeddings, and that make the table of row pages."""

import triton
import triton.language as tl

from ..._cache.kernels.write import store_codes, store_rows
from ..._paged.portable.parameters import (
    AppendCounts,
    AppendPointers,
    AppendStrides,
    AppendTile,
    PageCounts,
    PagePointers,
)
from ..._paged.portable.structures import (
    Columns,
    Packed,
    Room,
    Rope,
    Side,
    Tokens,
    VectorLayout,
    Vectors,
)

# as in ``_paged/portable/attention.py``
APPEND_NUMBERS = AppendCounts._fields + AppendStrides._fields


@triton.jit
def _tokens(block, lengths_ptr, batch, seqlen, MOVING: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return the ``Tokens`` of a block, at the first new position or, with MOVING, from it on."""
    token = block * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    exists = token < batch * seqlen
    sequence = token // seqlen
    position = tl.load(lengths_ptr + sequence, mask=exists, other=0)
    if MOVING:
        position += token % seqlen
    return Tokens(token.to(tl.int64), sequence.to(tl.int64), position, exists)


@triton.jit
def _load(x, tokens, head, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Load a head of new tokens, ``[BLOCK_T, BLOCK_D]``."""
    cols = tl.arange(0, COLUMNS.BLOCK_D)  # [BLOCK_D]
    rows = tokens.token * x.stride_token + head * x.stride_head  # [BLOCK_T]
    where = tl.multiple_of(x.ptr + rows[:, None], [TILE.ROW_BYTES, TILE.ROW_BYTES]) + cols[None, :]
    mask = tokens.exists[:, None] & (cols < COLUMNS.HEAD_DIM)[None, :]
    return tl.load(where, mask=mask, other=0.0)


@triton.jit
def _rotated(values, x, tokens, head, rope, TILE: tl.constexpr):
    """Rotate each pair of numbers by the angle of its token's position, in fp32."""
    ROTARY_DIM: tl.constexpr = TILE.ROTARY_DIM
    HALF: tl.constexpr = ROTARY_DIM // 2
    cols = tl.arange(0, TILE.BLOCK_D)  # [BLOCK_D]
    if TILE.INTERLEAVED:
        pair, other, is_first = cols // 2, cols ^ 1, cols % 2 == 0
    else:
        pair, is_first = cols % HALF, cols < HALF
        other = tl.where(is_first, cols + HALF, cols - HALF)
    turned = cols < ROTARY_DIM
    mask = (tokens.exists & (tokens.position < rope.seqlen))[:, None] & turned[None, :]
    position = tokens.position.to(tl.int64)[:, None]
    pair = pair[None, :].to(tl.int64)
    # [BLOCK_T, BLOCK_D]
    cos = tl.load(
        rope.cos_ptr + position * rope.stride_cos_t + pair * rope.stride_cos_d, mask=mask, other=1.0
    ).to(tl.float32)
    sin = tl.load(
        rope.sin_ptr + position * rope.stride_sin_t + pair * rope.stride_sin_d, mask=mask, other=0.0
    ).to(tl.float32)
    rows = tokens.token * x.stride_token + head * x.stride_head
    partner = tl.load(x.ptr + rows[:, None] + other[None, :], mask=mask, other=0.0).to(tl.float32)
    partner = tl.where(is_first[None, :], -partner, partner)
    return (values.to(tl.float32) * cos + partner * sin).to(values.dtype)


@triton.jit
def _append(
    values,
    tokens,
    side,
    head,
    room,
    LAYOUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write a head of new tokens at their positions; positions outside the cache are skipped."""
    cache, scales = side.cache, side.scales
    inside = tokens.exists & (tokens.position >= 0) & (tokens.position < room.slots)
    index = (tokens.position // room.page).to(tl.int64)  # [BLOCK_T]
    if room.table_ptr is not None:
        entry = room.table_ptr + tokens.sequence * room.stride_sequence + index * room.stride_entry
        page = tl.load(entry, mask=inside, other=0).to(tl.int64)
    elif room.batch_idx_ptr is not None:
        page = tl.load(room.batch_idx_ptr + tokens.sequence, mask=inside, other=0).to(tl.int64)
    else:
        page = tokens.sequence
    inside &= (page >= 0) & (page < room.pages)
    slot = (tokens.position % room.page).to(tl.int64)
    rows = page * cache.stride_page + slot * cache.stride_slot + head * side.stride_head
    if TILE.INT_MAX > 0:
        at = page * scales.stride_page + slot * scales.stride_slot + head * side.stride_head_scales
        store_codes(values, cache, scales, rows, at, inside, LAYOUT, COLUMNS, TILE.INT_MAX)
    else:
        cols = tl.arange(0, COLUMNS.BLOCK_D)  # [BLOCK_D]
        store_rows(values, cache, rows, inside, cols, LAYOUT, COLUMNS.HEAD_DIM)


@triton.jit(do_not_specialize=APPEND_NUMBERS, do_not_specialize_on_alignment=AppendPointers._fields)
def append_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    cache_seqlens_ptr,
    cache_batch_idx_ptr,
    block_table_ptr,
    rotary_cos_ptr,
    rotary_sin_ptr,
    rotated_ptr,
    k_scale_cache_ptr,
    v_scale_cache_ptr,
    batch,
    seqlen_new,
    seqlen_q,
    page,
    room,
    pages,
    seqlen_ro,
    stride_qs,
    stride_qh,
    stride_ks,
    stride_kh,
    stride_vs,
    stride_vh,
    stride_kcp,
    stride_kcs,
    stride_kch,
    stride_kcd,
    stride_vcp,
    stride_vcs,
    stride_vch,
    stride_vcd,
    stride_table_b,
    stride_table_p,
    stride_cos_t,
    stride_cos_d,
    stride_sin_t,
    stride_sin_d,
    stride_skp,
    stride_sks,
    stride_skh,
    stride_svp,
    stride_svs,
    stride_svh,
    HEADS_Q: tl.constexpr,
    HEADS_K: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    MOVING: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    K_UNIT: tl.constexpr,
    K_BYTES: tl.constexpr,
    V_UNIT: tl.constexpr,
    V_BYTES: tl.constexpr,
    INT_MAX: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """``k_cache[row, cache_seqlens + i] = rotate(k[i])``, ``v_cache`` the same without rotation.

    Rotated queries go to ``rotated_ptr``. A program writes the keys, the values or the queries of a
    block of tokens of one head.
    """
    TILE: tl.constexpr = AppendTile(
        HEADS_Q,
        HEADS_K,
        HEAD_DIM,
        HEAD_DIM_V,
        ROTARY_DIM,
        INTERLEAVED,
        MOVING,
        ROW_BYTES,
        K_UNIT,
        K_BYTES,
        V_UNIT,
        V_BYTES,
        INT_MAX,
        BLOCK_T,
        BLOCK_D,
        BLOCK_DV,
    )
    KEY: tl.constexpr = Columns(HEAD_DIM, BLOCK_D)
    VALUE: tl.constexpr = Columns(HEAD_DIM_V, BLOCK_DV)
    OF_BYTE: tl.constexpr = 2 if INT_MAX == 7 else 1
    K_LAYOUT: tl.constexpr = VectorLayout(HEAD_DIM // OF_BYTE, K_UNIT, K_BYTES, 0)
    V_LAYOUT: tl.constexpr = VectorLayout(HEAD_DIM_V // OF_BYTE, V_UNIT, V_BYTES, 0)
    places = Room(
        block_table_ptr, stride_table_b, stride_table_p, cache_batch_idx_ptr, page, room, pages
    )
    cols = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    pid = tl.program_id(0)
    programs = tl.cdiv(batch * seqlen_new, BLOCK_T) * 2 * HEADS_K
    if pid < programs:
        head_k = (pid // 2 % HEADS_K).to(tl.int64)
        new = _tokens(pid // 2 // HEADS_K, cache_seqlens_ptr, batch, seqlen_new, True, BLOCK_T)
        if pid % 2 == 0:
            key = Packed(k_ptr, stride_ks, stride_kh)
            keys = _load(key, new, head_k, KEY, TILE)  # [BLOCK_T, BLOCK_D]
            if ROTARY_DIM > 0:
                key_rope = Rope(
                    rotary_cos_ptr,
                    rotary_sin_ptr,
                    stride_cos_t,
                    stride_cos_d,
                    stride_sin_t,
                    stride_sin_d,
                    seqlen_ro,
                )
                keys = _rotated(keys, key, new, head_k, key_rope, TILE)
            k_cache = Vectors(k_cache_ptr, stride_kcp, stride_kcs, None, stride_kcd)
            k_scales = Vectors(k_scale_cache_ptr, stride_skp, stride_sks, None, None)
            k_side = Side(key, k_cache, stride_kch, None, k_scales, stride_skh)
            _append(keys, new, k_side, head_k, places, K_LAYOUT, KEY, TILE)
        else:
            # [BLOCK_T, BLOCK_DV]
            value = Packed(v_ptr, stride_vs, stride_vh)
            values = _load(value, new, head_k, VALUE, TILE)
            v_cache = Vectors(v_cache_ptr, stride_vcp, stride_vcs, None, stride_vcd)
            v_scales = Vectors(v_scale_cache_ptr, stride_svp, stride_svs, None, None)
            v_side = Side(value, v_cache, stride_vch, None, v_scales, stride_svh)
            _append(values, new, v_side, head_k, places, V_LAYOUT, VALUE, TILE)
    elif ROTARY_DIM > 0:
        head = ((pid - programs) % HEADS_Q).to(tl.int64)
        block = (pid - programs) // HEADS_Q
        tokens = _tokens(block, cache_seqlens_ptr, batch, seqlen_q, MOVING, BLOCK_T)
        x = Packed(q_ptr, stride_qs, stride_qh)
        rope = Rope(
            rotary_cos_ptr,
            rotary_sin_ptr,
            stride_cos_t,
            stride_cos_d,
            stride_sin_t,
            stride_sin_d,
            seqlen_ro,
        )
        queries = _load(x, tokens, head, KEY, TILE)  # [BLOCK_T, BLOCK_D]
        queries = _rotated(queries, x, tokens, head, rope, TILE)
        rows = (tokens.token * HEADS_Q + head) * HEAD_DIM
        # the launcher allocates this tensor without gaps
        where = tl.multiple_of(rotated_ptr + rows[:, None], [ROW_BYTES, ROW_BYTES]) + cols[None, :]
        tl.store(where, queries, mask=tokens.exists[:, None] & (cols < HEAD_DIM)[None, :])


@triton.jit(
    do_not_specialize=PageCounts._fields, do_not_specialize_on_alignment=PagePointers._fields
)
def pages_kernel(
    cache_seqlens_ptr,
    cache_batch_idx_ptr,
    cache_leftpad_ptr,
    starts_ptr,
    lengths_ptr,
    table_ptr,
    seqlen_q,
    new,
    row_pages,
    step,
    pages,
    BLOCK: tl.constexpr,
):
    """``starts[b] = b * seqlen_q``; ``lengths[b] = cache_seqlens[b] + new - leftpad[b]``.

    Without a page table also ``table[b, i] = row * row_pages + leftpad[b] + i * step``. One program
    per sequence.
    """
    sequence = tl.program_id(0)
    tl.store(starts_ptr + sequence + 1, (sequence + 1) * seqlen_q)
    if sequence == 0:
        tl.store(starts_ptr, 0)
    length = tl.load(cache_seqlens_ptr + sequence) + new
    first = 0
    if cache_leftpad_ptr is not None:
        first = tl.load(cache_leftpad_ptr + sequence)
        length -= first
    tl.store(lengths_ptr + sequence, length)
    if table_ptr is not None:
        row = sequence
        if cache_batch_idx_ptr is not None:
            row = tl.load(cache_batch_idx_ptr + sequence).to(tl.int32)
        first += row * row_pages
        entries = table_ptr + sequence.to(tl.int64) * pages
        for begin in range(0, pages, BLOCK):
            index = begin + tl.arange(0, BLOCK)  # [BLOCK]
            tl.store(entries + index, first + index * step, mask=index < pages)
