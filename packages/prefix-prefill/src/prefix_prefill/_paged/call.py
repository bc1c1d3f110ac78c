"""The arguments of the operators as structures, and the results of a call's checks."""

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
    """The options of attention, in the order of the operator's last arguments."""

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
    # cascade: the call holds the suffix keys, so every sequence has a key for each of its queries
    own_keys: bool = False


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
    """Launcher of the attention calls with one signature; it bypasses the operator."""

    def run(self, x: Tensors, max_seqlen_q: int, max_seqlen_k: int) -> None:
        """Launch one call."""


class WritePlan(Protocol):
    """Launcher of the writes with one signature; it bypasses the operator."""

    def run(self, x: WriteTensors) -> None:
        """Launch one write."""


class Checked(NamedTuple):
    """The results of the checks, which all calls with one signature share."""

    options: Options
    out_dtype: torch.dtype
    head_dim_v: int
    plan: Plan | None = None  # None: calls go through the operator


class AppendTensors(NamedTuple):
    """The tensors of the append operator, in its order."""

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
    rotated: Tensor | None  # output for the rotated queries; None without rotary embeddings
    k_scale_cache: Tensor | None
    v_scale_cache: Tensor | None


class AppendOptions(NamedTuple):
    """How queries and keys are rotated, in the order of the append operator."""

    interleaved: bool
    moving: bool  # query i is at position i after the first new one; False: all are at the first


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
    """The options of attention over rows of a cache, in the order of the operator."""

    new: int  # keys of each sequence after those that cache_seqlens counts
    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    num_splits: int
    invariant: bool = False

    def as_options(self) -> Options:
        """Return the same options as the attention operator takes them."""
        return Options(*self[1:6], invariant=self.invariant)


class AppendPlan(Protocol):
    """Launcher of the appends with one signature; it bypasses the operator."""

    def run(self, x: AppendTensors) -> None:
        """Launch one append."""


class RowPlan(Protocol):
    """Launcher of attention over rows with one signature; it bypasses the operator."""

    def run(self, x: RowTensors) -> None:
        """Launch one call."""
