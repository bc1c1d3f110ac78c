"""Compressed rows from a list of columns per row, as a selector of top-k blocks returns it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._linked.host.operators import register
from .checks import check_indices
from .kept_lists import NAMESPACE


def check_columns(indices: Any, counts: Any) -> None:
    """Check ``indices`` and ``counts``, except their values."""
    check_indices("indices", indices)
    if counts is not None:
        check_indices("counts", counts)
    if indices.ndim not in (3, 4) or 0 in indices.shape[:-2]:
        raise ValueError(
            "indices must be [heads, rows, k] or [batch, heads, rows, k] with one head at least, "
            f"got {list(indices.shape)}"
        )
    if counts is None:
        return
    if counts.shape != indices.shape[:-1]:
        raise ValueError(
            f"counts must have the shape of indices without the last dimension, "
            f"{list(indices.shape[:-1])}, got {list(counts.shape)}"
        )
    if counts.device != indices.device:
        raise ValueError(
            f"counts must be on the device of indices, {indices.device}, got {counts.device}"
        )


def _check_values(indices: Tensor, counts: Tensor | None, cols: int) -> None:
    """Raise for the first count or column of a CPU tensor that is out of range."""
    if counts is not None:
        wrong = ((counts < 0) | (counts > indices.shape[-1])).nonzero()
        if len(wrong):
            at = wrong[0].tolist()
            raise ValueError(
                f"counts{at} must be from 0 to {indices.shape[-1]}, got {int(counts[tuple(at)])}"
            )
    wrong = (_listed(indices, counts) & ((indices < -1) | (indices >= cols))).nonzero()
    if len(wrong):
        at = wrong[0].tolist()
        raise ValueError(
            f"indices{at} must be from 0 to {cols - 1}, a block column, or -1, "
            f"got {int(indices[tuple(at)])}"
        )


def _listed(indices: Tensor, counts: Tensor | None) -> Tensor:
    listed = indices != -1
    if counts is None:
        return listed
    place = torch.arange(indices.shape[-1], device=indices.device)
    return listed & (place < counts[..., None])


def _csr(indices: Tensor, counts: Tensor | None, cols: int) -> tuple[Tensor, Tensor]:
    """Count, sum and scatter: nothing is sorted, and the host reads no value."""
    *leading, rows, k = indices.shape
    listed = _listed(indices, counts)
    crow = indices.new_zeros((*leading, rows + 1), dtype=torch.int32)
    crow[..., 1:] = listed.sum(-1).cumsum(-1)
    listed = listed.flatten(-2)
    # columns out of range stay out of range in 32 bits; kernels ignore them
    values = indices.flatten(-2).clamp(-2, cols).to(torch.int32)
    place = torch.where(listed, listed.cumsum(-1) - 1, rows * k)
    col = torch.full((*leading, rows * k + 1), -1, dtype=torch.int32, device=indices.device)
    return crow, col.scatter_(-1, place, values)[..., :-1].contiguous()


def _csr_fake(indices: Tensor, counts: Tensor | None, cols: int) -> tuple[Tensor, Tensor]:
    *leading, rows, k = indices.shape
    crow = indices.new_empty((*leading, rows + 1), dtype=torch.int32)
    return crow, indices.new_empty((*leading, rows * k), dtype=torch.int32)


rows_of_indices = register(
    f"{NAMESPACE}::rows_of_indices",
    "(Tensor indices, Tensor? counts, SymInt cols) -> (Tensor crow, Tensor col)",
    fake=_csr_fake,
    kernels=_csr,
    eager=_csr,
    check=_check_values,
)
