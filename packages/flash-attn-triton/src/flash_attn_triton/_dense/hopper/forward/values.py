"""Transpose FP8 values into the tiles that wgmma reads on Hopper, with the keys permuted.

This kernel runs before the forward kernel. It reads and writes the values once, which takes little
time compared with the products. It also turns the descales into two factors per head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...._linked.launch.entries import entry
from ...portable.schedule import find_sequence
from .arguments import ValuesNumbers, ValuesOptions, ValuesTensors


@entry(triton.jit)
def transpose_values(tensors: ValuesTensors, numbers: ValuesNumbers, OPTIONS: ValuesOptions):
    """Write ``out[tile, head, d, n] = v[keys of tile, head, d]`` and two factors per head.

    ``out`` is ``[tiles, heads_k, BLOCK_D, BLOCK_N]``. The factors, ``[batch, heads_k, 2]``, are
    ``q_descale * k_descale`` of the scores and ``v_descale`` of the values. Sequence ``b`` of a
    packed tensor owns the tiles from ``cu_seqlens_k[b] // BLOCK_N + b`` on. Keys that no query sees
    become 0: they may be NaN, and zero times NaN is not zero.
    """
    strides = numbers.v
    slot = tl.program_id(0) // numbers.heads_k
    head = tl.program_id(0) % numbers.heads_k
    if tensors.cu_seqlens_k_ptr is None:
        sequence = slot // numbers.tiles
        tile = slot % numbers.tiles
        start = tl.zeros([], tl.int64)
        len_q = numbers.tokens_q
        len_k = numbers.tokens_k
    else:
        # find_sequence counts slots from 1
        sequence = find_sequence(tensors.cu_seqlens_k_ptr, slot + 1, numbers.batch, OPTIONS.BLOCK_N)
        if (sequence < 0) | (sequence >= numbers.batch):
            return
        begin = tl.load(tensors.cu_seqlens_k_ptr + sequence)
        len_k = tl.load(tensors.cu_seqlens_k_ptr + sequence + 1) - begin
        starts_q = tensors.cu_seqlens_q_ptr
        len_q = tl.load(starts_q + sequence + 1) - tl.load(starts_q + sequence)
        tile = slot - (begin // OPTIONS.BLOCK_N + sequence)
        start = begin.to(tl.int64)
    if tensors.seqused_k_ptr is not None:
        len_k = tl.load(tensors.seqused_k_ptr + sequence)
    if tile == 0:
        of_scores = 1.0
        of_values = 1.0
        place = sequence * numbers.heads_k + head
        at = place if OPTIONS.DESCALE_PER_HEAD else 0
        if tensors.q_descale_ptr is not None:
            of_scores *= tl.load(tensors.q_descale_ptr + at)
        if tensors.k_descale_ptr is not None:
            of_scores *= tl.load(tensors.k_descale_ptr + at)
        if tensors.v_descale_ptr is not None:
            of_values *= tl.load(tensors.v_descale_ptr + at)
        tl.store(tensors.factors_ptr + 2 * place, of_scores)
        tl.store(tensors.factors_ptr + 2 * place + 1, of_values)
    first = 0
    if OPTIONS.HAS_LEFT:
        first = len_k - len_q - numbers.window_left

    # four keys and four columns at a time, as bytes of four words; a word of the output holds keys
    # 2i, 2i + 1, 2i + 8 and 2i + 9 of 16 keys, see ``fp8.pack``
    word = tl.arange(0, OPTIONS.BLOCK_N // 4)  # [BLOCK_N // 4]
    keys = tile * OPTIONS.BLOCK_N + word // 4 * 16 + word % 4 * 2
    columns = tl.arange(0, OPTIONS.BLOCK_D // 4)  # [BLOCK_D // 4]
    base = tensors.v_ptr + sequence.to(tl.int64) * strides.batch + head.to(tl.int64) * strides.head
    base += start * strides.token
    base = base.to(tl.pointer_type(tl.int32))
    # [BLOCK_N // 4, BLOCK_D // 4] each
    a = load_words(base, keys, columns, strides.token, first, len_k, OPTIONS.HEAD_DIM)
    b = load_words(base, keys + 1, columns, strides.token, first, len_k, OPTIONS.HEAD_DIM)
    c = load_words(base, keys + 8, columns, strides.token, first, len_k, OPTIONS.HEAD_DIM)
    d = load_words(base, keys + 9, columns, strides.token, first, len_k, OPTIONS.HEAD_DIM)
    out_base = tensors.out_ptr.to(tl.pointer_type(tl.int32))
    out_base += tl.program_id(0).to(tl.int64) * (OPTIONS.BLOCK_D * OPTIONS.BLOCK_N // 4)
    at = out_base + columns[None, :] * OPTIONS.BLOCK_N + word[:, None]
    for byte in tl.static_range(4):
        tl.store(at + byte * (OPTIONS.BLOCK_N // 4), gather_bytes(a, b, c, d, 8 * byte))


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
