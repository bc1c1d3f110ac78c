"""A checked call: its tensors, and what the checks of its form came to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Tensors(NamedTuple):
    """The tensors of a call, in the order of the operator."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    block_table: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    out_scale: Tensor | None
    positions: Tensor | None
    out: Tensor
    lse: Tensor | None


class Options(NamedTuple):
    """What is no tensor, in the order of the operator, behind the bounds of the lengths."""

    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    num_splits: int = 0
    signed_alibi: bool = False
    skip_decode: bool = False
    decode_from_cache: bool = False
    fill_padding: bool = True
    long_only: bool = False


class Checked(NamedTuple):
    """What is known of every call of one form."""

    options: Options
    out_dtype: torch.dtype
    # how to launch it past the operator; None where that has to be asked
    plan: Any = None
