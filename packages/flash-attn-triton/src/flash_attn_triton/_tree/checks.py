"""Checks of the arguments that make a tree of segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._dense import checks
from .._dense.call import Tensors
from .._linked.host.arguments import (
    FP8_DTYPES,
    as_length,
    check_offset_values,
    check_offsets,
    check_tensor,
    is_int,
    kind,
    shown,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_tokens(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    """Check q, k, v and the sinks."""
    check_tensor("q", q)
    if q.dtype in FP8_DTYPES:
        raise NotImplementedError(
            "q must be torch.float16, torch.bfloat16 or torch.float32: trees are not offered in "
            f"FP8, got {q.dtype}; use torch.bfloat16"
        )
    if q.dtype not in DTYPES:
        raise TypeError(
            f"q must be torch.float16, torch.bfloat16 or torch.float32, got {q.dtype}; "
            "tree_attention_reference takes torch.float64"
        )
    checks.check_qkv(q, k, v, 3)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have as many tokens as q, {q.shape[0]}, got {k.shape[0]}")
    checks.check_extras(Tensors(q, k, v, sinks=sinks), 0, 0, 0)


def check_tree_reference(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    """Check q, k, v and the sinks of the reference: any float dtypes, any head dimension."""
    checks.check_reference(q, k, v, 3, sinks=sinks)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have as many tokens as q, {q.shape[0]}, got {k.shape[0]}")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks must be [heads_q], [{q.shape[1]}], got {list(sinks.shape)}")


def check_tree(q: Tensor, cu_seqlens: Tensor, parents: Any, max_seqlen: Any) -> int:
    """Check the arguments of the tree but values in tensors; return the length as an int."""
    check_offsets("cu_seqlens", cu_seqlens, q)
    if cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must be [segments + 1], got {list(cu_seqlens.shape)}")
    segments = cu_seqlens.shape[0] - 1
    longest = as_length("max_seqlen", max_seqlen)
    if isinstance(parents, Tensor):
        check_offsets("parents", parents, q)
    elif not isinstance(parents, (list, tuple)):
        raise TypeError(
            f"parents must be a list of ints or a torch.int32 tensor, got {kind(parents)}"
        )
    # no len() of a tensor: a trace would take it for a constant
    count = parents.shape[0] if isinstance(parents, Tensor) else len(parents)
    if count != segments:
        raise ValueError(
            f"parents must have one entry per segment of cu_seqlens, {segments}, got {count}"
        )
    if not isinstance(parents, Tensor):
        for i, parent in enumerate(parents):
            if not is_int(parent):
                raise TypeError(f"parents[{i}] must be an int, got {kind(parent)}")
        check_parent_values(parents)
    return longest


def check_tree_values(
    starts: list[int], parents: Sequence[int], tokens: int, max_seqlen: int
) -> None:
    """Check the values of offsets and parents."""
    check_offset_values("cu_seqlens", starts, tokens, "max_seqlen", max_seqlen)
    check_parent_values(parents)


def check_parent_values(parents: Sequence[int]) -> None:
    """Check that every parent comes before its child."""
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            allowed = f"-1 or a segment ahead of it, from 0 to {i - 1}"
            if i == 0:
                allowed = "-1, as no segment is ahead of it"
            raise ValueError(f"parents[{i}] must be {allowed}, got {shown(parent)}")


def parents_on_device(parents: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Return the parents as a tensor; the host does not wait for a copy to a GPU."""
    if isinstance(parents, Tensor):
        return parents
    if device.type != "cuda" or torch.compiler.is_compiling():
        return torch.tensor(parents, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "parents must be a tensor while a CUDA graph is captured, because a replay would copy "
            f"from memory of the host that is used otherwise by then, got {kind(parents)}; pass "
            "torch.tensor(parents, dtype=torch.int32, device=q.device), made before"
        )
    pinned = torch.tensor(parents, dtype=torch.int32, device="cpu", pin_memory=True)
    return pinned.to(device, non_blocking=True)
