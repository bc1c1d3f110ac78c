"""A checked call: its tensors, and what its signature determines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._linked.host.arguments import FP8_DTYPES

# gradients of q, k, v, the bias and the sinks
Grads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
# the same without the operators; operators cannot return None
PlannedGrads = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


class Tensors(NamedTuple):
    """The tensors of a call, in the order of the forward operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    out_scale: Tensor | None = None
    spans: Tensor | None = None
    rng_state: Tensor | None = None


class Options(NamedTuple):
    """The options of a call, in the order of the operators."""

    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    dropout_p: float


class Arguments(NamedTuple):
    """The arguments of the public functions that are no tensors, as the caller gave them."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    deterministic: bool = False
    return_attn_probs: bool = False
    return_lse: bool = False
    invariant: bool = False
    out_dtype: torch.dtype | None = None


class ForwardCall(NamedTuple):
    """The arguments of the forward operator."""

    tensors: Tensors
    max_seqlen_q: int
    max_seqlen_k: int
    options: Options
    out_dtype: torch.dtype | None
    deterministic: bool = False  # for the derivative
    invariant: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the output."""
        dtype = self.tensors.q.dtype
        return self.out_dtype or (torch.bfloat16 if dtype in FP8_DTYPES else dtype)


class BackwardCall(NamedTuple):
    """The arguments of the backward operator."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    spans: Tensor | None
    rng_state: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    options: Options
    deterministic: bool
    needs_dbias: bool

    @property
    def tensors(self) -> Tensors:
        """The tensors of the forward."""
        given: dict[str, Any] = {name: getattr(self, name, None) for name in Tensors._fields}
        return Tensors(**given)


# returns ``(out, lse)``; the kernels read the tensors without a copy
Forward = Callable[[Tensors], tuple[Tensor, Tensor]]
# merges results over a call's keys into ``out`` and ``lse`` over other keys; returns whether it did
Merge = Callable[[Tensors, Tensor, Tensor], bool]
# returns the gradients; takes the tensors, out, lse, dout, dlse, and whether to make dbias
Backward = Callable[[Tensors, Tensor, Tensor, Tensor, Tensor | None, bool], PlannedGrads]


class Plan(Protocol):
    """The launcher of calls with one signature, without the operators."""

    @property
    def forward(self) -> Forward: ...

    @property
    def backward(self) -> Backward | None:
        """None if no call with the signature asks for a gradient."""

    @property
    def merge(self) -> Merge | None:
        """None if no kernel merges."""

    def fits(self, x: Tensors) -> bool:
        """Tell whether saved tensors still have the layout that the launcher was made for."""


class Given:
    """Which fields of ``Tensors`` the calls with one signature have."""

    def __init__(self, present: Iterable[bool]) -> None:
        """Take, for each field of ``Tensors``, whether it is given."""
        fields = [i for i, is_given in enumerate(present) if is_given]
        places = [fields.index(i) if i in fields else -1 for i in range(len(Tensors._fields))]
        # selects the given fields; q, k and v are always given
        self.of: Callable[[tuple[Any, ...]], tuple[Any, ...]] = itemgetter(*fields)
        self._spread = itemgetter(*places)

    def spread(self, given: Iterable[Any]) -> Tensors:
        """Return all fields, None for fields that are not given."""
        return Tensors._make(self._spread((*given, None)))


class Checked(NamedTuple):
    """The properties that a signature determines for all its calls."""

    options: Options
    out_dtype: torch.dtype
    # whether gradients have to repeat bit for bit
    deterministic: bool
    # whether a row of the forward depends only on its own query and keys
    invariant: bool
    # None if calls must go through the operators
    plan: Plan | None = None
    # None if no gradient can be asked for later
    given: Given | None = None
    # whether the caller gets the lse
    returns_lse: bool = True
