"""The decayed sum of states that arrive from other ranks."""

import triton
import triton.language as tl

from ..._linear.portable.primitives import factor, rate_of
from ..._linear.portable.structures import ArriveNumbers, ArriveTensors


@triton.jit(
    do_not_specialize=ArriveNumbers._fields, do_not_specialize_on_alignment=ArriveTensors._fields
)
def arrive_kernel(
    states_ptr,
    decay_ptr,
    base_ptr,
    out_ptr,
    offsets_ptr,
    entries_ptr,
    heads,
    size,
    BLOCK: tl.constexpr,
):
    """``out = base + sum_j exp(-s n_j) state_j``, over the sources j of a row.

    A program computes a block of the state of one head. Sources are added in order.
    """
    pid = tl.program_id(0)
    blocks = tl.cdiv(size, BLOCK)
    index = pid % blocks * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    pid = pid // blocks
    head = pid % heads
    row = pid // heads
    inside = index < size
    rate = rate_of(decay_ptr, head)
    place = (row.to(tl.int64) * heads + head) * size
    state = tl.zeros([BLOCK], tl.float32)
    if base_ptr is not None:
        state = tl.load(base_ptr + place + index, mask=inside, other=0.0)
    begin = tl.load(offsets_ptr + row)
    entries = entries_ptr + 2 * begin.to(tl.int64)
    for i in tl.range(0, tl.load(offsets_ptr + row + 1) - begin):
        slot = tl.load(entries + 2 * i)
        distance = tl.load(entries + 2 * i + 1)
        source = (slot.to(tl.int64) * heads + head) * size
        written = tl.load(states_ptr + source + index, mask=inside, other=0.0)
        state += factor(rate, distance) * written
    tl.store(out_ptr + place + index, state, mask=inside)
