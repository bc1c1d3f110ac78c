"""Helpers of hopper tests that other tests use too."""

from __future__ import annotations

import functools

import torch
from flash_attn_triton._dense.call import Options, Tensors
from flash_attn_triton._dense.hopper.forward.launch import HopperForward
from flash_attn_triton._dense.hopper_tiles import hopper_tile
from flash_attn_triton._dense.launch import PortableForward
from flash_attn_triton._dense.portable.form import Form, readable

HOPPER = "nvidia:sm_90"


LONG = hopper_tile(64, True, is_long=True)


def hopper(
    q,
    k,
    v,
    *,
    sinks=None,
    alibi_slopes=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    softmax_scale=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=0,
    max_seqlen_k=0,
    seqused_k=None,
    dropout_p=0.0,
    rng_state=None,
    return_lse=True,
    tile=None,
    merges=False,
):
    """Launch the kernel with the arguments of the public functions; once more if it ``merges``."""
    left, right = window_size
    right = 0 if causal else right
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    x = Tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, None, alibi_slopes, sinks)
    x = readable(x._replace(rng_state=rng_state))
    options = Options(scale, left, right, softcap, dropout_p)
    form = Form(x, options)
    portable = PortableForward(form, x, q.dtype)
    forward = HopperForward(form, x, q.dtype, portable, is_kept=q.is_cuda, tile=tile)
    out, lse = forward(x)
    assert not merges or forward.merge(x, out, lse)
    return out, lse


def features(name: str) -> dict[str, object]:
    name = name.removeprefix("merging ")
    meta = functools.partial(torch.empty, device="meta")
    offsets = meta(3, dtype=torch.int32)
    return {
        "full": {},
        "causal": {"causal": True},
        "long": {"causal": True, "tile": LONG},
        "left": {"window_size": (100, -1)},
        "dropout": {"dropout_p": 0.1, "rng_state": meta(2, dtype=torch.int64)},
        "causal dropout": {
            "causal": True,
            "dropout_p": 0.1,
            "rng_state": meta(2, dtype=torch.int64),
        },
        "few": {"causal": True, "sinks": meta(16)},
        "packed": {"causal": True, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets},
        "rich": {
            "window_size": (100, 0),
            "softcap": 30.0,
            "sinks": meta(4),
            "alibi_slopes": meta(4),
            "cu_seqlens_q": offsets,
            "cu_seqlens_k": offsets,
            "seqused_k": meta(2, dtype=torch.int32),
        },
    }[name]
