"""Checks of the options: what is not a tensor, nor about one."""

import math
from typing import Any

from torch import Tensor

from ._call import Options
from ._linked.host.arguments import (
    FACTOR_MAX,
    FP32_MAX,
    FP32_TINY,
    check_length,
    check_number,
    check_scale,
    is_int,
    kind,
    shown,
)

# a window of this size hides nothing, and sums of it and a position fit everywhere
MAX_WINDOW = 2**30

# partial results of every split are merged in one go
MAX_SPLITS = 1024


def check_options(
    q: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    num_splits: int,
    return_lse: bool,
) -> Options:
    """Check what is not a tensor; return the options as the operator takes them."""
    for name, flag in (("causal", causal), ("return_lse", return_lse)):
        check_flag(name, flag)
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    else:
        softmax_scale = check_scale("softmax_scale", softmax_scale)
    softcap = _check_softcap(softcap, softmax_scale)
    left, right = check_window(window_size)
    check_length("num_splits", num_splits)
    if num_splits > MAX_SPLITS:
        raise ValueError(
            f"num_splits must be from 0 to {MAX_SPLITS}, where 0 decides by load, got {num_splits}"
        )
    return Options(softmax_scale, left, 0 if causal else right, softcap, num_splits)


def check_flag(name: str, flag: Any) -> None:
    """Check that an argument is a bool."""
    if not isinstance(flag, bool):
        raise TypeError(f"{name} must be a bool, got {kind(flag)}")


def check_window(window_size: tuple[int, int]) -> tuple[int, int]:
    """Check a window; return it with sizes that 32 bits hold."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be a tuple of two ints, got {window_size!r}")
    left, right = window_size
    if not (is_int(left) and is_int(right)):
        raise TypeError(f"window_size must be a tuple of two ints, got {window_size!r}")
    if left < -1 or right < -1:
        raise ValueError(f"window_size must hold -1 or numbers from 0 up, got {window_size!r}")
    left = left if left < MAX_WINDOW else MAX_WINDOW
    right = right if right < MAX_WINDOW else MAX_WINDOW
    return left, right


def _check_softcap(softcap: float, softmax_scale: float) -> float:
    if softcap.__class__ is not float:
        check_number("softcap", softcap)
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap must be finite and at least 0.0, got {shown(softcap)}")
    if softcap == 0.0:
        return 0.0
    if not FP32_TINY <= softcap <= FACTOR_MAX:
        raise ValueError(
            f"softcap must be 0.0 or from {FP32_TINY:.3g} to {FACTOR_MAX:.3g}, for fp32, "
            f"got {shown(softcap)}"
        )
    if abs(softmax_scale) > FP32_MAX * softcap:
        raise ValueError(
            "softcap must be large enough for softmax_scale / softcap to be finite in fp32, got "
            f"softcap {softcap} and softmax_scale {softmax_scale}"
        )
    return float(softcap) if softcap.__class__ is int else softcap
