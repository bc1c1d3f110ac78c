"""The CPU implementation of a product's backward; see :mod:`.passes`."""

from __future__ import annotations

from torch import Tensor

from .._dense.call import Grads, Options, Tensors
from .._reference.eager import attention_backward


def backward(
    x: Tensors, options: Options, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    """Return the gradients of a product; ``out`` and ``lse`` are over the keys of all ranks."""
    others = *x.optional, x.rng_state
    return attention_backward(dout, x.q, x.k, x.v, lse, dlse, *others, *options, out)
