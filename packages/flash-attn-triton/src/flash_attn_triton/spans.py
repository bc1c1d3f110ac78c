"""Makers of spans: the keys that each query sees, as ranges, for calls with ``spans``."""

from __future__ import annotations

import torch
from torch import Tensor

from ._linked.host.arguments import (
    as_int32,
    as_length,
    check_cu_seqlens,
    check_flag,
    check_tensor,
    check_window,
)


def attention_spans(
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    prefix: int | Tensor | None = None,
    segments: Tensor | None = None,
    batch: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the ``spans`` of a mask for :func:`flash_attn_func`.

    A query sees the keys that ``causal`` and ``window_size`` show it, the first ``prefix`` keys,
    and the keys of its own segment. All is computed on the device, without waiting for it.

    Args:
        seqlen_q: queries of a sequence: an int, or what ``operator.index`` takes.
        seqlen_k: keys of a sequence, as ``seqlen_q``. Queries and keys end together.
        causal: as in :func:`flash_attn_func`. Default: False.
        window_size: as in :func:`flash_attn_func`. Default: ``(-1, -1)``.
        prefix: how many of the first keys all queries see: an int, or int32 ``[batch]``.
            Default: None (0).
        segments: a number for each query, int32 ``[seqlen_q]`` or ``[batch, seqlen_q]``. Queries
            that follow each other with one number are a segment, such as an image in a text:
            each sees the keys at the places of all. -1: in no segment. Default: None.
        batch: sequences of the result. Default: those of ``prefix`` or ``segments``, else 1, which
            serves a batch of any size.
        device: where the result is made. Default: the device of ``prefix`` or ``segments``, else
            PyTorch's default.

    Returns:
        int32 ``[batch, seqlen_q, n, 2]``; ``n`` is 2 with a ``prefix`` beside a left window, else
        1: no mask of these needs more.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range.
    """
    seqlen_q, seqlen_k = as_length("seqlen_q", seqlen_q), as_length("seqlen_k", seqlen_k)
    if batch is not None:
        batch = as_length("batch", batch)
    if device is None:
        device = next((x.device for x in (prefix, segments) if isinstance(x, Tensor)), None)
    rows = torch.arange(seqlen_q, device=device)[None]  # [1, seqlen_q]
    prefix = _checked_prefix(prefix, batch, rows)
    if segments is not None:
        _check_ids(segments, rows)
        of_batch = segments.shape[:-1]
        if segments.shape[-1:] != (seqlen_q,) or len(of_batch) > 1 or _differs(of_batch, batch):
            raise ValueError(
                f"segments must be [seqlen_q] or [batch, seqlen_q], with seqlen_q {seqlen_q}"
                f"{'' if batch is None else f' and batch {batch}'}, got {list(segments.shape)}"
            )
        segments = segments if segments.ndim == 2 else segments[None]
    if isinstance(prefix, Tensor):
        prefix = prefix[:, None]
    place = rows + (seqlen_k - seqlen_q)
    starts = rows == 0
    spans = _spans(place, seqlen_k, causal, window_size, prefix, segments, starts)
    if batch is None or spans.shape[0] == batch:
        return spans
    return spans.expand(batch, *spans.shape[1:]).contiguous()


def varlen_attention_spans(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    tokens_q: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    prefix: int | Tensor | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Return the ``spans`` of a mask for :func:`flash_attn_varlen_func`.

    Args:
        cu_seqlens_q: offsets of the sequences of queries, int32 or int64 ``[batch + 1]``.
        cu_seqlens_k: offsets of the sequences of keys, as ``cu_seqlens_q``. Queries and keys of a
            sequence end together; ``seqused_k`` moves no query.
        tokens_q: the number of queries, padding included.
        causal: as in :func:`attention_spans`; so is ``window_size``.
        prefix: how many of the first keys of its sequence a query sees: an int, or int32
            ``[batch]``. Default: None (0).
        segments: as in :func:`attention_spans`, int32 ``[tokens_q]``; a segment ends with its
            sequence. Default: None.

    Returns:
        int32 ``[tokens_q, n, 2]``, ``n`` as in :func:`attention_spans`. Padding sees nothing.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range.
    """
    cu_seqlens_q, cu_seqlens_k = as_int32(cu_seqlens_q), as_int32(cu_seqlens_k)
    batch = check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, cu_seqlens_q)
    tokens_q = as_length("tokens_q", tokens_q)
    tokens = torch.arange(tokens_q, device=cu_seqlens_q.device, dtype=torch.int32)
    prefix = _checked_prefix(prefix, batch, tokens)
    if segments is not None:
        _check_ids(segments, tokens)
        if segments.shape != (tokens_q,):
            raise ValueError(
                f"segments must be [tokens_q], [{tokens_q}], got {list(segments.shape)}"
            )
    found = torch.searchsorted(cu_seqlens_q, tokens, right=True) - 1
    if batch == 0:
        return tokens.new_zeros((tokens_q, 1, 2))
    of = found.clamp(0, batch - 1)
    length_k = cu_seqlens_k.diff()[of]
    # the sequence's last query stands at its last key
    place = tokens - cu_seqlens_q[1:][of] + length_k
    if isinstance(prefix, Tensor):
        prefix = prefix.expand(batch)[of]
    spans = _spans(
        place, length_k, causal, window_size, prefix, segments, tokens == cu_seqlens_q[of]
    )
    return spans.masked_fill((found != of)[:, None, None], 0)


