"""Checks of tensor data.

Calls on CPU tensors always run them. On a GPU they are for debugging and tests: each copies a small
tensor to the host, so it waits for the device, and a CUDA graph cannot capture it.
"""

import torch
from torch import Tensor

from .._linked.host.arguments import as_int32, check_readable, check_tensor, kind, warn_once
from . import checks


def validate_decay(decay: Tensor) -> None:
    """Check that decays are at least 0, as every function of the package assumes.

    Args:
        decay: fp32, any shape.

    Raises:
        TypeError: if ``decay`` is no tensor.
        ValueError: for the first wrong value, with its index.
    """
    check_tensor("decay", decay)
    if not decay.dtype.is_floating_point:
        raise TypeError(f"decay must be of a float dtype, got {decay.dtype}")
    check_readable(decay=decay)
    rates = decay.reshape(-1).tolist()
    for i, rate in enumerate(rates):
        # written so that NaN fails
        if not rate >= 0.0:
            raise ValueError(f"decay[{i}] must be at least 0, got {rate}")
    if len(rates) > 1 and all(0.89 < rate < 1.0 for rate in rates):
        warn_once(
            "decay",
            f"decay looks like the factor of a state, got {rates[0]} and others from 0.9 to 1; the "
            "factor is exp(-decay), so pass -decay.log() if these are factors",
        )


def validate_varlen(q: Tensor, cu_seqlens: Tensor) -> None:
    """Check the values of packed offsets.

    Args:
        q: queries, ``[tokens, heads, d]``; only the shape is used.
        cu_seqlens: starts of the sequences, int32 or int64 ``[batch + 1]``: from 0 to ``tokens``,
            not decreasing.

    Raises:
        TypeError: if an argument has a wrong type or dtype.
        ValueError: if a shape or a device is wrong, or for the first wrong value, with its index.
    """
    check_tensor("q", q)
    if q.ndim != 3:
        raise ValueError(f"q must be [tokens, heads, d], got {list(q.shape)}")
    checks.check_packed(q, as_int32(cu_seqlens))
    check_readable(cu_seqlens=cu_seqlens)
    last = 0
    for i, offset in enumerate(cu_seqlens.tolist()):
        if not 0 <= offset <= q.shape[0]:
            raise ValueError(
                f"cu_seqlens[{i}] must be from 0 to the number of tokens, {q.shape[0]}, "
                f"got {offset}"
            )
        if offset < last:
            raise ValueError(f"cu_seqlens[{i}] must be at least {last}, as before it, got {offset}")
        last = offset


def validate_slots(slots: Tensor, state_cache: Tensor, name: str = "slots") -> None:
    """Check the values of ``slot_idx`` or ``state_indices``.

    Args:
        slots: int32 or int64 ``[batch]``: below the number of slots, all different except for
            negative values, which are padding.
        state_cache: ``[slots, heads, d, e]``; only the shape is used.
        name: name of ``slots`` in messages. Default: ``"slots"``.

    Raises:
        TypeError: if an argument is no tensor.
        ValueError: for the first wrong value, with its index.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {kind(name)}")
    check_tensor(name, slots)
    if slots.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be torch.int32 or torch.int64, got {slots.dtype}")
    if slots.ndim != 1:
        raise ValueError(f"{name} must be [batch], got {list(slots.shape)}")
    check_tensor("state_cache", state_cache)
    if state_cache.ndim != 4:
        raise ValueError(f"state_cache must be [slots, heads, d, e], got {list(state_cache.shape)}")
    check_readable(**{name: slots})
    seen: dict[int, int] = {}
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        if slot >= state_cache.shape[0]:
            raise ValueError(f"{name}[{i}] must be below {state_cache.shape[0]}, got {slot}")
        if slot in seen:
            raise ValueError(
                f"{name}[{i}] must differ from {name}[{seen[slot]}], got {slot} in both"
            )
        seen[slot] = i
