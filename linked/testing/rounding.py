"""Rounding errors of kernels, and results with error bounds; docs/numerics.md has the symbols.

``bounds.py`` and ``walk_bounds.py`` compute in float64 the exact results of a call, and a bound of
each element's error for a kernel that rounds as the document says. The bounds follow from the data
and the precision of each step; nothing in them is measured.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP32 = 2.0**-24  # one rounding to nearest
SUM = 2.0**-23  # one addition of a tensor core, which may truncate
EXP2 = 2.0**-22  # relative error of the hardware's exponential; absolute error of its logarithm
TINY = 2.0**-126
# one rounding to nearest, and half the smallest distance between numbers
ROUNDING = {
    torch.bfloat16: (2.0**-8, 2.0**-134),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.float32: (2.0**-24, 2.0**-150),
    torch.float8_e4m3fn: (2.0**-4, 2.0**-10),
    torch.float8_e4m3fnuz: (2.0**-4, 2.0**-11),
}
TF32X3 = 2.0**-21  # an fp32 product made of three TF32 products


class Bounded(NamedTuple):
    """Exact results and the error bound of each element."""

    exact: Tensor
    bound: Tensor

    def ratio(self, got: Tensor) -> Tensor:
        """Return error over bound for finite elements; infinity if only one is finite."""
        wide = got.double()
        finite = torch.isfinite(self.exact)
        error = torch.where(finite, (wide - self.exact).abs(), 0.0)
        wrong = torch.where(finite, ~torch.isfinite(wide), wide != self.exact)
        ratio = torch.where(error > 0, error / self.bound.clamp_min(1e-300), 0.0)
        return torch.where(wrong, torch.inf, ratio)


def assert_within(got: dict[str, Tensor], bounds: dict[str, Bounded]) -> None:
    """Require the error of every element to be within its bound; NaN fails."""
    for name, bounded in bounds.items():
        ratio = bounded.ratio(got[name])
        assert ratio.numel() == 0 or bool(ratio.max() <= 1), (
            f"{name}: {float(ratio.max()):.3g} times its bound"
        )


def median(bounded: Bounded, got: Tensor) -> float:
    """Return the median of error over bound; it is tiny if the bound is too loose."""
    ratio = bounded.ratio(got)
    return float(ratio.median()) if ratio.numel() else 0.0


def gamma(terms: int) -> float:
    """Return the relative error of a sum of ``terms`` terms in any order."""
    return terms * SUM / (1 - terms * SUM)


def product_error(dtype: torch.dtype) -> float:
    """Return the relative error of a product in a dtype; 16 and 8 bits are exact."""
    return TF32X3 if dtype == torch.float32 else 0.0


def stored_unit(dtype: torch.dtype, truncates: bool) -> float:
    """Return the error of a result's final rounding; Triton's interpreter truncates 16 bits."""
    unit, _ = ROUNDING[dtype]
    return 2 * unit if truncates and dtype != torch.float32 else unit
