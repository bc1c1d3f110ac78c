"""A checked call: its tensors, its options, the results of its checks, and its launcher."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, Protocol

from torch import Tensor

from .._linked.host.operators import Written

# decays are clamped to this: exp(-LARGEST_RATE) is 0 in every format
LARGEST_RATE = 1e4


class Tensors(NamedTuple):
    """The tensors of a call, in the order of the forward operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    cu_seqlens: Tensor | None
    initial_state: Tensor | None


class CachedTensors(NamedTuple):
    """The tensors of a call with a cache of states, in the operator's order, without ``out``."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    cu_seqlens: Tensor
    state_cache: Annotated[Tensor, "Tensor(b!)"]
    state_indices: Tensor | None
    has_initial_state: Tensor | None


class BackwardTensors(NamedTuple):
    """The tensors of a backward pass, in the order of the operators; each uses some of them."""

    dout: Tensor
    # a tensor, or None if only the gradient of q is needed
    q: Annotated[Any, "Tensor"]
    k: Tensor
    v: Tensor
    decay: Tensor
    cu_seqlens: Tensor | None
    initial_state: Tensor | None = None
    dfinal_state: Tensor | None = None

    # Gradients of a walk are walks, too. See ``portable/walk.py``.

    def walk_of_dq(self) -> Inputs:
        """Return the walk whose reads are dq, from the first token to the last."""
        first = _turned(self.initial_state)
        return Inputs(self.dout, self.v, self.k, self.decay, self.cu_seqlens, first)

    def walk_of_dk(self) -> Inputs:
        """Return the walk whose reads are dk, from the last token to the first."""
        first = _turned(self.dfinal_state)
        return Inputs(self.v, self.dout, self.q, self.decay, self.cu_seqlens, first)

    def walk_of_dv(self, dinitial_state: Tensor | None = None) -> Inputs:
        """Return the walk whose reads are dv; its final state is the initial state's gradient."""
        first, last = self.dfinal_state, dinitial_state
        return Inputs(self.k, self.q, self.dout, self.decay, self.cu_seqlens, first, last)


class Inputs(NamedTuple):
    """The tensors of a walk; its fields begin like ``Tensors``, the walk of the forward pass."""

    # None for a walk without reads
    read: Tensor | None
    key: Tensor
    value: Tensor
    decay: Tensor
    # starts of packed sequences
    cu_seqlens: Tensor | None = None
    # initial states, and memory for final states
    first: Tensor | None = None
    last: Tensor | None = None
    # the slot of each sequence in ``first`` and ``last``, and whether it has an initial state
    slots: Tensor | None = None
    has_first: Tensor | None = None


class StepTensors(NamedTuple):
    """The tensors of a decoding step, in the order of the operator."""

    out: Written
    q: Tensor
    k: Tensor
    v: Tensor
    state_cache: Written
    decay: Tensor
    slot_idx: Tensor
    states_out: Written | None


class Options(NamedTuple):
    """Arguments that are no tensors, in the order of the forward operator."""

    scale: float
    schedule: str
    output_final_state: bool


class Needs(NamedTuple):
    """Which gradients are needed."""

    q: bool
    k: bool
    v: bool
    decay: bool
    initial_state: bool


class Gradients(NamedTuple):
    """Gradients; None for those that are not needed."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    decay: Tensor | None
    initial_state: Tensor | None


class Plan(Protocol):
    """The launcher of calls of one form, past the operators."""

    def forward(self, x: Tensors) -> tuple[Tensor, Tensor]:
        """Return the output and the final states (without elements if not needed)."""

    def fill(self, out: Tensor, x: CachedTensors) -> None:
        """Fill ``out``, and advance the sequences' slots of the cache."""

    def fits(self, x: BackwardTensors) -> bool:
        """Return whether saved tensors still have the memory layout of the forward pass."""

    def backward(self, x: BackwardTensors, needs: Needs) -> Gradients:
        """Return the needed gradients."""


class StepPlan(Protocol):
    """The launcher of decoding steps of one form, past the operator."""

    def decode(self, x: StepTensors) -> None:
        """Advance each sequence by its new tokens."""


class Checked(NamedTuple):
    """The checked options of calls of one form, and their launcher."""

    options: Options
    # None: call the operators
    plan: Plan | None = None


class CheckedStep(NamedTuple):
    """The checked scale of decoding steps of one form, and their launcher."""

    scale: float
    plan: StepPlan | None = None


def _turned(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.transpose(-1, -2)
