"""Checks of single tensors: device, lengths, indices, scales."""

from typing import Any

import torch
from torch import Tensor

from .._linked.host.arguments import check_tensor

INDEX_DTYPES = frozenset((torch.int32, torch.int64))


def check_device(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Check that two tensors are on one device."""
    if x.device != other.device:
        raise ValueError(
            f"{name} must be on the device of {other_name}, {other.device}, got {x.device}"
        )


def check_lengths(name: str, x: Any, q: Tensor) -> None:
    """Check a vector of lengths or offsets."""
    check_tensor(name, x)
    if x.dtype != torch.int32:
        raise TypeError(f"{name} must be torch.int32, got {x.dtype}")
    check_device(name, x, "q", q)
    if x.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got {list(x.shape)}")


def check_indices(name: str, x: Any, like_name: str, like: Tensor, ndim: int) -> None:
    """Check a tensor of page or slot numbers."""
    check_tensor(name, x)
    if x.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name} must be torch.int32 or torch.int64, got {x.dtype}")
    check_device(name, x, like_name, like)
    if x.ndim != ndim:
        count = "one dimension" if ndim == 1 else f"{ndim} dimensions"
        raise ValueError(f"{name} must have {count}, got {list(x.shape)}")


def check_scale_tensor(
    name: str,
    scale: Tensor,
    like_name: str,
    like: Tensor,
    heads_k: int,
    batch: int | None = None,
) -> None:
    """Check a scale of one element, ``[heads_k]``, or, with ``batch``, ``[batch, heads_k]``.

    With ``heads_k`` 0 it must have one element.
    """
    check_tensor(name, scale)
    if scale.dtype != torch.float32:
        raise TypeError(f"{name} must be torch.float32, got {scale.dtype}")
    check_device(name, scale, like_name, like)
    per_sequence = batch is not None and scale.shape == (batch, heads_k)
    if scale.numel() != 1 and not per_sequence and not (heads_k and scale.shape == (heads_k,)):
        wanted = f" or be [heads_k], [{heads_k}]" if heads_k else ""
        wanted += f", or [batch, heads_k], [{batch}, {heads_k}]" if batch is not None else ""
        raise ValueError(f"{name} must have one element{wanted}, got {list(scale.shape)}")
