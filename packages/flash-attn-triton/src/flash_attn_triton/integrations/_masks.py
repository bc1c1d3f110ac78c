"""Describe a mask of ``transformers`` without writing it out: patterns, packing, alignment."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.utils.import_utils import is_tracing

from .._linked.host.versions import need

need("transformers", (5, 8), "flash_attn_triton.integrations.transformers")

_STARTS = "_flash_attn_triton_starts"

# with at most so many queries and a longer cache, a bias costs less than packing the cache
_FEW_QUERIES = 16


@dataclass(frozen=True)
class Pattern:
    """The keys that a query sees, in positions within its sequence; -1 is unlimited."""

    causal: bool
    left: int = -1
    right: int = -1
    segments: Tensor | None = None  # [batch, tokens]: where the number changes, a sequence starts

    @property
    def window(self) -> tuple[int, int]:
        return self.left, self.right

    @property
    def is_positional(self) -> bool:
        """Whether the pattern depends on a query's position among the keys."""
        return self.causal or self.window != (-1, -1) or self.segments is not None

    def bites(self, length: int) -> bool:
        """Whether the window hides anything in a sequence of this length."""
        return any(0 <= side < length - 1 for side in self.window)

    def intersect(self, other: Pattern) -> Pattern | None:
        """Return the keys that both patterns show, or None if that is no pattern."""
        if self.segments is not None and other.segments is not None:
            return None
        sides = zip(self.window, other.window, strict=True)
        left, right = (max(a, b) if min(a, b) < 0 else min(a, b) for a, b in sides)
        segments = self.segments if other.segments is None else other.segments
        return Pattern(self.causal or other.causal, left, right, segments)


@dataclass(frozen=True)
class Packing:
    """Indices of the valid tokens in the padded tensors, and offsets of the sequences."""

    indices_q: Tensor | None  # None: every query is kept
    indices_k: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True)
