"""A checked call: its tensors, and what the checks of its form came to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_Maybe = Tensor | None
# gradients of q, k, v, the bias and the sinks
Grads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
# the same past the operators, which return no None
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
    rng_state: Tensor | None = None

    @property
    def optional(self) -> tuple[_Maybe, _Maybe, _Maybe, _Maybe, _Maybe, _Maybe]:
        """What both passes take besides q, k and v: ``cu_seqlens_q`` to ``sinks``."""
        return self[3:9]


class Options(NamedTuple):
    """What is no tensor, in the order of the operators; the lengths are not among them."""

    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    dropout_p: float


# ``(out, lse)`` of tensors that the kernels may read where they are
Forward = Callable[[Tensors], tuple[Tensor, Tensor]]
# merges results over the keys of a call into ``out`` and ``lse`` over others; whether it did
Merge = Callable[[Tensors, Tensor, Tensor], bool]
# the gradients; of those tensors, out, lse, dout, dlse, and whether the bias wants one
Backward = Callable[[Tensors, Tensor, Tensor, Tensor, Tensor | None, bool], PlannedGrads]


class Plan(Protocol):
    """How calls of one form are launched, without the operators."""

    @property
    def forward(self) -> Forward: ...

    @property
    def backward(self) -> Backward | None:
        """None where no call of the form asks for a gradient."""

    @property
    def merge(self) -> Merge | None:
        """None where no kernel merges."""

    def fits(self, x: Tensors) -> bool:
        """Say whether tensors that were put away since still lie in memory as they did."""


class Given:
    """Which tensors the calls of one form have."""

    def __init__(self, present: Iterable[bool]) -> None:
        """Take whether there is a tensor, field by field of ``Tensors``."""
        fields = [i for i, is_given in enumerate(present) if is_given]
        places = [fields.index(i) if i in fields else -1 for i in range(len(Tensors._fields))]
        # of all fields those that are given; q, k and v are
        self.of: Callable[[tuple[Any, ...]], tuple[Any, ...]] = itemgetter(*fields)
        self._spread = itemgetter(*places)

    def spread(self, given: Iterable[Any]) -> Tensors:
        """Return all fields, None where nothing is given."""
        return Tensors._make(self._spread((*given, None)))


class Checked(NamedTuple):
    """What is known of every call of one form."""

    options: Options
    out_dtype: torch.dtype
    # whether gradients have to repeat bit for bit
    deterministic: bool
    # whether a row of the forward depends on its own query and keys alone
    invariant: bool
    # None where the operators have to be asked
    plan: Plan | None = None
    # None where nobody can ask for a gradient later
    given: Given | None = None
    # whether the caller gets the lse
    returns_lse: bool = True
