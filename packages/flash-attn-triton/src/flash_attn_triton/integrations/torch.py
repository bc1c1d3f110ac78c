"""PyTorch's own flash attention: ``scaled_dot_product_attention`` runs these kernels.

Example::

    import flash_attn_triton.integrations.torch as attention
    from torch.nn.functional import scaled_dot_product_attention
    from torch.nn.attention import SDPBackend, sdpa_kernel

    handle = attention.register()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, is_causal=True)  # CUDA tensors
    handle.remove()  # PyTorch's own kernels again

PyTorch chooses a backend for each call: the flash backend takes fp16 and bf16 tensors without a
mask. Every call for which PyTorch chooses the flash backend runs these kernels, whether it comes
from a module, ``torch.nn.attention.varlen.varlen_attn``,
``torch.nn.attention.bias.causal_lower_right`` or context parallelism. The CUDA kernels of seven
operators of ``aten`` are replaced: ``_scaled_dot_product_flash_attention``,
``_flash_attention_forward``, their ``quantized`` overloads for FP8, their backward operators, and
``_flash_attention_forward_no_dropout_inplace``. CPU tensors are not affected.

From 2.14 on, PyTorch prefers cuDNN in ``varlen_attn``, if cuDNN can compute the call. While
registered, these kernels are preferred; PyTorch 2.15 still obeys
``sdpa_kernel(SDPBackend.CUDNN_ATTENTION)``, and an order set with ``set_priority=True``. For paged
keys and values (``block_table``) use ``prefix_prefill.integrations.torch.register()`` of the
package prefix-prefill.

In these operators, ``is_causal`` is aligned bottom-right, as in this package.
``scaled_dot_product_attention`` itself aligns top-left, but never passes causal calls with unequal
lengths to the flash backend. The fields of the random state are a seed and an offset, as in
PyTorch's kernels, but only these kernels can interpret them.

Registering follows the protocol of ``torch.nn.attention`` for implementations:
``"flash_attn_triton"`` appears in ``list_flash_attention_impls()``, and
``restore_flash_attention_impl()`` also undoes it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ._aten import OVERRIDES
from ._varlen import take_varlen

__all__ = ["Handle", "register"]

_NAME = "flash_attn_triton"


class Handle:
    """A registration that can be undone."""

    def remove(self) -> None:
        """Restore PyTorch's own kernels; does nothing if they are already restored."""
        if current_implementation() == _NAME:
            _attention_module().restore_flash_attention_impl()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Overrides:
    """The kernels in the dispatcher, as long as this object lives; the registry holds it."""

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        new: Any = torch.library.Library
        library = new("aten", "IMPL", dispatch_key)
        with warnings.catch_warnings():
            # PyTorch warns that its kernels are overridden, which is the purpose
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            for operator, function in OVERRIDES.items():
                library.impl(operator, function, dispatch_key)
        self.library: Any = library
        self._restore_selection = take_varlen()

    def remove(self) -> None:
        # a library without references removes its kernels from the dispatcher
        self.library = None
        self._restore_selection()


def register() -> Handle:
    """Make these kernels PyTorch's flash attention on GPUs, in this process.

    Replaces the active implementation. Does nothing if these kernels are already active.

    Returns:
        A handle, whose ``remove()`` restores PyTorch's kernels. It is also a context manager.

    Raises:
        RuntimeError: If PyTorch is older than 2.11, which has no registry of implementations.
    """
    module = _attention_module()
    module.register_flash_attention_impl(_NAME, register_fn=_Overrides)
    if current_implementation() != _NAME:
        module.activate_flash_attention_impl(_NAME)
    return Handle()


def current_implementation() -> str | None:
    """Return the name of the active implementation, None for PyTorch's own."""
    name: str | None = _attention_module().current_flash_attention_impl()
    return name


def _attention_module() -> Any:
    module = torch.nn.attention
    needed = ("register", "activate", "restore", "current")
    if not all(hasattr(module, f"{verb}_flash_attention_impl") for verb in needed):
        raise RuntimeError(
            "registering a flash attention implementation needs PyTorch 2.11 or newer, "
            f"got {torch.__version__}"
        )
    return module
