"""A decoding step: a program reads and writes some columns of one head's state once.

Memory traffic of the states bounds the step, so the products are plain multiply-adds in fp32.
"""

import triton
import triton.language as tl

from .primitives import factor, rate_of
from .structures import DecodeNumbers, DecodeTensors


@triton.jit
def _state_pointers(base, rows, cols, stride_d, stride_e, BYTES: tl.constexpr, ALONG: tl.constexpr):
    """Return the pointers of a tile of a state, [D, E].

    ``ALONG`` is the dimension with stride 1: 1 e, 0 d. Its rows are aligned to ``BYTES``.
    """
    rows_64 = rows.to(tl.int64)[:, None]
    cols_64 = cols.to(tl.int64)[None, :]
    if ALONG == 1:
        begin = tl.multiple_of(base + rows_64 * stride_d, [BYTES, BYTES])
        return begin + cols[None, :]
    if ALONG == 0:
        begin = tl.multiple_of(base + cols_64 * stride_e, [BYTES, BYTES])
        return begin + rows[:, None]
    return base + rows_64 * stride_d + cols_64 * stride_e


@triton.jit(
    do_not_specialize=DecodeNumbers._fields, do_not_specialize_on_alignment=DecodeTensors._fields
)
def decode_kernel(
    read_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    states_ptr,
    last_ptr,
    decay_ptr,
    slots_ptr,
    scale,
    tokens,
    heads,
    stride_rb,
    stride_rs,
    stride_rh,
    stride_rd,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_kd,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_vd,
    stride_ob,
    stride_os,
    stride_oh,
    stride_od,
    stride_states_b,
    stride_states_h,
    stride_states_d,
    stride_states_e,
    stride_last_b,
    stride_last_s,
    stride_last_h,
    stride_last_d,
    stride_last_e,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BYTES: tl.constexpr,
    ALONG: tl.constexpr,
    BYTES_LAST: tl.constexpr,
    ALONG_LAST: tl.constexpr,
):
    """``S = exp(-s) S + k^T v``, then ``out = scale q S``, token by token.

    A program updates some columns of the state of one head of one sequence.
    """
    SPLITS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    pid = tl.program_id(0)
    cols = pid % SPLITS * BLOCK_E + tl.arange(0, BLOCK_E)  # [E]
    head = (pid // SPLITS % heads).to(tl.int64)
    row = (pid // SPLITS // heads).to(tl.int64)
    rows = tl.arange(0, BLOCK_D)  # [D]
    inside_d = rows < D
    inside_e = cols < E
    inside = inside_d[:, None] & inside_e[None, :]  # [D, E]
    out_base = out_ptr + row * stride_ob + head * stride_oh + cols.to(tl.int64) * stride_od
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        for t in tl.range(0, tokens):
            zeros = tl.zeros([BLOCK_E], out_ptr.dtype.element_ty)
            tl.store(out_base + (tl.zeros([], tl.int64) + t) * stride_os, zeros, mask=inside_e)
        return
    cache = states_ptr + slot * stride_states_b + head * stride_states_h
    pointers = _state_pointers(cache, rows, cols, stride_states_d, stride_states_e, BYTES, ALONG)
    state = tl.load(pointers, mask=inside, other=0.0)  # [D, E]
    kept = factor(rate_of(decay_ptr, head), tl.full([], 1, tl.int32))
    q_base = read_ptr + row * stride_rb + head * stride_rh + rows.to(tl.int64) * stride_rd
    k_base = key_ptr + row * stride_kb + head * stride_kh + rows.to(tl.int64) * stride_kd
    v_base = value_ptr + row * stride_vb + head * stride_vh + cols.to(tl.int64) * stride_vd
    for t in tl.range(0, tokens):
        t_64 = tl.zeros([], tl.int64) + t
        q = tl.load(q_base + t_64 * stride_rs, mask=inside_d, other=0.0).to(tl.float32)
        k = tl.load(k_base + t_64 * stride_ks, mask=inside_d, other=0.0).to(tl.float32)
        v = tl.load(v_base + t_64 * stride_vs, mask=inside_e, other=0.0).to(tl.float32)
        state = state * kept + k[:, None] * v[None, :]  # [D, E]
        out = tl.sum(state * q[:, None], 0) * scale  # [E]
        tl.store(out_base + t_64 * stride_os, out.to(out_ptr.dtype.element_ty), mask=inside_e)
        if last_ptr is not None:
            after = last_ptr + row * stride_last_b + t_64 * stride_last_s + head * stride_last_h
            after_ptrs = _state_pointers(
                after, rows, cols, stride_last_d, stride_last_e, BYTES_LAST, ALONG_LAST
            )
            tl.store(after_ptrs, state, mask=inside)
    if last_ptr is None:
        tl.store(pointers, state, mask=inside)
