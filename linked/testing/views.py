"""Other layouts of the same values, for tests of strides."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _inside(x: Tensor) -> Tensor:
    """A window of a larger tensor of NaN, so that reads outside it show."""
    if not x.ndim:
        return x
    frame = x.new_full([n + 3 for n in x.shape], float("nan"))
    view = frame[tuple(slice(1, 1 + n) for n in x.shape)]
    return view.copy_(x)


def _last_dim_strided(x: Tensor) -> Tensor:
    """Every other element of the last dimension, NaN between them."""
    frame = x.new_full([*x.shape, 2], float("nan"))
    view = frame[..., 0]
    return view.copy_(x)


def _heads_first(x: Tensor) -> Tensor:
    """Memory in the order of [batch, heads, tokens, head_dim]."""
    if x.ndim < 3:
        return _inside(x)
    return x.transpose(-2, -3).contiguous().transpose(-2, -3)


def _reversed_memory(x: Tensor) -> Tensor:
    """Memory in the order of the reversed shape: the last dimension moves slowest."""
    order = tuple(reversed(range(x.ndim)))
    return _inside(x) if x.ndim < 2 else x.permute(order).contiguous().permute(order)


def _odd_token_stride(x: Tensor) -> Tensor:
    """Rows with one element of padding, so that they are not aligned."""
    frame = x.new_full([*x.shape[:-1], x.shape[-1] + 1], float("nan"))
    view = frame[..., :-1]
    return view.copy_(x)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "inside": _inside,
    "last_dim_strided": _last_dim_strided,
    "heads_first": _heads_first,
    "reversed_memory": _reversed_memory,
    "odd_token_stride": _odd_token_stride,
}


def same_values(view: str, x: Tensor) -> Tensor:
    """Return the values of ``x`` in the memory layout of a view, without a graph."""
    with torch.no_grad():
        return VIEWS[view](x.detach())
