"""Writing new keys and values into the pages of a cache."""

import triton
import triton.language as tl

from .arguments import NUMBERS, POINTERS


@triton.jit
def _store_rows(
    values, base, rows, inside, cols, stride_step, stride_inner,
    WIDTH: tl.constexpr, RUN: tl.constexpr, UNIT: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Store rows x cols of vectors in runs, as ``load_rows`` reads them."""
    begin = base + rows[:, None]
    if RUN < WIDTH:
        begin += (cols // RUN).to(tl.int64)[None, :] * stride_step
    place = cols % RUN if RUN < WIDTH else cols
    if UNIT:
        pointers = tl.multiple_of(begin, [BYTES, BYTES]) + place[None, :]
    else:
        pointers = begin + place.to(tl.int64)[None, :] * stride_inner
    tl.store(pointers, values, mask=inside[:, None] & (cols < WIDTH)[None, :])


@triton.jit
def _stored(values, scale_ptr, scale_at, cache_ptr, FP8_MAX: tl.constexpr):
    """Return values as the cache holds them: FP8 is scaled and saturated first."""
    if FP8_MAX > 0:
        values = values.to(tl.float32)
        if scale_ptr is not None:
            values /= tl.load(scale_ptr + scale_at)
        values = tl.clamp(values, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return values.to(cache_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def _reshape_and_cache_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, k_scale_ptr, v_scale_ptr,
    tokens, heads_k, slots, stride_slot, stride_ks, stride_kh, stride_vs, stride_vh,
    stride_kcp, stride_kcs, stride_kch, stride_kcx, stride_kcd,
    stride_vcp, stride_vcs, stride_vch, stride_vcx, stride_vcd,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    K_RUN: tl.constexpr,
    K_UNIT: tl.constexpr,
    K_BYTES: tl.constexpr,
    V_UNIT: tl.constexpr,
    V_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    SCALE_PER_HEAD: tl.constexpr,
    FP8_MAX: tl.constexpr,  # largest finite value of an fp8 cache, 0 for other caches
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write a block of tokens of one head; those with a slot below 0, or past the end, stay out."""
    pid = tl.program_id(0)
    head = (pid % heads_k).to(tl.int64)
    token = pid // heads_k * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(
        slot_mapping_ptr + token.to(tl.int64) * stride_slot, mask=token < tokens, other=-1
    )
    slot = slot.to(tl.int64)
    inside = (slot >= 0) & (slot < slots)
    slot = tl.where(inside, slot, 0)
    page = slot // PAGE
    in_page = slot % PAGE
    token = token.to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (cols < HEAD_DIM)[None, :]
    scale_at = head if SCALE_PER_HEAD else 0
    for is_value in tl.static_range(2):
        if is_value == 0:
            rows = token * stride_ks + head * stride_kh
            values = tl.load(
                tl.multiple_of(k_ptr + rows[:, None], [ROW_BYTES, ROW_BYTES]) + cols[None, :],
                mask=mask, other=0.0,
            )  # fmt: skip
            _store_rows(
                _stored(values, k_scale_ptr, scale_at, k_cache_ptr, FP8_MAX), k_cache_ptr,
                page * stride_kcp + in_page * stride_kcs + head * stride_kch, inside, cols,
                stride_kcx, stride_kcd, HEAD_DIM, K_RUN, K_UNIT, K_BYTES,
            )  # fmt: skip
        else:
            rows = token * stride_vs + head * stride_vh
            values = tl.load(
                tl.multiple_of(v_ptr + rows[:, None], [ROW_BYTES, ROW_BYTES]) + cols[None, :],
                mask=mask, other=0.0,
            )  # fmt: skip
            _store_rows(
                _stored(values, v_scale_ptr, scale_at, v_cache_ptr, FP8_MAX), v_cache_ptr,
                page * stride_vcp + in_page * stride_vcs + head * stride_vch, inside, cols,
                stride_vcx, stride_vcd, HEAD_DIM, HEAD_DIM, V_UNIT, V_BYTES,
            )  # fmt: skip
