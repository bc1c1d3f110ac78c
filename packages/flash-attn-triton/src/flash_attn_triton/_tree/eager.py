"""The CPU implementation of attention over a tree: every path is written out."""

from __future__ import annotations

import torch
from torch import Tensor

from .._reference.eager import attention_backward, attention_forward
from .reference import write_out_paths


def tree_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: list[int],
    parents: list[int],
    sinks: Tensor | None,
    softmax_scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the LSE in fp32."""
    index, offsets, path_offsets = _paths(starts, parents)
    none = (None,) * 5
    return attention_forward(
        q.float(),
        k.float()[index],
        v.float()[index],
        offsets,
        path_offsets,
        None,
        None,
        None,
        sinks,
        *none,
        softmax_scale,
        -1,
        0,
        softcap,
        0.0,
        q.dtype,
    )


def tree_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    starts: list[int],
    parents: list[int],
    sinks: Tensor | None,
    softmax_scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and sinks in their dtypes; empty if there are no sinks."""
    index, offsets, path_offsets = _paths(starts, parents)
    dq, dk_paths, dv_paths, _, dsinks = attention_backward(
        dout,
        q.float(),
        k.float()[index],
        v.float()[index],
        lse,
        dlse,
        offsets,
        path_offsets,
        None,
        None,
        None,
        sinks,
        None,
        softmax_scale,
        -1,
        0,
        softcap,
        0.0,
    )
    dk, dv = (torch.zeros_like(x, dtype=torch.float32).contiguous() for x in (k, v))
    dk.index_add_(0, index, dk_paths)
    dv.index_add_(0, index, dv_paths)
    dsinks = q.new_empty((0,)) if sinks is None else dsinks
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def _paths(starts: list[int], parents: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens of all paths, and the offsets of segments and of paths."""
    tokens, path_starts = write_out_paths(starts, parents)
    index = torch.tensor(tokens, dtype=torch.int64)
    return index, torch.tensor(starts), torch.tensor(path_starts)
