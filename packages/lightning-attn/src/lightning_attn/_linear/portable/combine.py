"""Scan over segments: from the states that they write to the state before each of them."""

import triton
import triton.language as tl

from .primitives import factor, rate_of, slot_of, state_offsets
from .structures import CombineNumbers, CombineTensors

# numbers that four warps hold, four per thread; of fewer numbers, several warps hold copies
SHARED = tl.constexpr(512)


@triton.jit(
    do_not_specialize=CombineNumbers._fields, do_not_specialize_on_alignment=CombineTensors._fields
)
def combine_kernel(
    states_ptr,
    decay_ptr,
    first_ptr,
    last_ptr,
    cu_seqlens_ptr,
    slots_ptr,
    has_first_ptr,
    batch,
    heads,
    tokens,
    size,
    pieces,
    stride_states_b,
    stride_states_s,
    stride_states_h,
    stride_states_d,
    stride_states_e,
    stride_first_b,
    stride_first_s,
    stride_first_h,
    stride_first_d,
    stride_first_e,
    stride_last_b,
    stride_last_s,
    stride_last_h,
    stride_last_d,
    stride_last_e,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    REVERSE: tl.constexpr,
    REPLACE: tl.constexpr,
):
    """``S_(j+1) = exp(-s n_j) S_j + written_j``, over the segments j of n_j tokens.

    For a tile of the state of one head, a program replaces the states that the segments of one
    sequence wrote by the states before them. Without ``REPLACE`` it only fills ``last``.
    """
    SPLITS_D: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    SPLITS_E: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    pid = tl.program_id(0)
    cols = pid % SPLITS_E * BLOCK_E + tl.arange(0, BLOCK_E)  # [E]
    pid = pid // SPLITS_E
    rows = pid % SPLITS_D * BLOCK_D + tl.arange(0, BLOCK_D)  # [D]
    pid = pid // SPLITS_D
    head = pid % heads
    sequence = pid // heads
    slot = slot_of(slots_ptr, sequence, batch)
    if slot < 0:
        return
    inside = (rows < D)[:, None] & (cols < E)[None, :]  # [D, E]
    head_64 = head.to(tl.int64)
    if cu_seqlens_ptr is None:
        length = tokens
        place = sequence.to(tl.int64) * stride_states_b
    else:
        start = tl.load(cu_seqlens_ptr + sequence)
        length = tl.load(cu_seqlens_ptr + sequence + 1) - start
        own = start // tl.maximum(size, 1) + sequence + 1
        place = own.to(tl.int64) * stride_states_s
    base = states_ptr + place + head_64 * stride_states_h
    base = base + state_offsets(rows, cols, stride_states_d, stride_states_e)  # [D, E]

    state = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)  # [D, E]
    if first_ptr is not None:
        is_there = inside
        if has_first_ptr is not None:
            there = tl.where(tl.load(has_first_ptr + sequence) != 0, D, 0)
            is_there = inside & (rows < there)[:, None]
        first_base = first_ptr + slot * stride_first_b + head_64 * stride_first_h
        offsets = state_offsets(rows, cols, stride_first_d, stride_first_e)
        state = tl.load(first_base + offsets, mask=is_there, other=0.0)
    rate = rate_of(decay_ptr, head)
    segments = tl.cdiv(length, tl.maximum(size, 1))
    for i in tl.range(0, segments):
        segment = i
        if REVERSE:
            segment = segments - 1 - i
        pointers = base + segment.to(tl.int64) * stride_states_s
        written = tl.load(pointers, mask=inside, other=0.0)
        if REPLACE:
            if BLOCK_D * BLOCK_E < SHARED:
                # several warps hold copies of a number: all must read it before one overwrites it
                tl.debug_barrier()
            tl.store(pointers, state, mask=inside)
        count = tl.minimum(size, length - segment * size)
        state = state * factor(rate, count) + written
    if last_ptr is not None:
        last_base = last_ptr + slot * stride_last_b + head_64 * stride_last_h
        offsets = state_offsets(rows, cols, stride_last_d, stride_last_e)
        tl.store(last_base + offsets, state, mask=inside)
