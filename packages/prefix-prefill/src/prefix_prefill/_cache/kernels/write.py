"""Writing new keys and values into the pages of a cache."""

import triton
import triton.language as tl

from ..._paged.portable.parameters import WriteCounts, WritePointers, WriteStrides, WriteTile
from ..._paged.portable.structures import Columns, Packed, Side, Slots, VectorLayout, Vectors

# 1.5 * 2**23: neighbouring fp32 numbers differ by 1 there
_ROUNDING = tl.constexpr(12582912.0)

# as in ``_paged/portable/attention.py``
NUMBERS = WriteCounts._fields + WriteStrides._fields


@triton.jit
def store_rows(values, cache, rows, inside, cols, LAYOUT: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Store rows x cols of vectors in runs, as ``load_rows`` reads them."""
    RUN: tl.constexpr = LAYOUT.RUN
    BYTES: tl.constexpr = LAYOUT.BYTES
    begin = cache.base + rows[:, None]  # [BLOCK_T, 1]
    if RUN < HEAD_DIM:
        begin += (cols // RUN).to(tl.int64)[None, :] * cache.stride_run  # [BLOCK_T, BLOCK_D]
    place = cols % RUN if RUN < HEAD_DIM else cols  # [BLOCK_D]
    if LAYOUT.UNIT:
        pointers = tl.multiple_of(begin, [BYTES, BYTES]) + place[None, :]  # [BLOCK_T, BLOCK_D]
    else:
        pointers = begin + place.to(tl.int64)[None, :] * cache.stride_number  # [BLOCK_T, BLOCK_D]
    tl.store(pointers, values, mask=inside[:, None] & (cols < HEAD_DIM)[None, :])


@triton.jit
def _stored(values, side, head, TILE: tl.constexpr):
    """Cast values to the dtype of the cache; FP8 is scaled and saturated first."""
    FP8_MAX: tl.constexpr = TILE.FP8_MAX
    if FP8_MAX > 0:
        values = values.to(tl.float32)
        if side.scale_ptr is not None:
            values /= tl.load(side.scale_ptr + (head if TILE.SCALE_PER_HEAD else 0))
        values = tl.clamp(values, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return values.to(side.cache.base.dtype.element_ty)


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
def _packed(codes):
    """Return bytes of two codes of 4 bits, the first in the low bits."""
    codes = codes.to(tl.int32) & 15  # [BLOCK_T, BLOCK_D]
    low, high = tl.split(tl.reshape(codes, [codes.shape[0], codes.shape[1] // 2, 2]))
    return low | (high << 4)  # [BLOCK_T, BLOCK_D // 2]


@triton.jit
def store_codes(
    values,
    cache,
    scales,
    rows,
    at,
    inside,
    LAYOUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    INT_MAX: tl.constexpr,
):
    """Store rows as codes, and their scales at offsets ``at``."""
    codes, scale = _quantised(values, INT_MAX, scales.base.dtype.element_ty)
    tl.store(scales.base + at, scale, mask=inside)
    if INT_MAX == 7:
        BYTES: tl.constexpr = COLUMNS.HEAD_DIM // 2
        cols = tl.arange(0, COLUMNS.BLOCK_D // 2)  # [BLOCK_D // 2]
        codes = _packed(codes).to(tl.uint8)
        store_rows(codes, cache, rows, inside, cols, LAYOUT, BYTES)
    else:
        cols = tl.arange(0, COLUMNS.BLOCK_D)  # [BLOCK_D]
        codes = codes.to(tl.int32).to(tl.int8)
        store_rows(codes, cache, rows, inside, cols, LAYOUT, COLUMNS.HEAD_DIM)


@triton.jit
def _write(
    side,
    places,
    token,
    head,
    PAGE: tl.constexpr,
    LAYOUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write tokens of one head into their slots; slots below 0 or past the end are skipped.

    Tokens are loaded without waiting for the slots, so skipped ones are loaded, too.
    """
    ROW_BYTES: tl.constexpr = TILE.ROW_BYTES
    new, cache = side.new, side.cache
    exists = token < places.tokens  # [BLOCK_T]
    token = token.to(tl.int64)
    cols = tl.arange(0, COLUMNS.BLOCK_D)  # [BLOCK_D]
    rows = token * new.stride_token + head * new.stride_head
    values = tl.load(
        tl.multiple_of(new.ptr + rows[:, None], [ROW_BYTES, ROW_BYTES]) + cols[None, :],
        mask=exists[:, None] & (cols < COLUMNS.HEAD_DIM)[None, :],
        other=0.0,
    )  # [BLOCK_T, BLOCK_D]
    slot_at = places.slot_mapping_ptr + token * places.stride_slot
    slot = tl.load(slot_at, mask=exists, other=-1).to(tl.int64)  # [BLOCK_T]
    inside = (slot >= 0) & (slot < places.slots)
    slot = tl.where(inside, slot, 0)
    if places.slots.dtype == tl.int32:
        slot = slot.to(tl.uint32)
    page = (slot // PAGE).to(tl.int64)
    in_page = (slot % PAGE).to(tl.int64)
    rows = page * cache.stride_page + in_page * cache.stride_slot + head * side.stride_head
    if TILE.INT_MAX > 0:
        scales = side.scales
        at = page * scales.stride_page + in_page * scales.stride_slot
        at += head * side.stride_head_scales
        store_codes(values, cache, scales, rows, at, inside, LAYOUT, COLUMNS, TILE.INT_MAX)
    else:
        values = _stored(values, side, head, TILE)
        store_rows(values, cache, rows, inside, cols, LAYOUT, COLUMNS.HEAD_DIM)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=WritePointers._fields)
def reshape_and_cache_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_scale_cache_ptr,
    v_scale_cache_ptr,
    tokens,
    slots,
    stride_slot,
    stride_ks,
    stride_kh,
    stride_vs,
    stride_vh,
    stride_kcp,
    stride_kcs,
    stride_kch,
    stride_kcx,
    stride_kcd,
    stride_vcp,
    stride_vcs,
    stride_vch,
    stride_vcx,
    stride_vcd,
    stride_skp,
    stride_sks,
    stride_skh,
    stride_svp,
    stride_svs,
    stride_svh,
    PAGE: tl.constexpr,
    K_RUN: tl.constexpr,
    K_UNIT: tl.constexpr,
    K_BYTES: tl.constexpr,
    V_UNIT: tl.constexpr,
    V_BYTES: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    SCALE_PER_HEAD: tl.constexpr,
    FP8_MAX: tl.constexpr,
    INT_MAX: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``k_cache[slot // PAGE, slot % PAGE] = k / k_scale`` with ``slot = slot_mapping[token]``.

    A program writes the keys or the values of a block of tokens of one head. With ``INT_MAX``,
    ``k_scale`` is ``max(abs(k)) / INT_MAX`` of each row, and is written to the scale cache.
    """
    TILE: tl.constexpr = WriteTile(
        HEADS,
        HEAD_DIM,
        HEAD_DIM_V,
        ROW_BYTES,
        SCALE_PER_HEAD,
        FP8_MAX,
        INT_MAX,
        BLOCK_T,
        BLOCK_D,
        BLOCK_DV,
        OVERLAP,
    )
    K_LAYOUT: tl.constexpr = VectorLayout(K_RUN, K_UNIT, K_BYTES, 0)
    V_RUN: tl.constexpr = HEAD_DIM_V // 2 if INT_MAX == 7 else HEAD_DIM_V
    V_LAYOUT: tl.constexpr = VectorLayout(V_RUN, V_UNIT, V_BYTES, 0)
    places = Slots(slot_mapping_ptr, stride_slot, tokens, slots)
    k_cache = Vectors(k_cache_ptr, stride_kcp, stride_kcs, stride_kcx, stride_kcd)
    v_cache = Vectors(v_cache_ptr, stride_vcp, stride_vcs, stride_vcx, stride_vcd)
    k_scales = Vectors(k_scale_cache_ptr, stride_skp, stride_sks, None, None)
    v_scales = Vectors(v_scale_cache_ptr, stride_svp, stride_svs, None, None)
    new_k, new_v = Packed(k_ptr, stride_ks, stride_kh), Packed(v_ptr, stride_vs, stride_vh)
    keys = Side(new_k, k_cache, stride_kch, k_scale_ptr, k_scales, stride_skh)
    values = Side(new_v, v_cache, stride_vch, v_scale_ptr, v_scales, stride_svh)
    pid = tl.program_id(0)
    head = (pid // 2 % HEADS).to(tl.int64)
    token = pid // 2 // HEADS * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    if OVERLAP:
        # the next kernel may start; each waits until the previous one has stored everything
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if pid % 2 == 0:
        KEY: tl.constexpr = Columns(HEAD_DIM, BLOCK_D)
        _write(keys, places, token, head, PAGE, K_LAYOUT, KEY, TILE)
    else:
        VALUE: tl.constexpr = Columns(HEAD_DIM_V, BLOCK_DV)
        _write(values, places, token, head, PAGE, V_LAYOUT, VALUE, TILE)
