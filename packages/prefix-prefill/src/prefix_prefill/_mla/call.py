"""The arguments of the MLA operators as structures, and the results of a call's checks."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .._linked.host.operators import Written


class MlaTensors(NamedTuple):
    """The tensors of a call, in the order of the operator."""

    q: Tensor  # [tokens, heads, head_dim]
    kv_cache: Tensor  # [num_blocks, block_size, head_dim]
    block_table: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    q_descale: Tensor | None
    kv_descale: Tensor | None
    out: Written  # [tokens, heads, head_dim_v]
    lse: Written | None  # [heads, tokens]


class MlaOptions(NamedTuple):
    """The options, in the order of the operator's last arguments."""

    softmax_scale: float
    causal: bool
    num_splits: int


class MlaCall(NamedTuple):
    """The arguments of the attention operator."""

    tensors: MlaTensors
    max_seqlen_q: int
    max_seqlen_k: int
    options: MlaOptions


class MlaWriteTensors(NamedTuple):
    """The arguments of the operator that writes into a cache."""

    kv_c: Tensor  # [tokens, head_dim_v]
    k_pe: Tensor  # [tokens, head_dim - head_dim_v]
    kv_cache: Written
    slot_mapping: Tensor
    scale: Tensor | None


class MlaPlan(Protocol):
    """Launcher of the attention calls with one signature; it bypasses the operator."""

    def run(self, x: MlaTensors, max_seqlen_q: int, max_seqlen_k: int) -> None:
        """Launch one call."""


class MlaWritePlan(Protocol):
    """Launcher of the writes with one signature; it bypasses the operator."""

    def run(self, x: MlaWriteTensors) -> None:
        """Launch one write."""


class MlaChecked(NamedTuple):
    """The results of the checks, which all calls with one signature share."""

    options: MlaOptions
    out_dtype: torch.dtype
    plan: MlaPlan | None = None  # None: calls go through the operator
