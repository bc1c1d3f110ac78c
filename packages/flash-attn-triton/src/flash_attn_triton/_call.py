"""A checked call: its tensors, and what the checks of its form came to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


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


class Options(NamedTuple):
    """What is no tensor, in the order of the operators; the lengths are not among them."""

    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    dropout_p: float


class Checked(NamedTuple):
    """What is known of every call of one form."""

    options: Options
    out_dtype: torch.dtype
    # whether gradients have to repeat bit for bit
    deterministic: bool
    # how to launch it past the operators; None where they have to be asked
    plan: Any = None
