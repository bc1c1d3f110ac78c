"""A checked call: its tensors, its options, what the checks of its form came to, and its plan."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

# from here on a token leaves nothing: exp of minus this is 0 in every format
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
    """The tensors of a call on a cache of states, in the order of the operator, but for ``out``."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    cu_seqlens: Tensor
    state_cache: Tensor
    state_indices: Tensor | None
    has_initial_state: Tensor | None


class BackwardTensors(NamedTuple):
    """The tensors of a backward pass, in the order of the operators; each takes those it needs."""

    dout: Tensor
    # a tensor, and None where the gradient of q is all that is asked for
    q: Any
    k: Tensor
    v: Tensor
    decay: Tensor
    cu_seqlens: Tensor | None
    initial_state: Tensor | None = None
    dfinal_state: Tensor | None = None

    # The gradient of a walk is made of walks. See ``_linear/portable/walk.py``.

    def walk_of_dq(self) -> Inputs:
        """Return what reads dq, from the first token to the last."""
        first = _turned(self.initial_state)
        return Inputs(self.dout, self.v, self.k, self.decay, self.cu_seqlens, first)

    def walk_of_dk(self) -> Inputs:
        """Return what reads dk, from the last token to the first."""
        first = _turned(self.dfinal_state)
        return Inputs(self.v, self.dout, self.q, self.decay, self.cu_seqlens, first)

    def walk_of_dv(self, dinitial_state: Tensor | None = None) -> Inputs:
        """Return what reads dv and leaves the gradient of the initial state, likewise."""
        first, last = self.dfinal_state, dinitial_state
        return Inputs(self.k, self.q, self.dout, self.decay, self.cu_seqlens, first, last)


class Inputs(NamedTuple):
    """The tensors of a walk; those of a call are the walk of its forward pass."""

    # None where nothing reads
    read: Tensor | None
    key: Tensor
    value: Tensor
    decay: Tensor
    # where packed sequences begin
    cu_seqlens: Tensor | None = None
    # the states to start from, and where those at the end go
    first: Tensor | None = None
    last: Tensor | None = None
    # the place of each sequence among these, and whether it has a state to start from
    slots: Tensor | None = None
    has_first: Tensor | None = None


class StepTensors(NamedTuple):
    """The tensors of a decoding step, in the order of the operator."""

    out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    state_cache: Tensor
    decay: Tensor
    slot_idx: Tensor
    states_out: Tensor | None


class Options(NamedTuple):
    """What is no tensor, in the order of the forward operator."""

    scale: float
    schedule: str
    output_final_state: bool


class Needs(NamedTuple):
    """Which gradients are asked for."""

    q: bool
    k: bool
    v: bool
    decay: bool
    initial_state: bool


class Gradients(NamedTuple):
    """Gradients; None for those that are not asked for."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    decay: Tensor | None
    initial_state: Tensor | None


class Plan(Protocol):
    """How to launch calls of one form past the operators."""

    def forward(self, x: Tensors) -> tuple[Tensor, Tensor]:
        """Return the output and the final states (without elements if not asked for)."""

    def fill(self, out: Tensor, x: CachedTensors) -> None:
        """Fill ``out``, and advance the sequences' slots of the cache."""

    def fits(self, x: BackwardTensors) -> bool:
        """Return whether tensors that were put away since still lie in memory as they did."""

    def backward(self, x: BackwardTensors, needs: Needs) -> Gradients:
        """Return the gradients that are asked for."""


class StepPlan(Protocol):
    """How to launch decoding steps of one form past the operator."""

    def decode(self, x: StepTensors) -> None:
        """Advance each sequence by its new tokens."""


class Checked(NamedTuple):
    """What is known of every call of one form."""

    options: Options
    # None where the operators have to be asked
    plan: Plan | None = None


class CheckedStep(NamedTuple):
    """What is known of every decoding step of one form."""

    scale: float
    plan: StepPlan | None = None


def _turned(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.transpose(-1, -2)
