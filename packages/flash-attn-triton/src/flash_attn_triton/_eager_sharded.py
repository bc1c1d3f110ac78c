"""What the CPU runs to merge results over the keys of several ranks; see :mod:`._sharded`."""

from __future__ import annotations

import torch
from torch import Tensor

from ._call import Grads, Options, Tensors
from ._eager import attention_backward


def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge results over other keys into ``out`` and ``lse``, in fp32.

    Args:
        out: ``[rows, heads, d]`` or ``[batch, rows, heads, d]``, of any float dtype.
        lse: fp32 ``[heads, rows]`` or ``[batch, heads, rows]``; -inf where no key was seen.
        part_out: shape of ``out``, any float dtype.
        part_lse: shape of ``lse``.
    """
    larger = torch.maximum(lse, part_lse)
    # where neither side saw a key there is nothing to divide by
    shift = larger.masked_fill(larger.isinf(), 0.0)
    own, other = torch.exp(lse - shift), torch.exp(part_lse - shift)
    total = own + other
    scale = total.reciprocal().masked_fill(total == 0.0, 0.0)
    own, other = ((weight * scale).transpose(-1, -2).unsqueeze(-1) for weight in (own, other))
    out.copy_(own * out.float() + other * part_out.float())
    lse.copy_(shift + torch.log(total))


def backward(
    x: Tensors, options: Options, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    """Return the gradients of some keys, with ``out`` and ``lse`` over those of all ranks."""
    others = *x[3:9], x.rng_state
    return attention_backward(dout, x.q, x.k, x.v, lse, dlse, *others, *options, out)
