"""The decayed sum of states that arrive from other ranks."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linear.portable.primitives import factor, rate_of
from ..._linked.launch.entries import entry
from .arguments import Numbers, Tensors


@entry(triton.jit)
def arrive_kernel(tensors: Tensors, numbers: Numbers, BLOCK: tl.constexpr):
    """``out = base + sum_j exp(-s n_j) state_j``, over the sources j of a row.

    A program computes a block of the state of one head. Sources are added in order.
    """
    heads, size = numbers.heads, numbers.size
    pid = tl.program_id(0)
    blocks = tl.cdiv(size, BLOCK)
    index = pid % blocks * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    pid = pid // blocks
    head = pid % heads
    row = pid // heads
    inside = index < size
    rate = rate_of(tensors.decay_ptr, head)
    place = (row.to(tl.int64) * heads + head) * size
    state = tl.zeros([BLOCK], tl.float32)
    if tensors.base_ptr is not None:
        state = tl.load(tensors.base_ptr + place + index, mask=inside, other=0.0)
    begin = tl.load(tensors.offsets_ptr + row)
    entries = tensors.entries_ptr + 2 * begin.to(tl.int64)
    for i in tl.range(0, tl.load(tensors.offsets_ptr + row + 1) - begin):
        slot = tl.load(entries + 2 * i)
        distance = tl.load(entries + 2 * i + 1)
        source = (slot.to(tl.int64) * heads + head) * size
        written = tl.load(tensors.states_ptr + source + index, mask=inside, other=0.0)
        state += factor(rate, distance) * written
    tl.store(tensors.out_ptr + place + index, state, mask=inside)
