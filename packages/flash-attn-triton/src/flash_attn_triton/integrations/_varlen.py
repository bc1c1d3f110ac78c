"""Change the backend that ``torch.nn.attention.varlen.varlen_attn`` chooses, from 2.14 on."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch

# the choosing functions of PyTorch 2.15 and of 2.14, and their arguments; earlier versions always
# take the flash backend
_CHOICES = {
    "_select_backend": (
        "query",
        "key",
        "value",
        "cu_seq_q",
        "cu_seq_k",
        "max_q",
        "window_size",
        "seqused_k",
        "block_table",
        "num_splits",
    ),
    "_can_use_cudnn": (
        "query",
        "key",
        "value",
        "max_q",
        "window_size",
        "enable_gqa",
        "seqused_k",
        "block_table",
        "num_splits",
    ),
}


def take_varlen() -> Callable[[], None]:
    """Prefer flash attention in ``varlen_attn`` where PyTorch would prefer cuDNN.

    Calls with pages are not changed.

    Returns:
        A function that undoes it.
    """
    # imported here: PyTorch loads it on demand
    from torch.nn.attention import varlen

    module: Any = varlen
    name = next((x for x in _CHOICES if hasattr(module, x)), None)
    if name is None:
        return lambda: None
    original, names = getattr(module, name), _CHOICES[name]
    if tuple(inspect.signature(original).parameters) != names:
        warnings.warn(
            f"varlen_attn of PyTorch {torch.__version__} chooses a backend in a way that is not "
            "known here: use sdpa_kernel(SDPBackend.FLASH_ATTENTION) to get these kernels",
            RuntimeWarning,
            stacklevel=6,
        )
        return lambda: None
    paged = names.index("block_table")

    def select_backend(*arguments: Any) -> Any:
        # respect a user's priority order and a disabled backend; the public flash_sdp_enabled is
        # the same function, but cannot be traced
        if (
            arguments[paged] is None
            and not module._is_sdp_priority_order_active()
            and torch._C._get_flash_sdp_enabled()
        ):
            return module._FLASH_ATTENTION_BACKEND
        return original(*arguments)

    def can_use_cudnn(*arguments: Any) -> Any:
        # the backward pass gives only the first arguments, and has no pages
        is_paged = len(arguments) > paged and arguments[paged] is not None
        return is_paged and original(*arguments)

    chosen = select_backend if name == "_select_backend" else can_use_cudnn

    def restore() -> None:
        if getattr(module, name) is chosen:
            setattr(module, name, original)

    setattr(module, name, chosen)
    return restore
