"""States that arrive from other ranks: their sum, and what it adds to outputs computed before."""

import triton
import triton.language as tl

from .primitives import dot_add, factor, load_rows, rate_of
from .structures import (
    ArriveNumbers,
    ArriveTensors,
    CorrectNumbers,
    CorrectTensors,
    Products,
)

# in base 2: what is left beyond is 0 in fp32, denormal numbers included
FORGOTTEN = tl.constexpr(150.0)


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

    A program sums up a block of the state of one head. Sources are added in their order.
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


@triton.jit(
    do_not_specialize=CorrectNumbers._fields, do_not_specialize_on_alignment=CorrectTensors._fields
)
def correct_kernel(
    read_ptr,
    out_ptr,
    decay_ptr,
    states_ptr,
    cu_seqlens_ptr,
    rows_ptr,
    scale,
    heads,
    blocks,
    stride_rs,
    stride_rh,
    D: tl.constexpr,
    E: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ROW_BYTES_V: tl.constexpr,
    TERMS: tl.constexpr,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``out_i = out_i + scale exp(-s (i + 1)) read_i S``, with the state S before a run.

    A program adds to some chunks of a run, for some columns of one head. Where nothing is left of
    the state, it reads and writes nothing.
    """
    PRODUCTS: tl.constexpr = Products(TERMS, NARROW, PRECISION, UPCAST)
    SPLITS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    pid = tl.program_id(0)
    cols = pid % SPLITS * BLOCK_E + tl.arange(0, BLOCK_E)  # [E]
    pid = pid // SPLITS
    head = pid % heads
    pid = pid // heads
    first = pid % blocks * (CHUNKS * CHUNK)
    run = tl.load(rows_ptr + pid // blocks)
    begin = tl.load(cu_seqlens_ptr + run)
    length = tl.load(cu_seqlens_ptr + run + 1) - begin
    rate = rate_of(decay_ptr, head)
    if first >= length or rate * (first + 1).to(tl.float32) >= FORGOTTEN:
        return
    rows_d = tl.arange(0, BLOCK_D)  # [D]
    index = tl.arange(0, CHUNK)  # [C]
    head_64 = head.to(tl.int64)
    begin_64 = begin.to(tl.int64)
    state_base = states_ptr + (run.to(tl.int64) * heads + head) * (D * E)
    inside_state = (rows_d < D)[:, None] & (cols < E)[None, :]
    pointers = state_base + (rows_d * E)[:, None] + cols[None, :]
    state = tl.load(pointers, mask=inside_state, other=0.0)  # [D, E]
    read_base = read_ptr + begin_64 * stride_rs + head_64 * stride_rh
    out_base = out_ptr + (begin_64 * heads + head) * E
    for chunk in tl.range(0, tl.minimum(CHUNKS, tl.cdiv(length - first, CHUNK))):
        rows = first + chunk * CHUNK + index
        inside = rows < length
        read = load_rows(read_base, rows, stride_rs, inside, rows_d, D, ROW_BYTES)  # [C, D]
        zeros = tl.zeros([CHUNK, BLOCK_E], tl.float32)
        reads = dot_add(zeros, read, state, read.dtype, PRODUCTS)  # [C, E]
        reads = reads * (factor(rate, rows + 1) * scale)[:, None]
        begins = out_base + rows.to(tl.int64)[:, None] * (heads * E)
        begins = tl.multiple_of(begins, [ROW_BYTES_V, ROW_BYTES_V])
        mask = inside[:, None] & (cols < E)[None, :]
        out = tl.load(begins + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(begins + cols[None, :], (out + reads).to(out_ptr.dtype.element_ty), mask=mask)
