"""Checks of the options: what is not a tensor, nor about one."""

import math
from typing import Any

import torch
from torch import Tensor

# a window of this size hides nothing, and sums of it and a position fit everywhere
MAX_WINDOW = 2**30

# the kernels compute in fp32, and in base 2
_FP32_MAX = torch.finfo(torch.float32).max
_FP32_TINY = torch.finfo(torch.float32).tiny
_FACTOR_MAX = _FP32_MAX / math.log2(math.e)
_INT64_MAX = 2**63 - 1
FP8_DTYPES = frozenset(
    (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
)


def check_options(
    q: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    deterministic: bool,
    return_attn_probs: bool,
    return_lse: bool,
) -> tuple[float, float, int, int]:
    """Check what is not a tensor; return scale, softcap and window as the operators take them."""
    if not (
        isinstance(causal, bool)
        and isinstance(deterministic, bool)
        and isinstance(return_attn_probs, bool)
        and isinstance(return_lse, bool)
    ):
        for name, flag in (
            ("causal", causal),
            ("deterministic", deterministic),
            ("return_attn_probs", return_attn_probs),
            ("return_lse", return_lse),
        ):
            if not isinstance(flag, bool):
                raise TypeError(f"{name} must be a bool, got {kind(flag)}")
    if dropout_p.__class__ is not float:
        check_number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {_shown(dropout_p)}")
    if dropout_p > 0.0 and q.dtype in FP8_DTYPES:
        raise NotImplementedError(f"dropout_p must be 0.0 for FP8 inputs, got {dropout_p}")
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    else:
        softmax_scale = check_scale("softmax_scale", softmax_scale)
    softcap = _check_softcap(softcap, softmax_scale)
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be a tuple of two ints, got {window_size!r}")
    left, right = window_size
    if not (_is_int(left) and _is_int(right)):
        raise TypeError(f"window_size must be a tuple of two ints, got {window_size!r}")
    if left < -1 or right < -1:
        raise ValueError(f"window_size must hold -1 or numbers from 0 up, got {window_size!r}")
    left = left if left < MAX_WINDOW else MAX_WINDOW
    right = right if right < MAX_WINDOW else MAX_WINDOW
    return softmax_scale, softcap, left, 0 if causal else right


def check_scale(name: str, scale: float) -> float:
    """Check a factor of the scores; return it as a float."""
    if scale.__class__ is not float:
        check_number(name, scale)
    if not -math.inf < scale < math.inf:
        raise ValueError(f"{name} must be finite, got {scale}")
    if not -_FACTOR_MAX <= scale <= _FACTOR_MAX:
        raise ValueError(
            f"{name} must be from -{_FACTOR_MAX:.3g} to {_FACTOR_MAX:.3g}, for fp32, "
            f"got {_shown(scale)}"
        )
    # the operators' schema takes no integer beyond 64 bits for a float
    return float(scale) if scale.__class__ is int else scale


def check_fp8_scale(name: str, scale: float) -> None:
    """Check a scale of FP8 numbers, which is divided by."""
    check_number(name, scale)
    if not _FP32_TINY <= scale <= _FP32_MAX:
        raise ValueError(
            f"{name} must be positive and finite, from {_FP32_TINY:.3g} to {_FP32_MAX:.3g}, "
            f"got {_shown(scale)}"
        )


def check_length(name: str, length: int) -> None:
    """Check the bound of a length."""
    if not _is_int(length):
        raise TypeError(f"{name} must be an int, got {kind(length)}")
    if length < 0:
        raise ValueError(f"{name} must be at least 0, got {_shown(length)}")
    if length > _INT64_MAX:
        raise ValueError(f"{name} must fit into 64 bits, got {_shown(length)}")


def check_number(name: str, x: Any) -> None:
    """Check that an argument is a real number, and not a bool."""
    if isinstance(x, bool) or not isinstance(x, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} must be a float, got {kind(x)}")


def _check_softcap(softcap: float, softmax_scale: float) -> float:
    if softcap.__class__ is not float:
        check_number("softcap", softcap)
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap must be finite and at least 0.0, got {_shown(softcap)}")
    if softcap == 0.0:
        return 0.0
    if not _FP32_TINY <= softcap <= _FACTOR_MAX:
        raise ValueError(
            f"softcap must be 0.0 or from {_FP32_TINY:.3g} to {_FACTOR_MAX:.3g}, for fp32, "
            f"got {_shown(softcap)}"
        )
    if abs(softmax_scale) > _FP32_MAX * softcap:
        raise ValueError(
            "softcap must be large enough for softmax_scale / softcap to be finite in fp32, got "
            f"softcap {softcap} and softmax_scale {softmax_scale}"
        )
    return float(softcap) if softcap.__class__ is int else softcap


def _is_int(x: Any) -> bool:
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)


def _shown(x: Any) -> str:
    """Return a number as text; Python does not write integers of thousands of digits."""
    return f"an int of {x.bit_length()} bits" if x.__class__ is int and abs(x) >> 256 else str(x)


def kind(x: Any) -> str:
    """Return the name of a type, for a message."""
    return type(x).__name__
