"""The 8-bit float formats, by torch's names, and the one that a platform uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .platform import CDNA3, Platform

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Fp8Info:
    """Range and layout of a format: one sign bit, then the exponent, then the mantissa."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    has_inf: bool
    bits: int = 8

    @property
    def min(self) -> float:
        """The most negative finite value."""
        return -self.max

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (1 - self.bias - self.mantissa_bits)


FORMATS = {
    info.name: info
    for info in (
        Fp8Info("float8_e4m3fn", 4, 3, bias=7, max=448.0, has_inf=False),
        Fp8Info("float8_e4m3fnuz", 4, 3, bias=8, max=240.0, has_inf=False),
        Fp8Info("float8_e5m2", 5, 2, bias=15, max=57344.0, has_inf=True),
        Fp8Info("float8_e5m2fnuz", 5, 2, bias=16, max=57344.0, has_inf=False),
    )
}


def fp8_info(dtype: torch.dtype | str) -> Fp8Info:
    """Return the format of a ``torch.dtype`` or of a name such as ``"float8_e4m3fn"``."""
    name = str(dtype).removeprefix("torch.")
    if name not in FORMATS:
        raise TypeError(f"fp8_info: dtype must be one of {', '.join(FORMATS)}, got {dtype}")
    return FORMATS[name]


def fp8_dtype(platform: Platform) -> str:
    """Return the name of a platform's e4m3 format.

    Only CDNA3 uses AMD's own ``float8_e4m3fnuz``. ``platform.supports_fp8`` tells whether the
    hardware computes in FP8 at all.
    """
    return "float8_e4m3fnuz" if platform.arch in CDNA3 else "float8_e4m3fn"
