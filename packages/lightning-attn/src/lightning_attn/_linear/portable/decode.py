"""A decoding step: a program reads and writes some columns of one head's state once.

Memory traffic of the states bounds the step, so the products are plain multiply-adds in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import entry
from ..._linked.portable.primitives import pointer_to
from .arguments import DecodeNumbers, DecodeOptions, DecodeTensors, StateTile
from .primitives import factor, rate_of


@triton.jit
def _base(ptr, strides, row, head, index):
    """Return the pointers to a row's elements of the first token."""
    return ptr + row * strides.batch + head * strides.head + index.to(tl.int64) * strides.element


@triton.jit
def _state_pointers(base, strides, rows, cols, BYTES: tl.constexpr, ALONG: tl.constexpr):
    """Return the pointers of a tile of a state, [D, E].

    ``ALONG`` is the dimension with stride 1: 1 e, 0 d. Its rows are aligned to ``BYTES``.
    """
    rows_64 = rows.to(tl.int64)[:, None]
    cols_64 = cols.to(tl.int64)[None, :]
    if ALONG == 1:
        begin = tl.multiple_of(base + rows_64 * strides.d, [BYTES, BYTES])
        return begin + cols[None, :]
    if ALONG == 0:
        begin = tl.multiple_of(base + cols_64 * strides.e, [BYTES, BYTES])
        return begin + rows[:, None]
    return base + rows_64 * strides.d + cols_64 * strides.e


@entry(triton.jit)
def decode_kernel(
    tensors: DecodeTensors, numbers: DecodeNumbers, OPTIONS: DecodeOptions, TILE: StateTile
):
    """``S = exp(-s) S + k^T v``, then ``out = scale q S``, token by token.

    A program updates some columns of the state of one head of one sequence.
    """
    SPLITS: tl.constexpr = (OPTIONS.E + TILE.BLOCK_E - 1) // TILE.BLOCK_E
    pid = tl.program_id(0)
    cols = pid % SPLITS * TILE.BLOCK_E + tl.arange(0, TILE.BLOCK_E)  # [E]
    head = (pid // SPLITS % numbers.heads).to(tl.int64)
    row = (pid // SPLITS // numbers.heads).to(tl.int64)
    rows = tl.arange(0, TILE.BLOCK_D)  # [D]
    inside_d = rows < OPTIONS.D
    inside_e = cols < OPTIONS.E
    inside = inside_d[:, None] & inside_e[None, :]  # [D, E]
    dtype = tensors.out_ptr.dtype.element_ty
    out_base = _base(tensors.out_ptr, numbers.out, row, head, cols)
    slot = tl.load(tensors.slot_idx_ptr + row).to(tl.int64)
    if slot < 0:
        for t in tl.range(0, numbers.tokens):
            out_ptrs = out_base + (tl.zeros([], tl.int64) + t) * numbers.out.token
            tl.store(out_ptrs, tl.zeros([TILE.BLOCK_E], dtype), mask=inside_e)
        return
    cache, after = numbers.state_cache, numbers.states_out
    base = tensors.state_cache_ptr + slot * cache.batch + head * cache.head
    pointers = _state_pointers(base, cache, rows, cols, OPTIONS.BYTES, OPTIONS.ALONG)
    state = tl.load(pointers, mask=inside, other=0.0)  # [D, E]
    kept = factor(rate_of(tensors.decay_ptr, head), tl.full([], 1, tl.int32))
    q_base = _base(tensors.q_ptr, numbers.q, row, head, rows)
    k_base = _base(tensors.k_ptr, numbers.k, row, head, rows)
    v_base = _base(tensors.v_ptr, numbers.v, row, head, cols)
    for t in tl.range(0, numbers.tokens):
        t_64 = tl.zeros([], tl.int64) + t
        q = tl.load(q_base + t_64 * numbers.q.token, mask=inside_d, other=0.0).to(tl.float32)
        k = tl.load(k_base + t_64 * numbers.k.token, mask=inside_d, other=0.0).to(tl.float32)
        v = tl.load(v_base + t_64 * numbers.v.token, mask=inside_e, other=0.0).to(tl.float32)
        state = state * kept + k[:, None] * v[None, :]  # [D, E]
        out = tl.sum(state * q[:, None], 0) * numbers.scale  # [E]
        tl.store(out_base + t_64 * numbers.out.token, out.to(dtype), mask=inside_e)
        if tensors.states_out_ptr is not None:
            base = pointer_to(tensors.states_out_ptr, after, row, t_64, head)
            after_ptrs = _state_pointers(
                base, after, rows, cols, OPTIONS.BYTES_OUT, OPTIONS.ALONG_OUT
            )
            tl.store(after_ptrs, state, mask=inside)
    if tensors.states_out_ptr is None:
        tl.store(pointers, state, mask=inside)