def _spans(
    place: Tensor,
    seqlen_k: int | Tensor,
    causal: bool,
    window_size: tuple[int, int],
    prefix: int | Tensor | None,
    segments: Tensor | None,
    starts: Tensor,
) -> Tensor:
    """Return the spans of queries at their places among the keys, ``[..., n, 2]``.

    ``starts`` tells which queries are the first of a sequence.
    """
    check_flag("causal", causal)
    left, right = check_window(window_size)
    right = 0 if causal else right
    for x in (prefix, segments):
        if isinstance(x, Tensor):  # each sequence has its own
            place = place + torch.zeros_like(x)
    zeros = torch.zeros_like(place)
    first = place - left if left >= 0 else zeros
    last = place + (right + 1) if right >= 0 else zeros + seqlen_k
    if segments is not None:
        begin, end = _runs(segments, starts)
        is_in = segments >= 0
        # a window holds the query's own place, as the segment does: the two make one span
        here = torch.arange(place.shape[-1], device=place.device)
        first = torch.where(is_in, torch.minimum(first, place + (begin - here)), first)
        last = torch.where(is_in, torch.maximum(last, place + (end - here)), last)
    ends = [first, last]
    if prefix is not None and left >= 0:
        ends = [zeros, zeros + prefix, first, last]
    elif prefix is not None:
        ends = [first, torch.maximum(last, zeros + prefix)]
    spans = torch.stack(ends, -1).view(*place.shape, len(ends) // 2, 2)
    limit = seqlen_k[..., None, None] if isinstance(seqlen_k, Tensor) else seqlen_k
    return torch.minimum(spans.clamp(min=0), spans.new_zeros(()) + limit).to(torch.int32)


def _runs(ids: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each entry, begin and end of the run of equal ids that it is in."""
    count = ids.shape[-1]
    index = torch.arange(count, device=ids.device).expand(ids.shape)
    is_new = starts.expand(ids.shape).clone()
    is_new[..., 1:] |= ids[..., 1:] != ids[..., :-1]
    begin = torch.where(is_new, index, 0).cummax(-1).values
    is_last = torch.ones_like(is_new)
    is_last[..., :-1] = is_new[..., 1:]
    end = torch.where(is_last, index + 1, count).flip(-1).cummin(-1).values.flip(-1)
    return begin, end


def _differs(shape: tuple[int, ...], batch: int | None) -> bool:
    """Tell whether sizes contradict a number of sequences, if one is given."""
    return batch is not None and any(size != 1 and size != batch for size in shape)


def _check_ids(segments: Tensor, like: Tensor) -> None:
    check_tensor("segments", segments)
    if segments.dtype != torch.int32:
        raise TypeError(f"segments must be torch.int32, got {segments.dtype}")
    _check_place("segments", segments, like)


def _checked_prefix(
    prefix: int | Tensor | None, batch: int | None, like: Tensor
) -> int | Tensor | None:
    """Check a prefix, an int or ``[batch]``, on the device of ``like``; return it."""
    if prefix is None:
        return None
    if not isinstance(prefix, Tensor) or prefix.ndim == 0:
        return as_length("prefix", prefix)
    check_tensor("prefix", prefix)
    if prefix.dtype != torch.int32:
        raise TypeError(f"prefix must be an int or torch.int32, got {prefix.dtype}")
    _check_place("prefix", prefix, like)
    if prefix.ndim != 1 or _differs(prefix.shape, batch):
        raise ValueError(
            f"prefix must be an int or [batch]{'' if batch is None else f', [{batch}]'}, "
            f"got {list(prefix.shape)}"
        )
    return prefix


def _check_place(name: str, x: Tensor, like: Tensor) -> None:
    if x.device != like.device:
        raise ValueError(
            f"{name} must be on the device of the spans, {like.device}, got {x.device}"
        )
