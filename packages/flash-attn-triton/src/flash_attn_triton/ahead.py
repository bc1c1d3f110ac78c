"""Build the kernels of a call ahead of time."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ._dense import ops
from ._linked.host.arguments import check_flag
from .api import flash_attn_func, flash_attn_varlen_func


class _Reached(Exception):
    """A call was checked and has reached its operator."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.arguments = arguments


class _Checking(TorchDispatchMode):
    """Stops a call at its operator, and draws no random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is ops.forward:
            raise _Reached(args)
        if func.overloadpacket is torch.ops.aten.randint:
            return torch.empty(args[-1], **kwargs)
        return func(*args, **kwargs)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backward: bool = True,
    out: str | PathLike[str] | None = None,
    **options: Any,
) -> None:
    """Compile all kernels that a call with this signature would launch, in parallel, and wait.

    The first call with a signature compiles its kernels, which takes seconds if Triton's cache on
    disk does not have them. This function compiles them ahead of time. It computes nothing, writes
    to no tensor, and draws no random numbers. On the CPU it only checks the arguments.

    With ``out`` the kernels are added to a folder, for processes that find it in the environment
    variable ``ATTN_KERNELS``: they launch them without a compiler. Tensors on meta need no GPU; the
    environment variable ``ATTN_COMMON_PLATFORM`` names the one to compile for (``nvidia:sm_90``).

    Args:
        q: queries of the call, or any with the same dtype, device and shape, of a typical length:
            ``[batch, seqlen_q, heads_q, head_dim]``, packed ``[tokens_q, heads_q, head_dim]``.
        k: keys of the call, or any with the same dtype, device and shape.
        v: values of the call, or any with the same dtype, device and shape.
        backward: also compile the kernels of the gradients, including the gradient of a bias that
            requires one. FP8 has no gradients. Default: True.
        out: a folder, made where there is none, for compiled kernels of NVIDIA's GPUs. Default:
            None, Triton's cache.
        **options: the other arguments of the call: of :func:`flash_attn_varlen_func` if
            ``cu_seqlens_q`` is among them, else of :func:`flash_attn_func`.

    Raises:
        TypeError: on an argument's type or dtype.
        ValueError: on a shape, a device or a range; on an ``out`` that holds the kernels of another
            version, GPU or Triton.
        NotImplementedError: on whatever the call itself does not offer.
    """
    check_flag("backward", backward)
    folder = None if out is None else Path(out)
    call: Any = flash_attn_varlen_func if "cu_seqlens_q" in options else flash_attn_func
    try:
        with _Checking():  # type: ignore[no-untyped-call]
            call(q, k, v, **options)
    except _Reached as reached:
        arguments = reached.arguments
    ops.build_calls(arguments, backward, folder)
