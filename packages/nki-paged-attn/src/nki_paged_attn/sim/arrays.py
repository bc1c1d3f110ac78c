"""NumPy arrays and PyTorch tensors in, the same kind out, without importing PyTorch."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

# PyTorch dtypes that NumPy lacks, and the dtypes of ml_dtypes with the same bits
_BITS = {
    "torch.bfloat16": ("int16", ml_dtypes.bfloat16),
    "torch.float8_e4m3fn": ("uint8", ml_dtypes.float8_e4m3fn),
    "torch.float8_e5m2": ("uint8", ml_dtypes.float8_e5m2),
}


def is_tensor(x: Any) -> bool:
    """Return whether an object is a PyTorch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def check_no_gradient(name: str, x: Any) -> None:
    """Check that a tensor to be written requires no gradient."""
    if is_tensor(x) and x.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise NotImplementedError(
            f"{name} must not require a gradient, for it is written; got requires_grad=True"
        )


def to_array(name: str, x: Any) -> Array:
    """Return a NumPy array; of a PyTorch tensor on the CPU a view of its memory."""
    if isinstance(x, np.ndarray):
        return x
    if not is_tensor(x):
        raise TypeError(f"{name} must be a NumPy array or a PyTorch tensor, got {type(x).__name__}")
    if x.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, got {x.device}")
    x = x.detach()
    if str(x.dtype) in _BITS:
        bits, dtype = _BITS[str(x.dtype)]
        found: Array = x.view(getattr(sys.modules["torch"], bits)).numpy().view(dtype)
        return found
    result: Array = x.numpy()
    return result


def as_array(name: str, x: Any) -> Array:
    """Return a NumPy array of an array, a tensor, a list or a number."""
    if is_tensor(x):
        return to_array(name, x)
    try:
        return np.asarray(x)
    except ValueError as error:
        raise ValueError(f"{name} must have rows of one length, got {x!r:.80}") from error


def like(x: Array, original: Any) -> Any:
    """Return an array in the type of the original."""
    if not is_tensor(original):
        return x
    torch = sys.modules["torch"]
    for name, (bits, dtype) in _BITS.items():
        if x.dtype == dtype:
            kind = getattr(torch, name.removeprefix("torch."))
            return torch.from_numpy(x.view(bits)).view(kind)
    return torch.from_numpy(x)
