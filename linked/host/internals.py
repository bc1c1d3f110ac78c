"""All uses of PyTorch's private interfaces, and their public replacements.

Private names are read only from tested versions (``versions.TORCH``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .versions import TORCH, is_tested, warn_untested

IS_TESTED = is_tested(torch.__version__, TORCH)

# The index of the current device, and the handle of a device's current stream. The public functions
# first check whether a GPU was initialised. A CPU build lacks the private functions.
current_device: Callable[[], int] = torch.cuda.current_device
current_stream: Callable[[int], int] = lambda index: torch.cuda.current_stream(index).cuda_stream  # noqa: E731
if IS_TESTED:
    current_device = getattr(torch._C, "_cuda_getDevice", current_device)
    current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", current_stream)
    # module-level names, since every call reads all four
    _dispatch_modes = torch._C._len_torch_dispatch_stack
    _function_modes = torch._C._len_torch_function_stack
    _transform = torch._C._functorch.peek_interpreter_stack
    _trace = torch._C._get_tracing_state


def is_watched() -> bool:
    """Return whether something traces, transforms or intercepts PyTorch's calls at this moment.

    A watched call must go through the operators. Otherwise an operator only costs time, except that
    profilers then see the kernels but no operator. With an untested version the answer is yes.
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
    """Return whether an argument is a strided tensor that a kernel may read by its address.

    Excluded: subclasses, tensors with a lazy negation bit, and tensors without storage, such as
    those of the older vmap (batched gradients).
    """
    return bool(
        x.__class__ is Tensor
        and x.layout is torch.strided
        and torch._C._has_storage(x)
        and not x.is_neg()
    )


def refuse_tangents(tensors: Iterable[Tensor | None]) -> None:
    """Raise NotImplementedError for a tangent, which an operator without a formula would drop."""
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
    """Return a faster ``function.apply`` for plain tensors in an unwatched call.

    PyTorch's own ``apply`` first unwraps tensors of finished torch.func transforms.
    """
    if not IS_TESTED:
        return function.apply
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


def is_transformed() -> bool:
    """Return whether a torch.func transform is active; these ignore operators' derivatives.

    With an untested version the answer is yes outside of traces: an autograd function serves every
    call there.
    """
    if not IS_TESTED:
        return not torch.compiler.is_compiling()
    return torch._C._are_functorch_transforms_active()


def process_group_named(name: str) -> Any:
    """Return a process group by its name, for which there is no public function."""
    from torch.distributed import distributed_c10d

    module: Any = distributed_c10d
    return module._resolve_process_group(name)
