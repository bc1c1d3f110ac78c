"""Writing new keys and values into the pages of a cache."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._linked.launch.entries import entry
from .arguments import Numbers, Options, Tensors
from .structures import New, Side

# 1.5 * 2**23: neighbouring fp32 numbers differ by 1 there
_ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def load(new, token, exists, head, VECTOR: tl.constexpr, OPTIONS: tl.constexpr):
    """Load a head of new tokens, ``[BLOCK_T, BLOCK_D]``."""
    BYTES: tl.constexpr = OPTIONS.ROW_BYTES
    cols = tl.arange(0, VECTOR.BLOCK_D)  # [BLOCK_D]
    rows = token * new.strides.token + head * new.strides.head  # [BLOCK_T]
    mask = exists[:, None] & (cols < VECTOR.HEAD_DIM)[None, :]
    where = tl.multiple_of(new.ptr + rows[:, None], [BYTES, BYTES]) + cols[None, :]
    return tl.load(where, mask=mask, other=0.0)


@triton.jit
def _store_rows(values, side, rows, inside, cols, VECTOR: tl.constexpr):
    """Store rows of vectors in runs, as ``load_rows`` reads them."""
    RUN: tl.constexpr = VECTOR.RUN
    # a byte of two codes is one column
    HEAD_DIM: tl.constexpr = VECTOR.HEAD_DIM * values.shape[1] // VECTOR.BLOCK_D
    begin = side.cache_ptr + rows[:, None]  # [BLOCK_T, 1]
    if RUN < HEAD_DIM:
        begin += (cols // RUN).to(tl.int64)[None, :] * side.cache.run  # [BLOCK_T, BLOCK_D]
    place = cols % RUN if RUN < HEAD_DIM else cols  # [BLOCK_D]
    if VECTOR.UNIT:
        BYTES: tl.constexpr = VECTOR.BYTES
        pointers = tl.multiple_of(begin, [BYTES, BYTES]) + place[None, :]  # [BLOCK_T, BLOCK_D]
    else:
        pointers = begin + place.to(tl.int64)[None, :] * side.cache.number  # [BLOCK_T, BLOCK_D]
    tl.store(pointers, values, mask=inside[:, None] & (cols < HEAD_DIM)[None, :])


@triton.jit
def _stored(values, side, head, OPTIONS: tl.constexpr):
    """Cast values to the dtype of the cache; FP8 is scaled and saturated first."""
    FP8_MAX: tl.constexpr = OPTIONS.FP8_MAX
    if FP8_MAX > 0:
        values = values.to(tl.float32)
        if side.scale_ptr is not None:
            values /= tl.load(side.scale_ptr + (head if OPTIONS.SCALE_PER_HEAD else 0))
        values = tl.clamp(values, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return values.to(side.cache_ptr.dtype.element_ty)


@triton.jit
def _quantised(values, INT_MAX: tl.constexpr, SCALE_DTYPE: tl.constexpr):
    """Return codes of rows, as whole numbers in fp32, and the scale of each row in its dtype.

    A row that is not finite gets a scale that is not finite, and codes of 0.
    """
    values = values.to(tl.float32)
    largest = tl.max(tl.abs(values), 1)  # [BLOCK_T]
    # the maximum ignores NaN
    is_nan = tl.max((values != values).to(tl.int32), 1) > 0
    largest = tl.where(is_nan, float("nan"), largest)
    scale = tl.div_rn(largest, tl.full(largest.shape, INT_MAX, tl.float32)).to(SCALE_DTYPE)
    divisor = scale.to(tl.float32)
    divisor = tl.where(divisor == 0.0, float("inf"), divisor)
    codes = tl.div_rn(values, tl.broadcast_to(divisor[:, None], values.shape))
    codes = tl.where(codes == codes, codes, 0.0)
    codes = tl.clamp(codes, -1.0 * INT_MAX, 1.0 * INT_MAX)
    # adding this rounds to the nearest integer, ties to even
    return (codes + _ROUNDING) - _ROUNDING, scale


@triton.jit
def _coded(values, LARGEST: tl.constexpr, LEAST: tl.constexpr, IS_INT: tl.constexpr):
    """Return codes and scales of rows as vLLM makes them: by the inverse, halves away from zero."""
    values = values.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 1) / LARGEST, 1e-6)  # [BLOCK_T]
    codes = values * (1.0 / scale)[:, None]
    if IS_INT:
        # the cast to an integer truncates
        codes = tl.where(codes >= 0, codes + 0.5, codes - 0.5)
    return tl.clamp(codes, LEAST, LARGEST), scale


@triton.jit
def _nearest(x):
    """Round to an integer, halves away from zero, from 0 to 15; return it in fp32."""
    x = tl.where(x >= 0, (x + 0.5).to(tl.int32), (x - 0.5).to(tl.int32))
    return tl.clamp(x.to(tl.float32), 0.0, 15.0)


@triton.jit
def _coded_from_zero(values, VECTOR: tl.constexpr):
    """Return codes of 4 bits without a sign, and scales whose lowest bits are the zero points."""
    values = values.to(tl.float32)
    exists = (tl.arange(0, VECTOR.BLOCK_D) < VECTOR.HEAD_DIM)[None, :]  # [1, BLOCK_D]
    least = tl.min(tl.where(exists, values, float("inf")), 1)  # [BLOCK_T]
    largest = tl.max(tl.where(exists, values, float("-inf")), 1)
    scale = tl.maximum((largest - least) / 15.0, 1e-6)
    zero = _nearest(-least / scale)
    inverse = 1.0 / scale
    codes = _nearest(values * inverse[:, None] + zero[:, None])
    bits = scale.to(tl.int32, bitcast=True) & -16 | zero.to(tl.int32)
    return codes, bits.to(tl.float32, bitcast=True)


@triton.jit
def _packed(codes):
    """Return bytes of two codes of 4 bits, the first in the low bits."""
    codes = codes.to(tl.int32) & 15  # [BLOCK_T, BLOCK_D]
    low, high = tl.split(tl.reshape(codes, [codes.shape[0], codes.shape[1] // 2, 2]))
    return low | (high << 4)  # [BLOCK_T, BLOCK_D // 2]


@triton.jit
def store(values, side, head, page, slot, inside, VECTOR: tl.constexpr, OPTIONS: tl.constexpr):
    """Store rows of a head in slots of pages, as numbers or as codes with their scales."""
    cache, scales = side.cache, side.scales
    cols = tl.arange(0, VECTOR.BLOCK_D)  # [BLOCK_D]
    rows = page * cache.page + slot * cache.slot + head * cache.head
    if OPTIONS.INT_MAX > 0 or OPTIONS.PER_TOKEN_HEAD:
        at = page * scales.page + slot * scales.slot + head * scales.head
        if not OPTIONS.PER_TOKEN_HEAD:
            stored: tl.constexpr = side.scale_cache_ptr.dtype.element_ty
            codes, scale = _quantised(values, OPTIONS.INT_MAX, stored)
        elif OPTIONS.INT_MAX == 7:
            codes, scale = _coded_from_zero(values, VECTOR)
        elif OPTIONS.INT_MAX > 0:
            codes, scale = _coded(values, 127.0, -128.0, True)
        else:
            codes, scale = _coded(values, OPTIONS.FP8_MAX, -OPTIONS.FP8_MAX, False)
        tl.store(side.scale_cache_ptr + at, scale, mask=inside)
        if OPTIONS.INT_MAX == 0:
            codes = codes.to(side.cache_ptr.dtype.element_ty)
            _store_rows(codes, side, rows, inside, cols, VECTOR)
        elif OPTIONS.INT_MAX == 7:
            cols = tl.arange(0, VECTOR.BLOCK_D // 2)  # [BLOCK_D // 2]
            codes = _packed(codes).to(tl.uint8)
            _store_rows(codes, side, rows, inside, cols, VECTOR)
        else:
            codes = codes.to(tl.int32).to(tl.int8)
            _store_rows(codes, side, rows, inside, cols, VECTOR)
    else:
        values = _stored(values, side, head, OPTIONS)
        _store_rows(values, side, rows, inside, cols, VECTOR)


@triton.jit
def _write(side, tensors, numbers, token, head, VECTOR: tl.constexpr, OPTIONS: tl.constexpr):
    """Write tokens of one head into their slots; slots below 0 or past the end are skipped.

    Tokens are loaded without waiting for the slots, so skipped ones are loaded, too.
    """
    exists = token < numbers.tokens  # [BLOCK_T]
    token = token.to(tl.int64)
    values = load(side.new, token, exists, head, VECTOR, OPTIONS)  # [BLOCK_T, BLOCK_D]
    slot_at = tensors.slot_mapping_ptr + token * numbers.slot_mapping
    slot = tl.load(slot_at, mask=exists, other=-1).to(tl.int64)  # [BLOCK_T]
    inside = (slot >= 0) & (slot < numbers.slots)
    slot = tl.where(inside, slot, 0)
    if numbers.slots.dtype == tl.int32:
        slot = slot.to(tl.uint32)
    page = (slot // OPTIONS.PAGE).to(tl.int64)
    in_page = (slot % OPTIONS.PAGE).to(tl.int64)
    store(values, side, head, page, in_page, inside, VECTOR, OPTIONS)


@entry(triton.jit)
def reshape_and_cache_kernel(tensors: Tensors, numbers: Numbers, OPTIONS: Options):
    """``k_cache[slot // PAGE, slot % PAGE] = k / k_scale`` with ``slot = slot_mapping[token]``.

    A program writes the keys or the values of a block of tokens of one head. With ``INT_MAX``,
    ``k_scale`` is ``max(abs(k)) / INT_MAX`` of each row, and is written to the scale cache.
    """
    keys = Side(
        New(tensors.k_ptr, numbers.k),
        tensors.k_cache_ptr,
        numbers.k_cache,
        tensors.k_scale_ptr,
        tensors.k_scale_cache_ptr,
        numbers.k_scales,
    )
    values = Side(
        New(tensors.v_ptr, numbers.v),
        tensors.v_cache_ptr,
        numbers.v_cache,
        tensors.v_scale_ptr,
        tensors.v_scale_cache_ptr,
        numbers.v_scales,
    )
    pid = tl.program_id(0)
    head = (pid // 2 % OPTIONS.HEADS).to(tl.int64)
    token = pid // 2 // OPTIONS.HEADS * OPTIONS.BLOCK_T + tl.arange(0, OPTIONS.BLOCK_T)  # [BLOCK_T]
    if OPTIONS.OVERLAP:
        # the next kernel may start; each waits until the previous one has stored everything
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if pid % 2 == 0:
        _write(keys, tensors, numbers, token, head, OPTIONS.KEY, OPTIONS)
    else:
        _write(values, tensors, numbers, token, head, OPTIONS.VALUE, OPTIONS)
