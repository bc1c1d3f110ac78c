"""A checked call: its tensors, and what the checks of its form came to."""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple, Protocol

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


class Call(NamedTuple):
    """All arguments of the attention operator."""

    tensors: Tensors
    max_seqlen_q: int
    max_seqlen_k: int
    options: Options

    @classmethod
    def of(cls, *arguments: Any) -> Call:
        """Return the operator's arguments, which come one by one, as structures."""
        rest = iter(arguments)
        tensors = Tensors._make(islice(rest, len(Tensors._fields)))
        max_seqlen_q, max_seqlen_k, *options = rest
        return cls(tensors, max_seqlen_q, max_seqlen_k, Options._make(options))


class WriteTensors(NamedTuple):
    """The tensors of a write into a cache, in the order of the operator."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


class Plan(Protocol):
    """How to launch the calls of one form past the operator."""

    def run(self, x: Tensors, max_seqlen_q: int, max_seqlen_k: int) -> None:
        """Launch for one call of the form."""


class WritePlan(Protocol):
    """How to launch the writes of one form past the operator."""

    def run(self, x: WriteTensors) -> None:
        """Launch for one write of the form."""


class Checked(NamedTuple):
    """What is known of every call of one form."""

    options: Options
    out_dtype: torch.dtype
    # None where calls have to go through the operator
    plan: Plan | None = None
