"""A checked call of multi-head latent attention: its tensors, its options, its plan."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class MlaTensors(NamedTuple):
    """The tensors of a call, in the order of the operator."""

    q: Tensor  # [tokens, heads, head_dim]
    kv_cache: Tensor  # [num_blocks, block_size, head_dim]
    block_table: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    q_descale: Tensor | None
    kv_descale: Tensor | None
    out: Tensor  # [tokens, heads, head_dim_v]
    lse: Tensor | None  # [heads, tokens]


class MlaOptions(NamedTuple):
    """What is no tensor, in the order of the operator, behind the bounds of the lengths."""

    softmax_scale: float
    causal: bool
    num_splits: int


class MlaWriteTensors(NamedTuple):
    """The tensors of a write into a cache, in the order of the operator."""

    kv_c: Tensor  # [tokens, head_dim_v]
    k_pe: Tensor  # [tokens, head_dim - head_dim_v]
    kv_cache: Tensor
    slot_mapping: Tensor
    scale: Tensor | None


class MlaPlan(Protocol):
    """How to launch the calls of one form past the operator."""

    def run(self, x: MlaTensors, max_seqlen_q: int, max_seqlen_k: int) -> None:
        """Launch for one call of the form."""


class MlaWritePlan(Protocol):
    """How to launch the writes of one form past the operator."""

    def run(self, x: MlaWriteTensors) -> None:
        """Launch for one write of the form."""


class MlaChecked(NamedTuple):
    """What is known of every call of one form."""

    options: MlaOptions
    out_dtype: torch.dtype
    # None where calls have to go through the operator
    plan: MlaPlan | None = None