class Layout:
    """The result of the mask function, attached to the mask that it returns."""

    pattern: Pattern
    packing: Packing | None  # None: no token is padding
    keys: int  # number of keys that attention will be given; keys after the mask are unused
    version: int

    ATTRIBUTE = "_flash_attn_triton_layout"


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Describe a mask to :func:`attention_forward`, storing as little of it as possible.

    Args:
        batch_size: Number of rows.
        q_length: Number of queries.
        kv_length: Number of keys that attention will be given; a static cache has unused keys.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        mask_function: The pattern, a function of ``transformers.masking_utils``.
        attention_mask: ``[batch, seen tokens]``, True where a token is not padding.
        **kwargs: Arguments of other mask functions; ``config`` and ``device`` are used here.

    Returns:
        None if only the pattern that the model passes to every layer hides keys; a mask
        ``[batch, keys]`` of valid keys (bool) or of each key's sequence number (int32); or a
        boolean mask ``[batch, 1, queries, keys]``, True for visible keys, which a causal mask with
        ``allow_is_causal_skip=False`` always becomes.

    Raises:
        ValueError: For a model whose attention cannot be replaced.
    """

    def dense() -> Tensor:
        given = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask = masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=padding,
            **given,
        )
        return cast(Tensor, mask)

    padding = attention_mask
    config = kwargs.get("config")
    if config is not None and not is_tracing(padding):
        _refuse_models_without_an_interface(config.__class__)
    if padding is not None and kv_offset > 0 and padding.shape[1] == kv_length:
        # generate() calls this a second time with a mask that was already cut to the keys
        padding = torch.nn.functional.pad(padding, (kv_offset, 0), value=True)

    tracing = is_tracing(padding)
    pattern = _describe(mask_function, follow=not tracing)
    if pattern is None or getattr(config, "model_type", None) in _READERS:
        return dense()
    # transformers itself sets allow_is_causal_skip=False for packed sequences
    asked_for = kwargs.get("allow_is_causal_skip") is False and pattern.segments is None
    if asked_for and pattern.causal:
        return dense()
    few = q_length <= _FEW_QUERIES and q_length < kv_length
    used = kv_length
    if pattern.is_positional:
        if isinstance(q_offset, Tensor):
            if tracing or few:
                return dense()
            q_offset = int(q_offset)
        # the kernel aligns the last query with the last key
        used = q_offset + q_length - kv_offset
        if used > kv_length or (used < kv_length and kv_offset > 0):
            return dense()
    bites = pattern.bites(used)

    if padding is None and pattern.segments is None and not bites and used == kv_length:
        return None
    if tracing or few:
        return dense()
    if pattern.segments is not None:
        if padding is not None or used != kv_length or q_length != kv_length:
            return dense()
        ids = (pattern.segments + 1).to(torch.int32)
        return _attach(ids, pattern, pack(ids, q_length, pack_queries=True), kv_length)
    if padding is None:
        every = torch.ones((batch_size, used), dtype=torch.bool, device=kwargs.get("device", "cpu"))
        return _attach(every, pattern, None, kv_length)

    padded = masking_utils.prepare_padding_mask(padding, kv_length, kv_offset)
    valid = cast(Tensor, padded)[:, kv_offset : kv_offset + used]
    full, holes = torch.stack([valid.all(), has_holes(valid)]).tolist()
    if full and not bites and used == kv_length:
        return None
    if holes and bites:
        # packing would move tokens on both sides of a hole closer together
        return dense()
    if full:
        return _attach(valid, pattern, None, kv_length)
    alone = pattern.is_positional or _attends_to_itself_only(config)
    pack_queries = alone and q_length <= used
    return _attach(valid, pattern, pack(valid, q_length, pack_queries), kv_length)


def _describe(function: Callable[..., Tensor], follow: bool = True) -> Pattern | None:
    """Return the pattern of a mask function of ``transformers``; None if it is unknown.

    Most are closures: the code identifies the function, and its free variables hold the parameters.
    Dynamo cannot read free variables, so closures are not followed while it traces.
    """
    if function is masking_utils.causal_mask_function:
        return Pattern(causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return Pattern(causal=False)
    if not follow:
        return None
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    names = getattr(code, "co_freevars", ())
    free = {name: cell.cell_contents for name, cell in zip(names, cells, strict=False)}
    if code is _CODE["and"] and "mask_functions" in free:
        pattern: Pattern | None = Pattern(causal=False)
        for part in map(_describe, free["mask_functions"]):
            pattern = pattern.intersect(part) if pattern is not None and part is not None else None
        return pattern
    if code is _CODE["causal window"] and isinstance(free.get("sliding_window"), int):
        # a window of transformers counts the query's own token
        return Pattern(causal=False, left=max(free["sliding_window"] - 1, 0))
    if code is _CODE["two-sided window"] and isinstance(free.get("sliding_window"), int):
        return Pattern(causal=False, left=free["sliding_window"], right=free["sliding_window"])
    if code is _CODE["packed"] and isinstance(free.get("packed_sequence_mask"), Tensor):
        return Pattern(causal=False, segments=free["packed_sequence_mask"])
    return None


_CODE = {
    name: function.__code__
    for name, function in {
        "and": masking_utils.and_masks(),
        "causal window": masking_utils.sliding_window_overlay(1),
        "two-sided window": masking_utils.sliding_window_bidirectional_overlay(1),
        "packed": masking_utils.packed_sequence_mask_function(torch.zeros(1, 1)),
    }.items()
}


def _attends_to_itself_only(config: Any) -> bool:
    """Whether a bidirectional mask of this model can only belong to self-attention.

    In cross-attention the mask does not describe the queries, and with equal lengths a call does
    not show which of the two it is. For models with both, every query is kept.
    """
    if getattr(config, "is_encoder_decoder", True):
        return False
    if getattr(config, "model_type", None) in _ENCODERS:
        return True
    return getattr(config, "add_cross_attention", None) is False and not config.is_decoder


# encoders without cross-attention, whose configuration has no switch for it
_ENCODERS = frozenset(
    {"albert", "distilbert", "eurobert", "modernbert", "mpnet", "nomic_bert", "wav2vec2", "hubert"}
)


# models whose masks are always written out: the model adds its own mask, or its decoder does not
# set is_causal
_READERS = frozenset({"doge", "pegasus_x", "umt5"})


@cache
def _refuse_models_without_an_interface(config_class: Hashable) -> None:
    """Raise for a model that calls this mask function but has its own attention."""
    # a single decoder (TrOCR's) has no entry in the first mapping
    found = (x.get(config_class, None) for x in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING))
    models = next((x for x in found if x is not None), None)
    for model in models if isinstance(models, (tuple, list)) else (models,):
        names = "_supports_sdpa", "_supports_attention_backend", "_supports_flash_attn"
        if model is not None and not any(getattr(model, name, True) for name in names):
            raise ValueError(
                f"{model.__name__} has no interface for attention implementations: load it with "
                'attn_implementation="eager"'
            )


def has_holes(valid: Tensor) -> Tensor:
    """Whether, in any row, padding lies between valid tokens."""
    starts = valid[:, 1:] & ~valid[:, :-1]
    return (starts.sum(1) + valid[:, 0] > 1).any()


def _attach(mask: Tensor, pattern: Pattern, packing: Packing | None, keys: int) -> Tensor:
    version = -1 if mask.is_inference() else mask._version
    setattr(mask, Layout.ATTRIBUTE, Layout(pattern, packing, keys, version))
    return mask


def may_be_narrower(mask: Tensor, layout: Layout | None, queries: int, keys: int) -> bool:
    """Whether a mask ``[batch, fewer than keys]`` belongs to a static cache with unused keys.

    The mask function returns such masks only for many queries. Any other one was made for another
    layer, whose cache has other keys.
    """
    if layout is not None:
        return layout.keys == keys
    return queries > _FEW_QUERIES and mask.shape[1] >= queries


def layout_of(mask: Tensor) -> Layout | None:
    """Return the ``Layout`` of a mask, None if the mask was copied or written to since."""
    layout = getattr(mask, Layout.ATTRIBUTE, None)
    if layout is None or (not mask.is_inference() and mask._version != layout.version):
        return None
    return cast(Layout, layout)


def pack(mask: Tensor, q_length: int, pack_queries: bool) -> Packing:
    """Find the valid tokens of a mask ``[batch, keys]``, whose last columns are the queries."""
    indices_k, cu_seqlens_k, max_k = _sequences(mask)
    if not pack_queries:
        batch = mask.shape[0]
        ends = torch.arange(batch + 1, dtype=torch.int32, device=mask.device) * q_length
        return Packing(None, indices_k, ends, cu_seqlens_k, q_length, max_k)
    if q_length == mask.shape[1]:
        return Packing(indices_k, indices_k, cu_seqlens_k, cu_seqlens_k, max_k, max_k)
    indices_q, cu_seqlens_q, max_q = _sequences(mask[:, mask.shape[1] - q_length :])
    return Packing(indices_q, indices_k, cu_seqlens_q, cu_seqlens_k, max_q, max_k)


def _sequences(mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return flat indices of the valid tokens, cumulative lengths, and the longest length.

    The number of valid tokens is a shape, so this waits for the device.
    """
    valid = mask != 0
    indices = valid.flatten().nonzero().flatten()
    if mask.dtype == torch.bool:
        lengths = valid.sum(1)
    else:
        rows = torch.arange(mask.shape[0], device=mask.device)[:, None].expand_as(mask)
        owner = torch.stack([rows, mask.to(rows.dtype)]).flatten(1)[:, indices]
        lengths = torch.unique_consecutive(owner, dim=1, return_counts=True)[1]
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return indices, ends, int(lengths.max()) if lengths.numel() else 0


