"""Launches of the kernels that write what they are given: into a cache, and merged results."""

from __future__ import annotations

from attn_common import cdiv, fp8_info

from .._configs import padded_head_dim
from .cache import _reshape_and_cache_kernel
from .launch import CacheForm, launch, one_form
from .merge import _state_merge_kernel
from .runtime import aligned, dense, is_interpreted, row_bytes

# tokens of one head that a program writes
BLOCK_T = 32
# rows of two results that a program merges
MERGE_ROWS = 16


def launch_reshape_and_cache(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale):
    """Run the operator that writes into a cache on checked inputs; see ``_ops.py``."""
    tokens = slot_mapping.shape[0]
    k, v = aligned(k[:tokens]), aligned(v[:tokens])
    _, heads_k, head_dim = k.shape
    cache = CacheForm(k_cache, v_cache)
    is_fp8 = k_cache.element_size() == 1
    per_head = any(scale is not None and scale.numel() != 1 for scale in (k_scale, v_scale))
    scales = one_form(heads_k, per_head, k_scale, v_scale)
    block_t = 16 if is_interpreted() else BLOCK_T
    page_v, slot_v, head_v, inner_v = cache.v_strides
    launch(
        _reshape_and_cache_kernel, cdiv(tokens, block_t) * heads_k,
        (k, v, k_cache, v_cache, slot_mapping, *scales),
        (
            tokens, heads_k, k_cache.shape[0] * cache.page, slot_mapping.stride(0),
            *k.stride()[:2], *v.stride()[:2], *cache.k_strides,
            page_v, slot_v, head_v, 0, inner_v,
        ),
        {
            "HEAD_DIM": head_dim,
            **cache.constants,
            "ROW_BYTES": row_bytes(k),
            "SCALE_PER_HEAD": per_head,
            "FP8_MAX": fp8_info(k_cache.dtype).max if is_fp8 else 0.0,
            "BLOCK_T": block_t,
            "BLOCK_D": padded_head_dim(head_dim),
            "num_warps": 4,
            "num_stages": 1,
        },
    )  # fmt: skip


def launch_merge(out_a, lse_a, out_b, lse_b, out_scale, out, lse):
    """Run the operator that merges two results on checked inputs; see ``_ops.py``."""
    tokens, heads_q, head_dim = out_a.shape
    target = out if out.stride(2) == 1 or head_dim == 1 else out.new_empty(out.shape)
    launch(
        _state_merge_kernel, cdiv(tokens * heads_q, MERGE_ROWS),
        (dense(out_a), dense(lse_a), dense(out_b), dense(lse_b), target, lse, out_scale),
        (heads_q, tokens, *target.stride()[:2]),
        {
            "HEAD_DIM": head_dim,
            "OUT_MAX": fp8_info(out.dtype).max if out.element_size() == 1 else 0.0,
            "BLOCK_D": padded_head_dim(head_dim),
            "ROWS": MERGE_ROWS,
            "num_warps": 4,
            "num_stages": 1,
        },
    )  # fmt: skip
    if target is not out:
        out.copy_(target)
