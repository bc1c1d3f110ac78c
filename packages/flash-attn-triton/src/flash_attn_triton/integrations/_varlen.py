"""Which backend ``torch.nn.attention.varlen.varlen_attn`` chooses, from PyTorch 2.15 on."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch

# arguments of the function by which PyTorch 2.15 chooses a backend for varlen_attn
_SELECTED_BY = (
    "query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "window_size", "seqused_k",
    "block_table", "num_splits",
)  # fmt: skip


def take_varlen() -> Callable[[], None]:
    """Prefer flash attention in ``varlen_attn`` where PyTorch would prefer cuDNN.

    Returns:
        A function that undoes it.
    """
    # imported here: PyTorch loads it on demand
    from torch.nn.attention import varlen

    module: Any = varlen
    original = getattr(module, "_select_backend", None)
    if original is None:  # up to 2.14, where cuDNN comes after the flash backend, or never
        return lambda: None
    if tuple(inspect.signature(original).parameters) != _SELECTED_BY:
        warnings.warn(
            f"varlen_attn of PyTorch {torch.__version__} chooses a backend in a way that is not "
            "known here: use sdpa_kernel(SDPBackend.FLASH_ATTENTION) to get these kernels",
            RuntimeWarning,
            stacklevel=6,
        )
        return lambda: None
    flash = module._FLASH_ATTENTION_BACKEND
    is_ordered = module._is_sdp_priority_order_active

    def select(*arguments: Any) -> int:
        is_paged = arguments[8] is not None
        if not is_paged and not is_ordered() and torch._C._get_flash_sdp_enabled():
            return flash  # type: ignore[no-any-return]
        return original(*arguments)  # type: ignore[no-any-return]

    def restore() -> None:
        if module._select_backend is select:
            module._select_backend = original

    module._select_backend = select
    return restore
