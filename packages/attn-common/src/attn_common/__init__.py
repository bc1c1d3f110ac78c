"""Helpers shared by the attention kernel wheels; the README has the rule of admission."""

from .arith import cdiv, is_power_of_2, next_power_of_2, round_up
from .fp8 import Fp8Info, fp8_dtype, fp8_info
from .platform import Platform, detect, has_gluon

__version__ = "1.0.0"
__all__ = [
    "Fp8Info",
    "Platform",
    "cdiv",
    "detect",
    "fp8_dtype",
    "fp8_info",
    "has_gluon",
    "is_power_of_2",
    "next_power_of_2",
    "round_up",
]
