"""Which kernel serves a call, and the tiles of the portable ones: functions that need no GPU.

A shape class is the padded head dimension and the element size. Nothing here may depend on lengths
of packed sequences or on their number: a sequence's result would then depend on its neighbours in
the batch. The tiles of the kernels for Hopper stand in ``hopper_tiles.py``.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace

import torch
from attn_common import Platform, detect, has_gluon
from torch import Tensor

from .._linked.host.arguments import FP32_TINY
from .._linked.host.tiles import Table, Tile, find_tile, padded_head_dim
from .call import Options, Tensors

# the interpreter: small tiles, so that short sequences cross tile edges
_INTERPRETED = ((256, Tile(16, 16, 1, 1)),)

_FORWARD: Table[Tile] = {
    "cpu": _INTERPRETED,
    "hopper": (
        (128, Tile(128, 64, 8, 3)),
        (256, Tile(128, 64, 8, 2)),
    ),
    "nvidia": (
        (64, Tile(64, 64, 4, 3)),
        (128, Tile(64, 32, 4, 3)),
        (256, Tile(64, 32, 8, 2)),
    ),
    "amd": (
        (128, Tile(128, 64, 4, 1)),
        (256, Tile(64, 32, 4, 1)),
    ),
    "rdna": (
        (64, Tile(64, 32, 4, 1)),
        (128, Tile(64, 32, 8, 1)),
        (256, Tile(32, 32, 8, 1)),
    ),
    "hopper-fp32": (
        (64, Tile(64, 64, 4, 2, "tf32x3")),
        (128, Tile(128, 32, 8, 2, "tf32x3")),
        (256, Tile(16, 32, 8, 1, "tf32x3")),
    ),
    "nvidia-fp32": (
        (64, Tile(64, 32, 4, 1, "tf32x3")),
        (128, Tile(32, 32, 8, 1, "tf32x3")),
        (256, Tile(16, 32, 8, 1, "tf32x3")),
    ),
    "amd-fp32": (
        (64, Tile(64, 32, 4, 1)),
        (128, Tile(32, 32, 4, 1)),
        (256, Tile(16, 32, 4, 1)),
    ),
    "rdna-fp32": (
        (64, Tile(32, 32, 8, 1)),
        (128, Tile(16, 32, 8, 1)),
        (256, Tile(16, 16, 8, 1)),
    ),
}

_BACKWARD_DKDV: Table[Tile] = {
    "cpu": _INTERPRETED,
    "hopper": (
        (64, Tile(64, 64, 4, 3)),
        (128, Tile(64, 64, 4, 2)),
        (256, Tile(64, 64, 8, 2)),
    ),
    "nvidia": (
        (64, Tile(32, 64, 4, 2)),
        (128, Tile(16, 64, 4, 2)),
        (256, Tile(16, 32, 8, 1)),
    ),
    "amd": (
        (128, Tile(64, 64, 8, 1)),
        (256, Tile(16, 32, 4, 1)),
    ),
    "rdna": (
        (64, Tile(32, 32, 4, 1)),
        (128, Tile(32, 32, 8, 1)),
        (256, Tile(16, 16, 8, 1)),
    ),
    "hopper-fp32": (
        (64, Tile(32, 32, 4, 1, "tf32x3")),
        (128, Tile(32, 32, 8, 1, "tf32x3")),
        (256, Tile(16, 16, 8, 1, "tf32x3")),
    ),
    "nvidia-fp32": (
        (64, Tile(32, 32, 4, 1, "tf32x3")),
        (128, Tile(16, 32, 8, 1, "tf32x3")),
        (256, Tile(16, 16, 8, 1, "tf32x3")),
    ),
    "amd-fp32": (
        (64, Tile(32, 32, 4, 1)),
        (128, Tile(16, 32, 4, 1)),
        (256, Tile(16, 16, 4, 1)),
    ),
    "rdna-fp32": (
        (64, Tile(16, 16, 4, 1)),
        (128, Tile(16, 16, 8, 1)),
        (256, Tile(16, 16, 8, 1)),
    ),
}

_BACKWARD_DQ: Table[Tile] = {
    "cpu": _INTERPRETED,
    "hopper": (
        (64, Tile(64, 64, 4, 3)),
        (128, Tile(128, 64, 8, 3)),
        (256, Tile(128, 32, 8, 3)),
    ),
    "nvidia": (
        (64, Tile(64, 32, 4, 2)),
        (128, Tile(64, 32, 4, 2)),
        (256, Tile(32, 32, 8, 1)),
    ),
    "amd": (
        (128, Tile(64, 32, 4, 1)),
        (256, Tile(32, 16, 4, 1)),
    ),
    "rdna": (
        (64, Tile(32, 32, 4, 1)),
        (128, Tile(32, 32, 8, 1)),
        (256, Tile(16, 16, 8, 1)),
    ),
    "hopper-fp32": (
        (64, Tile(64, 32, 4, 1, "tf32x3")),
        (128, Tile(32, 32, 8, 1, "tf32x3")),
        (256, Tile(16, 16, 8, 1, "tf32x3")),
    ),
    "nvidia-fp32": (
        (64, Tile(32, 32, 4, 1, "tf32x3")),
        (128, Tile(32, 16, 8, 1, "tf32x3")),
        (256, Tile(16, 16, 8, 1, "tf32x3")),
    ),
    "amd-fp32": (
        (64, Tile(32, 32, 4, 1)),
        (128, Tile(32, 16, 4, 1)),
        (256, Tile(16, 16, 4, 1)),
    ),
    "rdna-fp32": (
        (64, Tile(16, 16, 4, 1)),
        (128, Tile(16, 16, 8, 1)),
        (256, Tile(16, 16, 8, 1)),
    ),
}

# walks are too short to pipeline
_BACKWARD_SHORT: Table[Tile] = {
    "cpu": _INTERPRETED,
    "hopper": ((64, Tile(64, 64, 4, 1)),),
}


@functools.cache
def forward_tile(platform: Platform, head_dim: int, itemsize: int) -> Tile:
    """Return the forward tile for the wider of the two head dimensions."""
    return find_tile(_FORWARD, platform, head_dim, itemsize)


@functools.cache
def backward_dkdv_tile(platform: Platform, head_dim: int, itemsize: int) -> Tile:
    """Return the tile of the pass that makes dk and dv."""
    return find_tile(_BACKWARD_DKDV, platform, head_dim, itemsize)


@functools.cache
def backward_dq_tile(
    platform: Platform, head_dim: int, itemsize: int, has_bias: bool = False
) -> Tile:
    """Return the tile of the pass that makes dq."""
    tile = find_tile(_BACKWARD_DQ, platform, head_dim, itemsize)
    if has_bias and padded_head_dim(head_dim) == 256 and tile.num_stages > 2:
        # the bias of a third step does not fit beside its keys and values
        return replace(tile, num_stages=2)
    return tile


@functools.cache
def short_tile(platform: Platform, head_dim: int, itemsize: int) -> Tile:
    """Return the tile of the kernel that makes all gradients of short sequences."""
    return find_tile(_BACKWARD_SHORT, platform, head_dim, itemsize)


@functools.cache
def bias_gradient_tile(platform: Platform, head_dim: int, itemsize: int) -> Tile:
    """Return the tile of the bias gradient: that of dq, but where three TF32 products overflow."""
    if platform.vendor == "nvidia" and itemsize == 4 and head_dim > 64:
        return Tile(16, 32, 8, 1, "tf32x3")
    return backward_dq_tile(platform, head_dim, itemsize)


# for comparisons, and in case of doubt: the portable kernels serve every call
HOPPER = os.environ.get("FLASH_ATTN_TRITON_HOPPER", "1") != "0"

HALF = (torch.float16, torch.bfloat16)

# with which the quotient of a bias and the scale still has room in fp32
LEAST_SCALE = 2.0**-10


def takes_hopper_forward(x: Tensors, options: Options, out_dtype: torch.dtype) -> bool:
    """Say whether the forward kernel for Hopper serves a call; the portable one has the rest."""
    if x.q.dtype == torch.float8_e4m3fn:
        fits = _fits_fp8_on_hopper(x, out_dtype)
    else:
        fits = out_dtype == x.q.dtype  # TMA writes what it reads
    return (
        fits
        and _takes_hopper(x, options, (*HALF, torch.float8_e4m3fn))
        # keys ahead of every window are left out, and dropout counts from the sequence's first
        and (options.dropout_p == 0.0 or options.window_left < 0)
        and max(x.q.shape[-1], x.v.shape[-1]) > 32  # half of a tile would be padding
        and x.out_scale is None
        # folded into the exponential, where only a positive one commutes with the maximum
        and options.softmax_scale >= FP32_TINY
        and (x.bias is None or _fits_bias_on_hopper(x, options))
    )


def _fits_bias_on_hopper(x: Tensors, options: Options) -> bool:
    """Say whether the forward kernel for Hopper has a form for an additive bias."""
    return (
        x.q.dtype in HALF
        and x.bias is not None
        and _has_tiles(x.bias, options)
        # a bias is divided by the scale, as products are multiplied with it behind the sum
        and options.softmax_scale >= LEAST_SCALE
    )


def _has_tiles(bias: Tensor, options: Options) -> bool:
    """Say whether TMA can copy tiles of a bias as the kernels for Hopper walk the keys.

    A tile begins at a multiple of 16 bytes in its row. Beside a window that ends on the left, keys
    count from the first one that a query sees, which may be any.
    """
    return has_columns(bias) and options.window_left < 0


def has_columns(bias: Tensor) -> bool:
    """Say whether a bias has tiles: it is not the same for all keys, which moves the LSE alone."""
    return bias.shape[-1] > 1 and bias.stride(-1) != 0 and bias.numel() > 0


def _fits_fp8_on_hopper(x: Tensors, out_dtype: torch.dtype) -> bool:
    """Say whether the forward in FP8 can have a call, and is worth the copy of the values."""
    is_worth = (
        x.cu_seqlens_q is not None  # there, lengths may not decide
        or x.q.shape[-3] > 128
        or x.k.shape[-3] >= 2048
    )
    return (
        is_worth
        # one product sums 32 columns: a tile of 16 does not compile
        and x.q.shape[-1] > 16
        and out_dtype in HALF
    )


def takes_hopper_backward(x: Tensors, options: Options) -> bool:
    """Say whether the backward kernel for Hopper serves a call; the portable ones have the rest."""
    return (
        _takes_hopper(x, options)
        and min(x.q.shape[-1], x.v.shape[-1]) > 32
        and (x.bias is None or _has_tiles(x.bias, options))
    )


# tokens, of queries and of keys, and head dimension, up to which one launch makes all gradients:
# beyond, large batches take longer than by the kernels for Hopper
SHORT = 128
SHORT_HEAD_DIM = 64


def takes_short_backward(x: Tensors, options: Options, out_dtype: torch.dtype) -> bool:
    """Say whether one launch makes all gradients of a call: a plain one, of short sequences."""
    return (
        HOPPER
        # a plan is made before the numbers of dropout are drawn
        and options.dropout_p == 0.0
        and all(t is None for t in x[3:])
        and detect(x.q.device).is_hopper
        and x.q.dtype in HALF
        and out_dtype == x.q.dtype
        and max(x.q.shape[1], x.k.shape[1]) <= SHORT
        and max(x.q.shape[-1], x.v.shape[-1]) <= SHORT_HEAD_DIM
        and all(t.numel() > 0 for t in x[:3])
    )


def _takes_hopper(x: Tensors, options: Options, dtypes: tuple[torch.dtype, ...] = HALF) -> bool:
    return (
        HOPPER
        and x.q.device.type != "cpu"
        and detect(x.q.device).is_hopper
        and x.q.dtype in dtypes
        # rows that TMA reads; ``readable`` has made others wider
        and x.q.shape[-1] * x.q.element_size() % 16 == 0
        and x.v.shape[-1] * x.v.element_size() % 16 == 0
        and x.k.numel() > 0
        and x.v.numel() > 0
        and has_gluon()
    )
