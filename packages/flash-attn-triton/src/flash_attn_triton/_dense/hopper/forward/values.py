"""Transpose FP8 values into the tiles that wgmma reads on Hopper, with the keys permuted.

This kernel runs before the forward kernel. It reads and writes the values once, which takes little
time compared with the products. It also turns the descales into two factors per head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...portable.schedule import find_sequence

NUMBERS = (
    "window_left",
    "batch",
    "heads_k",
    "tokens_q",
    "tokens_k",
    "tiles",
    "stride_b",
    "stride_s",
    "stride_h",
)
POINTERS = (
    "v_ptr",
    "q_descale_ptr",
    "k_descale_ptr",
    "v_descale_ptr",
    "cu_seqlens_q_ptr",
    "cu_seqlens_k_ptr",
    "seqused_k_ptr",
)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def transpose_values(
    v_ptr,
    out_ptr,
    factors_ptr,
    q_descale_ptr,
    k_descale_ptr,
    v_descale_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_k_ptr,
    window_left,
    batch,
    heads_k,
    tokens_q,
    tokens_k,
    tiles,
    stride_b,
    stride_s,
    stride_h,
    HEAD_DIM: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    DESCALE_PER_HEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write ``out[tile, head, d, n] = v[keys of tile, head, d]`` and two factors per head.

    ``out`` is ``[tiles, heads_k, BLOCK_D, BLOCK_N]``. The factors, ``[batch, heads_k, 2]``, are
    ``q_descale * k_descale`` of the scores and ``v_descale`` of the values. Sequence ``b`` of a
    packed tensor owns the tiles from ``cu_seqlens_k[b] // BLOCK_N + b`` on. Keys that no query sees
    become 0: they may be NaN, and zero times NaN is not zero.
    """
    slot = tl.program_id(0) // heads_k
    head = tl.program_id(0) % heads_k
    if cu_seqlens_k_ptr is None:
        sequence = slot // tiles
        tile = slot % tiles
        start = tl.zeros([], tl.int64)
        len_q = tokens_q
        len_k = tokens_k
    else:
        # find_sequence counts slots from 1
        sequence = find_sequence(cu_seqlens_k_ptr, slot + 1, batch, BLOCK_N)
        if (sequence < 0) | (sequence >= batch):
            return
        begin = tl.load(cu_seqlens_k_ptr + sequence)
        len_k = tl.load(cu_seqlens_k_ptr + sequence + 1) - begin
        len_q = tl.load(cu_seqlens_q_ptr + sequence + 1) - tl.load(cu_seqlens_q_ptr + sequence)
        tile = slot - (begin // BLOCK_N + sequence)
        start = begin.to(tl.int64)
    if seqused_k_ptr is not None:
        len_k = tl.load(seqused_k_ptr + sequence)
    if tile == 0:
        of_scores = 1.0
        of_values = 1.0
        place = sequence * heads_k + head
        at = place if DESCALE_PER_HEAD else 0
        if q_descale_ptr is not None:
            of_scores *= tl.load(q_descale_ptr + at)
        if k_descale_ptr is not None:
            of_scores *= tl.load(k_descale_ptr + at)
        if v_descale_ptr is not None:
            of_values *= tl.load(v_descale_ptr + at)
        tl.store(factors_ptr + 2 * place, of_scores)
        tl.store(factors_ptr + 2 * place + 1, of_values)
    first = 0
    if HAS_LEFT:
        first = len_k - len_q - window_left

    # four keys and four columns at a time, as bytes of four words; a word of the output holds keys
    # 2i, 2i + 1, 2i + 8 and 2i + 9 of 16 keys, see ``fp8.pack``
    word = tl.arange(0, BLOCK_N // 4)  # [BLOCK_N // 4]
    keys = tile * BLOCK_N + word // 4 * 16 + word % 4 * 2
    columns = tl.arange(0, BLOCK_D // 4)  # [BLOCK_D // 4]
    base = v_ptr + sequence.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    base += start * stride_s
    base = base.to(tl.pointer_type(tl.int32))
    # [BLOCK_N // 4, BLOCK_D // 4] each
    a = load_words(base, keys, columns, stride_s, first, len_k, HEAD_DIM)
    b = load_words(base, keys + 1, columns, stride_s, first, len_k, HEAD_DIM)
    c = load_words(base, keys + 8, columns, stride_s, first, len_k, HEAD_DIM)
    d = load_words(base, keys + 9, columns, stride_s, first, len_k, HEAD_DIM)
    out_base = out_ptr.to(tl.pointer_type(tl.int32))
    out_base += tl.program_id(0).to(tl.int64) * (BLOCK_D * BLOCK_N // 4)
    at = out_base + columns[None, :] * BLOCK_N + word[:, None]
    for byte in tl.static_range(4):
        tl.store(at + byte * (BLOCK_N // 4), gather_bytes(a, b, c, d, 8 * byte))


@triton.jit
def load_words(base, keys, columns, stride, first, last, HEAD_DIM: tl.constexpr):
    """Load words of four columns each, ``[keys, columns]``; 0 for keys outside [first, last)."""
    begin = tl.multiple_of(keys.to(tl.int64)[:, None] * (stride // 4), [4, 4])
    mask = (keys >= first)[:, None] & (keys < last)[:, None] & (4 * columns < HEAD_DIM)[None, :]
    return tl.load(base + begin + columns[None, :], mask=mask, other=0)


@triton.jit
def gather_bytes(a, b, c, d, SHIFT: tl.constexpr):
    """Return words made of one byte of each of the four words."""
    word = (a >> SHIFT) & 0xFF
    word |= ((b >> SHIFT) & 0xFF) << 8
    word |= ((c >> SHIFT) & 0xFF) << 16
    return word | (((d >> SHIFT) & 0xFF) << 24)
