"""Hugging Face ``transformers`` 5.17, and 5.19 to 5.24: continuous batching.

Example::

    import prefix_prefill.integrations.transformers as paged
    from transformers import AutoModelForCausalLM

    name = paged.register()  # "paged|prefix_prefill", or from 5.19 on "prefix_prefill_flash_2"
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=name)
    answers = model.generate_batch(prompts, generation_config)

In 5.17 the library's cache holds a tensor of keys and one of values for each layer of a group, in
blocks. At every step it passes to the layers the slots of the new tokens (``write_index``) and the
slots of all keys, sequence by sequence (``read_index``). Other implementations gather these keys
into new tensors; these kernels read them in place:

=====================  ============================================================================
layers                 what runs
=====================  ============================================================================
full attention         ``reshape_and_cache``, then ``paged_attn_func`` over blocks as pages; a block
                       table is the slots of the first token of each block, divided by its size
sliding windows        ``paged_attn_func`` over slots as pages of one token, because the library
                       keeps a ring of one window's slots, and over new keys; then
                       ``reshape_and_cache``, which may overwrite keys that the call read
a step of prompts      ``paged_attn_func`` over new keys only
=====================  ============================================================================

From 5.19 on the library gathers the keys itself, which the kernels then read, sequence by sequence.
It hands on pages only on GPUs, in steps in which all sequences decode, for models without windows;
there keys are read in place. A model that lists its flash implementations, as gpt-oss does, takes
no other: the library warns and loads one of the list.

Tables are made once for all layers of a step. Nothing waits for the device, so a CUDA graph can
capture a step (``ContinuousBatchingConfig(use_cuda_graph=True)``). ``generate`` has no pages: load
the model with another ``attn_implementation`` for it.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .._linked.host.arguments import one_of
from .._linked.host.versions import need
from .._paged.checks import check_paged
from ..api import paged_attn_func, reshape_and_cache

_SERVED = (5, 17), __name__, (5, 25)

try:
    from transformers import AttentionInterface

    from ._transformers_step import check_layer, check_options_of, check_step, window_of
except ImportError:
    need("transformers", *_SERVED)
    raise

_VERSION = need("transformers", *_SERVED)
if _VERSION == (5, 18):
    # it has a cache of its own
    install = 'pip install "transformers>=5.19,<5.25"'
    raise ImportError(f"{__name__} needs transformers 5.17, or 5.19 to 5.24, got 5.18: {install}")

__all__ = ["attention_forward", "register"]

_PREFIX = "paged|"
# what the library takes for continuous batching: any name behind a prefix in 5.17, then names of
# flash attention, and their 2 or 3 tells of tables of pages
_HAS_PREFIX = _VERSION == (5, 17)
_NAME = "paged|prefix_prefill" if _HAS_PREFIX else "prefix_prefill_flash_2"
# substrings of a name that transformers interprets
_RESERVED = ("sdpa", "flex_attention", "eager", "|", "/")

Lengths = Tensor | dict[str, Tensor]
Bounds = int | dict[str, int]


class _Pages(NamedTuple):
    """The pages of a group of layers in one step, and the slots of its new keys."""

    block_table: Tensor  # [sequences, pages]
    seqlens_k: Tensor  # [sequences]
    slots: Tensor  # [tokens]
    max_seqlen_k: int


class _Step:
    """The pages of a step, by the groups of layers that share them."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.last_layer = -1
        self.groups: dict[int, _Pages] = {}


# the last step of each of the library's caches
_steps: WeakKeyDictionary[Any, _Step] = WeakKeyDictionary()


