"""Kernels that append to a cache, with rotary embeddings, and that make the table of row pages."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._cache.kernels.arguments import Options
from ..._cache.kernels.structures import New, Side, Tokens
from ..._cache.kernels.write import load, store
from ..._linked.launch.entries import entry
from .arguments import Numbers, PageNumbers, PageTensors, Tensors


@triton.jit
def _tokens(block, seqlen, tensors, numbers, MOVING: tl.constexpr, OPTIONS: tl.constexpr):
    """Return the ``Tokens`` of a block, at the first new position or, with MOVING, from it on."""
    token = block * OPTIONS.BLOCK_T + tl.arange(0, OPTIONS.BLOCK_T)  # [BLOCK_T]
    exists = token < numbers.batch * seqlen
    sequence = token // seqlen
    position = tl.load(tensors.cache_seqlens_ptr + sequence, mask=exists, other=0)
    if MOVING:
        position += token % seqlen
    return Tokens(token.to(tl.int64), sequence.to(tl.int64), position, exists)


@triton.jit
def _load(new, tokens, head, tensors, numbers, VECTOR: tl.constexpr, OPTIONS: tl.constexpr):
    """Load a head of queries or keys, with each pair of numbers rotated in fp32.

    The angle is that of a token's position.
    """
    values = load(new, tokens.token, tokens.exists, head, VECTOR, OPTIONS)  # [BLOCK_T, BLOCK_D]
    if OPTIONS.ROTARY_DIM > 0:
        HALF: tl.constexpr = OPTIONS.ROTARY_DIM // 2
        cols = tl.arange(0, VECTOR.BLOCK_D)  # [BLOCK_D]
        if OPTIONS.INTERLEAVED:
            pair, other, is_first = cols // 2, cols ^ 1, cols % 2 == 0
        else:
            pair, is_first = cols % HALF, cols < HALF
            other = tl.where(is_first, cols + HALF, cols - HALF)
        turned = cols < OPTIONS.ROTARY_DIM
        mask = (tokens.exists & (tokens.position < numbers.seqlen_ro))[:, None] & turned[None, :]
        position = tokens.position.to(tl.int64)[:, None]
        pair = pair[None, :].to(tl.int64)
        # [BLOCK_T, BLOCK_D]
        cos_at = tensors.rotary_cos_ptr + position * numbers.cos.position + pair * numbers.cos.pair
        cos = tl.load(cos_at, mask=mask, other=1.0).to(tl.float32)
        sin_at = tensors.rotary_sin_ptr + position * numbers.sin.position + pair * numbers.sin.pair
        sin = tl.load(sin_at, mask=mask, other=0.0).to(tl.float32)
        rows = tokens.token * new.strides.token + head * new.strides.head
        partner_at = new.ptr + rows[:, None] + other[None, :]
        partner = tl.load(partner_at, mask=mask, other=0.0).to(tl.float32)
        partner = tl.where(is_first[None, :], -partner, partner)
        values = (values.to(tl.float32) * cos + partner * sin).to(values.dtype)
    return values


@triton.jit
def _append(
    values,
    side,
    tokens,
    head,
    tensors,
    numbers,
    VECTOR: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """Write a head of new tokens at their positions; positions outside the cache are skipped."""
    position = tokens.position
    inside = tokens.exists & (position >= 0) & (position < numbers.room)
    index = (position // numbers.page).to(tl.int64)  # [BLOCK_T]
    if tensors.block_table_ptr is not None:
        row = tensors.block_table_ptr + tokens.sequence * numbers.table.sequence
        page = tl.load(row + index * numbers.table.page, mask=inside, other=0).to(tl.int64)
    elif tensors.cache_batch_idx_ptr is not None:
        at = tensors.cache_batch_idx_ptr + tokens.sequence
        page = tl.load(at, mask=inside, other=0).to(tl.int64)
    else:
        page = tokens.sequence
    inside &= (page >= 0) & (page < numbers.pages)
    slot = (position % numbers.page).to(tl.int64)
    store(values, side, head, page, slot, inside, VECTOR, OPTIONS)


@entry(triton.jit)
def append_kernel(tensors: Tensors, numbers: Numbers, OPTIONS: Options):
    """``k_cache[row, cache_seqlens + i] = rotate(k[i])``, ``v_cache`` the same without rotation.

    Rotated queries go to ``rotated_ptr``. A program writes the keys, the values or the queries of a
    block of tokens of one head.
    """
    cols = tl.arange(0, OPTIONS.KEY.BLOCK_D)  # [BLOCK_D]
    pid = tl.program_id(0)
    programs = tl.cdiv(numbers.batch * numbers.seqlen_new, OPTIONS.BLOCK_T) * 2 * OPTIONS.HEADS
    if pid < programs:
        head_k = (pid // 2 % OPTIONS.HEADS).to(tl.int64)
        new = _tokens(
            pid // 2 // OPTIONS.HEADS, numbers.seqlen_new, tensors, numbers, True, OPTIONS
        )
        if pid % 2 == 0:
            k = Side(
                New(tensors.k_ptr, numbers.k),
                tensors.k_cache_ptr,
                numbers.k_cache,
                None,
                tensors.k_scale_cache_ptr,
                numbers.k_scales,
            )
            # [BLOCK_T, BLOCK_D]
            keys = _load(k.new, new, head_k, tensors, numbers, OPTIONS.KEY, OPTIONS)
            _append(keys, k, new, head_k, tensors, numbers, OPTIONS.KEY, OPTIONS)
        else:
            v = Side(
                New(tensors.v_ptr, numbers.v),
                tensors.v_cache_ptr,
                numbers.v_cache,
                None,
                tensors.v_scale_cache_ptr,
                numbers.v_scales,
            )
            # [BLOCK_T, BLOCK_DV]
            values = load(v.new, new.token, new.exists, head_k, OPTIONS.VALUE, OPTIONS)
            _append(values, v, new, head_k, tensors, numbers, OPTIONS.VALUE, OPTIONS)
    elif OPTIONS.ROTARY_DIM > 0:
        BYTES: tl.constexpr = OPTIONS.ROW_BYTES
        head = ((pid - programs) % OPTIONS.HEADS_Q).to(tl.int64)
        block = (pid - programs) // OPTIONS.HEADS_Q
        tokens = _tokens(block, numbers.seqlen_q, tensors, numbers, OPTIONS.MOVING, OPTIONS)
        q = New(tensors.q_ptr, numbers.q)
        # [BLOCK_T, BLOCK_D]
        queries = _load(q, tokens, head, tensors, numbers, OPTIONS.KEY, OPTIONS)
        rows = (tokens.token * OPTIONS.HEADS_Q + head) * OPTIONS.KEY.HEAD_DIM
        # the launcher allocates this tensor without gaps
        where = tl.multiple_of(tensors.rotated_ptr + rows[:, None], [BYTES, BYTES]) + cols[None, :]
        mask = tokens.exists[:, None] & (cols < OPTIONS.KEY.HEAD_DIM)[None, :]
        tl.store(where, queries, mask=mask)


@entry(triton.jit)
def pages_kernel(tensors: PageTensors, numbers: PageNumbers, BLOCK: tl.constexpr):
    """``starts[b] = b * seqlen_q``; ``lengths[b] = cache_seqlens[b] + new - leftpad[b]``.

    Without a page table also ``table[b, i] = row * row_pages + leftpad[b] + i * step``. One program
    per sequence.
    """
    sequence = tl.program_id(0)
    tl.store(tensors.starts_ptr + sequence + 1, (sequence + 1) * numbers.seqlen_q)
    if sequence == 0:
        tl.store(tensors.starts_ptr, 0)
    length = tl.load(tensors.cache_seqlens_ptr + sequence) + numbers.new
    first = 0
    if tensors.cache_leftpad_ptr is not None:
        first = tl.load(tensors.cache_leftpad_ptr + sequence)
        length -= first
    tl.store(tensors.lengths_ptr + sequence, length)
    if tensors.table_ptr is not None:
        row = sequence
        if tensors.cache_batch_idx_ptr is not None:
            row = tl.load(tensors.cache_batch_idx_ptr + sequence).to(tl.int32)
        first += row * numbers.row_pages
        entries = tensors.table_ptr + sequence.to(tl.int64) * numbers.pages
        for begin in range(0, numbers.pages, BLOCK):
            index = begin + tl.arange(0, BLOCK)  # [BLOCK]
            tl.store(entries + index, first + index * numbers.step, mask=index < numbers.pages)
