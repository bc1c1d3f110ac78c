"""Choose the kernel of a call, and the tiles of the portable kernels, without a GPU.

Tables are keyed by GPU, padded head dimension and element size. Nothing here may depend on the
lengths or the number of packed sequences: a sequence's result would then depend on its neighbours
in the batch. The tiles of the Hopper kernels stand in ``hopper_tiles.py``.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace

import torch
from attn_common import Platform, detect
from torch import Tensor

from .._linked.host.arguments import FP32_TINY
from .._linked.host.tiles import Table, Tile, find_tile, padded_head_dim
from .call import Options, Tensors

# small tiles in the interpreter, so that short sequences cross tile edges
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
    """Return the tile of the kernel that makes dk and dv."""
    return find_tile(_BACKWARD_DKDV, platform, head_dim, itemsize)


@functools.cache
def backward_dq_tile(
    platform: Platform, head_dim: int, itemsize: int, has_bias: bool = False
) -> Tile:
    """Return the tile of the kernel that makes dq."""
    tile = find_tile(_BACKWARD_DQ, platform, head_dim, itemsize)
    if has_bias and padded_head_dim(head_dim) == 256 and tile.num_stages > 2:
        # shared memory holds keys and values of a third step, but not also its bias
        return replace(tile, num_stages=2)
    return tile


@functools.cache
def short_tile(platform: Platform, head_dim: int, itemsize: int) -> Tile:
    """Return the tile of the kernel that makes all gradients of short sequences."""
    return find_tile(_BACKWARD_SHORT, platform, head_dim, itemsize)


@functools.cache
def bias_gradient_tile(platform: Platform, head_dim: int, itemsize: int) -> Tile:
    """Return the tile of the bias gradient: the tile of dq, or a smaller one for wide TF32."""
    if platform.vendor == "nvidia" and itemsize == 4 and head_dim > 64:
        return Tile(16, 32, 8, 1, "tf32x3")
    return backward_dq_tile(platform, head_dim, itemsize)


# "0" makes the portable kernels run every call, for comparisons and in case of doubt
HOPPER = os.environ.get("FLASH_ATTN_TRITON_HOPPER", "1") != "0"

HALF = (torch.float16, torch.bfloat16)

# smallest scale by which a bias may be divided without overflow in fp32
LEAST_SCALE = 2.0**-10


def takes_hopper_forward(x: Tensors, options: Options, out_dtype: torch.dtype) -> bool:
    """Tell whether the Hopper forward runs a call; the portable one runs all other calls."""
    if x.q.dtype == torch.float8_e4m3fn:
        fits = _fits_fp8_on_hopper(x, out_dtype)
    else:
        fits = out_dtype == x.q.dtype  # TMA does not convert
    return (
        fits
        and _takes_hopper(x, (*HALF, torch.float8_e4m3fn))
        # with a left window the first keys are left out, but dropout numbers keys from the first
        and (options.dropout_p == 0.0 or options.window_left < 0)
        and max(x.q.shape[-1], x.v.shape[-1]) > 32  # half of a tile would be padding
        and x.out_scale is None
        # the exponential applies the scale, and only a positive one commutes with the maximum
        and options.softmax_scale >= FP32_TINY
        and (x.bias is None or _fits_bias_on_hopper(x, options))
    )


def _fits_bias_on_hopper(x: Tensors, options: Options) -> bool:
    """Tell whether the Hopper forward supports an additive bias in this call."""
    return (
        x.q.dtype in HALF
        and x.bias is not None
        and _has_tiles(x.bias, options)
        # the kernel divides the bias by the scale, and multiplies the sum with the scale later
        and options.softmax_scale >= LEAST_SCALE
    )


def _has_tiles(bias: Tensor, options: Options) -> bool:
    """Tell whether TMA can copy tiles of a bias in the Hopper kernels' walk over keys.

    A tile has to begin at a multiple of 16 bytes in its row. With a left window, tiles begin at the
    first key that a query sees, which may be any key.
    """
    return has_columns(bias) and options.window_left < 0


def has_columns(bias: Tensor) -> bool:
    """Tell whether a bias differs between keys; one that does not only shifts the LSE."""
    return bias.shape[-1] > 1 and bias.stride(-1) != 0 and bias.numel() > 0


def _fits_fp8_on_hopper(x: Tensors, out_dtype: torch.dtype) -> bool:
    """Tell whether the FP8 forward can run a call, and is worth the copy of the values."""
    is_worth = (
        x.cu_seqlens_q is not None  # lengths of packed sequences must not decide
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
    """Tell whether the Hopper backward runs a call; portable kernels run all other calls."""
    return (
        _takes_hopper(x)
        and min(x.q.shape[-1], x.v.shape[-1]) > 32
        and (x.bias is None or _has_tiles(x.bias, options))
    )


# most queries, keys and head dimension for which one launch makes all gradients: above, large
# batches are faster with the Hopper kernels
SHORT = 128
SHORT_HEAD_DIM = 64


def takes_short_backward(x: Tensors, options: Options, out_dtype: torch.dtype) -> bool:
    """Tell whether one launch makes all gradients: of short sequences with only q, k and v."""
    return (
        HOPPER
        # rng_state is still None when the launcher is made
        and options.dropout_p == 0.0
        and all(t is None for t in x[3:])
        and detect(x.q.device).is_hopper
        and x.q.dtype in HALF
        and out_dtype == x.q.dtype
        and max(x.q.shape[1], x.k.shape[1]) <= SHORT
        and max(x.q.shape[-1], x.v.shape[-1]) <= SHORT_HEAD_DIM
        and all(t.numel() > 0 for t in x[:3])
    )


def _takes_hopper(x: Tensors, dtypes: tuple[torch.dtype, ...] = HALF) -> bool:
    return (
        HOPPER
        and x.q.device.type != "cpu"
        and detect(x.q.device).is_hopper
        and x.q.dtype in dtypes
        and x.spans is None
        # rows that TMA can read; ``readable`` has widened all others
        and x.q.shape[-1] * x.q.element_size() % 16 == 0
        and x.v.shape[-1] * x.v.element_size() % 16 == 0
        and x.k.numel() > 0
        and x.v.numel() > 0
    )
