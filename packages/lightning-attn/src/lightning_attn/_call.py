"""A checked call: what the checks of its form came to, and what plans offer."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


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

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        cu_seqlens: Tensor | None,
        initial_state: Tensor | None,
        output_final_state: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the final states (without elements if not asked for)."""

    def fill(
        self,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        cu_seqlens: Tensor,
        state_cache: Tensor,
        state_indices: Tensor | None,
        has_initial_state: Tensor | None,
    ) -> None:
        """Fill ``out``, and advance the sequences' slots of ``state_cache``."""

    def fits(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> bool:
        """Return whether tensors that were put away since still lie in memory as they did."""

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        cu_seqlens: Tensor | None,
        initial_state: Tensor | None,
        dfinal_state: Tensor | None,
        needs: Needs,
    ) -> Gradients:
        """Return the gradients that are asked for."""


class StepPlan(Protocol):
    """How to launch decoding steps of one form past the operator."""

    def decode(
        self,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state_cache: Tensor,
        decay: Tensor,
        slot_idx: Tensor,
        states_out: Tensor | None,
    ) -> None:
        """Advance each sequence by its new tokens."""


class Checked(NamedTuple):
    """What is known of every call of one form."""

    scale: float
    # None where the operators have to be asked
    plan: Plan | None = None


class CheckedStep(NamedTuple):
    """What is known of every decoding step of one form."""

    scale: float
    plan: StepPlan | None = None
