"""PyTorch's own flash attention: ``scaled_dot_product_attention`` runs these kernels.

Example::

    import flash_attn_triton.integrations.torch as attention
    from torch.nn.functional import scaled_dot_product_attention
    from torch.nn.attention import SDPBackend, sdpa_kernel

    handle = attention.register()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, is_causal=True)  # CUDA tensors
    handle.remove()  # PyTorch's own kernels again

PyTorch chooses a backend for each call by rules of its own: the flash backend takes fp16 and bf16
tensors without a mask. What it does choose runs here, wherever it is called from: modules,
``torch.nn.attention.varlen.varlen_attn``, ``torch.nn.attention.bias.causal_lower_right``, context
parallelism. The CUDA kernels of seven operators of ``aten`` are replaced:
``_scaled_dot_product_flash_attention``, ``_flash_attention_forward``, their ``quantized`` overloads
for FP8, their backward operators, and ``_flash_attention_forward_no_dropout_inplace``. On CPU
tensors nothing changes.

From 2.14 on, PyTorch gives ``varlen_attn`` to cuDNN first, where cuDNN can compute it. While
registered, it comes here first; with PyTorch 2.15 ``sdpa_kernel(SDPBackend.CUDNN_ATTENTION)``, and
an order that was set with ``set_priority=True``, are obeyed. Paged keys and values
(``block_table``) are served by the package prefix-prefill, by
``prefix_prefill.integrations.torch.register()``.

In these operators, ``is_causal`` is aligned to the bottom right, as it is here; the dispatcher of
``scaled_dot_product_attention``, whose own alignment is to the top left, gives them no causal
problem whose lengths differ. The fields of the random state are a seed and an offset, as from
PyTorch's kernels, but have a meaning only for these kernels.

Registering follows the protocol of ``torch.nn.attention`` for implementations:
``"flash_attn_triton"`` appears in ``list_flash_attention_impls()``, and
``restore_flash_attention_impl()`` undoes it, too.
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
    """A registration that can be taken back."""

    def remove(self) -> None:
        """Give PyTorch its own kernels back; does nothing if they are back already."""
        if current_implementation() == _NAME:
            _attention_module().restore_flash_attention_impl()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Overrides:
    """The kernels in the dispatcher, for as long as this lives; what the registry holds."""

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
        # a library that nobody holds takes its kernels out of the dispatcher
        self.library = None
        self._restore_selection()


def register() -> Handle:
    """Make these kernels PyTorch's flash attention on GPUs, in this process.

    Replaces whatever implementation was active. Does nothing to a process that already runs it.

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
    """Name of the implementation that was activated, None for PyTorch's own."""
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
