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
    k_scale_cache: Tensor | None
    v_scale_cache: Tensor | None
    out_scale: Tensor | None
    positions: Tensor | None
    tree_mask: Tensor | None
    out: Tensor
    lse: Tensor | None

    @classmethod
    def of(cls, **given: Tensor | None) -> Tensors:
        """Return the tensors of a call; those that are not given are None."""
        return cls(**{**dict.fromkeys(cls._fields), **given})  # type: ignore[arg-type]


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
    invariant: bool = False
    own_keys: bool = False  # behind others: every query has one here


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
        return cls(tensors, max_seqlen_q, max_seqlen_k, Options(*options))


class WriteTensors(NamedTuple):
    """The tensors of a write into a cache, in the order of the operator."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    k_scale_cache: Tensor | None
    v_scale_cache: Tensor | None


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
    head_dim_v: int
    # None where calls have to go through the operator
    plan: Plan | None = None


class AppendTensors(NamedTuple):
    """The tensors of what is appended to a cache, in the order of the operator."""

    q: Tensor  # [batch * seqlen_q, heads_q, head_dim]
    k: Tensor  # [batch * seqlen_new, heads_k, head_dim]
    v: Tensor  # [batch * seqlen_new, heads_k, head_dim_v]
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    cache_batch_idx: Tensor | None
    block_table: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotated: Tensor | None  # where the queries go; None without rotary embeddings
    k_scale_cache: Tensor | None
    v_scale_cache: Tensor | None


class AppendOptions(NamedTuple):
    """How it is rotated, in the order of the operator."""

    interleaved: bool
    moving: bool  # queries stand one behind the other, not all at the first new position


class RowTensors(NamedTuple):
    """The tensors of attention over the rows of a cache, in the order of the operator."""

    q: Tensor  # [batch * seqlen_q, heads_q, head_dim]
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None
    alibi_slopes: Tensor | None
    k_scale_cache: Tensor | None
    v_scale_cache: Tensor | None
    out: Tensor  # [batch * seqlen_q, heads_q, head_dim_v]
    lse: Tensor | None  # [heads_q, batch * seqlen_q]


class RowOptions(NamedTuple):
    """What is no tensor, in the order of the operator."""

    new: int  # keys of each sequence behind those that cache_seqlens counts
    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    num_splits: int
    invariant: bool = False

    def as_options(self) -> Options:
        """Return them as those of the attention operator."""
        return Options(*self[1:6], invariant=self.invariant)


class AppendPlan(Protocol):
    """How to append in the calls of one form past the operator."""

    def run(self, x: AppendTensors) -> None:
        """Launch for one call of the form."""


class RowPlan(Protocol):
    """How to attend in the calls of one form past the operator."""

    def run(self, x: RowTensors) -> None:
        """Launch for one call of the form."""