def register(name: str = _NAME) -> str:
    """Make the kernels available to continuous batching as ``attn_implementation=name``.

    Registering again, or under a second name, does no harm.

    Args:
        name: the name to register. ``transformers`` 5.17 requires for continuous batching that it
            begins with ``"paged|"``; the rest must not contain "flash". Later versions require
            "flash" in it, and a 2 or 3 behind that. None may contain "sdpa", "flex_attention",
            "eager", another "|" or "/", nor be one of the library's own. Default:
            ``"paged|prefix_prefill"`` with 5.17, later ``"prefix_prefill_flash_2"``.

    Returns:
        The name.

    Raises:
        ValueError: if ``transformers`` would interpret the name otherwise.
    """
    rest = name.removeprefix(_PREFIX)
    if _HAS_PREFIX and (rest == name or not rest):
        what = f"begin with {_PREFIX!r} and go on behind it"
        raise ValueError(f"name must {what}, as {_NAME!r}, got {name!r}")
    if not _HAS_PREFIX and not re.fullmatch(r".*flash.*[23].*", name):
        what = f"contain 'flash', and a 2 or 3 behind it, as {_NAME!r}"
        raise ValueError(f"name must {what}, got {name!r}")
    reserved = ("flash", *_RESERVED) if _HAS_PREFIX else ("flash_attention_", *_RESERVED)
    taken = next((word for word in reserved if word in (rest if _HAS_PREFIX else name)), None)
    if taken is not None:
        what = f"contain {taken!r}, which transformers interprets"
        raise ValueError(f"name must not {what}; take {_NAME!r}, got {name!r}")
    if _HAS_PREFIX:
        AttentionInterface.register(name, attention_forward)
    else:
        from ._transformers_flash import register as register_flash

        register_flash(name)
    return name


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
    cu_seq_lens_k: Lengths | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: Bounds | None = None,
    read_index: list[Tensor] | None = None,
    write_index: list[Tensor] | None = None,
    block_table: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer in a step of ``transformers``' continuous batching.

    Args:
        module: the calling layer; ``layer_idx`` is read from it.
        query: ``[1, heads_q, tokens, head_dim]``, the new tokens of all sequences.
        key: ``[1, heads_k, tokens, head_dim]``.
        value: ``[1, heads_k, tokens, head_dim]``.
        attention_mask: must be None; the library makes no mask for this implementation.
        dropout: must be 0.0.
        scaling: factor of the scores. Default: ``head_dim ** -0.5``.
        is_causal: must be True. Default: ``module.is_causal``, or True.
        sliding_window: number of keys that a query sees, its own included. Default: the cache's
            window for this layer.
        softcap: ``softcap * tanh(scores / softcap)`` replaces the scores.
        s_aux: sinks ``[heads_q]``: extra logits in the softmax's denominator.
        learnable_sink: another name of ``s_aux``.
        sinks: another name of ``s_aux``.
        cache: the library's ``PagedAttentionCache``.
        cu_seq_lens_q: offsets of the sequences in the tokens, int32 ``[sequences + 1]``.
        cu_seq_lens_k: offsets of the sequences in the keys, or a dict of them by type of layer.
        max_seqlen_q: the most new tokens of a sequence.
        max_seqlen_k: the most keys of a sequence, or a dict by type of layer.
        read_index: for each group of layers the slots of all keys, ``[keys]``; empty if no sequence
            has a cached key.
        write_index: for each group of layers the slots of the new tokens, ``[tokens]``.
        block_table: must be None; the library makes tables only for flash-attn.
        **kwargs: arguments that models pass to all their layers are ignored; others raise.

    Returns:
        The output ``[1, tokens, heads_q, head_dim]``, and None for the weights.

    Raises:
        ValueError: without a cache: in ``generate``, training, or a call of the model.
        NotImplementedError: on attention weights, masks, dropout and unknown arguments.
    """
    given = attention_mask, cu_seq_lens_q, cu_seq_lens_k, read_index, write_index
    others = {"attention_mask": attention_mask, **kwargs}
    has_step = None not in (cache, max_seqlen_q, max_seqlen_k)
    check_step(others, "cache", has_step and all(x is not None for x in given[1:]))
    if block_table is not None:
        raise NotImplementedError("block_table must be None: read_index says what it does")
    check_layer(module, dropout, is_causal)
    sink = one_of(s_aux=s_aux, learnable_sink=learnable_sink, sinks=sinks)
    layer: int = module.layer_idx  # type: ignore[assignment]
    group, place = cache.layer_index_to_group_indices[layer]
    ring = cache.sliding_windows[layer]
    window = window_of(ring, sliding_window)
    pages = _pages_of_step(
        cache, layer, group, ring, cu_seq_lens_k, max_seqlen_k, read_index, write_index
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    slots, heads, head_dim = cache.key_cache[place].shape
    size = cache.block_size if ring == 1 else 1
    shape = slots // size, size, heads, head_dim
    k_cache, v_cache = cache.key_cache[place].view(shape), cache.value_cache[place].view(shape)
    # with a ring, or without cached keys, attention reads the new keys from k and v
    has_new = ring != 1 or pages.block_table.shape[1] == 0
    if not has_new:
        # what attention would refuse is refused before the cache changes
        check_paged(q, k_cache, v_cache, None, None)
        check_options_of(q, heads, scaling, window, softcap, sink)
        reshape_and_cache(k, v, k_cache, v_cache, pages.slots)
    out = paged_attn_func(
        q,
        k_cache,
        v_cache,
        pages.block_table,
        cu_seq_lens_q,  # type: ignore[arg-type]
        pages.seqlens_k,
        max_seqlen_q,  # type: ignore[arg-type]
        pages.max_seqlen_k,
        k=k if has_new else None,
        v=v if has_new else None,
        softmax_scale=scaling,
        window_size=window,
        softcap=softcap or 0.0,
        sinks=sink,
    )
    if has_new:
        reshape_and_cache(k, v, k_cache, v_cache, pages.slots)
    return out[None], None


def _pages_of_step(
    cache: Any,
    layer: int,
    group: int,
    ring: int,
    cu_seq_lens_k: Any,
    max_seqlen_k: Any,
    read_index: Any,
    write_index: Any,
) -> _Pages:
    """Return the pages of a layer's group; the first layer of the group in a step makes them."""
    if isinstance(cu_seq_lens_k, dict):
        kind = "full_attention" if ring == 1 else "sliding_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
    arguments = (
        read_index[group],
        write_index[group],
        cu_seq_lens_k,
        max_seqlen_k,
        cache.block_size if ring == 1 else 1,
        cache.write_trash_index,
    )
    if torch.compiler.is_compiling():
        # the compiler merges what layers have in common
        return _make_pages(*arguments)
    step = _steps.get(cache)
    # a step may run twice, for warm-up and for capture; each run makes its tables
    if step is None or step.owner is not read_index or layer <= step.last_layer:
        step = _steps[cache] = _Step(read_index)
    step.last_layer = layer
    pages = step.groups.get(group)
    if pages is None:
        pages = step.groups[group] = _make_pages(*arguments)
    return pages


def _make_pages(
    read_index: Tensor,
    write_index: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_k: int,
    page: int,
    trash: int,
) -> _Pages:
    """Make the page table from the slots of all keys.

    Entries after a sequence's end hold other sequences' pages, and are not read. Slots of padding,
    and of tokens that no later query sees, are -1.
    """
    lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    slots = torch.where(write_index == trash, -1, write_index)
    count = -(-max_seqlen_k // page) if read_index.shape[0] else 0
    first = torch.arange(0, count * page, page, device=cu_seqlens_k.device)  # [pages]
    at = cu_seqlens_k[:-1, None] + first[None, :]  # [sequences, pages]
    if count:
        at = read_index[at.clamp(max=read_index.shape[0] - 1)]
        if page > 1:
            at = torch.div(at, page, rounding_mode="floor")
    return _Pages(at.to(torch.int32), lengths, slots, max_seqlen_k)
