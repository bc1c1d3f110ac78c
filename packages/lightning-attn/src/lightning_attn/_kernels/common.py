"""What launches have in common: the arguments that kernels take, and the call itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launch.runtime import Launch, aligned, dense

# The kernels take numbers and pointers as they come. A variant per value or alignment would give a
# stride its own rounding and a length its own compilation, and would have to be looked up per call.
NUMBERS = (
    "batch", "heads", "tokens", "size", "pieces", "splits_d",
    *(f"stride_{x}{axis}" for x in "rkvdo" for axis in "bshd"),
    *(f"stride_{x}_{axis}" for x in ("first", "last", "states", "out") for axis in "bshde"),
)  # fmt: skip
POINTERS = (
    "read_ptr", "key_ptr", "value_ptr", "dout_ptr", "out_ptr", "decay_ptr", "first_ptr", "last_ptr",
    "states_ptr", "cu_seqlens_ptr", "slots_ptr", "has_first_ptr",
)  # fmt: skip
KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def state_strides(x: Tensor | None) -> tuple[int, int, int, int, int]:
    """Strides of sequence, segment, head, d and e of ``[batch, heads, d, e]``."""
    if x is None:
        return (0, 0, 0, 0, 0)
    batch, *rest = x.stride()
    return (batch, 0, *rest)  # type: ignore[return-value]


class States(NamedTuple):
    """A state per piece, with the strides of sequence, segment, head, d and e."""

    memory: Tensor | None
    strides: tuple[int, int, int, int, int]

    @classmethod
    def of(cls, state: Tensor | None) -> States:
        """Describe ``[batch, heads, d, e]``."""
        return cls(state, state_strides(state))

    @property
    def transposed(self) -> States:
        *rest, stride_d, stride_e = self.strides
        return States(self.memory, (*rest, stride_e, stride_d))  # type: ignore[arg-type]


class Inputs(NamedTuple):
    """The tensors of a walk, apart from what reads."""

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

    @property
    def readable(self) -> Inputs:
        """The same, as kernels may read it; copies are made of what lies askew."""
        return self._replace(
            key=aligned(self.key),
            value=aligned(self.value),
            decay=dense(self.decay),
            slots=dense(self.slots),
            has_first=dense(self.has_first),
        )


def run(
    kernel: Any,
    grid: int,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    constants: dict[str, Any],
    num_warps: int,
    num_stages: int,
) -> None:
    """Launch a one-dimensional grid on the first tensor's device; an empty grid is no launch."""
    launch = Launch(kernel, {**constants, "num_warps": num_warps, "num_stages": num_stages})
    launch(grid, tensors, numbers)
