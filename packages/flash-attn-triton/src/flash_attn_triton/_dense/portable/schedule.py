"""Find the block, head and sequence of a program, in an order that keeps the GPU busy."""

import triton
import triton.language as tl

# sequences per step of a program's search in cu_seqlens
SEARCH_CHUNK = tl.constexpr(128)


@triton.jit
def find_sequence(cu_seqlens_ptr, slot, batch, BLOCK: tl.constexpr):
    """Return the sequence that owns a slot; -1 and ``batch``: padding before and after them all.

    Sequence ``b`` owns the slots from ``cu_seqlens[b] // BLOCK + b + 1`` on. These are at least as
    many as its blocks, and the grid's bound, ``tokens // BLOCK + batch + 2``, needs no device data.
    """
    owned = tl.zeros([], tl.int32)
    for first in range(0, batch + 1, SEARCH_CHUNK):
        index = first + tl.arange(0, SEARCH_CHUNK)
        start = tl.load(cu_seqlens_ptr + index, mask=index <= batch, other=0)
        mine = (start // BLOCK + index < slot) & (index <= batch)
        owned += tl.sum(mine.to(tl.int32), 0)
    return owned - 1


@triton.jit
def locate(
    cu_own_ptr,
    cu_other_ptr,
    batch,
    heads,
    tokens_own,
    tokens_other,
    tiles,
    span,
    BLOCK: tl.constexpr,
    BALANCE: tl.constexpr,
    LAST_IS_LONGEST: tl.constexpr,
):
    """Return ``(block, sequence, head, own_start, other_start, own_len, other_len)``.

    "Own" is the side whose blocks the grid divides, queries or keys. ``block`` is negative for a
    slot without a block. Under a causal mask the walks differ in length: ``BALANCE`` starts the
    longest first, for as many heads at a time (``span``) as the cache holds. Without it, neighbours
    are blocks of one head.
    """
    pid = tl.program_id(0)
    if cu_own_ptr is None:
        if BALANCE:
            section = pid // (span * tiles)
            place = pid % (span * tiles)
            heads_here = tl.minimum(span, batch * heads - section * span)
            block = place // heads_here
            batch_head = section * span + place % heads_here
        else:
            block = pid % tiles
            batch_head = pid // tiles
        sequence = batch_head // heads
        head = batch_head % heads
        blocks = tiles
        own_start = tl.zeros([], tl.int64)
        other_start = tl.zeros([], tl.int64)
        own_len = tokens_own
        other_len = tokens_other
    else:
        slot = pid // heads if BALANCE else pid % tiles
        head = pid % heads if BALANCE else pid // tiles
        sequence = find_sequence(cu_own_ptr, slot, batch, BLOCK)
        # padding before the first and after the last sequence: two more sequences without keys
        is_real = (sequence >= 0) & (sequence < batch)
        own_begin = tl.load(cu_own_ptr + sequence, mask=sequence >= 0, other=0)
        own_end = tl.load(cu_own_ptr + sequence + 1, mask=sequence < batch, other=tokens_own)
        other_begin = tl.load(cu_other_ptr + sequence, mask=is_real, other=0)
        other_end = tl.load(cu_other_ptr + sequence + 1, mask=is_real, other=0)
        block = slot - (own_begin // BLOCK + sequence + 1)
        own_len = own_end - own_begin
        other_len = other_end - other_begin
        own_start = own_begin.to(tl.int64)
        other_start = other_begin.to(tl.int64)
        blocks = tl.cdiv(own_len, BLOCK)
    if BALANCE and LAST_IS_LONGEST:
        block = blocks - 1 - block
    block = tl.where(block < blocks, block, -1)
    return block, sequence, head, own_start, other_start, own_len, other_len
