"""What a call under the law consists of: tensors, keys, and what runs it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from .arguments import KeyStrides, ValueStrides


class Call(NamedTuple):
    """The tensors of a call, aligned for the kernels.

    ``q`` is ``[batch, tokens, heads, head_dim]``, or ``[tokens, heads, head_dim]`` with
    ``cu_seqlens_q``; ``lse`` is ``[batch, heads, tokens]`` or ``[heads, tokens]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None
    sinks: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    block_table: Tensor | None = None
    new_k: Tensor | None = None
    new_v: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqlens_k: Tensor | None = None


class KeyForm(NamedTuple):
    """Layout of keys and values."""

    head_dim_v: int
    heads_k: int
    page: int  # slots per page; 0: keys are dense
    k_run: int
    k_bytes: int
    v_bytes: int
    k: KeyStrides
    v: ValueStrides
    descale_ndim: int = 0
    # a sequence of one query has all of its keys in pages, even if the call has new keys
    decode_from_cache: bool = False


class InvariantRun(Protocol):
    """A launcher of calls of one form."""

    def run(self, x: Call, tokens_k: int, most_queries: int, most_keys: int) -> None: ...
