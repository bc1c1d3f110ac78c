"""The CPU implementation of attention over a tree: every path is written out."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dense.call import Tensors
from .._reference.eager import attention_backward, attention_forward
from .call import TreeBackwardCall, TreeCall
from .reference import write_out_paths


def tree_forward(call: TreeCall, starts: list[int], parents: list[int]) -> tuple[Tensor, Tensor]:
    """Return the output, and the LSE in fp32."""
    x, _ = _written_out(call, starts, parents)
    return attention_forward(x, call.options, call.q.dtype)


def tree_backward(
    call: TreeBackwardCall, starts: list[int], parents: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and sinks in their dtypes; empty if there are no sinks."""
    q, k, v = call.q, call.k, call.v
    x, index = _written_out(call.forward, starts, parents)
    dq, dk_paths, dv_paths, _, dsinks = attention_backward(
        x, call.forward.options, None, call.lse, call.dout, call.dlse
    )
    dk, dv = (torch.zeros_like(t, dtype=torch.float32).contiguous() for t in (k, v))
    dk.index_add_(0, index, dk_paths)
    dv.index_add_(0, index, dv_paths)
    dsinks = q.new_empty((0,)) if call.sinks is None else dsinks
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def _written_out(call: TreeCall, starts: list[int], parents: list[int]) -> tuple[Tensors, Tensor]:
    """Return a call with the keys of all paths, and the tokens that these are."""
    tokens, path_starts = write_out_paths(starts, parents)
    index = torch.tensor(tokens, dtype=torch.int64)
    x = Tensors(
        call.q.float(),
        call.k.float()[index],
        call.v.float()[index],
        torch.tensor(starts),
        torch.tensor(path_starts),
        sinks=call.sinks,
    )
    return x, index
