"""The arguments of the operators as structures, and the results of a call's checks."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .._linked.host.operators import Written


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
    out: Written
    lse: Written | None

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
    num_splits: int
    signed_alibi: bool
    skip_decode: bool
    decode_from_cache: bool
    fill_padding: bool
    long_only: bool
    invariant: bool = False
    # cascade: the call holds the suffix keys, so every sequence has a key for each of its queries
    own_keys: bool = False
    # int4 counts from a zero point, which the lowest bits of its scale hold
    zero_points: bool = False


# those of an ordinary call, without a mask
ORDINARY = Options(
    softmax_scale=1.0,
    window_left=-1,
    window_right=-1,
    softcap=0.0,
    num_splits=0,
    signed_alibi=False,
    skip_decode=False,
    decode_from_cache=False,
    fill_padding=True,
    long_only=False,
)


class Call(NamedTuple):
    """The arguments of the attention operator."""

    tensors: Tensors
    max_seqlen_q: int
    max_seqlen_k: int
    options: Options


class WriteTensors(NamedTuple):
    """The arguments of the operator that writes into a cache."""

    k: Tensor
    v: Tensor
    k_cache: Written
    v_cache: Written
    slot_mapping: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    k_scale_cache: Written | None
    v_scale_cache: Written | None


class WriteCall(NamedTuple):
    """All arguments of that operator; ``per_token_head``: scales and codes as vLLM makes them."""

    tensors: WriteTensors
    per_token_head: bool = False


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
    k_cache: Written
    v_cache: Written
    cache_seqlens: Tensor
    cache_batch_idx: Tensor | None
    block_table: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotated: Written | None  # output for the rotated queries; None without rotary embeddings
    k_scale_cache: Written | None
    v_scale_cache: Written | None


class AppendOptions(NamedTuple):
    """How queries and keys are rotated, in the order of the append operator."""

    interleaved: bool
    moving: bool  # query i is at position i after the first new one; False: all are at the first


class AppendCall(NamedTuple):
    """The arguments of the append operator that its implementations take."""

    tensors: AppendTensors
    options: AppendOptions


class CheckedAppend(NamedTuple):
    """All arguments of the append operator; the last are those of the attention that follows.

    What that would refuse is refused before anything is written.
    """

    call: AppendCall
    cache_leftpad: Tensor | None = None
    window_left: int = -1


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
    out: Written  # [batch * seqlen_q, heads_q, head_dim_v]
    lse: Written | None  # [heads_q, batch * seqlen_q]


class RowOptions(NamedTuple):
    """The options of attention over rows of a cache, in the order of the operator."""

    new: int  # keys of each sequence after those that cache_seqlens counts
    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    num_splits: int
    invariant: bool = False

    @classmethod
    def of(cls, new: int, options: Options) -> RowOptions:
        """Return options of an ordinary call."""
        given = {"new": new, **options._asdict()}
        return cls(**{name: given[name] for name in cls._fields})

    def as_options(self) -> Options:
        """Return the same options as the attention operator takes them."""
        given = self._asdict()
        del given["new"]
        return ORDINARY._replace(**given)


class RowCall(NamedTuple):
    """The arguments of the operator that attends to rows of a cache."""

    tensors: RowTensors
    options: RowOptions


class AppendPlan(Protocol):
    """Launcher of the appends with one signature; it bypasses the operator."""

    def run(self, x: AppendTensors) -> None:
        """Launch one append."""


class RowPlan(Protocol):
    """Launcher of attention over rows with one signature; it bypasses the operator."""

    def run(self, x: RowTensors) -> None:
        """Launch one call."""
