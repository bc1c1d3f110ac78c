"""Which rows of which sequence a program owns; computed on the device from the offsets.

A row is one query head of one token; the ``GROUP`` heads that share a head of keys are neighbours.
"""

import triton
import triton.language as tl

from .structures import Place

# entries of cu_seqlens that a program searches per step
SEARCH_CHUNK = tl.constexpr(128)


@triton.jit
def find_sequence(cu_seqlens_ptr, slot, batch, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sequence that owns a slot; -1 is padding before the first, ``batch`` after all.

    Sequence ``b`` owns the slots from ``cu_seqlens[b] * GROUP // BLOCK + b + 1`` on, at least as
    many as it has tiles. The size of the grid, ``tokens * GROUP // BLOCK + batch + 2``, needs no
    device data.
    """
    owned = tl.zeros([], tl.int32)
    for first in range(0, batch + 1, SEARCH_CHUNK):
        index = first + tl.arange(0, SEARCH_CHUNK)  # [SEARCH_CHUNK]
        start = tl.load(cu_seqlens_ptr + index, mask=index <= batch, other=0)
        mine = (start * GROUP // BLOCK + index < slot) & (index <= batch)
        owned += tl.sum(mine.to(tl.int32), 0)
    return owned - 1


@triton.jit
def locate(unit, cu_seqlens_ptr, batch, SCHEDULE: tl.constexpr):
    """Return the ``Place`` of a unit; its tile is -1 if the unit has none.

    With ``TILES`` > 0 every sequence has this many units. With 0 units are slots: see
    ``find_sequence``. Only sequences with ``MIN_TOKENS`` to ``MAX_TOKENS`` queries have tiles.
    """
    if SCHEDULE.TILES > 0:
        sequence = unit // SCHEDULE.TILES
        tile = unit % SCHEDULE.TILES
    else:
        sequence = find_sequence(cu_seqlens_ptr, unit, batch, SCHEDULE.GROUP, SCHEDULE.BLOCK_M)
        tile = 0
    is_real = (sequence >= 0) & (sequence < batch)
    q_start = tl.load(cu_seqlens_ptr + sequence, mask=is_real, other=0)
    q_end = tl.load(cu_seqlens_ptr + sequence + 1, mask=is_real, other=0)
    seqlen_q = q_end - q_start
    tiles = tl.cdiv(seqlen_q * SCHEDULE.GROUP, SCHEDULE.BLOCK_M)
    if SCHEDULE.TILES == 0:
        # the last tile sees the most keys under a causal mask, and starts first
        tile = tiles - 1 - (unit - (q_start * SCHEDULE.GROUP // SCHEDULE.BLOCK_M + sequence + 1))
    is_mine = is_real & (seqlen_q >= SCHEDULE.MIN_TOKENS)
    is_mine = is_mine & (seqlen_q <= SCHEDULE.MAX_TOKENS) & (tile < tiles)
    return Place(sequence, tl.where(is_mine, tile, -1), q_start, seqlen_q)