def packing_of_positions(position_ids: Tensor | None, q: Tensor, k: Tensor) -> Packing | None:
    """Find packed sequences by positions that restart, in a batch of one without a cache."""
    tokens = q.shape[1]
    if (
        position_ids is None
        or position_ids.shape != (1, tokens)
        or (q.shape[0], k.shape[1]) != (1, tokens)
        or is_tracing(position_ids)
    ):
        return None
    version = None if position_ids.is_inference() else position_ids._version
    known = getattr(position_ids, _STARTS, None)
    if known is None or version is None or known[0] != version:
        # every layer asks, and the answer changes only with the positions
        known = version, _restarts(position_ids[0])
        setattr(position_ids, _STARTS, known)
    starts = known[1]
    if len(starts) == 1:
        return None
    cu_seqlens = torch.tensor([*starts, tokens], dtype=torch.int32, device=q.device)
    longest = max(b - a for a, b in zip(starts, [*starts[1:], tokens], strict=True))
    return Packing(None, None, cu_seqlens, cu_seqlens, longest, longest)


def _restarts(positions: Tensor) -> list[int]:
    """Return the starts of sequences: each return to the first position, without other jumps."""
    jumps = (positions.diff() != 1).nonzero().flatten() + 1
    where, landed = torch.stack([jumps, positions[jumps] - positions[0]]).tolist()
    return [0] if any(landed) else [0, *where]


def expand(mask: Tensor, q_length: int, pattern: Pattern) -> Tensor:
    """Write out a mask ``[batch, keys]`` and a pattern as ``[batch, 1, queries, keys]``, bool."""
    length = mask.shape[1]
    cols = torch.arange(length, device=mask.device)
    rows = torch.arange(length - q_length, length, device=mask.device)[:, None]
    seen = (mask != 0)[:, None, None, :].expand(-1, 1, q_length, -1)
    left, right = pattern.window
    if pattern.causal:
        seen = seen & (cols <= rows)
    if left >= 0:
        seen = seen & (cols >= rows - left)
    if right >= 0:
        seen = seen & (cols <= rows + right)
    if mask.dtype == torch.int32:
        seen = seen & (mask[:, None, length - q_length :, None] == mask[:, None, None, :])
    return seen
