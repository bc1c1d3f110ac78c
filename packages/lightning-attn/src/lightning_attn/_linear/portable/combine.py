"""Scan over segments: from the states that they write to the state before each of them."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import Foreign, entry
from .arguments import CombineNumbers, Options, StateTile, Tensors
from .primitives import factor, rate_of, slot_of, state_offsets

# numbers that four warps hold, four per thread; of fewer numbers, several warps hold copies
SHARED = tl.constexpr(512)


@entry(triton.jit)
def combine_kernel(
    states_ptr: Foreign,
    tensors: Tensors,
    numbers: CombineNumbers,
    OPTIONS: Options,
    TILE: StateTile,
):
    """``S_(j+1) = exp(-s n_j) S_j + written_j``, over the segments j of n_j tokens.

    For a tile of the state of one head, a program replaces the states that the segments of one
    sequence wrote by the states before them. Without ``REPLACE`` it only fills ``last``.
    """
    SPLITS_D: tl.constexpr = (OPTIONS.D + TILE.BLOCK_D - 1) // TILE.BLOCK_D
    SPLITS_E: tl.constexpr = (OPTIONS.E + TILE.BLOCK_E - 1) // TILE.BLOCK_E
    lengths = numbers.lengths
    size = lengths.size
    states, first, last = numbers.states, numbers.first, numbers.last
    pid = tl.program_id(0)
    cols = pid % SPLITS_E * TILE.BLOCK_E + tl.arange(0, TILE.BLOCK_E)  # [E]
    pid = pid // SPLITS_E
    rows = pid % SPLITS_D * TILE.BLOCK_D + tl.arange(0, TILE.BLOCK_D)  # [D]
    pid = pid // SPLITS_D
    head = pid % lengths.heads
    sequence = pid // lengths.heads
    slot = slot_of(tensors.slots_ptr, sequence, lengths.batch)
    if slot < 0:
        return
    inside = (rows < OPTIONS.D)[:, None] & (cols < OPTIONS.E)[None, :]  # [D, E]
    head_64 = head.to(tl.int64)
    if tensors.cu_seqlens_ptr is None:
        length = lengths.tokens
        place = sequence.to(tl.int64) * states.batch
    else:
        start = tl.load(tensors.cu_seqlens_ptr + sequence)
        length = tl.load(tensors.cu_seqlens_ptr + sequence + 1) - start
        own = start // tl.maximum(size, 1) + sequence + 1
        place = own.to(tl.int64) * states.token
    base = states_ptr + place + head_64 * states.head
    base = base + state_offsets(rows, cols, states)  # [D, E]

    state = tl.zeros([TILE.BLOCK_D, TILE.BLOCK_E], tl.float32)  # [D, E]
    if tensors.first_ptr is not None:
        is_there = inside
        if tensors.has_first_ptr is not None:
            there = tl.where(tl.load(tensors.has_first_ptr + sequence) != 0, OPTIONS.D, 0)
            is_there = inside & (rows < there)[:, None]
        first_base = tensors.first_ptr + slot * first.batch + head_64 * first.head
        state = tl.load(first_base + state_offsets(rows, cols, first), mask=is_there, other=0.0)
    rate = rate_of(tensors.decay_ptr, head)
    segments = tl.cdiv(length, tl.maximum(size, 1))
    for i in tl.range(0, segments):
        segment = i
        if OPTIONS.REVERSE:
            segment = segments - 1 - i
        pointers = base + segment.to(tl.int64) * states.token
        written = tl.load(pointers, mask=inside, other=0.0)
        if OPTIONS.REPLACE:
            if TILE.BLOCK_D * TILE.BLOCK_E < SHARED:
                # several warps hold copies of a number: all must read it before one overwrites it
                tl.debug_barrier()
            tl.store(pointers, state, mask=inside)
        count = tl.minimum(size, length - segment * size)
        state = state * factor(rate, count) + written
    if tensors.last_ptr is not None:
        last_base = tensors.last_ptr + slot * last.batch + head_64 * last.head
        tl.store(last_base + state_offsets(rows, cols, last), state, mask=inside)
