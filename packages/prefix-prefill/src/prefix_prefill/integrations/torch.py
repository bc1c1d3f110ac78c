"""PyTorch's ``varlen_attn`` with paged keys and values, on these kernels.

Example::

    import prefix_prefill.integrations.torch as paged
    from torch.nn.attention.varlen import varlen_attn

    handle = paged.register()
    out = varlen_attn(  # CUDA tensors; caches [pages, page size, heads, head_dim]
        q, k_cache, v_cache, cu_seqlens_q, None, max_q, max_k,
        seqused_k=lengths, block_table=table, window_size=(-1, 0),
    )
    handle.remove()  # PyTorch's own kernels again

Calls of ``varlen_attn`` and ``varlen_attn_out`` with a ``block_table`` run on these kernels,
whatever backend PyTorch would choose. Calls without one run as before. If the flash backend is
disabled, as within ``sdpa_kernel(SDPBackend.CUDNN_ATTENTION)``, all calls run as before. On CPU
tensors nothing changes.

For ``varlen_attn`` without pages and ``scaled_dot_product_attention`` there is
``flash_attn_triton.integrations.torch.register()``. The two may be registered together, in any
order.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from .._linked.host.arguments import ERRORS, renamed
from ..api import paged_attn_func

__all__ = ["Handle", "register"]

_OPERATORS = ("_varlen_attn", "_varlen_attn_out")
_active: _Overrides | None = None


# argument names of paged_attn_func: names in PyTorch's function
_NAMES = {
    "q": "query",
    "k_cache": "key",
    "v_cache": "value",
    "cu_seqlens_q": "cu_seq_q",
    "seqlens_k": "seqused_k",
    "max_seqlen_q": "max_q",
    "max_seqlen_k": "max_k",
    "softmax_scale": "scale",
    "causal": "is_causal",
}


class Handle:
    """A registration that can be undone."""

    def remove(self) -> None:
        """Restore PyTorch's kernels; does nothing if they are restored already."""
        global _active
        if _active is not None:
            _active.remove()
            _active = None

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def register() -> Handle:
    """Serve paged calls of ``torch.nn.attention.varlen`` on GPUs, in this process.

    Does nothing if they are served already.

    Returns:
        A handle, whose ``remove()`` restores PyTorch's kernels. It is also a context manager.

    Raises:
        RuntimeError: If this PyTorch has no ``varlen_attn`` with a ``block_table``.
    """
    global _active
    if _active is None:
        _active = _Overrides()
    return Handle()


class _Overrides:
    """Our kernels in PyTorch's dispatcher, as long as this object lives."""

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        # imported here: PyTorch loads it on demand
        import torch.nn.attention.varlen

        new: Any = torch.library.Library
        library = new("torch_attn", "IMPL", dispatch_key)
        with warnings.catch_warnings():
            # PyTorch warns that its kernels are overridden, as intended
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            for name in _OPERATORS:
                library.impl(name, _served(name, dispatch_key), dispatch_key, with_keyset=True)
        self.library: Any = library

    def remove(self) -> None:
        # without a reference, a library removes its kernels from the dispatcher
        self.library = None


def _served(name: str, dispatch_key: str) -> Any:
    """Return a kernel that computes paged calls, and passes on all others to PyTorch's kernel."""
    packet = getattr(torch.ops.torch_attn, name, None)
    names = [] if packet is None else [x.name for x in packet.default._schema.arguments]
    if "block_table" not in names:
        raise RuntimeError(
            "serving varlen_attn with pages needs PyTorch 2.12 or newer, whose varlen_attn takes a "
            f"block_table, got {torch.__version__}"
        )
    kernel = torch.library.get_kernel(f"torch_attn::{name}", dispatch_key)
    # Any, because the function is not typed
    is_enabled: Any = torch.backends.cuda.flash_sdp_enabled

    def serve(keyset: Any, *arguments: Any, **options: Any) -> Any:
        given = dict(zip(names, arguments, strict=False)) | options
        if given.get("block_table") is None or not is_enabled():
            return kernel.call_boxed(keyset, *arguments, **options)
        return _attend(**given)

    return serve


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    backend: int | None = None,
    out: Tensor | None = None,
) -> Any:
    """Compute a paged call; return ``(out, lse, random state)``, or the LSE if ``out`` is given."""
    if block_table is None or seqused_k is None:
        raise ValueError("seqused_k must be given with block_table: [batch] int32, got None")
    if out is None and value.shape[-1] != query.shape[-1]:
        # the operator's fake, and so compiled graphs, give the output the shape of the queries
        raise ValueError(
            f"value must have the head_dim of query, {query.shape[-1]}, got {value.shape[-1]}: "
            "varlen_attn_out takes values with a head_dim of their own"
        )
    left, right = (-1, -1) if window_size is None else window_size
    try:
        result, lse = paged_attn_func(
            query,
            key,
            value,
            block_table,
            cu_seq_q,
            seqused_k,
            max_q,
            max_k,
            softmax_scale=scale,
            causal=is_causal,
            window_size=(left, right),
            num_splits=num_splits or 0,
            out=out,
            return_lse=True,
        )
    except ERRORS as error:
        raise renamed(error, _NAMES) from error
    if out is not None:
        return lse
    if result.stride() != query.stride() and result.shape == query.shape:
        # compiled graphs rely on the strides of the operator's fake
        result = torch.empty_like(query).copy_(result)
    return result, lse, torch.zeros(2, dtype=torch.uint64, device=query.device)
