"""flash-attn 2's helpers that pack the tokens of a padded batch, and pad them again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._linked.host.arguments import check_count, check_tensor
from ._linked.host.forms import checks_values

_MASKS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens of a padded batch; this waits for the device.

    Args:
        hidden_states: ``[batch, seqlen, ...]``, any dtype and strides. Has a gradient.
        attention_mask: bool or integers, ``[batch, seqlen]``: tokens that are not 0 are packed.
        unused_mask: further tokens that are packed, as ``attention_mask``: the last ones of their
            sequences, so that ``seqused`` tells keys to use from keys to leave out. Default: None.

    Returns:
        ``(packed, indices, cu_seqlens, max_seqlen, seqused)``: the tokens, ``[tokens, ...]``; their
        places in the flattened batch, int64 ``[tokens]``, for :func:`pad_input`; the offsets of
        the sequences, int32 ``[batch + 1]``; the longest length, an int; and how many tokens of
        each sequence ``attention_mask`` has, int32 ``[batch]``, for ``seqused_k``.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape or a device.
    """
    check_tensor("hidden_states", hidden_states)
    if hidden_states.ndim < 2:
        raise ValueError(
            f"hidden_states must be [batch, seqlen, ...], got {list(hidden_states.shape)}"
        )
    used = kept = _flags("attention_mask", attention_mask, hidden_states)
    if unused_mask is not None:
        kept = used | _flags("unused_mask", unused_mask, hidden_states)
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = max(lengths.tolist(), default=0)
    packed = hidden_states.flatten(0, 1).index_select(0, indices)
    return packed, indices, cu_seqlens, longest, used.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put packed tokens back into a batch padded with zeros.

    Args:
        hidden_states: ``[tokens, ...]``, any dtype and strides. Has a gradient.
        indices: the place of each token in the flattened batch, int32 or int64 ``[tokens]``, all
            different: what :func:`unpad_input` returned.
        batch: number of sequences.
        seqlen: tokens of a padded sequence.

    Returns:
        ``[batch, seqlen, ...]``.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range; on the values of ``indices`` on the CPU.
    """
    check_tensor("hidden_states", hidden_states)
    check_tensor("indices", indices)
    check_count("batch", batch, 0)
    check_count("seqlen", seqlen, 0)
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices must be torch.int32 or torch.int64, got {indices.dtype}")
    _check_device("indices", indices, hidden_states)
    if hidden_states.ndim < 1 or indices.shape != hidden_states.shape[:1]:
        raise ValueError(
            f"indices must have an entry for each token of hidden_states, "
            f"{list(hidden_states.shape[:1])}, got {list(indices.shape)}"
        )
    places = batch * seqlen
    if checks_values(indices) and not torch.compiler.is_compiling():
        for i in ((indices < 0) | (indices >= places)).nonzero().flatten().tolist():
            raise ValueError(f"indices[{i}] must be from 0 to {places - 1}, got {indices[i]}")
    padded = hidden_states.new_zeros((places, *hidden_states.shape[1:]))
    padded = padded.index_copy(0, indices.long(), hidden_states)
    return padded.view(batch, seqlen, *padded.shape[1:])


def _check_device(name: str, x: Tensor, of: Tensor) -> None:
    if x.device != of.device:
        raise ValueError(
            f"{name} must be on the device of hidden_states, {of.device}, got {x.device}"
        )


def _flags(name: str, mask: Any, x: Tensor) -> Tensor:
    """Check a mask of tokens; return it as bools."""
    check_tensor(name, mask)
    if mask.dtype not in _MASKS:
        raise TypeError(f"{name} must be bool or integers, got {mask.dtype}")
    _check_device(name, mask, x)
    if mask.shape != x.shape[:2]:
        raise ValueError(
            f"{name} must be [batch, seqlen], {list(x.shape[:2])}, got {list(mask.shape)}"
        )
    flags: Tensor = mask.bool()
    return flags
