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


@triton.jit
def _write(
    new_ptr, cache_ptr, slot_mapping_ptr, scale_ptr, scale_at, token, head, tokens, slots,
    stride_slot, stride_new_s, stride_new_h, stride_page, stride_in_page, stride_head, stride_step,
    stride_inner,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, RUN: tl.constexpr, UNIT: tl.constexpr,
    BYTES: tl.constexpr, ROW_BYTES: tl.constexpr, FP8_MAX: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write tokens of one head into their slots; those below 0, or past the end, stay out.

    What is to be written does not wait for the slots: of tokens that stay out it is read in vain.
    """
    exists = token < tokens
    token = token.to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    rows = token * stride_new_s + head * stride_new_h
    values = tl.load(
        tl.multiple_of(new_ptr + rows[:, None], [ROW_BYTES, ROW_BYTES]) + cols[None, :],
        mask=exists[:, None] & (cols < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip
    slot = tl.load(slot_mapping_ptr + token * stride_slot, mask=exists, other=-1).to(tl.int64)
    inside = (slot >= 0) & (slot < slots)
    slot = tl.where(inside, slot, 0)
    if slots.dtype == tl.int32:
        slot = slot.to(tl.uint32)
    page = (slot // PAGE).to(tl.int64)
    place = (slot % PAGE).to(tl.int64)
    _store_rows(
        _stored(values, scale_ptr, scale_at, cache_ptr, FP8_MAX), cache_ptr,
        page * stride_page + place * stride_in_page + head * stride_head,
        inside, cols, stride_step, stride_inner, HEAD_DIM, RUN, UNIT, BYTES,
    )  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def _reshape_and_cache_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, k_scale_ptr, v_scale_ptr,
    tokens, slots, stride_slot, stride_ks, stride_kh, stride_vs, stride_vh,
    stride_kcp, stride_kcs, stride_kch, stride_kcx, stride_kcd,
    stride_vcp, stride_vcs, stride_vch, stride_vcx, stride_vcd,
    HEADS: tl.constexpr,
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
    OVERLAP: tl.constexpr,  # programs are set up while the kernel before still runs
):  # fmt: skip
    """Write the keys, or the values, of a block of tokens of one head."""
    pid = tl.program_id(0)
    head = (pid // 2 % HEADS).to(tl.int64)
    token = pid // 2 // HEADS * BLOCK_T + tl.arange(0, BLOCK_T)
    scale_at = head if SCALE_PER_HEAD else 0
    if OVERLAP:
        # the one behind may be set up, too; each waits until the one before has written all
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if pid % 2 == 0:
        _write(
            k_ptr, k_cache_ptr, slot_mapping_ptr, k_scale_ptr, scale_at, token, head, tokens, slots,
            stride_slot, stride_ks, stride_kh, stride_kcp, stride_kcs, stride_kch, stride_kcx,
            stride_kcd, HEAD_DIM, PAGE, K_RUN, K_UNIT, K_BYTES, ROW_BYTES, FP8_MAX, BLOCK_D,
        )  # fmt: skip
    else:
        _write(
            v_ptr, v_cache_ptr, slot_mapping_ptr, v_scale_ptr, scale_at, token, head, tokens, slots,
            stride_slot, stride_vs, stride_vh, stride_vcp, stride_vcs, stride_vch, stride_vcx,
            stride_vcd, HEAD_DIM, PAGE, HEAD_DIM, V_UNIT, V_BYTES, ROW_BYTES, FP8_MAX, BLOCK_D,
        )  # fmt: skip
