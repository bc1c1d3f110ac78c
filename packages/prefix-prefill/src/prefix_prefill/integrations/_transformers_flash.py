"""Continuous batching of ``transformers`` from 5.19 on, which takes names of flash attention only.

The library gathers the keys of a step before a layer attends, and asks for ``cu_seq_lens``. Where
all sequences decode, on a GPU, it gives the pages instead: keys are read in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, modeling_flash_attention_utils

from .._linked.host.arguments import one_of
from ..api import paged_attn_func
from ._transformers_step import check_layer, check_options_of, check_step, window_of

# what a step passes beside the arguments that are named
_OF_A_STEP = frozenset(
    {
        "block_table",
        "cu_seq_lens_k",
        "k_cache",
        "max_length_k",
        "max_length_q",
        "read_index",
        "v_cache",
        "write_index",
    }
)

_names: set[str] = set()
_lazy_imports = modeling_flash_attention_utils._lazy_imports


def register(name: str) -> None:
    """Make ``attention_forward`` an implementation of that name, which contains "flash"."""
    AttentionInterface.register(name, attention_forward)
    _names.add(name)
    modeling_flash_attention_utils._lazy_imports = _import


def _import(implementation: Any, *rest: Any, **options: Any) -> Any:
    """Stand in for the library's import of flash attention, which it looks for on the hub."""
    if implementation in _names:
        # their signatures tell what is supported; attention_forward itself is called in their place
        return *[attention_forward] * 3, None, None
    return _lazy_imports(implementation, *rest, **options)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    sinks: Tensor | None = None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer in a step; see ``transformers.attention_forward``.

    ``key`` and ``value`` hold all keys of a step, or, from 5.19 to 5.23, the new ones beside
    ``cache``, which gives all. With ``block_table`` they are new ones, to be written to the pages.
    """
    others = {"attention_mask": attention_mask, **kwargs}
    is_batching = cu_seq_lens_q is not None and kwargs.get("cu_seq_lens_k") is not None
    check_step(others, "cu_seq_lens_q", is_batching, _OF_A_STEP)
    check_layer(module, dropout, is_causal)
    sink = one_of(s_aux=s_aux, learnable_sink=learnable_sink, sinks=sinks)
    window = window_of(1, sliding_window)
    check_options_of(query[0].transpose(0, 1), key.shape[1], scaling, window, softcap, sink)
    if cache is not None:
        layer = module.layer_idx
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=layer, kwargs=kwargs
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    cu_seqlens_k, table = kwargs["cu_seq_lens_k"], kwargs.get("block_table")
    if table is None:
        lengths, longest = cu_seqlens_k.diff(), kwargs["max_length_k"]
        at = torch.arange(longest, device=q.device, dtype=torch.int32)
        # keys of a sequence follow each other: pages of one token
        table = cu_seqlens_k[:-1, None] + at
        k_cache, v_cache = k[:, None], v[:, None]
    else:
        k_cache, v_cache = kwargs["k_cache"], kwargs["v_cache"]
        table, page = table[: len(q)], k_cache.shape[1]
        starts = cu_seq_lens_q, cu_seqlens_k
        cu_seq_lens_q, cu_seqlens_k = (x[: len(q) + 1] for x in starts)  # type: ignore[index]
        lengths, longest = cu_seqlens_k.diff(), table.shape[1] * page
        _append(k, v, k_cache, v_cache, table, lengths)
    out = paged_attn_func(
        q,
        k_cache,
        v_cache,
        table,
        cu_seq_lens_q,  # type: ignore[arg-type]
        lengths,
        kwargs["max_length_q"],
        longest,
        softmax_scale=scaling,
        window_size=window,
        softcap=softcap or 0.0,
        sinks=sink,
    )
    return out[None], None


def _append(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor
) -> None:
    """Write the last key and value of each sequence.

    The library's pages of keys and of values overlap, though no sequence has both kinds of a page,
    and its first page is a place for what belongs to no sequence.
    """
    page, last = k_cache.shape[1], (lengths - 1).clamp(min=0)
    pages = table.gather(1, (last // page).long()[:, None])[:, 0]
    slots = torch.where(lengths > 0, pages * page + last % page, 0).long()
    k_cache.flatten(0, 1).index_copy_(0, slots, k)
    v_cache.flatten(0, 1).index_copy_(0, slots, v)
