"""Launches of the kernels that write what they are given: into a cache, and merged results."""

from __future__ import annotations

from attn_common import cdiv, detect, fp8_info
from torch import Tensor

from .._configs import padded_head_dim
from .cache import _reshape_and_cache_kernel
from .common import CacheForm, launch, one_form
from .launch.runtime import Launch, aligned, dense, is_aligned, row_bytes
from .merge import _state_merge_kernel

# tokens of one head that a program writes
BLOCK_T = 16
# rows of two results that a program merges
MERGE_ROWS = 16


def launch_reshape_and_cache(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale):
    """Run the operator that writes into a cache on checked inputs; see ``_ops.py``."""
    tokens = slot_mapping.shape[0]
    x = aligned(k[:tokens]), aligned(v[:tokens]), k_cache, v_cache, slot_mapping, k_scale, v_scale
    WritePlan(*x).run(*x)


def write_plan_of(k: Tensor, v: Tensor, *rest: Tensor | None) -> WritePlan | None:
    """Return how to launch a form of writes, or None where tensors have to be copied first."""
    return WritePlan(k, v, *rest) if is_aligned(k) and is_aligned(v) else None


class WritePlan:
    """All of a write's launch that depends on its form alone: on no data, and no token count."""

    def __init__(self, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale) -> None:
        """Plan for writes like this one, whose new keys are as ``aligned`` leaves them."""
        _, self._heads_k, head_dim = k.shape
        cache = CacheForm(k_cache, v_cache)
        is_fp8 = k_cache.element_size() == 1
        self._per_head = any(s is not None and s.numel() != 1 for s in (k_scale, v_scale))
        platform = detect(k.device)
        overlap = platform.is_hopper or platform.is_blackwell
        page_v, slot_v, head_v, inner_v = cache.v_strides
        self._numbers = (
            k_cache.shape[0] * cache.page, slot_mapping.stride(0),
            *k.stride()[:2], *v.stride()[:2], *cache.k_strides,
            page_v, slot_v, head_v, 0, inner_v,
        )  # fmt: skip
        self._write = Launch(
            _reshape_and_cache_kernel,
            {
                "HEADS": self._heads_k,
                "HEAD_DIM": head_dim,
                **cache.constants,
                "ROW_BYTES": row_bytes(k),
                "SCALE_PER_HEAD": self._per_head,
                "FP8_MAX": fp8_info(k_cache.dtype).max if is_fp8 else 0.0,
                "BLOCK_T": BLOCK_T,
                "BLOCK_D": padded_head_dim(head_dim),
                "OVERLAP": overlap,
                "num_warps": 4,
                "num_stages": 1,
                **({"launch_pdl": True} if overlap else {}),
            },
        )

    def run(self, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale) -> None:
        """Launch for one write of the form."""
        tokens = slot_mapping.shape[0]
        scales = k_scale, v_scale
        if k_scale is not None or v_scale is not None:
            scales = one_form(self._heads_k, self._per_head, *scales)
        self._write(
            2 * cdiv(tokens, BLOCK_T) * self._heads_k,
            (k, v, k_cache, v_cache, slot_mapping, *scales),
            (tokens, *self._numbers),
        )


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
