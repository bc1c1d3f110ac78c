"""All that is used of PyTorch beneath its public interface, and what serves in its place.

The private names are read only from versions that were tested (``versions.TORCH``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .versions import TORCH, is_tested, warn_untested

IS_TESTED = is_tested(torch.__version__, TORCH)

# The index of the current device, and the handle of a device's current stream. PyTorch's own
# functions first ask whether a GPU was initialised. A CPU build lacks the private ones.
current_device: Callable[[], int] = torch.cuda.current_device
current_stream: Callable[[int], int] = lambda index: torch.cuda.current_stream(index).cuda_stream  # noqa: E731
if IS_TESTED:
    current_device = getattr(torch._C, "_cuda_getDevice", current_device)
    current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", current_stream)
    # what may be at work at a moment, each a name here: every call asks for all of them
    _dispatch_modes = torch._C._len_torch_dispatch_stack
    _function_modes = torch._C._len_torch_function_stack
    _transform = torch._C._functorch.peek_interpreter_stack
    _trace = torch._C._get_tracing_state


def is_watched() -> bool:
    """Return whether something traces, transforms or intercepts PyTorch's calls at this moment.

    It has to see operators then. If nothing does, an operator's boundary only costs time, except to
    profilers, which see kernels and no operator. With an untested version the answer is yes.
    """
    if torch.compiler.is_compiling():
        return True
    if not IS_TESTED:
        warn_untested("torch", torch.__version__, TORCH)
        return True
    return bool(
        _dispatch_modes()
        or _function_modes()
        or _transform() is not None
        or forward_ad._current_level >= 0
        or _trace() is not None
    )


def is_plain_tensor(x: Any) -> bool:
    """Return whether an argument is a strided tensor that its address describes.

    Subclasses are not, nor tensors with a lazy negation bit, nor those of the older vmap, which
    differentiates in batches: they have no storage.
    """
    return bool(
        x.__class__ is Tensor
        and x.layout is torch.strided
        and torch._C._has_storage(x)
        and not x.is_neg()
    )


def refuse_tangents(tensors: Iterable[Tensor | None]) -> None:
    """Raise on forward-mode differentiation: an operator without a formula would drop tangents.

    Raises:
        NotImplementedError: if a tensor has a tangent.
    """
    if IS_TESTED and forward_ad._current_level < 0:
        return
    if any(x is not None and _has_tangent(x) for x in tensors):
        raise NotImplementedError(
            "forward-mode differentiation (torch.func.jvp, jacfwd, forward_ad) is not "
            "offered, got an input with a tangent"
        )


def _has_tangent(x: Tensor) -> bool:
    """Return whether a tensor has a tangent, at any level of torch.func's transforms."""
    unpack_dual: Any = forward_ad.unpack_dual
    if not IS_TESTED:
        return unpack_dual(x).tangent is not None
    functorch = torch._C._functorch
    while True:
        # unpacking has no batching rule
        batched = functorch.is_batchedtensor(x)
        if not batched and unpack_dual(x).tangent is not None:
            return True
        if not (batched or functorch.is_gradtrackingtensor(x)):
            return False
        x = functorch.get_unwrapped(x)


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return what applies an autograd function to plain tensors, where nothing is watched.

    PyTorch's own way first looks for tensors that torch.func's transforms left behind.
    """
    if not IS_TESTED:
        return function.apply
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


def is_transformed() -> bool:
    """Say whether torch.func is at work; its transforms take no formula of an operator.

    Where that cannot be asked, outside of traces: the form that they take serves every call.
    """
    if not IS_TESTED:
        return not torch.compiler.is_compiling()
    return torch._C._are_functorch_transforms_active()


def process_group_named(name: str) -> Any:
    """Return a process group by its name, as the operators of PyTorch find theirs.

    There is no public way, and a graph may hold a name but no group.
    """
    from torch.distributed import distributed_c10d

    module: Any = distributed_c10d
    return module._resolve_process_group(name)
