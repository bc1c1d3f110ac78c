"""Checks of the arguments of layouts; only :func:`validate_csr` reads device data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._linked.host.arguments import (
    FLOAT_DTYPES,
    check_choice,
    check_count,
    check_flag,
    check_groups,
    check_readable,
    check_tensor,
    is_int,
    shown,
)

BLOCK_SIZES = (16, 32, 64, 128)
INDEX_DTYPES = (torch.int32, torch.int64)


def check_indices(name: str, x: Any) -> None:
    """Check type and dtype of a tensor of indices."""
    check_tensor(name, x)
    if x.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name} must be torch.int32 or torch.int64, got {x.dtype}")


def check_block_size(block_size: Any, name: str = "block_size") -> tuple[int, int]:
    """Check a block size; return it as ``(q, k)``."""
    sides = block_size
    if is_int(block_size):
        sides = (block_size, block_size)
    if not isinstance(sides, Sequence) or len(sides) != 2:
        raise TypeError(f"{name} must be an int or a pair (q, k), got {shown(block_size)}")
    for side in sides:
        if not is_int(side):
            raise TypeError(f"{name} must be an int or a pair (q, k), got {shown(block_size)}")
        if side not in BLOCK_SIZES:
            raise ValueError(f"{name} must be 16, 32, 64 or 128, got {shown(block_size)}")
    return sides[0], sides[1]


def check_calls(num_heads: int, heads_q: Any, heads_k: Any, head_dim: Any, dtype: Any) -> None:
    """Check the arguments of ``BlockSparseLayout.prepare`` for a layout of ``num_heads``."""
    if not isinstance(dtype, torch.dtype) or dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"dtype must be torch.float16, torch.bfloat16 or torch.float32, got {dtype!r}"
        )
    for name, value in (("heads_q", heads_q), ("heads_k", heads_k), ("head_dim", head_dim)):
        check_count(name, value, 1)
    check_groups(heads_q, heads_k)
    if num_heads not in (1, heads_q, heads_k):
        raise ValueError(
            f"heads of layout must be 1, heads_k, {heads_k}, or heads_q, {heads_q}, got {num_heads}"
        )


def is_top_left(align: Any) -> bool:
    """Check ``align``; return whether it is "top-left"."""
    check_choice("align", align, ("bottom-right", "top-left"))
    return bool(align == "top-left")


def check_local_strided(
    num_heads: Any,
    local_blocks: Any,
    vert_stride: Any,
    head_range: Any,
    homo_head: Any,
) -> tuple[int, int]:
    """Check the arguments of the local and strided pattern; return the range of its heads."""
    for name, value, least in (
        ("num_heads", num_heads, 1),
        ("local_blocks", local_blocks, 1),
        ("vert_stride", vert_stride, 1),
    ):
        check_count(name, value, least)
    check_flag("homo_head", homo_head)
    if head_range is None:
        head_range = 0, num_heads
    if not isinstance(head_range, Sequence) or len(head_range) != 2:
        raise TypeError(f"head_range must be a pair (first, last + 1), got {head_range!r}")
    first, last = head_range
    check_count("head_range[0]", first, 0)
    check_count("head_range[1]", last, first + 1)
    if last > num_heads:
        raise ValueError(f"head_range must end at num_heads, {num_heads}, or before, got {last}")
    return first, last


def check_csr(crow: Any, col: Any, ndims: tuple[int, ...] = (2, 3)) -> None:
    """Check ``crow`` and ``col``, except their values."""
    for name, x in (("crow", crow), ("col", col)):
        check_indices(name, x)
        if x.ndim not in ndims or 0 in x.shape[:-1]:
            form = "[heads, rows + 1]" if name == "crow" else "[heads, nnz]"
            raise ValueError(f"{name} must be {form} with one head at least, got {list(x.shape)}")
    if crow.shape[-1] < 1:
        raise ValueError(f"crow must be [heads, rows + 1], got {list(crow.shape)}")
    if col.shape[-2] != crow.shape[-2]:
        raise ValueError(
            f"heads of col must be those of crow, {crow.shape[-2]}, got {col.shape[-2]}"
        )
    if col.shape[:-1] != crow.shape[:-1]:
        raise ValueError(
            f"batch of col must be that of crow, {list(crow.shape[:-2])}, "
            f"got {list(col.shape[:-2])}"
        )
    if col.device != crow.device:
        raise ValueError(f"col must be on the device of crow, {crow.device}, got {col.device}")


def check_alike(layouts: Any) -> None:
    """Check that layouts can be joined to the layout of a batch."""
    if not isinstance(layouts, Sequence) or not layouts:
        raise ValueError(f"layouts must be a sequence of one layout or more, got {layouts!r}")
    first = layouts[0]
    for i, one in enumerate(layouts):
        if type(one) is not type(first):
            raise TypeError(f"layouts[{i}] must be a BlockSparseLayout, got {type(one).__name__}")
        if one.batch is not None:
            raise ValueError(f"layouts[{i}] must not be of a batch itself, got batch {one.batch}")
        if one._rule is not None and len(one._rule) > 1:
            raise ValueError(f"layouts[{i}] must have one token rule, got {len(one._rule)}")
        # what is right with ``causal=False`` alone may join what leaves it to the call
        if (one.causal is True) != (first.causal is True):
            raise ValueError(
                f"causal of layouts[{i}] must be that of the first, {first.causal}, got "
                f"{one.causal}"
            )
        for name in ("block_size", "num_rows", "num_cols", "num_heads", "device"):
            got, want = getattr(one, name), getattr(first, name)
            if got != want:
                raise ValueError(
                    f"{name} of layouts[{i}] must be that of the first, {want}, got {got}"
                )


def check_mask(mask: Any) -> None:
    check_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be torch.bool, got {mask.dtype}")
    if mask.ndim not in (2, 3) or (mask.ndim == 3 and mask.shape[0] < 1):
        raise ValueError(
            f"mask must be [rows, cols] or [heads, rows, cols], got {list(mask.shape)}"
        )


def check_csr_values(crow: Tensor, col: Tensor, cols: int) -> None:
    """Raise for the first value of CPU tensors that is out of range.

    Columns may be -1 or repeat: these are no errors, and :func:`validate_csr` names them.
    """
    used = torch.arange(col.shape[-1], device=col.device) < crow[..., -1:]
    wrong = (crow[..., 0] != 0).any() | (crow[..., 1:] < crow[..., :-1]).any()
    wrong |= (crow[..., -1] > col.shape[-1]).any()
    if wrong | (used & ((col < -1) | (col >= cols))).any():
        validate_csr(crow, col, cols, least=-1)


def validate_csr(crow: Tensor, col: Tensor, cols: int, least: int = 0) -> None:
    """Check the values of ``crow`` and ``col`` on the host; the error names the first wrong one."""
    check_readable(crow=crow, col=col)
    crow, col = crow.cpu().long(), col.cpu().long()
    for place in itertools.product(*map(range, crow.shape[:-1])):
        _validate_head(", ".join(map(str, place)), crow[place], col[place], cols, least)


def _validate_head(head: str, pointers: Tensor, col: Tensor, cols: int, least: int) -> None:
    if int(pointers[0]) != 0:
        raise ValueError(f"crow[{head}, 0] must be 0, got {int(pointers[0])}")
    falls = (pointers[1:] < pointers[:-1]).nonzero()
    if len(falls):
        at = int(falls[0]) + 1
        raise ValueError(
            f"crow[{head}, {at}] must be at least crow[{head}, {at - 1}], "
            f"{int(pointers[at - 1])}, got {int(pointers[at])}"
        )
    used, nnz = int(pointers[-1]), col.shape[0]
    if used > nnz:
        at = len(pointers) - 1
        raise ValueError(f"crow[{head}, {at}] must be at most the length of col, {nnz}, got {used}")
    here = col[:used]
    wrong = ((here < least) | (here >= cols)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(
            f"col[{head}, {at}] must be from 0 to {cols - 1}, a block column, got {int(here[at])}"
        )
    if least < 0:
        return
    row = torch.repeat_interleave(torch.arange(len(pointers) - 1, device="cpu"), pointers.diff())
    pair, order = (row * max(cols, 1) + here).sort(stable=True)
    repeated = (pair[1:] == pair[:-1]).nonzero()
    if len(repeated):
        at = int(order[int(repeated[0]) + 1])
        raise ValueError(
            f"col[{head}, {at}] must not repeat a column of row {int(row[at])}, got {int(here[at])}"
        )
    rest = (col[used:] != -1).nonzero()
    if len(rest):
        at = used + int(rest[0])
        raise ValueError(f"col[{head}, {at}] must be -1, being padding, got {int(col[at])}")
